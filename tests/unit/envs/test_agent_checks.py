"""Wrong uses of an agent are named where they happen."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from forge import Agent, Task, Turn, episode
from forge.errors import OptionError, RewardError
from forge.testing import play

HI = [{"role": "user", "content": "Hi"}]


def fail(use: Any, error: type[Exception] = OptionError) -> Any:
    """Run an episode that uses its agent wrongly, and return the error."""

    @episode
    async def program(task: Task, agent: Agent) -> float:
        await use(agent)
        return 1.0

    with pytest.raises(error) as found:
        asyncio.run(play(program, ["a", "b"]))
    return found.value


@pytest.mark.parametrize("messages", ["Hi", HI[0], None, ["Hi"], [{"content": "Hi"}], [{"role": 3}]])
def test_what_is_not_a_list_of_messages(messages):
    async def replaces(agent: Agent) -> None:
        agent.replace_history(messages)

    assert fail(lambda agent: agent.generate(messages)).path == "agent.generate"
    assert fail(lambda agent: agent.run_tools(messages, tools=[])).path == "agent.run_tools"
    assert fail(replaces).path == "agent.replace_history"


@pytest.mark.parametrize("options", [{"n": 2}, {"seed": 1}, {"max_tokens": 0}, {"max_tokens": "8"}])
def test_options_that_are_not_the_program_s_to_choose(options: Mapping[str, Any]):
    (name,) = options
    assert fail(lambda agent: agent.generate(HI, **options)).path == f"agent.generate({name}=)"
    assert fail(lambda agent: agent.run_tools(HI, tools=[], **options)).path == f"agent.generate({name}=)"


def test_no_turn_at_all():
    assert fail(lambda agent: agent.run_tools(HI, tools=[], max_turns=0)).path == "agent.run_tools(max_turns=)"


def test_rewards_without_a_name_or_for_other_turns():
    kept: list[Turn] = []

    @episode
    async def first(task: Task, agent: Agent) -> float:
        kept.append(await agent.generate(HI))
        kept.append(await agent.generate(HI))
        return 1.0

    asyncio.run(play(first, ["a", "b"]))

    def rewards(**words: Any) -> Any:
        async def use(agent: Agent) -> None:
            agent.add_reward(1.0, **words)

        return use

    assert fail(rewards(name="")).path == "agent.add_reward(name=)"
    assert fail(rewards(name=3)).path == "agent.add_reward(name=)"
    assert fail(rewards(turn=0)).path == "agent.add_reward(turn=)"
    assert fail(rewards(turn=kept[1])).path == "agent.add_reward(turn=)"


def test_a_reward_that_is_too_large_for_a_number():
    async def use(agent: Agent) -> None:
        agent.add_reward(10**400)

    assert fail(use, RewardError).value == 10**400


def test_a_program_without_a_task_and_an_agent():
    async def program() -> float:
        return 1.0

    with pytest.raises(OptionError, match="takes a task and an agent"):
        episode(program)
