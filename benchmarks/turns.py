"""How much prefill does reusing the cache between the turns of an episode save?

Both sides are the same engine on the same weights (Qwen3's shape, about 32 million random weights, made here), once
with `prefix_sharing` and once without, in this process. They take turns after every turn of an episode. An episode is a
prompt of 200 tokens and 16 turns: each samples 32 tokens, and 48 tokens of a tool's answer follow. Every turn's prompt
is the whole conversation so far, as tokens.

*Alone*: one episode at a time, so that the time until a turn's first token is the time of its prefill. *Group*: eight
episodes of the same prompt at once, where only the whole turn can be timed. CPU seconds are those of all of the
engine's processes: they depend less on what else the machine does than the clock. Tokens that were computed do not
depend on it at all. With the native engine both sides must sample the same tokens with the same logprobs, bit for bit.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from forge.config import GeneratorConfig, ModelConfig, Sampling
from forge.generator.engine import Request, engine_class
from forge.models.locate import resolve
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer
from forge.types import Completion
from harness.report import machine, table

GOAL = 4.0
SHAPE = {
    "num_layers": 8,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
    "max_seq_len": 2048,
    "tie_embeddings": True,
}
QUICK_SHAPE = {"vocab_size": 1024, "num_layers": 2, "max_seq_len": 512}
SIDES = (("reuse", True), ("no reuse", False))


@dataclass(frozen=True)
class Plan:
    """What an episode is, and how many there are of it."""

    engine: str = "native"
    num_turns: int = 16
    num_prompt: int = 200
    num_sampled: int = 32
    num_observed: int = 48
    num_members: int = 8
    num_rounds: int = 3
    vocab_size: int = 16384

    @property
    def max_seq_len(self) -> int:
        return self.num_prompt + self.num_turns * (self.num_sampled + self.num_observed)

    def observed(self, *key: object) -> tuple[int, ...]:
        """Return a tool's answer; the same for both sides."""
        draw = random.Random(str(key))
        num = self.num_observed if len(key) > 1 else self.num_prompt
        return tuple(draw.randrange(600, self.vocab_size) for _ in range(num))


@dataclass
class Measured:
    """What one side did."""

    first_s: list[float] = field(default_factory=list)
    first_cpu_s: list[float] = field(default_factory=list)
    turn_s: list[float] = field(default_factory=list)
    turn_cpu_s: list[float] = field(default_factory=list)
    num_computed: int = 0
    num_reused: int = 0


class Side:
    """An engine, and what was measured of it."""

    def __init__(self, name: str, engine: Any) -> None:
        self.name, self.engine = name, engine
        self._others: list[psutil.Process] = []

    async def start(self) -> None:
        await self.engine.start()
        self._others += map(psutil.Process, self.engine.stats().more.get("pids", ()))

    def cpu_s(self) -> float:
        times = [process.cpu_times() for process in self._others]
        return time.process_time() + sum(each.user + each.system for each in times)

    async def turn(self, found: Measured, requests: Sequence[Request]) -> list[Completion]:
        """Sample one turn of every episode, all at once."""
        before, began, began_cpu = self.engine.stats(), time.perf_counter(), self.cpu_s()
        if len(requests) == 1:
            completion = None
            async for delta in self.engine.stream(requests[0]):
                if completion is None and delta.token_ids and len(found.first_s) == len(found.turn_s):
                    found.first_s.append(time.perf_counter() - began)
                    found.first_cpu_s.append(self.cpu_s() - began_cpu)
                completion = delta.completion
            assert completion is not None
            answers = [completion]
        else:
            answers = [each for (each,) in await asyncio.gather(*map(self.engine.generate, requests))]
        found.turn_s.append(time.perf_counter() - began)
        found.turn_cpu_s.append(self.cpu_s() - began_cpu)
        after = self.engine.stats()
        found.num_computed += after.num_prefill_tokens - before.num_prefill_tokens
        found.num_reused += after.num_shared_tokens - before.num_shared_tokens
        return answers


async def episodes(plan: Plan, sides: Sequence[Side], *, num_members: int, number: int) -> dict[str, Measured]:
    """Run a group of episodes on every side, a turn of one side after a turn of the other."""
    found = {side.name: Measured() for side in sides}
    start = plan.observed(f"prompt {number} {num_members}")
    histories = {side.name: [start] * num_members for side in sides}
    for turn in range(plan.num_turns):
        answers: dict[str, list[Completion]] = {}
        for side in sides if (turn + number) % 2 else reversed(sides):
            requests = [
                Request(f"{number}-{member}-{turn}", ids, _sampling(plan, number, member, turn))
                for member, ids in enumerate(histories[side.name])
            ]
            answers[side.name] = await side.turn(found[side.name], requests)
            histories[side.name] = [
                (*each.prompt_ids, *each.token_ids, *plan.observed(number, member, turn))
                for member, each in enumerate(answers[side.name])
            ]
        if plan.engine == "native":
            _check_equal(answers)
    return found


def _sampling(plan: Plan, *key: int) -> Sampling:
    seed = random.Random(str(key)).getrandbits(60)
    return Sampling(temperature=1.0, seed=seed, max_tokens=plan.num_sampled, ignore_eos=True)


def _check_equal(answers: dict[str, list[Completion]]) -> None:
    one, other = answers.values()
    for ours, theirs in zip(one, other, strict=True):
        if (ours.token_ids, ours.logprobs) != (theirs.token_ids, theirs.logprobs):
            raise AssertionError("with reuse other tokens or logprobs were sampled than without")


async def measure(plan: Plan, folder: Path) -> dict[str, Any]:
    sides = [Side(name, _engine(plan, folder, sharing=sharing)) for name, sharing in SIDES]
    started = []
    try:
        for side in sides:
            await side.start()
            started.append(side)
        await episodes(replace(plan, num_turns=2), sides, num_members=2, number=-1)  # the first steps are slow
        loads: dict[str, list[dict[str, Measured]]] = {"alone": [], "group": []}
        for number in range(plan.num_rounds):
            for load, num_members in (("alone", 1), ("group", plan.num_members)):
                print(f"round {number + 1} of {plan.num_rounds}, {load}", file=sys.stderr, flush=True)
                loads[load].append(await episodes(plan, sides, num_members=num_members, number=number))
    finally:
        for side in started:
            await side.engine.close()
    return {load: [{name: asdict(each) for name, each in one.items()} for one in each] for load, each in loads.items()}


def _engine(plan: Plan, folder: Path, *, sharing: bool) -> Any:
    config = GeneratorConfig(
        model=ModelConfig(path=str(folder)),
        engine=plan.engine,
        max_seq_len=plan.max_seq_len,
        max_batch=plan.num_members,
        prefix_sharing=sharing,
        with_gpus=False,
    )
    tokenizer = ChatTokenizer.load(folder)
    return engine_class(plan.engine)(config, model=resolve(config.model), tokenizer=tokenizer)


# ---- the report


def rows_of(rounds: Sequence[dict[str, dict[str, Any]]], keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return for each side its medians over rounds, and its ratio to the side without reuse."""
    rows: dict[str, dict[str, Any]] = {}
    for name, _ in SIDES:
        row: dict[str, Any] = {"num_computed": rounds[0][name]["num_computed"]}
        row["num_reused"] = rounds[0][name]["num_reused"]
        for key in keys:
            row[key] = statistics.median(sum(one[name][key]) for one in rounds)
            row[f"{key}_ratio"] = statistics.median(_ratio(one, name, key) for one in rounds)
        row["computed_ratio"] = rounds[0]["no reuse"]["num_computed"] / row["num_computed"]
        rows[name] = row
    return rows


def _ratio(one: dict[str, dict[str, Any]], name: str, key: str) -> float:
    return float(sum(one["no reuse"][key]) / (sum(one[name][key]) or math.nan))


ALONE = (("first_s", "prefill s"), ("first_cpu_s", "prefill CPU s"), ("turn_cpu_s", "whole CPU s"))
GROUP = (("turn_s", "whole s"), ("turn_cpu_s", "whole CPU s"))


def report(plan: Plan, found: dict[str, Any]) -> tuple[str, float]:
    """Return the tables, and by how much prefill takes less CPU time."""
    parts, ratio = [], 0.0
    for load, columns in (("alone", ALONE), ("group", GROUP)):
        rows = rows_of(found[load], [key for key, _ in columns])
        if load == "alone":
            ratio = rows["reuse"]["first_cpu_s_ratio"]
        num = 1 if load == "alone" else plan.num_members
        head = ["", "prompt tokens computed", "found in the cache", "ratio"]
        for _, title in columns:
            head += [title, "ratio"]
        cells = []
        for name, row in rows.items():
            line = [name, f"{row['num_computed']:,}", f"{row['num_reused']:,}", f"{row['computed_ratio']:.1f}"]
            for key, _ in columns:
                line += [f"{row[key]:.2f}", f"{row[f'{key}_ratio']:.1f}"]
            cells.append(line)
        title = f"## {load}: {num} episode{'s' if num > 1 else ''} of {plan.num_turns} turns, {plan.engine} engine"
        parts.append(f"{title}\n\n{table(head, cells)}")
    verdict = "met" if ratio >= GOAL else "missed"
    parts.append(f"Prefill of an episode takes {ratio:.1f} times less CPU time (goal >= {GOAL:g}: {verdict}).")
    return "\n\n".join(parts), ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model and few turns; figures mean little")
    parser.add_argument("--engine", choices=("native", "vllm"), default="native")
    parser.add_argument("--turns", type=int, default=16, help="turns of an episode")
    parser.add_argument("--sampled", type=int, default=32, help="tokens sampled in a turn")
    parser.add_argument("--observed", type=int, default=48, help="tokens of a tool's answer")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of the first prompt")
    parser.add_argument("--members", type=int, default=8, help="episodes at once, in the group")
    parser.add_argument("--rounds", type=int, default=3, help="episodes, or groups, of each side")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the goal is missed")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    chosen = parser.parse_args()
    plan = Plan(
        chosen.engine,
        chosen.turns,
        chosen.prompt,
        chosen.sampled,
        chosen.observed,
        num_members=chosen.members,
        num_rounds=chosen.rounds,
    )
    shape: dict[str, Any] = dict(SHAPE)
    if chosen.quick:
        plan = Plan(chosen.engine, 4, 40, 8, 16, num_members=3, num_rounds=1, vocab_size=1024)
        shape = QUICK_SHAPE
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(Path(folder) / "model", **shape)
        found: dict[str, Any] = {"machine": machine(), "plan": asdict(plan)}
        found |= asyncio.run(measure(plan, Path(folder) / "model"))
    text, ratio = report(plan, found)
    print(", ".join(f"{name} {value}" for name, value in found["machine"].items()))
    print(f"\n{text}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if chosen.check and ratio < GOAL else 0


if __name__ == "__main__":
    sys.exit(main())
