"""verifiers: what becomes of its rewards, errors and limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest

from external_envs import Unavailable, venv_or_unavailable
from forge import Task
from forge.config import EpisodeLimits
from forge.envs.environment import load_program
from forge.envs.episode import EpisodeRun
from forge.envs.external.processes import close_servers
from forge.envs.limits import Fault
from forge.errors import OptionError
from forge.testing import play
from verifiers_envs import COMMON, REQUIREMENTS

Drive = Callable[[Coroutine[Any, Any, Any]], Any]
TASK = Task("count:2", metadata={"index": 1})


@pytest.fixture(scope="module")
def drive() -> Iterator[Drive]:
    """Run coroutines on one loop, so that all tests share one server."""
    try:
        venv_or_unavailable(REQUIREMENTS)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with asyncio.Runner() as runner:
        yield runner.run
        runner.run(close_servers())


async def count(
    answers: Sequence[str], task: Task = TASK, limits: EpisodeLimits | None = None, **args: Any
) -> EpisodeRun:
    return await play(load_program("verifiers", {**COMMON, **args}), answers, task=task, limits=limits)


def test_its_requests_are_turns_and_its_rewards_are_ours(drive: Drive) -> None:
    run = drive(count(["one", "two", "nine"]))
    assert dict(run.score.parts) == {"counted": 2.0, "brief": 0.0}
    assert [turn.messages[-1]["content"] for turn in run.turns] == ["Count to three, Grace.", "Next.", "Next."]
    assert [turn.prefix_break for turn in run.turns] == [None] * 3


def test_a_limit_is_an_outcome(drive: Drive) -> None:
    run = drive(count(["one", "two", "three"], limits=EpisodeLimits(max_turns=2)))
    assert (run.outcome, run.score.reward, len(run.turns)) == ("turn_limit", 0.0, 2)


def test_a_plain_conversation_needs_no_harness(drive: Drive) -> None:
    config = {"taskset": {"id": "plain_taskset"}}
    run = drive(count(["two"], Task("t", metadata={"index": 0}), config=config, chat=True))
    assert [turn.messages for turn in run.turns] == [
        (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What comes after one?"},
        )
    ]
    assert dict(run.score.parts) == {"right": 1.0}


def test_errors_of_the_environment_are_faults(drive: Drive) -> None:
    with pytest.raises(Fault, match="the reward function is broken") as caught:
        drive(count(["one", "raise"]))
    assert caught.value.kind == "verifiers_error"
    with pytest.raises(Fault, match="temperature") as caught:
        drive(count(["one"], sampling={"temperature": 0.123}))
    assert caught.value.kind == "verifiers_error"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": {"taskset": {"id": "no_such_taskset"}}}, "no_such_taskset"),
        ({"config": {"taskset": {"id": "counting_taskset", "speed": 3}}}, "speed"),
        ({"task": Task("t", metadata={"index": 9})}, "has no task 9"),
        ({"task": Task("t")}, "named by its index"),
        ({"episode_timeout_s": 0}, "greater than 0"),
    ],
)
def test_mistakes_end_the_run(drive: Drive, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        drive(count(**{"answers": [], **changes}))


def test_an_account_that_is_missing_is_named(drive: Drive) -> None:
    config = {"taskset": {"id": "counting_taskset"}}  # the default runtime is on its makers' machines
    with pytest.raises(Fault, match="PRIME_API_KEY"):
        drive(count([], config=config))
