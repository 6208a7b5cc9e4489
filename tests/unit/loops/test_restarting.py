"""Whether a run starts again in its program when a worker is lost."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge.errors import ActorFailure, RecoveryError
from forge.loops.planning import GRPOPlan, plan_run
from forge.loops.restarting import Restarts
from forge.loops.stopping import Stop
from forge.types import Batch
from grpo_runs import config

LOST = ActorFailure("policy[0] was lost: rank 0 ended")


class Loop(SimpleNamespace):
    """What is asked of a loop that ended."""

    def __init__(self, step: int, batch: Batch | None = None) -> None:
        super().__init__(step=step, learner=SimpleNamespace(batch=batch, note_restart=self.note))
        self.noted: dict[str, float] = {}

    def note(self, metrics: dict[str, float]) -> None:
        self.noted = metrics


def after(restarts: Restarts, plan: GRPOPlan, step: int, stop: Stop, batch: Batch | None = None) -> GRPOPlan:
    loop: Any = Loop(step, batch)
    restarts.begin(loop, plan)
    return asyncio.run(restarts.after(LOST, plan, stop=stop))


def test_a_run_starts_again_until_it_was_lost_too_often(tmp_path: Path) -> None:
    plan = plan_run(config(tmp_path / "run", "recovery.max_restarts=2", "recovery.backoff_s=0", "recovery.window_s=9"))
    now = [100.0]
    restarts, stop = Restarts(plan, clock=lambda: now[0]), Stop()
    stop.ask()  # as rollouts do that fail with the policy
    again = after(restarts, plan, 3, stop)
    assert (again.config.checkpointing.resume, again.loss, stop.is_asked) == ("auto", plan.loss, False)
    now[0] += 5
    loop: Any = Loop(0)
    assert restarts.begin(loop, again) is loop
    assert loop.noted == {"recovery/restarts": 1, "recovery/seconds": 5.0, "recovery/steps_retrained": 3}
    after(restarts, plan, 4, stop)
    with pytest.raises(RecoveryError) as caught:
        after(restarts, plan, 5, stop)
    assert (caught.value.path, caught.value.rule) == ("recovery.max_restarts", "at most 2 in 9 s")
    assert (caught.value.value, "--resume" in str(caught.value.repair)) == (LOST.message, True)
    now[0] += 10
    after(restarts, plan, 6, stop)  # the earlier ones no longer count


def test_the_same_step_is_not_tried_a_third_time(tmp_path: Path) -> None:
    import torch

    plan, stop = plan_run(config(tmp_path / "run", "recovery.backoff_s=0")), Stop()
    restarts = Restarts(plan)
    batch = Batch(torch.zeros(3, dtype=torch.int64), torch.ones(3), (3,), identities=("group 7",))
    after(restarts, plan, 2, stop, batch)
    with pytest.raises(RecoveryError, match="died twice in a step after 2 step") as caught:
        after(restarts, plan, 2, stop, batch)
    folder = tmp_path / "run" / "crashes" / "worker-step-00000003"
    assert caught.value.path == str(folder)
    assert "group 7" in (folder / "README.md").read_text()


@pytest.mark.parametrize("why", ["signal", "switched off", "not started", "other hosts"])
def test_the_failure_is_raised_where_the_run_does_not_start_again(tmp_path: Path, why: str) -> None:
    overrides = {"switched off": ["recovery.max_restarts=0"]}.get(why, [])
    plan, stop = plan_run(config(tmp_path / "run", *overrides)), Stop()
    if why == "signal":
        stop.ask(signal.SIGTERM)
    if why == "other hosts":
        launcher = plan.config.launcher.model_copy(update={"kind": "hosts"})
        object.__setattr__(plan, "config", plan.config.model_copy(update={"launcher": launcher}))
    restarts = Restarts(plan)
    loop: Any = Loop(1)
    if why != "not started":
        restarts.begin(loop, plan)
    with pytest.raises(ActorFailure) as caught:
        asyncio.run(restarts.after(LOST, plan, stop=stop))
    assert caught.value is LOST
    assert (stop.signal is signal.SIGTERM) == (why == "signal")


def test_a_signal_is_not_taken_back() -> None:
    stop = Stop()
    stop.ask(signal.SIGTERM)
    stop.retract()
    assert stop.is_asked
