"""What does recording each step for `forge replay` cost, compared with steps that are not recorded?

One engine takes training steps on batches of the same shape, in windows that take turns: with a step log, and without.
A window with a log ends when all of its steps are on the disk, so that what the log's thread does counts in its own
window. Steps of a run also generate, which takes longer than training: the share of such a step is smaller.

What the log's thread computes is also measured alone, as the thread's own CPU time: on a busy machine the difference of
two windows is noise.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forge.config import AlgorithmConfig, DistributedConfig, ReplayRecordConfig, TrainerConfig, TrainingConfig
from forge.losses import make_loss
from forge.models.tiny import make_tiny
from forge.rollout.credit import assign_advantages
from forge.rollout.samples import make_batch
from forge.rollout.step_log import StepLog, recorded_steps
from forge.rollout.step_record import StepRecord, batch_digest, encode_step
from forge.trainer.engine import Engine
from forge.types import Batch, Completion, Episode, Group, Score, Task, VersionSpan
from harness.report import machine, table

GOAL = 1.02
ON, OFF = "recorded", "not recorded"
VOCAB = 4096


@dataclass(frozen=True)
class Plan:
    """How much is measured: windows of steps on each side, and the shape of a batch."""

    num_windows: int = 6
    num_steps: int = 2
    num_groups: int = 4
    group_size: int = 8
    prompt_tokens: int = 32
    completion_tokens: int = 96
    hidden_size: int = 256
    num_layers: int = 4


def make_groups(plan: Plan, *, seed: int) -> list[Group]:
    """Return groups of random tokens."""
    random = np.random.default_rng(seed)
    return [
        Group(number, 0, tuple(_episode(plan, random, number, member) for member in range(plan.group_size)))
        for number in range(plan.num_groups)
    ]


def _episode(plan: Plan, random: np.random.Generator, number: int, member: int) -> Episode:
    prompt = tuple(np.random.default_rng(number).integers(0, VOCAB, plan.prompt_tokens).tolist())
    tokens = tuple(random.integers(0, VOCAB, plan.completion_tokens).tolist())
    logprobs = tuple(np.float32(-random.exponential(1.0, plan.completion_tokens)).tolist())
    spans = (VersionSpan(0, 0, len(tokens)),)
    completion = Completion(
        prompt, tokens, logprobs, logprobs, "word " * len(tokens), "stop", None, spans, index=member
    )
    task = Task(f"task:{number}", messages=({"role": "user", "content": f"What is {number}?"},))
    return Episode.single(task, completion, Score(float(random.integers(0, 2))))


class Side:
    """Steps of one engine, with a log or without."""

    def __init__(self, engine: Engine, batches: Sequence[tuple[list[Group], Batch]], log: StepLog | None) -> None:
        self._engine, self._batches, self._log = engine, batches, log

    def window(self, num_steps: int) -> dict[str, float]:
        """Take steps, and return seconds and CPU seconds for each, and for how long a call of the log held it up."""
        held_s = 0.0
        began, cpu = time.perf_counter(), time.process_time()
        for number in range(num_steps):
            groups, batch = self._batches[number % len(self._batches)]
            result = self._engine.train_step(batch, keep_logprobs=True)
            if self._log is not None:
                called = time.perf_counter()
                self._log.write(result.step, groups, batch=batch, result=result, weights="0" * 64)
                held_s += time.perf_counter() - called
        if self._log is not None:
            self._log.flush()
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        return {"seconds": seconds / num_steps, "cpu_s": cpu_s / num_steps, "held_s": held_s / num_steps}


def measure(plan: Plan, folder: Path) -> dict[str, Any]:
    """Return the windows of each side, and how large the log is."""
    shape = {"hidden_size": plan.hidden_size, "intermediate_size": 4 * plan.hidden_size, "num_layers": plan.num_layers}
    make_tiny(folder / "model", **shape, vocab_size=VOCAB)
    algorithm = AlgorithmConfig()
    loss = make_loss(algorithm, max_tokens=plan.completion_tokens, temperature=1.0, iterations=1, exact_entropy=True)
    training = TrainingConfig(max_seq_len=1024, schedule="constant", share_prefixes=True)
    distributed = DistributedConfig(with_gpus=False)
    config = TrainerConfig(model={"path": str(folder / "model")}, training=training, distributed=distributed)
    engine = Engine(config, loss=loss)
    batches = []
    for seed in range(plan.num_steps):
        groups = assign_advantages(make_groups(plan, seed=seed), algorithm, mask_truncated=False)
        batches.append((groups, make_batch(groups)))
    log = StepLog(folder / "replay", config=ReplayRecordConfig(), kept_checkpoints=list, resume_step=None)
    sides = {ON: Side(engine, batches, log), OFF: Side(engine, batches, None)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for side in sides.values():
        side.window(1)  # warms up
    for number in range(plan.num_windows):
        order = list(sides) if number % 2 else list(reversed(sides))
        for name in order:
            found[name].append(sides[name].window(plan.num_steps))
    alone_s = min(_encoding_s(*batches[0]) for _ in range(5))
    log.close()
    engine.close()
    sizes = [path.stat().st_size for path in recorded_steps(folder / "replay").values()]
    num_tokens = batches[0][1].num_tokens
    bytes_per_token = statistics.mean(sizes) / num_tokens
    return {"windows": found, "num_tokens": num_tokens, "bytes_per_token": bytes_per_token, "alone_s": alone_s}


def _encoding_s(groups: Sequence[Group], batch: Batch) -> float:
    """Return the CPU seconds of this thread that encoding a step takes."""
    began = time.thread_time()
    encode_step(StepRecord(1, tuple(groups), batch_digest(batch), {"num_tokens": batch.num_tokens}))
    return time.thread_time() - began


def ratio(found: Mapping[str, Sequence[Mapping[str, float]]], key: str) -> float:
    """Return the median over pairs of neighbouring windows of recorded over not recorded steps."""
    return statistics.median(on[key] / off[key] for on, off in zip(found[ON], found[OFF], strict=True))


def report(found: Mapping[str, Any]) -> tuple[str, float]:
    """Return the table, and the ratio that the goal is for."""
    windows = found["windows"]

    def row(title: str, key: str) -> list[str]:
        cells = [f"{1e3 * statistics.median(each[key] for each in windows[name]):.1f} ms" for name in (ON, OFF)]
        return [title, *cells, f"{ratio(windows, key):.4f}", f"<= {GOAL}"]

    alone, step = found["alone_s"], statistics.median(each["cpu_s"] for each in windows[OFF])
    held = 1e3 * statistics.median(each["held_s"] for each in windows[ON])
    rows = [
        row("CPU for each training step", "cpu_s"),
        row("time of each training step", "seconds"),
        ["the step waits for the log", f"{held:.2f} ms", "", "", ""],
        [
            "encoding alone, CPU",
            f"{1e3 * alone:.2f} ms",
            f"{1e3 * step:.1f} ms",
            f"{1 + alone / step:.4f}",
            f"<= {GOAL}",
        ],
    ]
    return table(["", ON, OFF, "ratio", "goal"], rows), ratio(windows, "cpu_s")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run; figures mean little")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--check", action="store_true", help="exit code 1 if the goal is missed")
    arguments = parser.parse_args()
    plan = Plan(num_windows=2, num_steps=1, num_groups=1, hidden_size=64, num_layers=1) if arguments.quick else Plan()
    with tempfile.TemporaryDirectory() as folder:
        found = {"machine": machine(), "plan": asdict(plan), **measure(plan, Path(folder))}
    print(json.dumps(found["machine"]), end="\n\n")
    text, worst = report(found)
    print(text)
    print(
        f"\nA recorded step of {found['num_tokens']} tokens takes {worst:.4f} times the CPU time of one that is not "
        f"(goal <= {GOAL}), and {found['bytes_per_token']:.2f} bytes of disk per token."
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if worst <= GOAL or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
