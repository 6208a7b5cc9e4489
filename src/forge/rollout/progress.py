"""What rollouts are doing: the stage of every group in flight, and the time in which anything was generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge.rollout.curriculum import Curriculum
    from forge.rollout.league import League


from forge.observe.clock import monotonic_s


@dataclass(slots=True)
class _Stage:
    name: str
    since: float


class RolloutProgress:
    """Counts what was sampled, and knows what each group in flight waits for."""

    def __init__(self, *, clock: Callable[[], float] = monotonic_s) -> None:
        self.num_samples = 0
        """Episodes that were sampled so far, whatever became of their groups."""
        self.num_tokens = 0
        """Tokens of those episodes."""
        self.league: League | None = None
        """What draws the opponents of groups; None where nothing does."""
        self.curriculum: Curriculum | None = None
        """What chooses the tasks of groups; None where they come in order."""
        self._clock = clock
        self._stages: dict[int, _Stage] = {}
        self._generating_s = 0.0
        self._num_generating = 0
        self._since = 0.0

    def enter(self, number: int, stage: str) -> None:
        """Note what a group waits for from now on."""
        self._stages[number] = _Stage(stage, self._clock())

    def update(self, number: int, stage: str) -> None:
        """Describe the stage that a group is in anew; it counts from when the group entered it."""
        self._stages[number].name = stage

    def leave(self, number: int) -> None:
        """Forget a group that is no longer in flight."""
        self._stages.pop(number, None)

    def count(self, num_samples: int, num_tokens: int) -> None:
        """Count episodes and their tokens."""
        self.num_samples += num_samples
        self.num_tokens += num_tokens

    def take_metrics(self) -> dict[str, float]:
        """Return what happened since the last call, by the names of metrics."""
        return {}

    def forget(self, numbers: Sequence[int]) -> None:
        """Drop what was kept to resume groups: these were trained on or dropped."""

    def stages(self) -> dict[int, tuple[str, float]]:
        """Return what every group in flight waits for, and for how many seconds."""
        now = self._clock()
        return {number: (stage.name, now - stage.since) for number, stage in sorted(self._stages.items())}

    @property
    def generating_s(self) -> float:
        """Seconds so far in which at least one group was being generated."""
        running = self._clock() - self._since if self._num_generating else 0.0
        return self._generating_s + running

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Count the block as time in which a group is being generated."""
        if self._num_generating == 0:
            self._since = self._clock()
        self._num_generating += 1
        try:
            yield
        finally:
            self._num_generating -= 1
            if self._num_generating == 0:
                self._generating_s += self._clock() - self._since
