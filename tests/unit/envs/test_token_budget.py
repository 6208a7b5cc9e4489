"""Tokens that branches of an episode share: handed out in the order in which turns start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from forge.envs.episode import episode, run_episode
from forge.envs.limits import EpisodeLimits, EpisodeOver
from forge.envs.token_budget import TokenBudget
from scripted_policy import END, ScriptedPolicy, state_of

LONG = "a b c d e f g h i j k l m n o p q r s t u v w x y z"


def turns_with(codec, delay: Callable[[str], float]) -> tuple[list[tuple[tuple[int, ...], int]], int, str]:
    @episode
    async def fan_out(task, agent):
        forks = [agent.fork() for _ in range(4)]
        asked = [
            fork.generate([{"role": "user", "content": f"Question {place}"}], max_tokens=10)
            for place, fork in enumerate(forks)
        ]
        await asyncio.gather(*asked, return_exceptions=True)
        return 1.0

    def answer(text: str) -> str:
        return LONG if "Question 1" in text or "Question 3" in text else f"No.{END}"

    policy = ScriptedPolicy(codec, answer, delay=delay)
    limits = EpisodeLimits(max_tokens=25)
    done = asyncio.run(run_episode(fan_out, state_of(policy, limits=limits)))
    return [(turn.path, len(turn)) for turn in done.turns], done.counts.num_sampled, done.outcome


def test_what_parallel_turns_get_does_not_depend_on_which_ends_first(codec):
    orders = {"forwards": (0, 1, 2, 3), "backwards": (3, 2, 1, 0), "mixed": (2, 0, 3, 1)}
    found = {}
    for name, order in orders.items():
        found[name] = turns_with(codec, lambda text, order=order: 0.002 * order[int(text.split("Question ")[1][0])])
    assert found["forwards"] == found["backwards"] == found["mixed"]
    turns, num_sampled, _ = found["forwards"]
    assert len(turns) == 4
    assert num_sampled == sum(length for _, length in turns) <= 25
    assert turns[1][1] == 10  # it asked early enough
    assert turns[3][1] > 1  # it waited for what others did not use


def test_a_turn_waits_for_those_before_it_and_gets_what_they_leave():
    async def body() -> None:
        budget = TokenBudget(10)
        assert await budget.take(6) == 6
        assert await budget.take(6) == 4
        third, fourth = (asyncio.ensure_future(budget.take(6)) for _ in range(2))
        await asyncio.sleep(0)
        budget.give_back(6, used=1)
        await asyncio.sleep(0)
        assert not third.done()
        budget.give_back(4, used=4)
        assert await third == 5
        await asyncio.sleep(0)
        assert not fourth.done()
        budget.give_back(5, used=5)
        assert await fourth == 0

    asyncio.run(body())


def test_a_turn_that_is_cancelled_while_it_waits_keeps_nobody_waiting():
    async def body() -> None:
        budget = TokenBudget(3)
        assert await budget.take(3) == 3
        second, third = (asyncio.ensure_future(budget.take(3)) for _ in range(2))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        budget.give_back(3, used=1)
        assert await third == 2
        assert second.cancelled()
        assert await TokenBudget(None).take(9) == 9

    asyncio.run(body())


def test_a_turn_that_is_refused_counts_for_nothing(codec):
    @episode
    async def talk(task, agent):
        await agent.generate(task.messages)
        with pytest.raises(EpisodeOver, match="token_limit"):
            await agent.generate(task.messages)
        return 1.0

    policy = ScriptedPolicy(codec, lambda text: LONG)
    done = asyncio.run(run_episode(talk, state_of(policy, limits=EpisodeLimits(max_tokens=5))))
    assert (done.outcome, done.counts.num_turns, done.counts.num_sampled) == ("token_limit", 1, 5)
