"""What a user may write to extend a run: one object of each kind that a configuration can name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from forge.data.tasks import Arguments
from forge.generator.native.engine import NativeEngine
from forge.losses import LossTerms, TokenView
from forge.types import Batch, Completion, Group, Task

FOLDER = "OWN_PARTS_FOLDER"
"""Names the folder in which each part leaves a file when it is used."""

constant = 3


def used(part: str) -> None:
    if FOLDER in os.environ:
        Path(os.environ[FOLDER], part).touch()


@dataclass(frozen=True)
class OnlyBetter:
    """-max(A, 0) log p times a factor, as a mean over tokens."""

    factor: float = 1.0
    temperature: float = 1.0
    fields: tuple[str, ...] = field(default=("advantages",), init=False)
    needs_entropy: bool = field(default=False, init=False)
    is_nll: bool = field(default=False, init=False)

    def normalizer(self, batch: Batch) -> float:
        return batch.total_weight

    def __call__(self, tokens: TokenView) -> LossTerms:
        used("loss")
        logprobs = tokens.counted(tokens.logprobs_T)
        gains = tokens.value("advantages").clamp(min=0.0)
        return LossTerms(-self.factor * tokens.sum(gains * logprobs), {"entropy": tokens.sum(-logprobs.detach())})


@dataclass(frozen=True)
class HalfLikelihood:
    """Half the negative log likelihood."""

    half: float = 0.5
    fields: tuple[str, ...] = field(default=(), init=False)
    needs_entropy: bool = field(default=False, init=False)
    is_nll: bool = field(default=False, init=False)

    def normalizer(self, batch: Batch) -> float:
        return batch.total_weight

    def __call__(self, tokens: TokenView) -> LossTerms:
        return LossTerms(-self.half * tokens.sum(tokens.counted(tokens.logprobs_T)))


def surrogate(log_ratio: Tensor, advantages: Tensor, *, clip_high: float, slope: float = 1.0) -> Tensor:
    used("surrogate")
    return -slope * log_ratio.exp().clamp(max=1.0 + clip_high) * advantages


def total(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    return -(log_ratio.exp() * advantages).sum()


def ranked(groups: Sequence[Group], *, spread: float = 1.0) -> list[list[float]]:
    """From -spread for the lowest reward of a group to spread for the highest."""
    used("advantage")
    found = []
    for group in groups:
        order = sorted(group.rewards)
        places = [order.index(reward) for reward in group.rewards]
        found.append([spread * (2 * place / max(1, max(places)) - 1) if any(places) else 0.0 for place in places])
    return found


ranked.needs_batch = False  # type: ignore[attr-defined]


class Doubling:
    """Prompts that ask for twice a number."""

    num_problems: int | None = None

    def __init__(self, arguments: Arguments, *, seed: int) -> None:
        arguments.only(["top"])
        self._top, self._seed = arguments.whole("top", default=100, low=1, high=1000), seed
        self.name = arguments.label

    def read(self, index: int) -> Task:
        used("task")
        number = (index * 7 + self._seed) % self._top
        return Task(f"{self.name}:{self._seed}:{index}", text=f"Twice {number} is", answer=str(2 * number))


def even(prompt: Task, completion: Completion, *, mark: float = 1.0) -> float:
    used("reward")
    return mark * (sum(completion.token_ids) % 2 == 0)


class OwnEngine(NativeEngine):
    async def start(self) -> None:
        used("engine")
        await super().start()


class FileSink:
    """Writes the names of metrics into a file of the run's folder."""

    def __init__(self, folder: Path, *, file: str) -> None:
        self._path = folder / file

    def write(self, step: int, values: Mapping[str, object]) -> None:
        used("sink")
        with self._path.open("a") as stream:
            stream.write(f"{step} {' '.join(sorted(values))}\n")

    def close(self) -> None:
        pass
