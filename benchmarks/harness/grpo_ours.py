"""Our sides of `grpo.py`: a process that runs the loop of `apps/grpo/main.py` in turns, and speaks as TRL's does.

A window begins and ends when a batch is about to be learned from and nothing is being generated. A synchronous run is
in that state by itself. In an asynchronous one nothing new is begun at the end of a window, and what is under way ends
on the clock: so every window has as many completions as it learns from, and nobody generates outside a window. This
costs an asynchronous window the overlap of one of its steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.grpo_plan import ROOT, Plan
from harness.windows import cpu_each_s

SIDES = {
    "ours, synchronous, one process": ("placement=shared",),
    "ours, synchronous, one process, 2 threads": ("placement=shared", "distributed.num_threads=2"),
    "ours, synchronous, apart": ("placement=apart",),
    "ours, asynchronous, staleness 1": ("placement=apart", "rollout.staleness=1"),
    "ours, asynchronous, staleness 2": ("placement=apart", "rollout.staleness=2"),
}


class Gate:
    """A policy that can be asked to begin nothing new, and knows its version. Everything else is the policy's own."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._open = asyncio.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._num_under_way = 0
        self._version = -1
        self._news = asyncio.Condition()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        await self._open.wait()
        self._num_under_way += 1
        self._quiet.clear()
        try:
            return await self._policy.generate(*args, **kwargs)
        finally:
            self._num_under_way -= 1
            if self._num_under_way == 0:
                self._quiet.set()

    async def update_weights(self, version: int) -> Any:
        reports = await self._policy.update_weights(version)
        async with self._news:
            self._version = version
            self._news.notify_all()
        return reports

    async def shut(self, version: int) -> None:
        """Begin nothing new, and return when nothing is under way and this version is served."""
        self._open.clear()
        await self._quiet.wait()
        async with self._news:
            await self._news.wait_for(lambda: self._version >= version)

    def open(self) -> None:
        self._open.set()


class Gone(Exception):
    """The measuring program wants no more windows."""


class Turns:
    """A trainer's handle that counts samples and time, and waits for its turn before each window."""

    def __init__(self, trainer: Any, gate: Gate, *, window: int, evaluator: Any = None) -> None:
        self._trainer, self._gate, self._window, self._evaluator = trainer, gate, window, evaluator
        self._steps = self._samples = self._tokens = 0
        gate.open()
        self._mark()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    async def train_step(self, batch: Any, **kwargs: Any) -> Any:
        if self._steps % self._window == 0:
            await self._take_turn()
        result = await self._trainer.train_step(batch, **kwargs)
        self._steps += 1
        self._samples += len(batch.lengths)
        self._tokens += int(batch.loss_weights.sum())
        return result

    async def _take_turn(self) -> None:
        await self._gate.shut(self._steps)
        seconds, cpu_seconds = time.perf_counter() - self._wall, _family_cpu_s() - self._cpu_s
        accuracy = None
        if self._evaluator is not None:
            accuracy = (await self._evaluator.run()).solved
        say(
            "window",
            step=self._steps,
            samples=self._samples,
            tokens=self._tokens,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            accuracy=accuracy,
        )
        if not sys.stdin.readline():
            raise Gone
        self._gate.open()
        self._samples = self._tokens = 0
        self._mark()

    def _mark(self) -> None:
        self._wall, self._cpu_s = time.perf_counter(), _family_cpu_s()


def _family_cpu_s() -> float:
    """CPU seconds of this process and those that it started."""
    import psutil

    family = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    return sum(cpu_each_s(family).values())


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def settings_of(plan: Plan, folder: Path, *, side: Sequence[str] = ()) -> list[str]:
    """The configuration of a run, as it would be written on the command line of `apps/grpo/main.py`."""
    return [
        *common_settings(plan, folder),
        f"evaluation.sources=[{{path: {folder / 'task' / 'heldout.jsonl'}}}]",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        "rewards.functions=[{kind: 'harness.grpo_plan:reward', name: right}]",
        f"generator.sampling.ignore_eos={str(plan.is_fixed_length).lower()}",
        *side,
        *plan.settings,
    ]


def common_settings(plan: Plan, folder: Path) -> list[str]:
    """Return the settings that do not depend on what an episode is."""
    return [
        f"run.seed={plan.seed}",
        f"model.path={folder / 'model'}",
        f"prompts.sources=[{{path: {folder / 'task' / 'prompts.jsonl'}}}]",
        f"rollout.batch_groups={plan.num_prompts}",
        f"rollout.group_size={plan.group_size}",
        "rollout.no_signal=keep",
        "rollout.max_no_signal_groups=1000000",
        f"generator.sampling.max_tokens={plan.max_tokens}",
        f"generator.max_batch={plan.samples_per_step}",
        "generator.with_gpus=false",
        f"training.max_seq_len={plan.max_seq_len}",
        "training.microbatch_tokens=2048",
        "training.max_steps=1000000",
        f"training.learning_rate={plan.learning_rate}",
        "training.schedule=constant",
        "training.warmup_steps=0",
        "distributed.with_gpus=false",
        "checkpointing.save_interval=null",
        "checkpointing.save_interval_s=null",
        "checkpointing.export_hf=false",
        "record.report=false",
    ]


@contextlib.asynccontextmanager
async def _opened(config: Any, plan: Plan) -> AsyncIterator[Any]:
    """The loop of a run, with `Turns` and `Gate` between it and those who work for it."""
    import forge
    from forge.loops.evaluation import make_evaluator
    from forge.loops.grpo import GRPOLoop
    from forge.loops.planning import episode_options, plan_run
    from forge.loops.rollouts import make_source
    from forge.loops.workers import start_workers

    run = plan_run(config)
    async with forge.run():
        workers = await start_workers(
            run.config,
            run.trainer,
            loss=run.loss,
            run=run.run,
            episodes=episode_options(run),
            tokenizer=run.tokenizer,
        )
        gate = Gate(workers.policy)
        evaluator = None if plan.goal is None else make_evaluator(run, workers, make_source(run, workers))
        trainer: Any = Turns(workers.trainer, gate, window=plan.window, evaluator=evaluator)
        policy: Any = gate
        watched = replace(workers, trainer=trainer, policy=policy)
        loop = GRPOLoop(run, watched, make_source(run, watched))
        try:
            yield loop
        finally:
            loop.close()


def serve(folder: Path, plan: Plan, name: str) -> None:
    """Train as `apps/grpo/main.py` does, in turns, until the measuring program has gone."""
    place = f"side{list(SIDES).index(name)}"
    metrics = train_in_turns(folder, plan, settings_of(plan, folder, side=SIDES[name]), place=place)
    say("done", times=time_split(metrics, plan))


def train_in_turns(folder: Path, plan: Plan, settings: Sequence[str], *, place: str) -> Path:
    """Run a loop with these settings until the measuring program has gone, and return the file of its metrics."""
    from forge.config import GRPOConfig, load

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    config = load(GRPOConfig, overrides=[*settings, f"run.output_dir={folder / 'runs'}", f"run.name={place}"])

    async def train() -> None:
        async with _opened(config, plan) as loop:
            with contextlib.suppress(Gone):
                await loop.run()

    asyncio.run(train())
    return folder / "runs" / place / "metrics.jsonl"


def time_split(path: Path, plan: Plan) -> dict[str, float]:
    """Seconds of a step by what they went into, on average over the steps that were measured.

    The first step of a window holds the wait for its turn, and is left out.
    """
    from forge.observe import read_jsonl

    def is_counted(step: int) -> bool:
        return step > plan.num_warm * plan.window and (plan.window == 1 or (step - 1) % plan.window != 0)

    lines = [line.values for line in read_jsonl(path) if is_counted(line.step) and "time/step" in line.values]
    names = sorted({name for line in lines for name in line if name.startswith("time/")})
    return {name.removeprefix("time/"): statistics.mean(float(line[name]) for line in lines) for name in names}
