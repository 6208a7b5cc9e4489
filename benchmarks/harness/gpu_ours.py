"""Our sides of `grpo_gpu.py`: the loop of `apps/grpo/main.py`, run for a few steps and watched.

    python gpu_ours.py SIDE PLAN.json FOLDER

What is watched is the trainer's handle, in the controller: when steps end, and how far the logprobs of sampler and
trainer are apart, over every token of every step. Where the time went is what the run itself writes down.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.gpu_plan import Plan, do_and_end, facts_of, leave, length_of, model_folder, prompts_file, say

SIDES: Mapping[str, tuple[str, ...]] = {
    "native-shared": ("placement=shared",),
    "native-shared-ahead": ("placement=shared", "rollout.staleness=1"),
    "native-shared-ahead2": ("placement=shared", "rollout.staleness=2"),
    "native-shared-ahead3": ("placement=shared", "rollout.staleness=3"),
    "native-turns": ("placement=turns",),
    "vllm-turns": ("placement=turns", "generator.engine=vllm"),
    "native-beside": ("placement=beside", "rollout.staleness=1"),
    "vllm-beside": ("placement=beside", "generator.engine=vllm", "rollout.staleness=1"),
    "native-beside-sync": ("placement=beside",),
    "vllm-beside-sync": ("placement=beside", "generator.engine=vllm"),
}
"""A side's settings. Those that say `beside` are asynchronous unless they say otherwise."""
NEAR = (0.9, 1.1)
"""Between which the ratio of trainer to sampler counts as near 1."""


def settings_of(plan: Plan, folder: Path, side: str) -> list[str]:
    """The configuration of a run, as it would be written on the command line of `apps/grpo/main.py`."""
    is_cuda = plan.device == "cuda"
    precision = {"mixed": "bfloat16", "pure": "bfloat16_pure", "float32": "float32"}[plan.precision]
    settings = [
        f"run.output_dir={folder / 'runs'}",
        f"run.name={side}",
        f"run.seed={plan.seed}",
        f"model.path={model_folder(folder, plan)}",
        f"prompts.sources=[{{path: {prompts_file(folder, plan)}}}]",
        "rewards.functions=[{kind: 'harness.gpu_plan:reward', name: spread}]",
        f"rollout.batch_groups={plan.num_prompts}",
        f"rollout.group_size={plan.group_size}",
        "rollout.no_signal=keep",
        f"generator.max_seq_len={plan.seq_len}",
        f"generator.max_batch={plan.num_samples}",
        f"generator.max_queue={4 * plan.num_samples}",
        f"generator.with_gpus={str(is_cuda).lower()}",
        f"generator.precision={plan.file_dtype}",
        f"generator.sampling.max_tokens={plan.max_tokens}",
        "generator.sampling.ignore_eos=true",
        f"training.max_steps={plan.total_steps}",
        f"training.max_seq_len={plan.seq_len}",
        f"training.microbatch_tokens={max(plan.microbatch_tokens, plan.seq_len)}",
        f"training.activation_checkpointing={plan.checkpointing}",
        f"training.compile={str(is_cuda).lower()}",
        f"training.learning_rate={plan.learning_rate}",
        "training.schedule=constant",
        "training.warmup_steps=0",
        f"distributed.precision={precision}",
        "distributed.shard=1",
        f"distributed.with_gpus={str(is_cuda).lower()}",
        "checkpointing.save_interval=null",
        "checkpointing.save_interval_s=null",
        "checkpointing.export_hf=false",
        "record.rollouts=some",
        "record.num_groups=4",
        "record.report=false",
        *SIDES[side],
    ]
    if "generator.engine=vllm" in settings and not is_cuda:
        settings.append("generator.kv_cache_gb=0.5")
    elif side == "vllm-turns":
        settings.append(f"generator.gpu_memory_share={plan.vllm_memory}")
    elif is_cuda and (side.startswith("native-shared") or side == "native-turns"):
        settings.append(f"generator.kv_cache_gb={cache_gib(plan)}")
    return [*settings, *plan.settings]


def cache_gib(plan: Plan) -> int:
    """What the keys and values of a step's samples take, each prompt once: the embedded engine would take more."""
    facts = facts_of(plan.shape)
    longest = plan.max_tokens if not plan.tail else 2 * plan.tail_median  # few are much longer
    tokens = plan.num_prompts * plan.prompt_tokens + plan.num_samples * (longest + 16)
    return -(-2 * 2 * tokens * facts.num_layers * facts.num_kv_heads * facts.head_dim // 2**30)


def mismatch(batch: Any, logprobs: Any) -> dict[str, float]:
    """How far the trainer's logprobs are from the sampler's, over the tokens that count."""
    import torch

    counted = batch.loss_weights != 0
    apart = (torch.cat(list(logprobs)) - batch.fields["old_logprobs"])[counted].double()
    ratio = apart.exp()
    outside = (ratio < NEAR[0]) | (ratio > NEAR[1])
    return {
        "mean_apart": float(apart.abs().mean()),
        "max_apart": float(apart.abs().max()),
        "outside": float(outside.double().mean()),
        "num_tokens": int(counted.sum()),
    }


class Times:
    """Tells where the time of each step went, and how stale its samples were, as the run writes it down."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_told = 0

    def tell(self) -> None:
        """The steps that were written since the last time."""
        from forge.observe import read_jsonl

        lines = [line for line in read_jsonl(self._path) if "time/step" in line.values] if self._path.exists() else []
        for line in lines[self._num_told :]:
            values = line.values
            times = {name.removeprefix("time/"): value for name, value in values.items() if name.startswith("time/")}
            stale = {name: values.get(f"rollout/{name}") for name in ("staleness_mean", "staleness_max", "reward_std")}
            sync = {name.replace("/", "_"): value for name, value in values.items() if name.startswith("sync/")}
            say("times", step=line.step, **stale, times=times, sync=sync)
        self._num_told = len(lines)


class Watched:
    """A trainer's handle that tells when steps end. It saves nothing: a checkpoint is no part of what is measured."""

    def __init__(self, trainer: Any, policy: Any, plan: Plan, *, times: Times) -> None:
        self._trainer, self._policy, self._plan, self._times = trainer, policy, plan, times
        self._num_steps = 0
        self._telling: asyncio.Task[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    async def save(self, **_: Any) -> None:
        """Nothing is kept."""

    async def train_step(self, batch: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = await self._trainer.train_step(batch, **{**named, "keep_logprobs": True})
        ended = time.perf_counter()
        self._num_steps += 1
        if self._telling is not None:
            await self._telling
        telling = self._tell(self._num_steps, batch, result, began=began, ended=ended)
        self._telling = asyncio.create_task(telling)  # while the next step generates: it is no part of a step
        if self._num_steps == self._plan.total_steps:
            await self._telling
            await self._tell_ends()
        return result

    async def _tell(self, step: int, batch: Any, result: Any, *, began: float, ended: float) -> None:
        apart = await asyncio.to_thread(mismatch, batch, result.logprobs)
        say(
            "step",
            step=step,
            ended=ended,
            samples=len(batch.lengths),
            tokens=int((batch.loss_weights != 0).sum()),
            train_s=ended - began,
            engine_s=result.seconds,
            loss=result.loss,
            **apart,
        )
        self._times.tell()

    async def _tell_ends(self) -> None:
        state = await self._trainer.state()
        stats = [
            {"num_preempted": each.num_preempted, "num_shared_tokens": each.num_shared_tokens, **dict(each.more)}
            for each in await self._policy.stats()
        ]
        plain = [{k: v for k, v in each.items() if isinstance(v, int | float | str)} for each in stats]
        say("trainer", **{name: state[name] for name in ("device_name", "compute_dtype", "memory_gib")}, engines=plain)


class VariedLengths:
    """A policy whose completions have the lengths of the plan. Everything else is the policy's own.

    Groups are begun in the order of their numbers.
    """

    def __init__(self, policy: Any, plan: Plan) -> None:
        self._policy, self._plan = policy, plan
        self._num_groups = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    async def generate(self, prompt: Any, *, sampling: Any) -> list[Any]:
        """Ask for each completion of a group by itself, since each has its own length."""
        group, self._num_groups = self._num_groups, self._num_groups + 1
        asked = [
            self._policy.generate(
                prompt,
                sampling=sampling.model_copy(
                    update={"n": 1, "max_tokens": length_of(self._plan, group, member), "seed": None}
                ),
            )
            for member in range(sampling.n)
        ]
        return [replace(found, index=member) for member, (found,) in enumerate(await asyncio.gather(*asked))]


def tell_phases(began: float) -> None:
    """Tell what each process does while the run starts, and when."""
    from forge.observe.phases import PhaseEvent, set_listener

    def tell(event: PhaseEvent) -> None:
        if event.state != "progress":
            at = time.perf_counter() - began
            say("phase", at=at, process=event.process, name=event.name, state=event.state, seconds=event.seconds)

    set_listener(tell)


async def train(plan: Plan, folder: Path, side: str) -> None:
    import forge
    from forge.config import GRPOConfig, load
    from forge.loops.grpo import GRPOLoop
    from forge.loops.planning import plan_run
    from forge.loops.rollouts import single_turn
    from forge.loops.workers import Workers, start_workers

    began = time.perf_counter()
    tell_phases(began)
    shutil.rmtree(folder / "runs" / side, ignore_errors=True)
    config = load(GRPOConfig, overrides=settings_of(plan, folder, side))
    run = plan_run(config)
    async with forge.run():
        workers = await start_workers(run.config, run.trainer, loss=run.loss, run=run.run)
        say("started", seconds=time.perf_counter() - began)
        if plan.only_start:
            leave()
        times = Times(folder / "runs" / side / "metrics.jsonl")
        watched: Any = Watched(workers.trainer, workers.policy, plan, times=times)
        policy: Any = VariedLengths(workers.policy, plan) if plan.tail else workers.policy
        workers = Workers(watched, policy, workers.rewards, workers.reference)

        class Measured(GRPOLoop):
            async def _finish(self) -> Any:
                """Leave: workers end with this process, and ending them in order is not measured."""
                times.tell()
                leave()

        loop = Measured(run, workers, single_turn(run, workers))
        try:
            await loop.run()
        finally:
            loop.close()


def main() -> None:
    side, plan_file, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    do_and_end(lambda: asyncio.run(train(Plan.read(plan_file), folder, side)))


if __name__ == "__main__":
    main()
