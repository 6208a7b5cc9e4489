"""TRL's `SFTTrainer` as a peer for `benchmarks/sft.py`. It runs in TRL's own environment and imports nothing of ours.

    python trl_sft.py --model DIR --train train.jsonl --validation val.jsonl --mode packed --steps 50

It trains on a CPU in float32 and prints JSON lines. `{"event": "window", ...}` comes after every `--window` optimizer
steps: the real tokens trained on since the last one (padding does not count) and the seconds that took, validation left
out. With `--take-turns` it then waits for a line on its standard input, so that two programs can be measured by turns
on a machine whose speed drifts; the end of the input ends the training. `{"event": "validation", ...}` gives the mean
loss per token of the held-out records when so many tokens have been trained on. `{"event": "done", ...}` comes last.

A record is `{"input_ids", "labels"}` (-100 where a token does not count), `{"messages"}` or `{"prompt", "completion"}`.
The first kind is the one to compare with: both sides then train on the very same tokens.

What is TRL's best on a CPU? Its defaults of bfloat16 and gradient checkpointing are switched off, since they only cost
time here. Three modes:

- `padded`: its default. Each row is one sample, padded to the longest of its micro-batch. `--order group_by_length`
  puts samples of similar length together, which saves most of the padding; measure it along with `packed`.
- `packed`: strategy `bfd`. TRL joins all rows of a micro-batch into one sequence and passes positions but no mask;
  transformers' `sdpa` attention then builds a mask of the documents from the positions. That is exact without a varlen
  kernel, but attention is dense over the joined sequence: use `--rows 1` and accumulate, and packs no longer than the
  longest sample. Samples longer than `--max-length` are cut off.
- `padding_free`: a micro-batch of unpacked samples joined in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from typing import Any

os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
os.environ.update({"HF_HUB_DISABLE_TELEMETRY": "1", "ACCELERATE_USE_CPU": "true"})


class Meter:
    """Counts real tokens and the time spent on them, and says so in windows."""

    def __init__(self, *, warmup_steps: int, window: int, take_turns: bool) -> None:
        self.warmup_steps, self.window, self.take_turns = warmup_steps, window, take_turns
        self.tokens = self.loss_tokens = self.slots = self.steps = 0
        self.measured_tokens, self.measured_s, self.measured_cpu_s = 0, 0.0, 0.0
        self.mark()

    def count(self, inputs: dict[str, Any]) -> None:
        """One micro-batch, before it goes through the model."""
        mask = inputs.get("attention_mask")
        self.slots += inputs["input_ids"].numel()
        self.tokens += inputs["input_ids"].numel() if mask is None else int(mask.sum())
        self.loss_tokens += int((inputs["labels"][..., 1:] != -100).sum())

    def step_ended(self) -> bool:
        """One optimizer step is done. False when the other end has gone, so that training should stop."""
        self.steps += 1
        if self.steps <= self.warmup_steps:
            self.mark()
            return True
        if (self.steps - self.warmup_steps) % self.window:
            return True
        tokens, seconds = self.tokens - self._tokens, time.perf_counter() - self._wall - self._paused_s
        cpu_s = time.process_time() - self._cpu - self._paused_cpu_s
        self.measured_tokens += tokens
        self.measured_s += seconds
        self.measured_cpu_s += cpu_s
        say("window", step=self.steps, tokens=tokens, seconds=seconds, cpu_seconds=cpu_s)
        goes_on = not self.take_turns or sys.stdin.readline() != ""
        self.mark()
        return goes_on

    def pause(self, wall_s: float, cpu_s: float) -> None:
        """Leave out what was not training."""
        self._paused_s += wall_s
        self._paused_cpu_s += cpu_s

    def mark(self) -> None:
        """A window starts here."""
        self._tokens, self._wall, self._cpu = self.tokens, time.perf_counter(), time.process_time()
        self._paused_s = self._paused_cpu_s = 0.0


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def read_records(path: str) -> Any:
    from datasets import Dataset

    with open(path, encoding="utf-8") as file:
        return Dataset.from_list([json.loads(line) for line in file if line.strip()])


def build_config(args: argparse.Namespace, folder: str) -> Any:
    from trl import SFTConfig

    packed = args.mode == "packed"
    return SFTConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=args.gradient_checkpointing,
        model_init_kwargs={"dtype": "float32", "attn_implementation": args.attention},
        packing=packed,
        packing_strategy="bfd",
        eval_packing=False,
        padding_free=args.mode == "padding_free",
        max_length=None if args.mode == "padding_free" else args.max_length,
        assistant_only_loss=args.loss_on == "answers" and args.conversational,
        per_device_train_batch_size=args.rows,
        gradient_accumulation_steps=args.accumulation,
        max_steps=args.steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=args.lr_warmup_steps,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        train_sampling_strategy=args.order,
        torch_compile=args.compile,
        dataloader_pin_memory=False,
        dataloader_num_workers=0,
        seed=args.seed,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="steps",
        logging_steps=10,
        disable_tqdm=True,
    )


def validation_loss(model: Any, records: Any) -> tuple[float, int]:
    """The mean loss of all tokens that count, from the model's plain logits, one record at a time."""
    import torch

    total, count, was_training = 0.0, 0, model.training
    model.eval()
    with torch.no_grad():
        for record in records:
            token_ids, labels = torch.tensor([record["input_ids"]]), torch.tensor(record["labels"])[1:]
            logits = model(input_ids=token_ids, use_cache=False).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
            count += int((labels != -100).sum())
    model.train(was_training)
    return total / max(1, count), count


def adapter_of(args: argparse.Namespace) -> Any:
    """Return PEFT's settings of an adapter on all linear layers; None to train all weights."""
    if args.lora_rank is None:
        return None
    from peft import LoraConfig

    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return LoraConfig(
        r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules=linear, lora_dropout=0.0, task_type="CAUSAL_LM"
    )


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build_trainer(args: argparse.Namespace, meter: Meter, folder: str) -> Any:
    from transformers import PrinterCallback, TrainerCallback
    from trl import SFTTrainer

    class MeteredTrainer(SFTTrainer):  # type: ignore[misc]
        """Counts every micro-batch on its way into the model."""

        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
            meter.count(inputs)
            return super().training_step(model, inputs, *rest, **named)

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Validates when enough tokens have been trained on, and closes windows."""

        due = args.validate_every_tokens

        def on_step_end(self, _args: Any, _state: Any, control: Any, **named: Any) -> None:
            while args.validate_every_tokens and meter.tokens >= self.due:
                wall, cpu = time.perf_counter(), time.process_time()
                say_validation(named["model"], trainer.eval_dataset, meter)
                meter.pause(time.perf_counter() - wall, time.process_time() - cpu)
                self.due = meter.tokens // args.validate_every_tokens * args.validate_every_tokens
                self.due += args.validate_every_tokens
            if not meter.step_ended():
                control.should_training_stop = True

        def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_named: Any) -> None:
            if logs and "loss" in logs:
                say("log", step=state.global_step, tokens=meter.tokens, loss=float(logs["loss"]))

    train = read_records(args.train)
    args.conversational = "messages" in train.column_names
    trainer = MeteredTrainer(
        model=args.model,
        args=build_config(args, folder),
        train_dataset=train,
        eval_dataset=read_records(args.validation),
        callbacks=[Watch()],
        peft_config=adapter_of(args),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def say_validation(model: Any, records: Any, meter: Meter) -> None:
    loss, count = validation_loss(model, records)
    say("validation", tokens=meter.tokens, loss_tokens=meter.loss_tokens, loss=loss, validation_tokens=count)


def main() -> None:
    args = parse_arguments()
    import torch
    import transformers
    import trl

    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    meter = Meter(warmup_steps=args.warmup_steps, window=args.window, take_turns=args.take_turns)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(args, meter, folder)
        say_validation(trainer.model, trainer.eval_dataset, meter)
        meter.mark()
        trainer.train()
        say_validation(trainer.model, trainer.eval_dataset, meter)
    say(
        "done",
        mode=args.mode,
        trl=trl.__version__,
        transformers=transformers.__version__,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        steps=meter.steps,
        tokens=meter.tokens,
        loss_tokens=meter.loss_tokens,
        slots=meter.slots,
        peak_bytes=peak_bytes(),
        measured_tokens=meter.measured_tokens,
        measured_seconds=meter.measured_s,
        tokens_per_second=meter.measured_tokens / meter.measured_s if meter.measured_s else None,
        tokens_per_cpu_second=meter.measured_tokens / meter.measured_cpu_s if meter.measured_cpu_s else None,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with TRL's SFTTrainer on a CPU and print JSON lines.")
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model with its tokenizer")
    parser.add_argument("--train", required=True, help="JSONL file of records to train on")
    parser.add_argument("--validation", required=True, help="JSONL file of held-out records")
    parser.add_argument("--mode", choices=("padded", "packed", "padding_free"), required=True)
    parser.add_argument("--loss-on", choices=("answers", "all"), default="answers", help="for records with messages")
    parser.add_argument("--max-length", type=int, default=1024, help="longest sample, and length of a pack")
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch; 8 is TRL's default")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of an optimizer step")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--warmup-steps", type=int, default=3, help="steps that are not measured")
    parser.add_argument("--window", type=int, default=5, help="steps of a window")
    parser.add_argument("--take-turns", action="store_true", help="wait for a line of input after each window")
    parser.add_argument("--validate-every-tokens", type=int, default=0, help="0 for only before and after")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--lr-warmup-steps", type=int, default=0)
    parser.add_argument("--order", choices=("random", "sequential", "group_by_length"), default="random")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="TRL's default, slower here")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--lora-rank", type=int, help="train a PEFT adapter of this rank on all linear layers")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
