"""Workers that run episodes: what programs and group rewards raise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from forge.config.episodes import EpisodeLimits
from forge.envs.episode import episode
from forge.envs.limits import Fault
from forge.errors import RewardError
from forge.rollout.episode_worker import EpisodeOptions, EpisodeWorker
from forge.types import Episode, Score, Task

TASK = Task("t", ({"role": "user", "content": "Hi"},))


class Policy:
    """Generators that are never asked."""

    def session(self) -> Policy:
        return self

    async def __aenter__(self) -> str:
        return "session"

    async def __aexit__(self, *error: object) -> None:
        return None

    @property
    def generate(self) -> Policy:
        return self

    def options(self, **options: Any) -> Policy:
        return self


@episode
async def exits(task: Task, agent: Any) -> float:
    raise SystemExit(1)


def worker(**changes: Any) -> EpisodeWorker:
    fields = {
        "program": exits, "limits": EpisodeLimits(), "evaluation_limits": EpisodeLimits(), "sampling": {},
        "evaluation_sampling": {}, "max_seq_len": 64, "tool_format": "json", "run_seed": 0,
    }  # fmt: skip
    return EpisodeWorker(EpisodeOptions(**{**fields, **changes}), cast(Any, None), cast(Any, Policy()))


def test_a_program_that_exits_ends_its_own_episode_only() -> None:
    made = worker()
    with pytest.raises(Fault, match="the program raised SystemExit") as fault:
        asyncio.run(made.run(TASK, 0, 0))
    assert fault.value.kind == "raised"
    assert asyncio.run(made.num_running()) == 0


def test_a_group_reward_that_raises_is_a_fault_and_one_of_wrong_values_ends_the_run() -> None:
    episodes = [Episode(TASK, (), Score(0.0))] * 2

    def raises(task: Task, given: Sequence[Episode]) -> list[float]:
        raise ConnectionError("no judge")

    with pytest.raises(Fault, match="the group reward raised ConnectionError: no judge") as fault:
        asyncio.run(worker(group_reward=raises).compare(TASK, episodes))
    assert fault.value.kind == "group_reward"
    for values in ([1.0], [1.0, float("nan")]):
        with pytest.raises(RewardError):
            asyncio.run(worker(group_reward=lambda task, given, values=values: values).compare(TASK, episodes))


@episode(deterministic=True)
async def silent(task: Task, agent: Any) -> float:
    return await agent.record(lambda: 1.0)


def test_an_episode_whose_journal_is_too_old_starts_over_and_is_counted(tmp_path: Path) -> None:
    made = worker(program=silent, journal_dir=str(tmp_path))
    turn = {"kind": "turn", "key": [0], "prompt": "x", "completion": {"versions": [{"version": 2}]}}
    (tmp_path / "0-0.jsonl").write_text(json.dumps(turn) + "\n")
    stale = asyncio.run(made.run(TASK, 0, 0, oldest_version=3))
    assert (stale.stats["num_replay_mismatches"], stale.stats["num_replayed"]) == (1.0, 0.0)
    again = asyncio.run(made.run(TASK, 0, 0, oldest_version=3))
    assert (again.stats["num_replay_mismatches"], again.stats["num_replayed"]) == (0.0, 1.0)
