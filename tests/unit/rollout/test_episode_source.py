"""Groups of episodes: retries after faults, failed groups, the breaker, and rewards of a whole group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from episodes import make_completion
from forge.config import AlgorithmConfig, EpisodeConfig, LeagueConfig
from forge.envs.limits import Fault
from forge.errors import ActorFailure, GroupFailed, RewardError, RolloutError
from forge.rollout.episode_source import EpisodeSource
from forge.rollout.league import Change, League
from forge.rollout.references import References
from forge.types import AgentResult, Episode, Score, Task

GROUP_SIZE = 3


class Tasks:
    def at(self, number: int) -> tuple[int, Task]:
        return number // 10, Task(f"task:{number}")


class Worker:
    """Runs episodes, and fails as often as it is told to for a member."""

    def __init__(self, failures: dict[int, list[Exception]] | None = None) -> None:
        self.failures, self.asked = failures or {}, list[tuple[int, int, dict[str, Any]]]()
        self.hold: asyncio.Event | None = None
        self.num_cancelled = 0
        self.all_asked = asyncio.Event()

    async def __call__(self, task: Task, group: int, member: int, **options: Any) -> Episode:
        self.asked.append((group, member, options))
        if len(self.asked) == GROUP_SIZE:
            self.all_asked.set()
        if self.failures.get(member):
            raise self.failures[member].pop(0)
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        episode = Episode.single(task, make_completion((5,) * (member + 1)), Score(float(member)))
        return replace(episode, member=member, stats={"num_turns": 1.0})


def source(worker: Worker, compare: Any = None, **keys: Any) -> EpisodeSource:
    config = EpisodeConfig(kind="own_episodes:dialogue", **keys)
    references = References(None, algorithm=AlgorithmConfig(), temperature=1.0)
    return EpisodeSource(
        Tasks(), run=worker, compare=compare, references=references, config=config, group_size=GROUP_SIZE
    )


def test_a_group_has_its_members_in_order_and_the_versions_that_journals_may_have() -> None:
    worker = Worker()
    made = source(worker)
    group = asyncio.run(made.roll_out(12, oldest_version=3))
    assert (group.number, group.epoch, group.task.id) == (12, 1, "task:12")
    assert [episode.member for episode in group.episodes] == [0, 1, 2]
    assert group.rewards == (0.0, 1.0, 2.0)
    assert worker.asked == [(12, member, {"oldest_version": 3}) for member in range(3)]
    assert (made.num_samples, made.num_tokens, made.stages()) == (3, 6, {})


def test_a_fault_runs_its_episode_again_and_only_that_one() -> None:
    worker = Worker({1: [Fault("gone", kind="sandbox"), ActorFailure("a worker died")]})
    made = source(worker, max_retries=2)
    group = asyncio.run(made.roll_out(0))
    assert group.rewards == (0.0, 1.0, 2.0)
    assert sorted(member for _, member, _ in worker.asked) == [0, 1, 1, 1, 2]
    assert made.take_metrics() == {
        "episode/faults/sandbox": 1.0,
        "episode/faults/worker": 1.0,
        "episode/num_faults": 2.0,
    }
    assert made.take_metrics() == {"episode/num_faults": 0.0}


def test_a_group_whose_retries_run_out_fails_as_a_whole_and_nothing_of_it_goes_on() -> None:
    async def body() -> None:
        worker = Worker({0: [Fault("gone")] * 5})
        worker.hold = asyncio.Event()
        with pytest.raises(GroupFailed, match="ended in a fault 3 times: gone") as failed:
            await source(worker, max_retries=2).roll_out(4)
        assert failed.value.path == "task:4"
        assert worker.num_cancelled == 2

    asyncio.run(body())


def test_groups_that_fail_in_a_row_end_the_run_and_one_that_does_not_starts_the_count_anew() -> None:
    async def body() -> None:
        worker = Worker()
        made = source(worker, max_retries=0, max_failed_groups=2)
        for number in range(3):
            worker.failures = {0: [Fault("gone", kind="server")]}
            with pytest.raises(GroupFailed):
                await made.roll_out(number)
            await made.roll_out(number)
        worker.failures = {0: [Fault("gone", kind="server")] * 2}
        with pytest.raises(GroupFailed):
            await made.roll_out(7)
        with pytest.raises(RolloutError, match="2 groups in a row failed by faults; the last one: gone") as ended:
            await made.roll_out(8)
        assert ended.value.path == "episode.max_failed_groups"
        assert "'server': 5" in str(ended.value.rule)

    asyncio.run(body())


def test_what_is_wrong_with_a_program_is_no_fault() -> None:
    worker = Worker({2: [RewardError("no reward")]})
    with pytest.raises(RewardError, match="no reward"):
        asyncio.run(source(worker).roll_out(0))
    assert len(worker.asked) == 3


def test_a_reward_of_the_group_is_added_to_what_each_earned() -> None:
    async def compare(task: Task, episodes: Sequence[Episode]) -> list[float]:
        return [10.0 * episode.num_tokens for episode in episodes]

    group = asyncio.run(source(Worker(), compare).roll_out(0))
    assert group.rewards == (10.0, 21.0, 32.0)
    assert [episode.score.parts for episode in group.episodes] == [{"group": 10.0}, {"group": 20.0}, {"group": 30.0}]


def test_stages_say_how_many_episodes_a_group_waits_for() -> None:
    async def body() -> None:
        worker = Worker()
        worker.hold = asyncio.Event()
        made = source(worker)
        rolling = asyncio.create_task(made.roll_out(3))
        await worker.all_asked.wait()
        ((name, seconds),) = made.stages().values()
        assert (name, seconds >= 0) == ("runs 3 episodes", True)
        assert made.generating_s > 0
        worker.hold.set()
        await rolling

    asyncio.run(body())


def test_journals_of_groups_that_are_done_with_are_removed(tmp_path: Path) -> None:
    for name in ("3-0", "3-1", "4-0", "13-0"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    config = EpisodeConfig(kind="own_episodes:dialogue")
    references = References(None, algorithm=AlgorithmConfig(), temperature=1.0)
    made = EpisodeSource(
        Tasks(), run=Worker(), compare=None, references=references, config=config, group_size=1, journal_dir=tmp_path
    )
    made.forget([3, 5])
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["13-0", "4-0"]


def test_a_comparison_that_fails_is_made_again_without_its_episodes() -> None:
    failures: list[Exception] = [Fault("no judge", kind="judge"), ActorFailure("a worker died")]

    async def compare(task: Task, episodes: Sequence[Episode]) -> list[float]:
        if failures:
            raise failures.pop(0)
        return [10.0] * len(episodes)

    worker = Worker()
    made = source(worker, compare, max_retries=2)
    assert asyncio.run(made.roll_out(0)).rewards == (10.0, 11.0, 12.0)
    assert len(worker.asked) == GROUP_SIZE
    failures[:] = [Fault("no judge", kind="judge")] * 3
    with pytest.raises(GroupFailed, match="the group's reward failed 3 times: no judge"):
        asyncio.run(made.roll_out(1))


def test_a_reference_model_that_dies_is_no_fault_of_an_episode() -> None:
    made = source(Worker())

    async def dies(batch: Any, temperature: float) -> None:
        raise ActorFailure("the reference died")

    made._references = References(dies, algorithm=AlgorithmConfig(), temperature=1.0)
    with pytest.raises(ActorFailure):  # the group is requeued
        asyncio.run(made.roll_out(0))
    assert made.take_metrics()["episode/num_faults"] == 0.0


# ---- A league -------------------------------------------------------------------------------------------------------


class Players(Worker):
    """Members win by their number against an opponent that always has 1."""

    async def __call__(self, task: Task, group: int, member: int, **options: Any) -> Episode:
        made = await super().__call__(task, group, member, **options)
        results = {
            name: AgentResult(Score(float(member) if seat.learns else 1.0), learns=seat.learns, policy=seat.label)
            for name, seat in options["seats"].items()
        }
        return replace(made, agents=results)


def test_a_fault_and_a_second_rollout_have_the_same_opponent() -> None:
    league = League(LeagueConfig(self_play=0.0), ("row", "column"), seed=0, max_versions=4)
    for version in (0, 5, 9):
        league.apply(Change(version))
    worker = Players({1: [Fault("its generator died", kind="generator")]})
    made = source(worker, max_retries=1)
    made.league = league
    asyncio.run(made.roll_out(3))
    league.config = LeagueConfig(rule="latest", self_play=0.0)
    asyncio.run(made.roll_out(3))  # it was requeued: its weights were too old
    seats = [options["seats"] for _, _, options in worker.asked]
    assert len(seats) == 7
    assert all(each == seats[0] for each in seats)
    assert [name for name, seat in seats[0].items() if seat.learns] == ["column"]
    league.commit([3], [])
    standing = league.standings[seats[0]["row"].label]
    assert (standing.num_wins, standing.num_draws, standing.num_losses) == (1, 1, 1)
    assert made.take_metrics()["league/num_games"] == 3.0
