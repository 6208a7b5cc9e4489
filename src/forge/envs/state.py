"""What all branches of an episode share: its key, what it used, its limits, and the turns so far."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from forge.config.agents import AgentLimits
from forge.envs.history import ChatCodec
from forge.envs.journal import Journal
from forge.envs.limits import EpisodeLimits, EpisodeOver
from forge.envs.token_budget import TokenBudget
from forge.envs.tool_calls import ToolFormat
from forge.types import DEFAULT_AGENT, LIVE, Completion, EpisodeOutcome, Task, Turn


class Policy(Protocol):
    """What an agent needs from the generators."""

    max_seq_len: int
    """The longest prompt and completion together, in tokens."""

    async def sample(self, token_ids: Sequence[int], *, options: Mapping[str, Any], session: str) -> Completion:
        """Sample one completion. Requests of one `session` go to the replica that has its cache, where it is up."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """What an episode's randomness depends on, together with the weights: nothing else, and never arrival order."""

    run_seed: int
    group: int
    member: int

    def seed(self, *parts: object) -> int:
        """Return 63 bits that depend on this key and `parts`."""
        text = ":".join(map(str, (self.run_seed, self.group, self.member, *parts)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def __str__(self) -> str:
        return f"{self.run_seed}-{self.group}-{self.member}"


@dataclass(frozen=True, slots=True)
class AgentBinding:
    """What answers for one agent of an episode, and how.

    Attributes:
        policy, codec, tool_format: who answers, and how its conversations become tokens.
        sampling: options of every completion.
        learns: whether its turns are trained on.
        label: what answers, in words: `live` for the policy that is trained.
        has_tokens: False where what stands for tokens are characters. They do not count in limits of tokens.
        limits: what this agent alone may use, besides the limits of the episode.
    """

    policy: Policy
    codec: ChatCodec
    tool_format: ToolFormat
    sampling: Mapping[str, Any]
    learns: bool = True
    label: str = LIVE
    has_tokens: bool = True
    limits: AgentLimits = field(default_factory=AgentLimits)

    @property
    def is_live(self) -> bool:
        """Whether the policy that is trained answers."""
        return self.label == LIVE


@dataclass(slots=True)
class AgentUse:
    """What one agent of an episode used of its own limits, and what it earned."""

    tokens: TokenBudget
    num_turns: int = 0
    rewards: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class EpisodeCounts:
    """What an episode used. `num_undelivered` are requests over HTTP whose answer never reached the client."""

    num_turns: int = 0
    num_sampled: int = 0
    num_observed: int = 0
    num_tool_calls: int = 0
    tool_errors: Counter[str] = field(default_factory=Counter)
    tools_s: float = 0.0
    prefix_breaks: Counter[str] = field(default_factory=Counter)
    num_undelivered: int = 0

    def as_stats(self) -> dict[str, float]:
        """Return the counts as plain numbers by name."""
        found = {
            "num_turns": float(self.num_turns),
            "num_sampled": float(self.num_sampled),
            "num_observed": float(self.num_observed),
            "num_tool_calls": float(self.num_tool_calls),
            "num_tool_errors": float(self.tool_errors.total()),
            "num_prefix_breaks": float(self.prefix_breaks.total()),
            "num_undelivered": float(self.num_undelivered),
            "tools_s": self.tools_s,
        }
        found |= {f"tool_errors/{kind}": float(count) for kind, count in sorted(self.tool_errors.items())}
        return found | {f"prefix_breaks/{kind}": float(count) for kind, count in sorted(self.prefix_breaks.items())}


@dataclass(slots=True)
class EpisodeState:
    """What all branches of one episode share.

    Attributes:
        task, key, limits: what is done, what its randomness depends on, and what it may use.
        policy, codec, tool_format, sampling: who answers, how conversations become tokens, and options of every
            completion, for all agents without a binding of their own.
        bindings: what answers for single agents, by name.
        journal: what happened, for a replay.
        is_evaluation: whether nothing of it is trained on.
        over: the limit that ended it; None while none has.
        tokens: the sampled tokens that it has left.
        full_branches: the branches whose conversation is too long, each with its agent's name first.
    """

    task: Task
    key: EpisodeKey
    limits: EpisodeLimits
    policy: Policy
    codec: ChatCodec
    tool_format: ToolFormat
    sampling: Mapping[str, Any]
    journal: Journal
    bindings: Mapping[str, AgentBinding] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    turn_rewards: dict[int, float] = field(default_factory=dict)
    counts: EpisodeCounts = field(default_factory=EpisodeCounts)
    outcome: EpisodeOutcome = "finished"
    is_evaluation: bool = False
    over: EpisodeOver | None = None
    full_branches: set[tuple[str | int, ...]] = field(default_factory=set)
    is_closed: bool = False
    generating: set[asyncio.Task[Any]] = field(default_factory=set)
    tokens: TokenBudget = field(init=False)
    _used: dict[str, AgentUse] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = TokenBudget(self.limits.max_tokens)

    def binding(self, agent: str) -> AgentBinding:
        """Return what answers for an agent."""
        own = self.bindings.get(agent)
        return own or AgentBinding(self.policy, self.codec, self.tool_format, self.sampling)

    def used(self, agent: str = DEFAULT_AGENT) -> AgentUse:
        """Return what an agent has used and earned so far."""
        if agent not in self._used:
            self._used[agent] = AgentUse(TokenBudget(self.binding(agent).limits.max_tokens))
        return self._used[agent]

    @property
    def rewards(self) -> dict[str, float]:
        """What was earned so far, by the name of the reward; where agents have names, after theirs."""
        return {
            name if agent == DEFAULT_AGENT else f"{agent}/{name}": value
            for agent, use in self._used.items()
            for name, value in use.rewards.items()
        }

    def end(self, over: EpisodeOver) -> EpisodeOver:
        """Take note of a limit that was reached, and return what to raise.

        The episode has no further turn, whether or not the program catches it. A conversation that is too long is the
        exception: the program may replace its history.
        """
        self.outcome = over.outcome
        if over.outcome != "context_full" and self.over is None:
            self.over = over
        return over

    def close(self) -> None:
        """End the episode: refuse further use of its agents, and cancel tasks that the program left waiting for a
        turn."""
        self.is_closed = True
        self.journal.close()
        for task in self.generating:
            task.cancel()
