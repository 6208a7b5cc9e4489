"""Small episodes for tests of the commands that try and check them."""

from __future__ import annotations

from typing import Any

import forge
from forge import Agent, Fault, Task


@forge.tool
async def add(a: int, b: int) -> str:
    "Add two numbers."
    return str(a + b)


@forge.episode(deterministic=True)
async def calculate(task: Task, agent: Agent, *, bonus: float = 0.0, max_turns: int | None = None) -> float:
    """Adds numbers with a tool; 1 for the right answer."""
    turn = await agent.run_tools(task.messages, tools=[add], max_turns=max_turns)
    if bonus:
        agent.add_reward(bonus, name="bonus", turn=agent.turns[0])
    return float(task.answer is not None and task.answer in turn.text)


def solutions(task: Task) -> list[Any]:
    """The oracle of `calculate`."""
    return [{"name": "add", "arguments": {"a": 1, "b": 1}}, f"It is {task.answer}."]


@forge.episode
async def compact(task: Task, agent: Agent) -> float:
    """Two turns, the second with another history."""
    await agent.generate(task.messages)
    agent.replace_history([])
    turn = await agent.generate([{"role": "user", "content": "Again?"}])
    return float(len(turn.text) % 2 == 0)


@forge.episode
async def broken(task: Task, agent: Agent) -> float:
    """Raises after its first turn."""
    await agent.generate(task.messages)
    agent.add_reward(0.5, name="early")
    raise KeyError("mine")


@forge.episode
async def unrewarded(task: Task, agent: Agent) -> None:
    """Gives no reward."""
    await agent.generate(task.messages)


@forge.episode
async def faulty(task: Task, agent: Agent) -> float:
    """Ends in a fault."""
    raise Fault("the tool server cannot be reached", kind="server")


class Guess:
    """Guess a number from 1 to 8: the environment says whether it is higher. `oracle` knows it."""

    def __init__(self, max_guesses: int = 5) -> None:
        self._left = max_guesses

    async def reset(self, task: Task) -> forge.Observation:
        self._number = int(task.answer or 1)
        return forge.Observation(task.messages)

    async def step(self, message: Any) -> forge.Observation:
        self._left -= 1
        said = str(message["content"]).strip()
        is_right = said == str(self._number)
        text = "Right." if is_right else "Wrong."
        return forge.Observation(
            [{"role": "user", "content": text}], reward=float(is_right), terminated=is_right, truncated=self._left == 0
        )

    async def close(self) -> None:
        return None

    @staticmethod
    def oracle(task: Task) -> list[str]:
        return [str(task.answer or 1)]
