"""What bounds an episode, how it ended, and what is not the policy's doing."""

from __future__ import annotations

from forge.config.episodes import EpisodeLimits
from forge.errors import ForgeError
from forge.types import EpisodeOutcome

__all__ = ["EpisodeLimits", "EpisodeOver", "Fault"]


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
