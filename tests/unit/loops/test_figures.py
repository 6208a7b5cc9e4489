"""The figures of a step."""

from __future__ import annotations

from episodes import make_group
from forge.loops.figures import StepClock, _of_rollouts
from forge.rollout.buffer import TakenBatch


def test_staleness_is_told_by_its_worst_and_on_average() -> None:
    groups = (make_group(0, version=1), make_group(1, version=4))
    values = _of_rollouts(TakenBatch(4, groups), groups)
    assert (values["rollout/staleness_max"], values["rollout/staleness_mean"]) == (3, 1.5)


def test_no_more_time_is_moved_than_there_is() -> None:
    clock = StepClock()
    with clock.part("waiting"):
        pass
    clock.move("waiting", "generating", 100.0)
    values = clock.values()
    assert values["time/waiting"] == 0.0
    assert 0.0 <= values["time/generating"] < 1.0
