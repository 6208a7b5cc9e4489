"""The real OpenEnv package, in a venv of its own: what the contract suite and the fake server do not show."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from external_envs import Unavailable
from forge import Fault, Task
from forge.envs.environment import load_program
from forge.envs.external.openenv import OpenEnv
from forge.envs.external.processes import close_servers
from forge.testing import play
from leftovers import lasting_children, running_children
from openenv_envs import act, openenv_python, server


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """An event loop for all tests, so that each server starts once."""
    try:
        openenv_python()
    except Unavailable as reason:
        pytest.skip(str(reason))
    children = running_children()
    with asyncio.Runner() as runner:
        yield runner
        runner.run(close_servers())
    assert lasting_children(children) == []


def run(loop: asyncio.Runner, body: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(600):
            return await body

    return loop.run(limited())


GAME = {"server": server("guessing_game"), "step_timeout_s": 240.0}
BOX = {"server": server("tool_box"), "step_timeout_s": 240.0}


def game(loop: asyncio.Runner, answers: Any, *, metadata: dict[str, Any] | None = None, **args: Any) -> Any:
    task = Task("guess:9", metadata={"reset": {"secret": 5}} if metadata is None else metadata)
    return run(loop, play(load_program("openenv", {**GAME, **args}), answers, task=task))


def test_rules_that_only_the_server_knows_are_answered_with_text(loop: asyncio.Runner) -> None:
    done = game(loop, [act(guess=9), act(guess=1, day="yesterday"), act(guess=5)])
    texts = [turn.messages[0]["content"] for turn in done.turns[1:]]
    assert texts[0] == "Error: bad arguments of act: guess: expected at most 8, got 9."
    assert texts[1].startswith("Error: Invalid message")
    assert "valid date" in texts[1]
    assert done.score.reward == 1.0
    # OpenEnv 0.10 cannot send what a validator in Python raises, and ends the session.
    with pytest.raises(Fault, match="SESSION_ERROR"):
        game(loop, [act(guess=7)])


def test_exceptions_of_the_environment(loop: asyncio.Runner) -> None:
    with pytest.raises(Fault, match="the dice are gone") as fault:
        game(loop, [act(guess=1, comment="raise")])
    assert fault.value.kind == "openenv_error"
    done = game(loop, [act(guess=1, comment="raise"), act(guess=5)], errors="text")
    assert (done.turns[1].messages[0]["content"], done.score.reward) == ("Error: the dice are gone", 1.0)
    with pytest.raises(Fault, match="the board is missing"):
        game(loop, [], metadata={"reset": {"broken_reset": True}})


def test_a_reward_that_is_not_a_number_and_a_long_text(loop: asyncio.Runner) -> None:
    with pytest.raises(Fault) as fault:  # OpenEnv sends null for NaN: an episode without any reward is an error, too
        game(loop, [act(guess=1, comment="violation")])
    assert fault.value.kind == "openenv_schema"
    done = game(loop, [act(guess=1, comment="long"), act(guess=5)])
    assert "its middle is left out" in done.turns[1].messages[0]["content"]


def test_the_seed_decides_the_game_and_the_state_can_be_read(loop: asyncio.Runner) -> None:
    async def secrets(*seeds: int) -> list[Any]:
        found = []
        for seed in seeds:
            env = OpenEnv(**GAME)
            try:
                await env.reset(Task("any", metadata={"seed": seed}))
                steps = [await env._session.step({"guess": guess}) for guess in (2, 4)]
                found.append(([each.observation["hint"] for each in steps], await env.state()))
            finally:
                await env.close()
        return found

    first, again, *others = run(loop, secrets(1, 1, 2, 3, 4, 5))
    assert first == again
    assert first[1]["step_count"] == 2
    assert any(texts != first[0] for texts, _ in others)


def test_an_environment_of_mcp_tools(loop: asyncio.Runner) -> None:
    def add(amount: Any) -> str:
        return f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'amount': amount}})}</tool_call>"

    program = load_program("openenv", BOX)
    done = run(loop, play(program, [add(2), add("two"), add(3)], task=Task("box")))
    texts = [turn.messages[0]["content"] for turn in done.turns[1:]]
    assert texts == ["The number is 2.", 'Error: bad arguments of add: amount: expected integer, got "two".']
    assert (done.score.reward, dict(done.turn_rewards)) == (1.0, {0: 0.0, 2: 1.0})
    stopped = run(loop, play(program, [add(2), "That is enough."], task=Task("box")))
    assert (stopped.outcome, stopped.score.reward, len(stopped.turns)) == ("finished", 0.0, 2)
