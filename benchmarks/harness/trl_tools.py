"""TRL's `GRPOTrainer` with its own tool loop as a peer for `grpo_tools.py`. It runs in TRL's own environment and speaks
as `trl_grpo.py` does.

The loop is what `GRPOTrainer(tools=[...])` runs: it generates one turn of all samples with transformers' `generate`,
parses the calls (TRL's parser for Qwen3's format), runs the tools, appends their results as tokens, and generates the
next turn of the samples that called one, from the whole conversation. Nothing of TRL is changed but that samples,
tokens and turns are counted where its loss is computed. Its settings are those of `trl_grpo.py`: float32, no gradient
checkpointing, all samples of a step through the model at once. `max_new_tokens` of `generation_kwargs` limits a turn,
as ours does; without it, a turn may be as long as a whole episode.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import trl_grpo
from trl_grpo import Meter

from harness.tools_plan import MAX_TURNS, is_right, open_box, read_tasks


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """The reward, as TRL calls it: a list of completions, each a list of messages."""
    return [
        is_right(said[-1].get("content") or "", wanted) if said[-1]["role"] == "assistant" else 0.0
        for said, wanted in zip(completions, answer, strict=True)
    ]


def build_config(args: argparse.Namespace, folder: str) -> Any:
    """Return the settings of `trl_grpo.py`, with the limits of turns and episodes."""
    config = trl_grpo.build_config(args, folder)
    config.max_completion_length = args.max_completion_tokens
    config.temperature = args.temperature
    config.max_tool_calling_iterations = MAX_TURNS - 1
    config.generation_kwargs = {"max_new_tokens": args.max_tokens}
    return config


class Counted(Meter):
    """Counts what episodes had as well, over all that the loss was computed on."""

    def __init__(self, *, window: int) -> None:
        super().__init__(window=window, judge=None)
        self.num_samples = self.num_turns = self.num_sampled = self.num_observed = 0

    def count(self, inputs: dict[str, Any]) -> None:
        """Count from the masks: each run of sampled tokens is a turn, and tool results lie between them."""
        read = inputs["completion_mask"]
        mask = read * inputs["tool_mask"]
        super().count({**inputs, "completion_mask": mask})
        starts = mask.clone()
        starts[:, 1:] *= 1 - mask[:, :-1]
        self.num_samples += mask.shape[0]
        self.num_turns += int(starts.sum())
        self.num_sampled += int(mask.sum())
        self.num_observed += int(read.sum() - mask.sum()) + int(inputs["prompt_mask"].sum())

    def means(self) -> dict[str, float]:
        """Return the means over episodes."""
        names = ("num_turns", "num_sampled", "num_observed")
        return {name: getattr(self, name) / max(self.num_samples, 1) for name in names}


def build_trainer(args: argparse.Namespace, folder: str, meter: Counted) -> Any:
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen3_template

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.response_template = qwen3_template  # TRL knows it for Qwen's own templates only
    return trl_grpo.open_trainer(
        args.model,
        meter,
        [{"prompt": each["messages"], "answer": each["answer"]} for each in read_tasks(args.prompts)],
        reward_funcs=right,
        args=build_config(args, folder),
        processing_class=tokenizer,
        tools=[open_box],
    )


def main() -> None:
    args = parse_arguments()
    meter = Counted(window=args.window)
    trl_grpo.run_side(
        args.threads, lambda folder: build_trainer(args, folder, meter), lambda: {"episodes": meter.means()}
    )


def parse_arguments() -> argparse.Namespace:
    parser = trl_grpo.side_parser("Train with TRL's tool loop on a CPU and print JSON lines.")
    parser.add_argument("--max-tokens", type=int, default=72, help="new tokens of a turn, at most")
    parser.add_argument("--max-completion-tokens", type=int, default=288, help="tokens after the prompt, at most")
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.set_defaults(window=2, fixed_length=False, continuous_batching=False)
    return parser.parse_args()


if __name__ == "__main__":
    main()
