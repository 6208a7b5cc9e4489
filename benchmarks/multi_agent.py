"""What does an episode with two agents cost, compared with two episodes of one agent?

Both sides have as many turns, prompt tokens and sampled tokens. They are measured in the same run, in windows that take
turns.

*Controller and worker*: the policy answers at once, so that what is left is the cost of episodes themselves. Each side
has a process of its own that runs episodes; its CPU time is counted, and that of the controller, which starts the
episodes, computes advantages and builds the batch.

*Native engine*: whole runs of reinforcement learning on the tiny model, one side after the other. A sample is what one
agent did in one episode. CPU time is that of all processes.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

import forge
from forge.config import AlgorithmConfig, EpisodeConfig, EpisodeLimits, GRPOConfig, ModelConfig
from forge.envs.environment import load_program
from forge.loops.grpo import run_grpo
from forge.models.locate import resolve
from forge.models.tokenizer import ChatTokenizer
from forge.rollout.agent_credit import AgentCredit
from forge.rollout.credit import assign_advantages
from forge.rollout.episode_source import EpisodeSource
from forge.rollout.episode_worker import EpisodeOptions, EpisodeWorker
from forge.rollout.references import References
from forge.rollout.samples import make_batch
from forge.types import Task
from harness.episode_load import InstantGenerator
from harness.report import machine, table

GOAL = 1.10
GROUP_SIZE = 8
NUM_TURNS = 4
PAIR, SINGLE = "two agents", "two episodes"
SIDES = {PAIR: ("pair", 1), SINGLE: ("dialogue", 2)}
"""For each side its program, and how many episodes replace one of the side with two agents."""


@dataclass(frozen=True)
class Plan:
    """How much is measured: windows of groups in the first part, runs of steps in the second."""

    num_windows: int = 12
    num_groups: int = 32
    num_rounds: int = 3
    num_steps: int = 8
    batch_groups: int = 4
    max_tokens: int = 16


class Tasks:
    """An endless line of small tasks, all of the same length."""

    def at(self, number: int) -> tuple[int, Task]:
        """Return the task of a group."""
        return 0, Task(f"task:{number}", messages=({"role": "user", "content": f"What is {number:06} + 1?"},))


# ---- Controller and worker, against a policy that answers at once ----------------------------------------------------


@dataclass
class Side:
    """One side: where its groups come from, the process that runs its episodes, and how it is credited."""

    name: str
    source: EpisodeSource
    worker: psutil.Process
    credit: AgentCredit
    number: int = 0

    async def window(self, num_groups: int) -> dict[str, float]:
        """Make a batch of groups, and return the CPU milliseconds for each turn."""
        own = psutil.Process()
        numbers = range(self.number, self.number + num_groups)
        self.number += num_groups
        before, began = (_cpu(own), _cpu(self.worker)), time.perf_counter()
        groups = await asyncio.gather(*map(self.source.roll_out, numbers))
        assigned = assign_advantages(groups, AlgorithmConfig(), mask_truncated=False, agents=self.credit)
        batch = make_batch(assigned)
        seconds, after = time.perf_counter() - began, (_cpu(own), _cpu(self.worker))
        num_turns = sum(len(episode.turns) for group in groups for episode in group.episodes)
        controller, worker = (1e3 * (late - early) / num_turns for early, late in zip(before, after, strict=True))
        return {
            "num_turns": num_turns,
            "num_tokens": len(batch.token_ids),
            "controller": controller,
            "worker": worker,
            "both": controller + worker,
            "seconds": seconds,
        }


def _cpu(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


async def measure_episodes(plan: Plan) -> dict[str, list[dict[str, float]]]:
    """Return the windows of each side."""
    folder = resolve(ModelConfig(preset="tiny")).folder
    assert folder is not None
    tokenizer = ChatTokenizer.load(folder)
    async with forge.run():
        policy: Any = await InstantGenerator.options(mesh_name="generator").as_service(16, vocab_size=500)
        sides = [await _side(name, tokenizer, policy) for name in SIDES]
        found: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
        for window in range(-2, plan.num_windows):  # the first ones fill caches
            for side in sides if window % 2 else reversed(sides):
                measured = await side.window(plan.num_groups * SIDES[side.name][1])
                if window >= 0:
                    found[side.name].append(measured)
    _check_equal(found)
    return found


async def _side(name: str, tokenizer: ChatTokenizer, policy: Any) -> Side:
    kind = f"harness.episode_load:{SIDES[name][0]}"
    program = load_program(kind, {"num_turns": NUM_TURNS})
    options = EpisodeOptions(
        program=program,
        limits=EpisodeLimits(),
        evaluation_limits=EpisodeLimits(),
        sampling={"max_tokens": 16, "temperature": 1.0},
        evaluation_sampling={},
        max_seq_len=4096,
        tool_format="hermes",
        run_seed=0,
    )
    spawner = EpisodeWorker.options(num_replicas=1, mesh_name=f"episodes_{SIDES[name][0]}")
    workers = await spawner.as_service(options, tokenizer, policy)
    ((pid,),) = (replica.pids for replica in (await workers.get_metrics()).replicas)
    source = EpisodeSource(
        Tasks(),
        run=workers.run.route,
        compare=None,
        references=References(None, algorithm=AlgorithmConfig(), temperature=1.0),
        config=EpisodeConfig(kind=kind),
        group_size=GROUP_SIZE,
    )
    return Side(name, source, psutil.Process(pid), AgentCredit({}, program.agents))


def _check_equal(found: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Refuse figures of sides that did not do the same work."""
    work = {name: [(each["num_turns"], each["num_tokens"]) for each in windows] for name, windows in found.items()}
    if work[PAIR] != work[SINGLE]:
        raise AssertionError(f"the sides had different numbers of turns or tokens: {work}")


# ---- Whole runs with the native engine -------------------------------------------------------------------------------


def train(plan: Plan, name: str, folder: Path, *, number: int) -> list[dict[str, float]]:
    """Run one side, and return the clock and the CPU time of all processes at the end of every step."""
    program, factor = SIDES[name]
    clock = folder / f"{program}_{number}.clock"
    config = GRPOConfig.model_validate(
        {
            "run": {"name": f"{program}_{number}", "output_dir": str(folder), "seed": number},
            "model": {"preset": "tiny"},
            "placement": "shared",
            "prompts": {"sources": [{"task": "arithmetic", "num_prompts": 100, "seed": number}]},
            "episode": {"kind": f"harness.episode_load:{program}", "args": {"num_turns": NUM_TURNS}},
            "rollout": {"batch_groups": plan.batch_groups * factor, "group_size": GROUP_SIZE, "no_signal": "keep"},
            "generator": {
                "max_seq_len": 512,
                "max_batch": 128,
                "sampling": {"max_tokens": plan.max_tokens, "ignore_eos": True},
            },
            "training": {"max_steps": plan.num_steps, "max_seq_len": 512, "microbatch_tokens": 4096},
            "checkpointing": {"save_interval": None, "export_hf": False},
            "record": {"rollouts": "none", "report": False, "trace": False},
            "metrics": {
                "tensorboard": False,
                "sinks": [{"kind": "harness.episode_load:StepClock", "args": {"path": str(clock)}}],
            },
        }
    )
    asyncio.run(run_grpo(config))
    return [json.loads(line) for line in clock.read_text().splitlines()]


def measure_runs(plan: Plan, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Return the median step of each run, in turns of the two sides."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    num_samples = 2 * plan.batch_groups * GROUP_SIZE
    for number in range(plan.num_rounds):
        for name in SIDES if number % 2 else reversed(SIDES):
            print(f"round {number + 1} of {plan.num_rounds}, {name}", file=sys.stderr, flush=True)
            steps = train(plan, name, folder, number=number)
            pairs = list(pairwise(steps[1:]))  # the first step starts up
            cpu_s = statistics.median(late["cpu_s"] - early["cpu_s"] for early, late in pairs)
            clock_s = statistics.median(late["clock_s"] - early["clock_s"] for early, late in pairs)
            found[name].append({"cpu_ms": 1e3 * cpu_s / num_samples, "samples_per_s": num_samples / clock_s})
    return found


# ---- The report ------------------------------------------------------------------------------------------------------


def ratio(found: Mapping[str, Sequence[Mapping[str, float]]], key: str) -> float:
    """Return the median over pairs of neighbouring windows of two agents over two episodes."""
    pairs = zip(found[PAIR], found[SINGLE], strict=True)
    return statistics.median(pair[key] / single[key] for pair, single in pairs)


def report(episodes: Mapping[str, Any], runs: Mapping[str, Any]) -> tuple[str, float]:
    """Return the table, and the ratio that the goal is for."""

    def row(title: str, found: Mapping[str, Any], key: str, shape: str, *, goal: str = "") -> list[str]:
        cells = [shape.format(statistics.median(each[key] for each in found[name])) for name in SIDES]
        return [title, *cells, f"{ratio(found, key):.3f}", goal]

    goal = f"<= {GOAL:.2f}"
    rows = [
        row("controller, CPU for each turn", episodes, "controller", "{:.3f} ms"),
        row("worker, CPU for each turn", episodes, "worker", "{:.3f} ms"),
        row("both together", episodes, "both", "{:.3f} ms", goal=goal),
    ]
    worst = ratio(episodes, "both")
    if runs[PAIR]:
        rows.append(row("native engine, CPU for each sample", runs, "cpu_ms", "{:.1f} ms", goal=goal))
        rows.append(row("native engine, samples a second", runs, "samples_per_s", "{:.1f}"))
        worst = max(worst, ratio(runs, "cpu_ms"))
    return table(["", *SIDES, "ratio", "goal"], rows), worst


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run; figures mean little")
    parser.add_argument("--only", choices=("episodes",), help="the first part alone")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--check", action="store_true", help="exit code 1 if the goal is missed")
    arguments = parser.parse_args()
    plan = Plan(num_windows=2, num_groups=2, num_rounds=1, num_steps=4, batch_groups=1) if arguments.quick else Plan()
    found: dict[str, Any] = {"machine": machine(), "plan": asdict(plan)}
    nothing: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    found["episodes"] = asyncio.run(measure_episodes(plan))
    with tempfile.TemporaryDirectory() as folder:
        found["runs"] = nothing if arguments.only == "episodes" else measure_runs(plan, Path(folder))
    print(json.dumps(found["machine"]), end="\n\n")
    text, worst = report(found["episodes"], found["runs"])
    print(text)
    print(f"\nAn episode with two agents costs {worst:.3f} times two episodes (goal <= {GOAL:.2f}).")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if worst <= GOAL or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
