"""Tasks of reasoning-gym as episodes: prompts, scores and attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from external_envs import Unavailable
from forge.config import EpisodeLimits
from forge.data.tasks import Arguments
from forge.data.tasks.gym import GymTask
from forge.envs.environment import load_program
from forge.envs.episode import EpisodeRun
from forge.errors import OptionError
from forge.testing import play
from forge.types import Task
from reasoning_gym_envs import importable


@pytest.fixture(scope="module")
def sums() -> Iterator[Task]:
    """A task as the prompt source makes it."""
    try:
        with importable():
            arguments = Arguments({"min_terms": 2}, where="prompts.sources[0]", task="reasoning_gym/chain_sum")
            yield GymTask(arguments, seed=1, where="prompts.sources[0]", size=4).read(0)
    except Unavailable as reason:
        pytest.skip(str(reason))


def solve(task: Task, answers: Sequence[str], limits: EpisodeLimits | None = None, **args: Any) -> EpisodeRun:
    return asyncio.run(play(load_program("reasoning_gym", args), answers, task=task, limits=limits))


def test_the_score_is_the_package_s(sums: Task) -> None:
    run = solve(sums, [str(sums.answer)])
    assert (run.score.reward, run.outcome, run.turn_rewards) == (1.0, "finished", {0: 1.0})
    assert run.turns[0].messages == ({"role": "user", "content": sums.text},)
    assert solve(sums, ["I cannot say"]).score.reward < 1.0
    assert solve(sums, [f"<answer>{sums.answer}</answer>"], within="answer").score.reward == 1.0
    assert solve(sums, [f"perhaps {sums.answer}0"], partial=False).score.reward == 0.0


def test_further_attempts_end_with_a_full_score(sums: Task) -> None:
    run = solve(sums, ["no", str(sums.answer)], attempts=3, feedback="Again.")
    assert run.turns[1].messages == ({"role": "user", "content": "Again."},)
    assert (run.score.reward, run.turn_rewards) == (1.0, {1: 1.0})


def test_the_last_answer_counts_where_a_limit_ends_the_next_attempt(sums: Task) -> None:
    run = solve(sums, ["no"], limits=EpisodeLimits(max_turns=1), attempts=3)
    assert (run.outcome, run.turn_rewards) == ("turn_limit", {0: run.score.reward})


def test_options_are_checked(sums: Task) -> None:
    with pytest.raises(OptionError, match="attempts"):
        solve(sums, [], attempts=0)
    with pytest.raises(OptionError, match="speed"):
        solve(sums, [], speed=1)
