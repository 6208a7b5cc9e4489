"""How fast a run is, what its steps report, and how fast a device could be."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forge.observe.clock import monotonic_s
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

    def __init__(self, *, window: int = 20, clock: Callable[[], float] = monotonic_s) -> None:
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
        """Count a step that has ended and took so many tokens."""
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
        """Leave out the time that the block takes."""
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
    """Return a step's result under the names that the console knows.

    `known` adds metrics that may be unknown, such as `tokens_per_s=meter.tokens_per_s` and `mfu=…`: each becomes
    `train/<name>`, and is left out where it is None. So does each metric of `result.metrics`; `memory_gib` there is
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


# ---- what accelerators can do at most
#
# Dense bfloat16 products with float32 sums, without sparsity, in operations per second, as the makers publish them:
# where only the metric with 2:4 sparsity is given, half of it. Most rows agree with other public tables; those of A10G,
# L4, A40, A800, H200 NVL, H800 PCIe, RTX 6000 Ada, RTX 5090, RTX 3090 and MI350X were compared with none.

_TERA = 1e12

# The first row all of whose words occur in the name decides, so narrower rows stand before wider ones.
_BF16_PEAKS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("gb300",), 2500 * _TERA),
    (("gb200",), 2500 * _TERA),
    (("b300",), 2250 * _TERA),
    (("b200",), 2250 * _TERA),
    (("gh200",), 989 * _TERA),
    (("h200", "nvl"), 835 * _TERA),
    (("h200",), 989 * _TERA),
    (("h100", "nvl"), 835 * _TERA),
    (("h100", "pcie"), 756 * _TERA),
    (("h100",), 989 * _TERA),
    (("h800", "pcie"), 756 * _TERA),
    (("h800",), 989 * _TERA),
    (("h20",), 148 * _TERA),
    (("a100",), 312 * _TERA),
    (("a800",), 312 * _TERA),
    (("a40",), 149.7 * _TERA),
    (("a30",), 165 * _TERA),
    (("a10g",), 70 * _TERA),
    (("a10",), 125 * _TERA),
    (("l40s",), 362 * _TERA),
    (("l40",), 181 * _TERA),
    (("l4",), 121 * _TERA),
    (("rtx", "a6000"), 154.8 * _TERA),
    (("rtx", "6000", "ada"), 364 * _TERA),
    (("rtx", "5090"), 209.5 * _TERA),
    (("rtx", "4090"), 165.2 * _TERA),
    (("rtx", "3090"), 71 * _TERA),
    (("mi355x",), 2500 * _TERA),
    (("mi350x",), 2300 * _TERA),
    (("mi325x",), 1307 * _TERA),
    (("mi300x",), 1307 * _TERA),
    (("mi250x",), 191.5 * _TERA),  # one of the two dies, which is what PyTorch shows as a device
)

# Words of cards that are not the one in the table whose name they share, and of slices of a card.
_OTHER_CARDS = frozenset({"mig", "laptop", "max", "ti", "d"})

_HALF_PRECISIONS = frozenset({"bfloat16", "bfloat16_pure", "float16"})


def device_peak_flops(name: str, dtype: object = "bfloat16") -> float | None:
    """Return the peak of one device in operations per second, or None where it is not known.

    `name` is what `torch.cuda.get_device_name()` says. `dtype` is a torch dtype, its name, or a value of
    `distributed.precision`; bfloat16 and float16 are equally fast on all of these. Other precisions, CPUs, slices of a
    device (MIG) and devices that are not in the table have no known peak: no MFU is better than a wrong one.
    """
    if str(dtype).removeprefix("torch.") not in _HALF_PRECISIONS:
        return None
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    if words & _OTHER_CARDS or ("amd" in words and "instinct" not in words):
        return None
    for needed, peak in _BF16_PEAKS:
        if words.issuperset(needed):
            return peak
    return None
