"""Our side of `context_gpu.py`: one training step on one sample, as long as it may be. And how the longest is sought.

    python gpu_context.py LENGTH PLAN.json FOLDER [KEY=VALUE ...]

The settings are `training.…` and `distributed.…`. A short step comes first, so that the optimizer's states are there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.gpu_plan import Plan, do_and_end, facts_of, say

SHORT = 64
BELOW, ABOVE = 0.98, 1.02
"""Where the end is believed to be, a try on either side shows it."""
MOST_GROWTH = 8.0
"""By how much one try may be longer than the longest that went well: estimates from short samples are rough."""


@dataclass(frozen=True)
class Try:
    """One length, how it ended (`trained`, `full` or `time`), and the bytes that were in use."""

    length: int
    outcome: str
    peak_bytes: float = 0.0
    seconds: float | None = None


def next_length(
    tries: Sequence[Try], *, total_bytes: float, least: int, near: float = 1.05, step: int = 256
) -> int | None:
    """The length to try next; None when the longest is known to within `near`, or nothing is left to try.

    Memory grows evenly with length, as good as: the two longest that went well say where it ends. Between a length
    that went well and one that did not, and where that line is of no use, the middle is tried.
    """
    good = sorted((each for each in tries if each.outcome == "trained"), key=lambda each: each.length)
    bad = min((each.length for each in tries if each.outcome != "trained"), default=None)
    if not good:
        first = least if bad is None else bad // 2
        return None if first < step else first
    longest = good[-1].length
    if bad is not None and bad <= longest * near:
        return None
    guess = longest * 2.0
    if len(good) > 1 and good[-1].peak_bytes > good[-2].peak_bytes:
        slope = (good[-1].peak_bytes - good[-2].peak_bytes) / (longest - good[-2].length)
        end = longest + (total_bytes - good[-1].peak_bytes) / slope
        guess = max(end * (BELOW if end * BELOW > longest * ABOVE else ABOVE), longest * ABOVE)
    guess = min(guess, longest * MOST_GROWTH)
    if bad is not None and guess >= bad:
        guess = (longest + bad) / 2
    rounded = int(guess) // step * step
    return rounded if rounded > longest and (bad is None or rounded < bad) else None


def longest_of(tries: Sequence[Try]) -> Try | None:
    return max((each for each in tries if each.outcome == "trained"), key=lambda each: each.length, default=None)


def end_of(tries: Sequence[Try]) -> Try | None:
    """The shortest that did not go well: it says what set the end."""
    return min((each for each in tries if each.outcome != "trained"), key=lambda each: each.length, default=None)


# ---- One step


def trainer_config(plan: Plan, length: int, words: Sequence[str]) -> Any:
    """What a trainer is made from: the plan's shape and precision, and the settings given."""
    import yaml

    from forge.config import TrainerConfig

    precision = {"mixed": "bfloat16", "pure": "bfloat16_pure", "float32": "float32"}[plan.precision]
    sections: dict[str, dict[str, Any]] = {
        "training": {"max_seq_len": length, "microbatch_tokens": length, "schedule": "constant", "warmup_steps": 0},
        "distributed": {"precision": precision, "with_gpus": plan.device == "cuda", "shard": 1},
    }
    for word in words:
        path, _, value = word.partition("=")
        section, _, key = path.partition(".")
        sections[section][key] = yaml.safe_load(value)
    model = facts_of(plan.shape).model_copy(update={"max_seq_len": max(length, SHORT)})
    return TrainerConfig.model_validate({"model": model, **sections})


def made_up(length: int, fields: Sequence[str]) -> Any:
    """A batch of one sample, a third of it prompt, with the fields that the loss reads."""
    import torch

    from forge.types import Batch, Sample

    draw = torch.Generator().manual_seed(0)
    weights = torch.ones(length)
    weights[: max(1, length // 3)] = 0
    values: Mapping[str, Any] = {name: torch.full((length,), 0.1) for name in fields}
    sample = Sample(torch.randint(0, 500, (length,), generator=draw), weights, dict(values))
    return Batch.of([sample])


def train(plan: Plan, length: int, words: Sequence[str]) -> None:
    import torch

    from forge.config import AlgorithmConfig
    from forge.losses import make_loss
    from forge.trainer.engine import Engine

    is_cuda = plan.device == "cuda"
    loss = make_loss(AlgorithmConfig(), max_tokens=length)
    engine = Engine(trainer_config(plan, length, words), loss=loss)
    engine.train_step(made_up(SHORT, loss.fields))
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    say("started", length=length)
    began = time.perf_counter()
    try:
        result = engine.train_step(made_up(length, loss.fields))
    except torch.OutOfMemoryError as error:
        say("full", length=length, what=str(error).splitlines()[0][:300])
        return
    peaks = {"allocated_gib": torch.cuda.max_memory_allocated() / 2**30} if is_cuda else {}
    say("trained", length=length, seconds=time.perf_counter() - began, loss=result.loss, **peaks)


def main() -> None:
    length, plan_file = int(sys.argv[1]), Path(sys.argv[2])
    words = sys.argv[4:]
    plan = Plan.read(plan_file)
    if plan.device == "cpu":
        import torch

        torch.set_num_threads(1)
    print(json.dumps({"length": length, "settings": words}), flush=True)
    do_and_end(lambda: train(plan, length, words))


if __name__ == "__main__":
    main()
