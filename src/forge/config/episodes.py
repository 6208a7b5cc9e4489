"""Episodes: the section `episode` of a reinforcement learning run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from forge.config.agents import AgentConfig
from forge.config.base import ConfigModel, EpisodeName, FrozenDict, GroupRewardName
from forge.config.league import LeagueConfig


class EpisodeLimits(ConfigModel):
    """What one episode may use. All its branches share the counts. Null means no limit."""

    max_turns: int | None = Field(default=32, ge=1, description="Completions.")
    max_tokens: int | None = Field(default=None, ge=1, description="Sampled tokens, all turns together.")
    max_tool_calls: int | None = Field(default=64, ge=0, description="Tool calls.")
    max_tool_tokens: int | None = Field(
        default=2048, ge=16, description="Tokens of one tool's output; the middle of a longer one is left out."
    )
    turn_timeout_s: float | None = Field(
        default=600.0, gt=0, description="Seconds that one completion may take; a longer one is a fault."
    )
    tool_timeout_s: float | None = Field(
        default=60.0,
        gt=0,
        description="Seconds that one tool call may take unless the tool sets its own limit; then the policy is told.",
    )
    timeout_s: float | None = Field(
        default=3600.0,
        gt=0,
        description="Seconds that the episode may take; a longer one is a fault, or the outcome `time_limit` where the "
        "episode declares time part of its task.",
    )


class EpisodeConfig(ConfigModel):
    """Episodes of several turns: a program of your own talks to the policy. Without `kind`, an episode is a prompt, a
    completion and the rewards."""

    kind: EpisodeName | None = Field(
        default=None,
        description="The program: `module:attribute` of an `@forge.episode`, or of a class with `reset`, `step` and "
        "`close`; or one of the built-in names. Null for prompts and rewards.",
    )
    args: Mapping[str, Any] = Field(default_factory=FrozenDict, description="Keyword arguments of the program.")
    limits: EpisodeLimits = Field(default_factory=EpisodeLimits, description="What one episode may use.")
    evaluation_limits: EpisodeLimits | None = Field(
        default=None, description="What an episode of the evaluation may use; null for the same."
    )
    agents: Mapping[str, AgentConfig] = Field(
        default_factory=FrozenDict,
        description="The agents that the program declares, by name: what answers for them, and how they learn. Agents "
        "that are not named here are the live policy.",
    )
    league: LeagueConfig | None = Field(
        default=None,
        description="Self-play: opponents are drawn from earlier versions of the policy. Null for no league.",
    )
    group_reward: GroupRewardName | None = Field(
        default=None,
        description="A function `module:attribute` (task, episodes) -> one number for each, which is added to what the "
        "episodes of a group earned: comparisons, judges. Where the program declares agents, numbers by agent. "
        "It may be a coroutine function.",
    )
    tool_format: Literal["auto", "hermes", "llama", "json"] = Field(
        default="auto", description="How the policy writes tool calls; `auto` reads it from the chat template."
    )
    num_replicas: int = Field(default=1, ge=1, description="Processes that run episodes, each hundreds at once.")
    max_retries: int = Field(
        default=3, ge=0, description="How often an episode is run again after a fault; then its whole group fails."
    )
    max_failed_groups: int = Field(
        default=8, ge=1, description="Consecutive groups that failed by faults after which the run ends."
    )

    @property
    def bound_versions(self) -> tuple[int, ...]:
        """The versions of the policy that agents are bound to, in rising order."""
        return tuple(sorted({agent.version for agent in self.agents.values() if agent.version is not None}))

    @property
    def chosen_keys(self) -> tuple[str, ...]:
        """The keys besides `kind` that have another value than the default."""
        fields = type(self).model_fields
        changed = (key for key in fields if getattr(self, key) != fields[key].get_default(call_default_factory=True))
        return tuple(key for key in changed if key != "kind")
