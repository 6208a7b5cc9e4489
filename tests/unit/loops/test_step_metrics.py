"""The metrics of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from episodes import make_group
from forge.generator.engine import UpdateReport
from forge.loops.step_metrics import StepClock, StepMetrics, _of_rollouts
from forge.rollout.taken_batch import Scored, TakenBatch
from forge.types import Group


def test_staleness_is_told_by_its_worst_and_on_average() -> None:
    groups = (make_group(0, version=1), make_group(1, version=4))
    values = _of_rollouts(TakenBatch(4, groups))
    assert (values["rollout/staleness_max"], values["rollout/staleness_mean"]) == (3, 1.5)


def test_parts_and_totals_cover_every_completion_that_was_scored() -> None:
    def group(number: int, rewards: tuple[float, ...], **changes: Any) -> Group:
        made = make_group(number, rewards, **changes)
        scores = [replace(each.score, parts={"right": 2 * each.score.reward}) for each in made.episodes]
        pairs = zip(made.episodes, scores, strict=True)
        return replace(made, episodes=tuple(replace(episode, score=score) for episode, score in pairs))

    dropped = group(1, (1.0, 1.0), finish_reason="length", token_ids=(1,), logprobs=(-1.0,))
    taken = TakenBatch(0, (group(0, (0.0, 1.0)),), dropped=tuple(Scored.of(each) for each in dropped.episodes))
    values = _of_rollouts(taken)
    assert (values["rollout/reward_mean"], values["reward/right"]) == (0.75, 1.5)
    assert (values["rollout/length_mean"], values["rollout/length_max"], values["rollout/truncated"]) == (2.0, 3, 0.5)
    assert values["rollout/num_groups"] == 1


def test_groups_that_taught_nothing_are_counted_by_reason() -> None:
    taken = TakenBatch(0, (make_group(0),), reasons={"equal_signal_reward": 3, "refused": 1})
    values = _of_rollouts(taken)
    found = {name: value for name, value in values.items() if name.startswith("rollout/no_signal/")}
    assert found == {"rollout/no_signal/equal_signal_reward": 3, "rollout/no_signal/refused": 1}


def test_replicas_add_up_what_they_received_and_share_the_time() -> None:
    metrics: Any = StepMetrics(None, None)  # type: ignore[arg-type]
    metrics.note_sync([UpdateReport(1, "keep", 2.0, 0.5, received_bytes=3 << 20), UpdateReport(1, "keep", 1.0, 0.7)])
    assert metrics._sync == {"sync/seconds": 2.0, "sync/stall_s": 0.7, "sync/received_mib": 3.0}


def test_no_more_time_is_moved_than_there_is() -> None:
    clock = StepClock()
    with clock.part("waiting"):
        pass
    clock.move("waiting", "generating", 100.0)
    values = clock.values()
    assert values["time/waiting"] == 0.0
    assert 0.0 <= values["time/generating"] < 1.0
