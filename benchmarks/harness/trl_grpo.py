"""TRL's `GRPOTrainer` as a peer for `benchmarks/grpo.py`. It runs in TRL's own environment and imports nothing of ours
but the reward, which needs the standard library alone.

    python trl_grpo.py --model DIR --prompts prompts.jsonl --heldout heldout.jsonl --prompts-per-step 8

It trains on a CPU in float32, or on a GPU in bfloat16 with float32 weights, and prints JSON lines.
`{"event": "window", ...}` comes before the first step and after every `--window` steps: the samples trained on since
the last one, and the seconds that took. It then waits for a line on its standard input; the end of the input ends the
training. With `--evaluate` a window also has the part of held-out questions that the likeliest answer solves;
evaluating is not on the clock. `{"event": "done", ...}` comes last.

What is TRL's best on a CPU? Its defaults of bfloat16 and gradient checkpointing are switched off, since they only cost
time here. All samples of a step go through the model at once unless `--rows` says otherwise. `--continuous-batching`
generates with transformers' continuous batching instead of a padded batch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_plan import is_right, read_questions
from learning_plan import is_solved

os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
os.environ.update({"HF_HUB_DISABLE_TELEMETRY": "1"})

ANSWERS: dict[str, Callable[[str, str], float]] = {"sentence": is_right, "number": is_solved}
"""How an answer is judged: the first `The answer is N.`, or the last number."""


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def as_messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def make_reward(is_right: Callable[[str, str], float]) -> Callable[..., list[float]]:
    """Return the reward, as TRL calls it: with a list of completions, each a list of messages."""

    def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [is_right(said[0]["content"], wanted) for said, wanted in zip(completions, answer, strict=True)]

    return right


def build_config(args: argparse.Namespace, folder: str) -> Any:
    if args.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    from trl import GRPOConfig

    samples = args.prompts_per_step * args.group_size
    rows = args.rows or samples
    fixed = {"min_new_tokens": args.max_tokens} if args.fixed_length else {}
    return GRPOConfig(
        output_dir=folder,
        use_cpu=args.device == "cpu",
        bf16=args.device == "cuda",
        fp16=False,
        gradient_checkpointing=False,
        **vllm_settings(args),
        model_init_kwargs={"dtype": "float32", "attn_implementation": args.attention},
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=samples // rows,
        num_generations=args.group_size,
        max_completion_length=args.max_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        generation_kwargs=fixed,
        use_transformers_continuous_batching=args.continuous_batching,
        transformers_continuous_batching_config={"num_blocks": 2 * samples, "max_batch_tokens": 16 * samples},
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        num_iterations=1,
        mask_truncated_completions=False,
        max_steps=args.most_steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        dataloader_pin_memory=False,
        dataloader_num_workers=0,
        seed=args.seed,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="steps",
        logging_steps=10,
        log_completions=False,
        disable_tqdm=True,
    )


def vllm_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of generation with vLLM in the trainer's process, where it is asked for."""
    if args.vllm_memory is None:
        return {}
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": False,
        "vllm_gpu_memory_utilization": args.vllm_memory,
        "vllm_max_model_length": args.max_seq_len,
    }


class Judge:
    """Asks the held-out questions and takes the likeliest tokens, all in one padded batch."""

    def __init__(self, tokenizer: Any, path: Path, *, max_tokens: int, answers: str = "sentence") -> None:
        self._tokenizer, self._max_tokens, self._is_right = tokenizer, max_tokens, ANSWERS[answers]
        questions = read_questions(path)
        self._answers = [each["answer"] for each in questions]
        self._texts = [
            tokenizer.apply_chat_template(as_messages(each["prompt"]), tokenize=False, add_generation_prompt=True)
            for each in questions
        ]

    def accuracy(self, model: Any) -> float:
        import torch
        from transformers import GenerationConfig

        was_training = model.training
        model.eval()
        asked = self._tokenizer(self._texts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        how = GenerationConfig(
            do_sample=False,
            max_new_tokens=self._max_tokens,
            pad_token_id=self._tokenizer.pad_token_id,
            eos_token_id=self._tokenizer.eos_token_id,
        )
        is_cuda = model.device.type == "cuda"
        with torch.no_grad(), torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=is_cuda):
            tokens = model.generate(**asked, generation_config=how)[:, asked["input_ids"].shape[1] :]
        model.train(was_training)
        said = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return sum(self._is_right(text, answer) for text, answer in zip(said, self._answers, strict=True)) / len(said)


class Meter:
    """Counts samples and the time spent on them, and says so in windows."""

    def __init__(self, *, window: int, judge: Judge | None) -> None:
        self._window, self._judge = window, judge
        self._steps = self._samples = self._tokens = 0
        self._mark()

    def count(self, inputs: dict[str, Any]) -> None:
        """What goes through the model for the loss."""
        self._samples += inputs["completion_ids"].shape[0]
        self._tokens += int(inputs["completion_mask"].sum())

    def begin(self, model: Any) -> bool:
        """Before the first step."""
        return self._turn(model)

    def step_ended(self, model: Any) -> bool:
        """One optimizer step is done. False when the measuring program has gone, so that training should stop."""
        self._steps += 1
        return self._turn(model) if self._steps % self._window == 0 else True

    def _turn(self, model: Any) -> bool:
        seconds, cpu_seconds = time.perf_counter() - self._wall, time.process_time() - self._cpu_s
        accuracy = None if self._judge is None else self._judge.accuracy(model)
        say(
            "window",
            step=self._steps,
            samples=self._samples,
            tokens=self._tokens,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            accuracy=accuracy,
        )
        goes_on = sys.stdin.readline() != ""
        self._samples = self._tokens = 0
        self._mark()
        return goes_on

    def _mark(self) -> None:
        self._wall, self._cpu_s = time.perf_counter(), time.process_time()


def open_trainer(model: Path, meter: Meter, records: list[dict[str, Any]], **options: Any) -> Any:
    """Return a `GRPOTrainer` on these records that reports windows. `options` are further ones of the trainer."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    class MeteredTrainer(GRPOTrainer):  # type: ignore[misc]
        """Counts what goes through the model for the loss."""

        def compute_loss(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
            meter.count(inputs)
            return super().compute_loss(model, inputs, *rest, **named)

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Closes windows."""

        def on_train_begin(self, _args: Any, _state: Any, control: Any, **named: Any) -> None:
            control.should_training_stop = not meter.begin(named["model"])

        def on_step_end(self, _args: Any, _state: Any, control: Any, **named: Any) -> None:
            if not meter.step_ended(named["model"]):
                control.should_training_stop = True

    trainer = MeteredTrainer(model=str(model), train_dataset=Dataset.from_list(records), callbacks=[Watch()], **options)
    trainer.remove_callback(PrinterCallback)
    return trainer


def build_trainer(args: argparse.Namespace, folder: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    how = {"max_tokens": args.max_tokens, "answers": args.answers}
    judge = Judge(tokenizer, args.heldout, **how) if args.evaluate else None
    questions = read_questions(args.prompts)
    return open_trainer(
        args.model,
        Meter(window=args.window, judge=judge),
        [{"prompt": as_messages(each["prompt"]), "answer": each["answer"]} for each in questions],
        reward_funcs=make_reward(ANSWERS[args.answers]),
        args=build_config(args, folder),
        processing_class=tokenizer,
    )


def run_side(threads: int, build: Callable[[str], Any], last: Callable[[], dict[str, Any]] = dict) -> None:
    """Train until the measuring program ends it, and report `done`. `build` gets a folder and returns the trainer.

    `last` returns what else is reported.
    """
    import torch
    import transformers
    import trl

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(folder)
        trainer.train()
    say(
        "done",
        trl=trl.__version__,
        transformers=transformers.__version__,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        log=trainer.state.log_history[-1:],
        **last(),
    )


def side_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser that knows the options of every side of TRL's."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face model with its tokenizer")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file of prompts and answers to train on")
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--rows", type=int, default=0, help="samples that go through the model at once; 0 for all")
    parser.add_argument("--window", type=int, default=4, help="steps of a window")
    parser.add_argument("--most-steps", type=int, default=1_000_000)
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--vllm-memory", type=float, help="generate with vLLM, which may take this part of the GPU")
    parser.add_argument("--max-seq-len", type=int, default=512, help="of vLLM")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    args = parse_arguments()
    run_side(args.threads, lambda folder: build_trainer(args, folder))


def parse_arguments() -> argparse.Namespace:
    parser = side_parser("Train with TRL's GRPOTrainer on a CPU and print JSON lines.")
    parser.add_argument("--heldout", type=Path, required=True, help="JSONL file of held-out prompts and answers")
    parser.add_argument("--max-tokens", type=int, default=32, help="new tokens of a completion")
    parser.add_argument("--fixed-length", action="store_true", help="exactly so many")
    parser.add_argument("--evaluate", action="store_true", help="ask the held-out questions at each window's end")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--continuous-batching", action="store_true", help="generate with continuous batching")
    parser.add_argument("--answers", choices=list(ANSWERS), default="sentence", help="how an answer is judged")
    return parser.parse_args()


if __name__ == "__main__":
    main()
