"""TextArena: games in text, alone or against scripted opponents, in a venv of their own.

Each game runs in a process of its own, forked from one that has imported TextArena, which takes seconds. The policy
reads what is new since its last move, so conversations stay token-exact. A move that the rules forbid is the game's
business; a game that raises, crashes, hangs or gives no reward is a `Fault`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self

from pydantic import Field, model_validator

from forge.envs.environment import Observation
from forge.envs.external.adapting import cut_text, env_program, options_of, said_text, seed_of, with_text
from forge.envs.external.hosted import HostedProcess, HostKind, HostOptions
from forge.envs.trace import Message
from forge.types import Task

KIND: Final = HostKind("textarena", module="textarena")


class TextArenaOptions(HostOptions):
    """The arguments of the episode `textarena`."""

    requirements: tuple[str, ...] = Field(
        default=("textarena>=0.7.4,<0.8",), description="What pip installs into a venv of its own, once per machine."
    )
    id: str = Field(
        description="The game, `GuessTheNumber-v0`, or `my_module:MyGame-v0` where your module registers it."
    )
    make: Mapping[str, Any] = Field(default_factory=dict, description="Keyword arguments of the game.")
    players: int = Field(default=1, ge=1, description="How many play.")
    seat: int = Field(default=0, ge=0, description="Which of them the policy is; 0 moves first in most games.")
    opponent: str = Field(
        default="random",
        description="Who plays the others: `random` chooses among the moves in brackets that the game offers; "
        "`module:attribute` is a function (text, random.Random) -> move.",
    )
    max_moves: int | None = Field(default=None, ge=1, description="Moves after which the game is truncated.")

    @model_validator(mode="after")
    def _check_seat(self) -> Self:
        if self.seat >= self.players:
            raise ValueError(f"seat must be below players ({self.players})")
        return self


class TextArenaEnv:
    """One game of TextArena; options as `TextArenaOptions`."""

    def __init__(self, **options: Any) -> None:
        self.options = options_of(TextArenaOptions, options)
        self._process = HostedProcess(KIND, self.options)
        self._num_moves = 0

    async def reset(self, task: Task) -> Observation:
        """Start the game with the task's seed: `metadata["seed"]`, or a number made of the task's id."""
        given = self.options
        await self._process.start()
        reply = await self._process.ask(
            "reset",
            env=given.id,
            make=dict(given.make),
            seed=seed_of(task),
            players=given.players,
            seat=given.seat,
            opponent=given.opponent,
        )
        return self._observation(reply, before=task)

    async def step(self, message: Message) -> Observation:
        """Make the policy's move."""
        self._num_moves += 1
        return self._observation(await self._process.ask("step", text=said_text(message)))

    async def close(self) -> None:
        """End the game's process."""
        await self._process.close()

    def _observation(self, reply: Any, before: Task | None = None) -> Observation:
        process = self._process
        text = cut_text(process.text_in(reply, "text"), self.options.max_chars)
        reward, is_over = process.number_in(reply, "reward"), process.flag_in(reply, "done")
        messages: list[Message] = [{"role": "user", "content": text}]
        return Observation(
            messages if before is None else with_text(before.messages, text),
            reward=reward if is_over else None,
            terminated=is_over,
            truncated=self._num_moves == self.options.max_moves,
        )


textarena_episode = env_program(TextArenaEnv, TextArenaOptions, "textarena_episode")
"""Plays a game of TextArena; arguments as `TextArenaOptions`."""
