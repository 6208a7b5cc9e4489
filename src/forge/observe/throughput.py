"""How fast a run goes, and what its steps report."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forge.observe.sink import (
    EPOCH,
    GRAD_NORM,
    LEARNING_RATE,
    NUM_LOSS_TOKENS,
    NUM_TOKENS,
    SKIPPED,
    STEP_SECONDS,
    TRAIN_LOSS,
    Value,
)
from forge.types import StepResult


class Throughput:
    """Tokens per second, over the last `window` steps and over all.

    Time counts from the construction on. Call `add` when a step has ended; what is not training (a validation, a wait
    for a checkpoint) goes into a `with meter.paused():` block and does not count. `clock` gives seconds that never go
    back.
    """

    def __init__(self, *, window: int = 20, clock: Callable[[], float] = time.monotonic) -> None:
        if window < 1:
            raise ValueError(f"a window holds at least one step, not {window}")
        self._clock = clock
        self._start_s = clock()
        self._paused_s = 0.0
        self._num_tokens = 0
        self._marks: deque[tuple[float, int]] = deque([(self._start_s, 0)], maxlen=window + 1)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def add(self, num_tokens: int) -> None:
        """One step has ended, which took so many tokens."""
        self._num_tokens += num_tokens
        self._marks.append((self._now_s(), self._num_tokens))

    @property
    def tokens_per_s(self) -> float | None:
        """Over the last steps; None as long as no time has gone by."""
        return _rate(self._marks[0], self._marks[-1])

    @property
    def overall_tokens_per_s(self) -> float | None:
        """From the start to the last step; None as long as no time has gone by."""
        return _rate((self._start_s, 0), self._marks[-1])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the time that the block takes."""
        began_s = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - began_s

    def _now_s(self) -> float:
        return self._clock() - self._paused_s


def _rate(first: tuple[float, int], last: tuple[float, int]) -> float | None:
    seconds = last[0] - first[0]
    return (last[1] - first[1]) / seconds if seconds > 0 else None


def step_values(result: StepResult, *, epoch: int | None = None, **known: float | None) -> dict[str, Value]:
    """A step's result under the names that the console knows.

    `known` adds figures that may be unknown, such as `tokens_per_s=meter.tokens_per_s` and `mfu=…`: each becomes
    `train/<name>`, and is left out where it is None. So does each figure of `result.metrics`; `memory_gib` there is
    what the console shows as memory.
    """
    values: dict[str, Value] = {
        TRAIN_LOSS: result.loss,
        LEARNING_RATE: result.learning_rate,
        GRAD_NORM: result.grad_norm,
        NUM_TOKENS: result.num_tokens,
        NUM_LOSS_TOKENS: result.num_loss_tokens,
        STEP_SECONDS: result.seconds,
    }
    if epoch is not None:
        values[EPOCH] = epoch
    if result.skipped:
        values[SKIPPED] = 1
    for name, value in {**result.metrics, **known}.items():
        if value is not None:
            values[f"train/{name}"] = value
    return values
