"""How many workers of a kind a run has: changed by `forge scale`, or by a rule between steps.

`scaling_rule` is a pure function of what the last steps looked like. `RunScaling` carries changes out one after
another, while training continues: it resizes the service, lets as many rollouts be in flight as the generators have
room for, and records the change in the run's folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from forge.config.generator import AutoscaleConfig
from forge.errors import ForgeError, OptionError, ResizeError, did_you_mean
from forge.loops.planning import GRPOPlan, in_flight_limit
from forge.loops.run_control import Handler
from forge.loops.run_paths import run_dir
from forge.loops.runtime_changes import RuntimeChange, record_change, value_at
from forge.loops.workers import Workers
from forge.rollout.buffer import ReplayBuffer

_log = logging.getLogger("forge.grpo")

KEYS: Final = {
    "generators": "generator.num_replicas",
    "rewards": "rewards.num_replicas",
    "reference": "reference.num_replicas",
    "episodes": "episode.num_replicas",
}
"""The kinds of workers that can be scaled, with the keys that say how many there are at the start."""
_BUSY: Final = 0.9
"""Generators that are busy for more of the time than this are not made fewer."""


@dataclass(frozen=True, slots=True)
class ScalingLoad:
    """What one step says about the number of generators.

    Attributes:
        queue: finished groups that were left when the step's batch was taken.
        busy: the part of the step's time in which groups were being generated.
        waiting: the part of the step's time in which training waited for a batch.
    """

    queue: int
    busy: float
    waiting: float


def scaling_rule(loads: Sequence[ScalingLoad], replicas: int, autoscale: AutoscaleConfig) -> int:
    """Return how many generators there should be, given the loads since the last change, oldest first.

    One more, if training waited for longer than `grow_above` in each of the last `patience` steps while groups were
    being generated and none was left over. One less, if it waited for less than `shrink_below` in each of them and one
    generator less would still not be busy all the time. Otherwise, and with fewer loads than `patience`, as many as
    there are. The result is within `min` and `max` in any case.
    """
    bounded = min(max(replicas, autoscale.min), autoscale.max)
    if bounded != replicas or len(loads) < autoscale.patience:
        return bounded
    last = list(loads)[-autoscale.patience :]
    if all(load.waiting > autoscale.grow_above and load.queue == 0 and load.busy > 0.5 * load.waiting for load in last):
        return min(replicas + 1, autoscale.max)
    spare = replicas / max(1, replicas - 1)
    if all(load.waiting < autoscale.shrink_below and load.busy * spare < _BUSY for load in last):
        return max(replicas - 1, autoscale.min)
    return replicas


class RunScaling:
    """Scales the workers of one run. All calls are made on the controller's loop.

    Args:
        plan: what the run does.
        workers: its services.
        buffer: admits rollouts; its limit follows the number of generators.
        step: returns the steps taken so far.
    """

    def __init__(self, plan: GRPOPlan, workers: Workers, buffer: ReplayBuffer, *, step: Callable[[], int]) -> None:
        self._plan, self._config, self._buffer, self._step = plan, plan.config, buffer, step
        self._workers = workers
        kinds = ("generators", *(kind for kind in KEYS if getattr(workers, kind, None) is not None))
        self._numbers = {kind: int(value_at(self._config, KEYS[kind])) for kind in kinds}
        self._rule = self._config.generator.autoscale
        self._loads: deque[ScalingLoad] = deque(maxlen=None if self._rule is None else self._rule.patience)
        self._generating_s = 0.0
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def _service(self, kind: str) -> Any:
        return self._workers.policy.service if kind == "generators" else getattr(self._workers, kind)

    @property
    def numbers(self) -> Mapping[str, int]:
        """How many workers of each kind there are."""
        return dict(self._numbers)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What answers the command `scale`."""
        return {"scale": self._answer}

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Scale by the rule inside the block. What is under way at its end is cancelled."""
        try:
            yield
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait({self._task})

    async def _answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Change the numbers that a request names, and return all."""
        wanted = request.get("workers", {})
        if not isinstance(wanted, dict):
            raise OptionError(
                "kinds of workers with their numbers are needed",
                path="workers",
                value=wanted,
                rule=f"numbers by kind: {', '.join(self._numbers)}",
                repair="forge scale RUN generators=2",
            )
        for kind, count in wanted.items():
            self._check(kind, count)
        for kind, count in wanted.items():
            await self.scale(kind, count, by="forge scale")
        return {"workers": self.numbers, "step": self._step()}

    def _check(self, kind: str, count: object) -> None:
        """Refuse what this run cannot do."""
        if kind not in KEYS:
            why = "a trainer keeps its number of ranks while it runs" if kind == "trainer" else "there is no such kind"
            resume = "stop the run, and resume it with another section distributed"
            raise OptionError(
                f"the workers `{kind}` cannot be scaled: {why}",
                path=kind,
                value=count,
                rule=f"one of {', '.join(self._numbers)}",
                repair=resume if kind == "trainer" else did_you_mean(kind, KEYS) or "name one of these",
            )
        if kind not in self._numbers:
            raise OptionError(
                f"this run has no workers `{kind}`",
                path=kind,
                value=count,
                rule=f"one of {', '.join(self._numbers)}",
                repair="name one of these",
            )
        if kind == "generators" and self._config.placement != "apart":
            raise OptionError(
                "generators that share the trainer's devices cannot be scaled",
                path="placement",
                value=self._config.placement,
                rule="`apart`",
                repair="resume the run with placement: apart",
            )
        bounds = None if self._rule is None or kind != "generators" else (self._rule.min, self._rule.max)
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        if not is_count or (bounds is not None and not bounds[0] <= count <= bounds[1]):  # type: ignore[operator]
            rule = "a whole number >= 1" if bounds is None else f"from {bounds[0]} to {bounds[1]} (generator.autoscale)"
            raise OptionError(
                f"the number of workers `{kind}` is out of range", path=kind, value=count, rule=rule, repair=f"{kind}=1"
            )

    async def scale(self, kind: str, count: int, *, by: str) -> None:
        """Change the number of workers of a kind. Raise `ResizeError` if not all could be started; those that could
        stay, and are recorded."""
        async with self._turn:
            before = self._numbers[kind]
            if count == before:
                return
            try:
                await self._service(kind).resize(count)
                self._took_effect(kind, count, by)
            except ResizeError as error:
                if error.num_replicas != before:
                    self._took_effect(kind, error.num_replicas, by)
                raise

    def _took_effect(self, kind: str, count: int, by: str) -> None:
        before, self._numbers[kind] = self._numbers[kind], count
        self._loads.clear()
        if kind in ("generators", "episodes"):
            limit = in_flight_limit(self._plan, {KEYS[each]: number for each, number in self._numbers.items()})
            self._buffer.limit_in_flight(limit)
        configured = value_at(self._plan.asked or self._config, KEYS[kind])
        change = RuntimeChange(self._step(), KEYS[kind], configured, before, count, by)
        record_change(run_dir(self._config), change)
        _log.info("%s: %d -> %d, by %s", kind, before, count, by)

    def after_step(self, values: Mapping[str, Any], *, generating_s: float) -> None:
        """Look at the metrics of a step, and scale the generators if the rule says so. Returns at once.

        `generating_s` are the seconds since the start in which at least one group was being generated.
        """
        if self._rule is None:
            return
        total = max(float(values["time/step"]), 1e-9)
        busy_s, self._generating_s = generating_s - self._generating_s, generating_s
        waiting = (float(values["time/waiting"]) + float(values["time/generating"])) / total
        self._loads.append(ScalingLoad(self._buffer.num_ready, busy=min(1.0, busy_s / total), waiting=waiting))
        if self._task is not None and not self._task.done():
            return
        wanted = scaling_rule(tuple(self._loads), self._numbers["generators"], self._rule)
        if wanted != self._numbers["generators"]:
            self._task = asyncio.create_task(self._scale_by_rule(wanted), name="autoscaling")

    async def _scale_by_rule(self, wanted: int) -> None:
        """Scale as the rule says. That it fails is logged: a run with fewer generators goes on."""
        try:
            await self.scale("generators", wanted, by="generator.autoscale")
        except ForgeError as error:
            self._loads.clear()
            _log.warning("the generators could not be scaled to %d: %s", wanted, error)
