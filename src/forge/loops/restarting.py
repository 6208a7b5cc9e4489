"""Start a run of reinforcement learning again inside its program, from the newest checkpoint, when a worker is lost.

A trainer in processes of its own is restored in place (`forge.trainer.recovering`), and services replace their
replicas. This is for the rest: a policy that trains and generates in one process (`placement: shared`), and a service
whose replicas died too often. The run does what `--resume` does: groups since the checkpoint are rolled out again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from forge.errors import ServiceStopped
from forge.loops.planning import GRPOPlan, episode_options
from forge.loops.preflight import check_grpo
from forge.loops.results import GRPOResult
from forge.loops.resuming import saved_step, where_it_stopped
from forge.loops.run_paths import checkpoint_dir, crash_dir, run_dir
from forge.loops.stopping import Stop, stopped_by_signals
from forge.loops.workers import Workers, start_workers
from forge.observe.clock import monotonic_s
from forge.runtime.lifetime import run
from forge.trainer.deaths import Deaths
from forge.trainer.handles import death_of
from forge.trainer.recovering import LOST

if TYPE_CHECKING:
    from forge.loops.grpo import GRPOLoop

_log = logging.getLogger("forge.grpo")


MakeLoop = Callable[[GRPOPlan, Workers, Stop], "GRPOLoop"]


async def run_with_restarts(plan: GRPOPlan, make_loop: MakeLoop) -> GRPOResult:
    """Run a plan, again from its newest checkpoint where the loss of a worker ends it. When all processes have ended,
    log what a resume continues after."""
    hint, grace_s = "this step is finished and saved", plan.config.checkpointing.grace_s
    restarts, is_stopped = Restarts(plan), True
    async with stopped_by_signals(save_hint=hint, grace_s=grace_s) as (stop, _):
        try:
            while True:
                try:
                    result = await _attempt(plan, restarts, stop=stop, make_loop=make_loop)
                except LOST as failure:
                    plan = await restarts.after(failure, plan, stop=stop)
                else:
                    is_stopped = result.is_stopped
                    return result
        finally:
            if is_stopped:
                step = plan.resume_step if restarts.loop is None else restarts.loop.step
                _log.warning("%s", where_it_stopped(step, checkpoint_dir(plan.config)))


async def _attempt(plan: GRPOPlan, restarts: Restarts, *, stop: Stop, make_loop: MakeLoop) -> GRPOResult:
    """Start the workers and run a loop."""
    async with run(plan.config.launcher):
        workers = await stop.unless(start_planned(plan))
        if workers is None:
            return GRPOResult.not_started(plan.resume_step, exit_code=stop.exit_code, folder=run_dir(plan.config))
        loop = restarts.begin(make_loop(plan, workers, stop), plan)
        try:
            result = await loop.run()
        except BaseException as error:
            failure = await death_of(workers.trainer, error) if isinstance(error, ServiceStopped) else error
            loop.close(failure)
            if failure is error:
                raise
            raise failure from error
        loop.close()
        return result


class Restarts:
    """Decides whether a run that lost a worker starts again, and counts what that costs."""

    def __init__(self, plan: GRPOPlan, *, clock: Callable[[], float] = monotonic_s) -> None:
        self._rules, self._clock = plan.config.recovery, clock
        self._deaths = Deaths("worker", self._rules, crash_dir(plan.config), clock=clock)
        self._lost_at = 0.0
        self._lost_step: int | None = None
        self.loop: GRPOLoop | None = None
        """The loop that runs, or ran last."""

    def begin(self, loop: GRPOLoop, plan: GRPOPlan) -> GRPOLoop:
        """Note that a loop starts, and add to its metrics what it cost to start the run again."""
        self.loop = loop
        if self._lost_step is not None:
            cost = {"seconds": self._clock() - self._lost_at, "steps_retrained": self._lost_step - plan.resume_step}
            loop.learner.note_restart({f"recovery/{name}": value for name, value in {"restarts": 1, **cost}.items()})
            self._lost_step = None
        return loop

    async def after(self, failure: Exception, plan: GRPOPlan, *, stop: Stop) -> GRPOPlan:
        """Return the plan of the run that continues after the loss of a worker, when it is time for it.

        Raise the failure if the run was asked to stop, or has not started; `RecoveryError` after too many.
        """
        is_local = plan.config.launcher.kind == "local"  # hosts cannot be attached to a second time
        loop = self.loop
        if loop is None or stop.signal is not None or not self._rules.max_restarts or not is_local:
            raise failure
        step = loop.step
        self._deaths.note(failure, what="a step", step=step, batch=loop.learner.batch)
        stop.retract()
        self._lost_at, self._lost_step = self._clock(), step
        await self._deaths.wait_to_restart(failure)
        saved = saved_step(checkpoint_dir(plan.config)) or 0
        _log.warning("all workers are started again, and the run continues after step %d of %d", saved, step)
        return resumed(plan)


async def start_planned(plan: GRPOPlan) -> Workers:
    """Start the workers of a plan."""
    return await start_workers(
        plan.config,
        plan.trainer,
        loss=plan.loss,
        run=plan.run,
        episodes=episode_options(plan),
        tokenizer=plan.tokenizer,
    )


def resumed(plan: GRPOPlan) -> GRPOPlan:
    """Return the plan of the same run from its newest checkpoint, or from its start if there is none."""
    config = plan.asked or plan.config
    checkpointing = config.checkpointing.model_copy(update={"resume": "auto"})
    again = check_grpo(config.model_copy(update={"checkpointing": checkpointing}), program=plan.program)
    return replace(
        again,
        loss=plan.loss,
        advantage=plan.advantage,
        own_loss=plan.own_loss,
        own_advantage=plan.own_advantage,
    )
