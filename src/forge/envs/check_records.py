"""What the check of an environment finds: episodes, agents and verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Literal

from forge.types import EpisodeOutcome

AgentName = Literal["nothing", "random", "oracle"]
Status = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class CheckedEpisode:
    """One episode of a check, run twice.

    Attributes:
        agent, number, task_id: who played what: the task's place and its name.
        transcript: the messages, answers, rewards and outcome, in order, as text; equal for equal episodes.
        outcome, reward, parts: how it ended and what it earned; None and nothing where it failed.
        num_turns, num_tool_calls, seconds, tool_errors: what it used.
        error_kind: `raised`, `fault` or `reward` where it failed; None where it did not.
        error: what happened then, in full.
        difference: what was different when it was run again with the same seed; None if nothing was.
        pending: tasks that were still running after it had ended.
        num_missing: turns for which the oracle had no answer.
        is_limited: whether the only reward is the one for episodes that a limit ended.
    """

    agent: AgentName
    number: int
    task_id: str
    transcript: tuple[str, ...]
    outcome: EpisodeOutcome | None = None
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    num_turns: int = 0
    num_tool_calls: int = 0
    tool_errors: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    error_kind: Literal["raised", "fault", "reward"] | None = None
    error: str = ""
    difference: str | None = None
    pending: tuple[str, ...] = ()
    num_missing: int = 0

    @property
    def is_limited(self) -> bool:
        return self.outcome not in (None, "finished") and set(self.parts) == {"limit"}


@dataclass(frozen=True, slots=True)
class AgentSummary:
    """All episodes of one agent."""

    name: AgentName
    episodes: tuple[CheckedEpisode, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(each.reward for each in self.episodes if each.reward is not None)

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(each.outcome or f"failed ({each.error_kind})" for each in self.episodes)

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as plain values."""
        rewards, episodes = self.rewards, self.episodes
        names = sorted({name for each in episodes for name in each.parts})
        num_turns = sum(each.num_turns for each in episodes)
        seconds = [each.seconds for each in episodes]
        return {
            "num_episodes": len(episodes),
            "reward_mean": fmean(rewards) if rewards else None,
            "reward_min": min(rewards, default=None),
            "reward_max": max(rewards, default=None),
            "rewards": {
                name: [min(found), max(found)]
                for name in names
                if (found := [each.parts[name] for each in episodes if name in each.parts])
            },
            "turns_mean": num_turns / len(episodes) if episodes else None,
            "num_tool_calls": sum(each.num_tool_calls for each in episodes),
            "tool_errors": dict(sum((Counter(each.tool_errors) for each in episodes), Counter[str]())),
            "seconds_per_turn": sum(seconds) / num_turns if num_turns else None,
            "seconds_median": median(seconds) if seconds else None,
            "seconds_max": max(seconds, default=None),
            "outcomes": dict(self.outcomes),
        }


@dataclass(frozen=True, slots=True)
class Check:
    """One verdict. `detail` has further lines: differences, tracebacks."""

    name: str
    status: Status
    message: str
    detail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EnvReport:
    """What was found.

    Attributes:
        name: the program.
        num_tasks: how many tasks were tried.
        agents: what each agent got.
        checks: the verdicts.
    """

    name: str
    num_tasks: int
    agents: tuple[AgentSummary, ...]
    checks: tuple[Check, ...]

    @property
    def is_ok(self) -> bool:
        """Whether nothing failed. Warnings do not count."""
        return all(check.status != "fail" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "program": self.name,
            "num_tasks": self.num_tasks,
            "is_ok": self.is_ok,
            "agents": {agent.name: agent.as_dict() for agent in self.agents},
            "checks": [
                {"name": each.name, "status": each.status, "message": each.message, "detail": list(each.detail)}
                for each in self.checks
            ],
        }
