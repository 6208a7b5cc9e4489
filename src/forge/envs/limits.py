"""What bounds an episode, how it ended, and what is not the policy's doing."""

from __future__ import annotations

from collections.abc import Iterator

from forge.config.episodes import EpisodeLimits
from forge.errors import ForgeError
from forge.types import EpisodeOutcome

__all__ = ["EpisodeLimits", "EpisodeOver", "Fault", "ReplayMismatch", "reason_of"]


class EpisodeOver(Exception):
    """Raised when a limit leaves no room for another turn, or an environment ends the episode. It is then scored."""

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


class ReplayMismatch(Exception):
    """A replayed episode asked for another turn than its journal has: it must be run from its start."""


def reason_of(error: BaseException) -> BaseException:
    """Return what ended a program: of the errors that tasks of a group raised, the one that decides.

    A replay that went wrong comes first, then a fault, then another error of this library. A limit decides only where
    nothing else went wrong. Otherwise it is the error itself.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    every = list(_single_errors(error))
    for kind in (ReplayMismatch, Fault, ForgeError):
        for each in every:
            if isinstance(each, kind):
                return each
    return every[0] if all(isinstance(each, EpisodeOver) for each in every) else error


def _single_errors(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _single_errors(each)
    else:
        yield error
