"""What a rule found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """A symptom of a run.

    Attributes:
        name: its name, such as `reward hacking`.
        symptom: what is wrong, in a sentence.
        evidence: what shows it: metrics with their values, and recorded completions.
        cause: what it usually comes from.
        repair: what to change, the most likely first.
        step: the step at which it shows first; None where it is the run as a whole.
    """

    name: str
    symptom: str
    evidence: tuple[str, ...]
    cause: str
    repair: tuple[str, ...]
    step: int | None = None

    def plain(self) -> Mapping[str, Any]:
        """Return it as what JSON can hold."""
        return asdict(self)
