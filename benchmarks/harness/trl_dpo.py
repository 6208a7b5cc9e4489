"""TRL's `DPOTrainer` as a peer for `benchmarks/dpo.py`. It runs in TRL's own environment and imports nothing of ours.

    python trl_dpo.py --model DIR --train pairs.ids.jsonl --steps 14

It trains on a CPU in float32 and prints JSON lines as `trl_sft.py` does, with the loss of every step as a line of its
own. A record is `{"prompt_ids", "chosen_ids", "rejected_ids"}`, so that it pays for no tokenising. Its defaults of
bfloat16 and gradient checkpointing are switched off, since they only cost time on a CPU. With `--precompute` the
reference's logprobs are computed before training, which is not counted; without it a copy of the model computes them in
every step.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from trl_sft import Meter, read_records, say  # first: it sets the environment


class PairMeter(Meter):
    """Counts real tokens of both answers, and keeps the losses of a window."""

    def count(self, inputs: dict[str, Any]) -> None:
        self.slots += inputs["input_ids"].numel()
        self.tokens += int(inputs["attention_mask"].sum())
        self.loss_tokens += int(inputs["completion_mask"][..., 1:].sum())


def build_trainer(args: argparse.Namespace, meter: PairMeter, folder: str) -> Any:
    from transformers import PrinterCallback, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class MeteredTrainer(DPOTrainer):  # type: ignore[misc]
        """Counts every micro-batch on its way into the model. Records are tokens already."""

        def _prepare_dataset(self, dataset: Any, *rest: Any, **named: Any) -> Any:
            return dataset

        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
            meter.count(inputs)
            return super().training_step(model, inputs, *rest, **named)

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Closes windows."""

        def on_step_end(self, _args: Any, _state: Any, control: Any, **_named: Any) -> None:
            control.should_log = True
            if not meter.step_ended():
                control.should_training_stop = True

        def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_named: Any) -> None:
            if logs and "loss" in logs:
                say("log", step=state.global_step, loss=float(logs["loss"]))

    config = DPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        beta=args.beta,
        max_length=args.max_length,
        precompute_ref_log_probs=args.precompute,
        per_device_train_batch_size=args.pairs,
        max_steps=args.steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        dataloader_num_workers=0,
        remove_unused_columns=False,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = MeteredTrainer(model=args.model, args=config, train_dataset=read_records(args.train), callbacks=[Watch()])
    trainer.remove_callback(PrinterCallback)
    return trainer


def main() -> None:
    args = parse_arguments()
    import torch
    import transformers
    import trl

    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    meter = PairMeter(warmup_steps=0, window=args.window, take_turns=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(args, meter, folder)
        meter.mark()
        trainer.train()
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    say("done", **versions, threads=torch.get_num_threads(), steps=meter.steps, tokens=meter.tokens, slots=meter.slots)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with TRL's DPOTrainer on a CPU and print JSON lines.")
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model with its tokenizer")
    parser.add_argument("--train", required=True, help="JSONL file of pairs to train on")
    parser.add_argument("--precompute", action="store_true", help="the reference's logprobs before training")
    parser.add_argument("--max-length", type=int, default=512, help="longest prompt with an answer")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of a step; 8 is TRL's default")
    parser.add_argument("--steps", type=int, default=14, help="optimizer steps")
    parser.add_argument("--window", type=int, default=1, help="steps of a window")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
