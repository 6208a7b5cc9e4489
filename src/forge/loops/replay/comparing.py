"""The differences between a step as it was recorded and as it is replayed, in the order of their causes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from forge.rollout.step_record import CriticRecord, StepRecord, same_number
from forge.types import Group

Component = Literal[
    "record",
    "checkpoint",
    "initial weights",
    "values",
    "advantages",
    "batch",
    "schedule",
    "forward pass",
    "loss",
    "backward pass",
    "optimizer",
    "critic",
]
"""What a difference is in. Each depends on those before it, so the first one that differs is the cause."""

DEFAULT_TOLERANCE: Final = 1e-3
"""How far numbers of a step may be apart where it is replayed on other hardware, in relation to the larger one."""

_OF_QUANTITY: Final[Mapping[str, Component]] = {
    "num_tokens": "batch",
    "num_loss_tokens": "batch",
    "learning_rate": "schedule",
    "grad_norm": "backward pass",
    "skipped": "backward pass",
}
_ORDER: Final[tuple[Component, ...]] = (
    *("batch", "schedule", "forward pass", "loss", "backward pass", "optimizer", "critic"),
)


@dataclass(frozen=True, slots=True)
class Difference:
    """One quantity of a step that is not as it was recorded."""

    component: Component
    quantity: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        return f"{self.component}: {self.quantity} was {self.recorded}, is now {self.replayed}"


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay of one step found.

    Attributes:
        step: its number.
        differences: in the order of their causes; none where the step is reproduced.
        other_hardware: what differs of the hardware and software, in words; then numbers were compared within
            `tolerance`, and digests of what was computed not at all.
        tolerance: see there; 0 where everything was compared bit for bit.
        weights: the digest of the weights after the step; None where it was not trained.
    """

    step: int
    differences: tuple[Difference, ...] = ()
    other_hardware: tuple[str, ...] = ()
    tolerance: float = 0.0
    weights: str | None = None

    @property
    def is_same(self) -> bool:
        """Whether the step is reproduced."""
        return not self.differences

    @property
    def component(self) -> Component | None:
        """What the first difference is in."""
        return self.differences[0].component if self.differences else None


def record_differences(record: StepRecord) -> Iterator[Difference]:
    """Yield what of a record is not as it was written."""
    for number, member, quantity, written, found in record.altered:
        yield Difference("record", f"digest of the {quantity} of group {number}, sample {member}", written, found)


def advantage_differences(
    recorded: Sequence[Group], replayed: Sequence[Group], *, tolerance: float = 0.0
) -> Iterator[Difference]:
    """Yield the episodes whose advantages are not those that were trained with."""
    for one, other in zip(recorded, replayed, strict=True):
        for before, now in zip(one.episodes, other.episodes, strict=True):
            what = f"of group {one.number}, sample {before.member}"
            if not is_close(before.advantage, now.advantage, tolerance=tolerance):
                yield Difference("advantages", f"advantage {what}", before.advantage, now.advantage)
            elif not _all_close(before.token_advantages, now.token_advantages, tolerance=tolerance):
                yield Difference("advantages", f"advantages of tokens {what}", "as recorded", "others")
            for name, result in before.agents.items():
                if not is_close(result.advantage, now.agents[name].advantage, tolerance=tolerance):
                    changed = now.agents[name].advantage
                    yield Difference("advantages", f"advantage of {name} {what}", result.advantage, changed)


def critic_differences(
    recorded: CriticRecord, replayed: CriticRecord, *, tolerance: float = 0.0
) -> Iterator[Difference]:
    """Yield which metrics of the critic's steps differ."""
    for name in dict.fromkeys((*recorded.outcome, *replayed.outcome)):
        one, other = recorded.outcome.get(name), replayed.outcome.get(name)
        if not is_close(one, other, tolerance=tolerance):
            yield Difference("critic", name.removeprefix("critic/"), one, other)


def outcome_differences(
    recorded: Mapping[str, Any], replayed: Mapping[str, Any], *, tolerance: float = 0.0
) -> list[Difference]:
    """Return which numbers of a step differ, in the order of their causes."""
    found = [
        Difference(_component(name), name.removeprefix("metrics."), recorded.get(name), replayed.get(name))
        for name in dict.fromkeys((*recorded, *replayed))
        if not is_close(recorded.get(name), replayed.get(name), tolerance=tolerance)
    ]
    return in_order(found)


def in_order(differences: Sequence[Difference]) -> list[Difference]:
    """Return differences of a trained step with causes before their effects."""
    return sorted(differences, key=lambda each: _ORDER.index(each.component))


def is_close(one: object, other: object, *, tolerance: float) -> bool:
    """Return whether two values are equal, or, as numbers with a fraction, no further apart than `tolerance`."""
    if same_number(one, other):
        return True
    if not (tolerance and isinstance(one, float) and isinstance(other, float)):
        return False
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)


def _all_close(one: Sequence[float] | None, other: Sequence[float] | None, *, tolerance: float) -> bool:
    if one is None or other is None or len(one) != len(other):
        return one is other
    return all(is_close(float(a), float(b), tolerance=tolerance) for a, b in zip(one, other, strict=True))


def _component(name: str) -> Component:
    return _OF_QUANTITY.get(name, "loss")
