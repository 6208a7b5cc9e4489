"""Gymnasium: environments whose observations and actions are text for the policy.

Each episode runs in a process of its own, forked from one that has imported gymnasium, so `step_timeout_s` holds for
environments in C too. An answer that is not an action comes back to the policy as text; an environment that raises,
crashes, hangs or gives what is not a number as its reward is a `Fault`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from forge.envs.environment import Observation
from forge.envs.external.adapting import cut_text, env_program, options_of, said_text, seed_of, with_text
from forge.envs.external.hosted import HostedProcess, HostKind, HostOptions
from forge.envs.trace import Message
from forge.types import Task

KIND: Final = HostKind("gymnasium", module="gymnasium", extra="gymnasium")


class GymnasiumOptions(HostOptions):
    """The arguments of the episode `gymnasium`."""

    id: str = Field(description="The environment, as `gymnasium.make` takes it: `FrozenLake-v1`, `my_module:Maze-v0`.")
    make: Mapping[str, Any] = Field(default_factory=dict, description="Keyword arguments of `gymnasium.make`.")
    reset: Mapping[str, Any] | None = Field(default=None, description="The `options` of every reset.")
    observe: str | None = Field(
        default=None,
        description="`render` for the environment's own text (`render_mode: ansi`), or a function `module:attribute`, "
        "(observation, info, env) -> text; null for the values themselves.",
    )
    act: str | None = Field(
        default=None,
        description="`module:attribute`: (text, env) -> action; it raises ValueError for text that is not one.",
    )
    actions: tuple[str, ...] = Field(default=(), description="Names of discrete actions, in their order.")
    pattern: str | None = Field(
        default=None,
        description="Where the action is in an answer: the first group of the last match; null: all of it.",
    )
    describe_actions: bool = Field(default=True, description="Whether the first message says what the actions are.")
    invalid_reward: float | None = Field(default=None, description="What an answer earns that is not an action.")
    max_invalid: int | None = Field(
        default=None, ge=1, description="Such answers after which the episode is truncated."
    )


class GymnasiumEnv:
    """One episode of a gymnasium environment; options as `GymnasiumOptions`."""

    def __init__(self, **options: Any) -> None:
        self.options = options_of(GymnasiumOptions, options)
        self._process = HostedProcess(KIND, self.options)
        self._num_invalid = 0

    async def reset(self, task: Task) -> Observation:
        """Make the environment and reset it with the task's seed.

        The task's `metadata` may have a `seed`, and `reset` with options in addition to those of every reset. Without a
        seed, one is made of the task's id: all episodes of a group play the same game.
        """
        given = self.options
        await self._process.start()
        options = {**(given.reset or {}), **task.metadata.get("reset", {})}
        reply = await self._process.ask(
            "reset",
            env=given.id,
            make=dict(given.make),
            seed=seed_of(task),
            options=options or None,
            observe=given.observe,
            act=given.act,
            actions=given.actions,
            pattern=given.pattern,
        )
        text, actions = self._process.text_in(reply, "text"), self._process.text_in(reply, "actions")
        if given.describe_actions and actions:
            text = f"{text}\n\nAnswer with one action: {actions}."
        return Observation(with_text(task.messages, cut_text(text, given.max_chars)))

    async def step(self, message: Message) -> Observation:
        """Take the policy's answer as the action."""
        process = self._process
        reply = await process.ask("step", text=said_text(message))
        if isinstance(reply, dict) and "problem" in reply:
            self._num_invalid += 1
            problem = cut_text(process.text_in(reply, "problem"), self.options.max_chars)
            return Observation(
                [{"role": "user", "content": f"Error: this is not an action: {problem}."}],
                reward=self.options.invalid_reward,
                truncated=self._num_invalid == self.options.max_invalid,
            )
        text = cut_text(process.text_in(reply, "text"), self.options.max_chars)
        return Observation(
            [{"role": "user", "content": text}],
            reward=process.number_in(reply, "reward"),
            terminated=process.flag_in(reply, "terminated"),
            truncated=process.flag_in(reply, "truncated"),
        )

    async def close(self) -> None:
        """End the environment's process."""
        await self._process.close()


gymnasium_episode = env_program(GymnasiumEnv, GymnasiumOptions, "gymnasium_episode")
"""Plays a gymnasium environment; arguments as `GymnasiumOptions`."""
