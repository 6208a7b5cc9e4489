"""What does an episode cost beside the policy: how much of a controller does a turn take, and does memory stay flat?

A controller runs 1,000 episodes at once, in groups of eight, through `EpisodeSource` and a service of episode workers,
as a run does. The policy is a service whose only actor answers at once, so nothing but ours is measured. Every episode
has four turns of 16 sampled tokens. New groups start as others finish, until 20,000 episodes are done. CPU seconds are
those of each process; memory is the controller's and the workers' own (RSS), read while the same number of episodes is
under way: the goals are less than 1 ms of the controller's CPU for each turn, and memory that does not grow.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

import forge
from forge.config import AlgorithmConfig, EpisodeConfig, EpisodeLimits, ModelConfig
from forge.envs.environment import load_program
from forge.models.locate import resolve
from forge.models.tokenizer import ChatTokenizer
from forge.rollout.episode_source import EpisodeSource
from forge.rollout.episode_worker import EpisodeOptions, EpisodeWorker
from forge.rollout.references import References
from forge.types import Task
from harness.episode_load import InstantGenerator
from harness.report import machine, table

GOAL_MS = 1.0
GOAL_GROWTH = 1.1
GROUP_SIZE = 8
NUM_TURNS = 4


@dataclass(frozen=True)
class Plan:
    """How many episodes there are, at once and in all."""

    num_at_once: int = 1000
    num_episodes: int = 20_000
    num_workers: int = 1


class Tasks:
    """An endless line of small tasks."""

    def at(self, number: int) -> tuple[int, Task]:
        """Return the task of a group."""
        return 0, Task(f"task:{number}", messages=({"role": "user", "content": f"What is {number} + 1?"},))


async def measure(plan: Plan) -> dict[str, Any]:
    """Run all episodes, and return what they cost."""
    folder = resolve(ModelConfig(preset="tiny")).folder
    assert folder is not None
    tokenizer = ChatTokenizer.load(folder)
    kind = "harness.episode_load:dialogue"
    options = EpisodeOptions(
        program=load_program(kind, {"num_turns": NUM_TURNS}),
        limits=EpisodeLimits(),
        evaluation_limits=EpisodeLimits(),
        sampling={"max_tokens": 16, "temperature": 1.0},
        evaluation_sampling={},
        max_seq_len=4096,
        tool_format="hermes",
        run_seed=0,
    )
    async with forge.run():
        policy: Any = await InstantGenerator.options(mesh_name="generator").as_service(16, vocab_size=500)
        spawner = EpisodeWorker.options(num_replicas=plan.num_workers, routing="least_loaded", mesh_name="episodes")
        workers = await spawner.as_service(options, tokenizer, policy)
        source = EpisodeSource(
            Tasks(),
            run=workers.run.route,
            compare=None,
            references=References(None, algorithm=AlgorithmConfig(), temperature=1.0),
            config=EpisodeConfig(kind=kind),
            group_size=GROUP_SIZE,
        )
        own = psutil.Process()
        pids = [pid for replica in (await workers.get_metrics()).replicas for pid in replica.pids]
        others = [psutil.Process(pid) for pid in pids]
        return await _run(plan, source, own, others)


async def _run(
    plan: Plan, source: EpisodeSource, own: psutil.Process, others: Sequence[psutil.Process]
) -> dict[str, Any]:
    numbers = iter(range(plan.num_episodes // GROUP_SIZE))
    memory: list[tuple[int, int, int]] = []
    num_done = 0

    async def lane() -> None:
        nonlocal num_done
        for number in numbers:
            group = await source.roll_out(number)
            num_done += len(group.episodes)
            if num_done % (plan.num_episodes // 20) < GROUP_SIZE:
                memory.append((num_done, own.memory_info().rss, sum(each.memory_info().rss for each in others)))

    before = (_cpu([own]), _cpu(others))
    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(plan.num_at_once // GROUP_SIZE)))
    seconds = time.perf_counter() - began
    num_turns = num_done * NUM_TURNS
    third = max(1, len(memory) // 3)
    return {
        "plan": asdict(plan),
        "num_episodes": num_done,
        "seconds": seconds,
        "turns_per_s": num_turns / seconds,
        "controller_ms": 1e3 * (_cpu([own]) - before[0]) / num_turns,
        "workers_ms": 1e3 * (_cpu(others) - before[1]) / num_turns,
        "controller_growth": _growth([each[1] for each in memory], third),
        "workers_growth": _growth([each[2] for each in memory], third),
        "memory": memory,
    }


def _cpu(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in processes)


def _growth(values: Sequence[int], third: int) -> float:
    """How much larger memory is in the last third than in the second: the first fills pools and caches."""
    return statistics.median(values[-third:]) / statistics.median(values[third : 2 * third] or values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="a smoke run of 400 episodes; figures mean little")
    parser.add_argument("--workers", type=int, default=1, help="processes that run episodes")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a goal is missed")
    arguments = parser.parse_args()
    sizes = {"num_at_once": 80, "num_episodes": 400} if arguments.quick else {}
    found = asyncio.run(measure(Plan(**sizes, num_workers=arguments.workers)))
    print(json.dumps(machine()), end="\n\n")
    rows = [
        ["turns a second, all processes on this machine", f"{found['turns_per_s']:.0f}", ""],
        ["controller, CPU for each turn", f"{found['controller_ms']:.2f} ms", f"< {GOAL_MS:g} ms"],
        ["episode workers, CPU for each turn", f"{found['workers_ms']:.2f} ms", ""],
        [
            "controller's memory, last third over second third",
            f"{found['controller_growth']:.3f}",
            f"< {GOAL_GROWTH:g}",
        ],
        ["workers' memory, the same", f"{found['workers_growth']:.3f}", f"< {GOAL_GROWTH:g}"],
    ]
    plan = found["plan"]
    title = f"{found['num_episodes']} episodes of {NUM_TURNS} turns, {plan['num_at_once']} at once"
    print(table([title, "", "goal"], rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    is_met = found["controller_ms"] < GOAL_MS and max(found["controller_growth"], found["workers_growth"]) < GOAL_GROWTH
    return 0 if is_met or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
