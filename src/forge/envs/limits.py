"""What bounds an episode, how it ended, and what is not the policy's doing."""

from __future__ import annotations

from dataclasses import dataclass

from forge.errors import ForgeError
from forge.types import EpisodeOutcome


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What an episode may use. All its branches share the counts. None means no limit.

    Attributes:
        max_turns: completions.
        max_tokens: sampled tokens.
        max_tool_calls: tool calls.
        max_tool_tokens: tokens of one tool's output; what is longer is cut in the middle, and says so.
        turn_timeout_s: seconds that one completion may take; beyond, it is a fault.
        tool_timeout_s: seconds that one tool call may take, unless the tool sets its own; beyond, the policy is told.
        timeout_s: seconds that the whole episode may take; beyond, it is a fault, or the outcome `time_limit` where
            time is part of the task.
    """

    max_turns: int | None = 32
    max_tokens: int | None = None
    max_tool_calls: int | None = 64
    max_tool_tokens: int | None = 2048
    turn_timeout_s: float | None = 600.0
    tool_timeout_s: float | None = 60.0
    timeout_s: float | None = 3600.0


class EpisodeOver(Exception):
    """Raised by the agent when a limit leaves no room for another turn. It ends the episode, which is then scored."""

    def __init__(self, outcome: EpisodeOutcome, detail: str) -> None:
        super().__init__(f"{outcome}: {detail}")
        self.outcome, self.detail = outcome, detail


class Fault(ForgeError, RuntimeError):
    """The infrastructure failed: a sandbox died, a tool server cannot be reached, time ran out.

    An episode that ends in a fault is never scored and never part of a baseline. The same task is run again with the
    same seed. Raise it in tools and environments for what is not the policy's doing. `kind` is what it is counted by.
    """

    def __init__(self, message: str, *, kind: str = "environment", path: str | None = None) -> None:
        super().__init__(message, path=path)
        self.kind = kind
