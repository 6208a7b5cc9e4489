"""Small games of two agents for tests of the loop: they run in worker processes, which import this module."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import forge
from forge import Agent, Task
from own_episodes import kill_once

PENNIES = ((1.0, -1.0), (-1.0, 1.0))
"""What the row player of matching pennies earns, by the move of each."""


def move(text: str) -> int:
    """A move of a model that says anything: whether its text has an odd number of characters."""
    return len(text) % 2


@forge.episode(agents=["row", "column"], deterministic=True)
async def pennies(task: Task, row: Agent, column: Agent, *, num_rounds: int = 2) -> Mapping[str, float]:
    """Matching pennies, moves at the same time. Afterwards each hears what the other one did."""
    heard = {"row": task.messages, "column": task.messages}
    total = 0.0
    for _ in range(num_rounds):
        first, second = await asyncio.gather(row.generate(heard["row"]), column.generate(heard["column"]))
        total += PENNIES[move(first.text)][move(second.text)]
        heard = {
            "row": ({"role": "user", "name": "column", "content": str(move(second.text))},),
            "column": ({"role": "user", "name": "row", "content": str(move(first.text))},),
        }
    return {"row": total, "column": -total}


@forge.episode(agents=["solver", "critic"])
async def review(task: Task, solver: Agent, critic: Agent) -> None:
    """The solver answers, the critic speaks to it, and the solver answers again. Both earn something for each turn."""
    draft = await solver.generate(task.messages)
    note = await critic.generate([{"role": "user", "name": "solver", "content": draft.text}])
    final = await solver.generate([{"role": "user", "name": "critic", "content": note.text}])
    for agent, turn in ((solver, draft), (critic, note), (solver, final)):
        agent.add_reward(float(move(turn.text)), name="odd", turn=turn)


@forge.episode(agents=["row", "column"], deterministic=True)
async def killing_pair(
    task: Task, row: Agent, column: Agent, *, marker: str, task_id: str, checkpoint: str | None = None
) -> Mapping[str, float]:
    """Two rounds of moves at the same time; once, between the rounds of one task, the controller is killed."""
    await asyncio.gather(row.generate(task.messages), column.generate(task.messages))
    if task.id == task_id:
        await kill_once(marker, victim="controller", checkpoint=checkpoint)
    turns = await asyncio.gather(*(agent.generate([{"role": "user", "content": "Again?"}]) for agent in (row, column)))
    won = (sum(turns[0].token_ids) - sum(turns[1].token_ids)) % 7 / 7
    return {"row": won, "column": -won}
