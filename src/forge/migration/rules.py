"""Constructors of the rules of a table, and conversions of single values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forge.migration.records import Convert, Converted, PeerConfig, Rule, Verdict

Value = Callable[[Any], Any]


def maps(theirs: str, ours: str, value: Value | None = None) -> Rule:
    """Return the rule of a key that means the same here."""
    return Rule((theirs,), "maps", (ours,), "", _single(theirs, ours, value))


def differs(theirs: str, ours: str, note: str, value: Value | None = None) -> Rule:
    """Return the rule of a key that is converted, and means something else here or has another default."""
    return Rule((theirs,), "differs", (ours,), note, _single(theirs, ours, value))


def lacks(theirs: str, note: str) -> Rule:
    """Return the rule of one or more keys, separated by spaces, without a counterpart; `note` says what to do."""
    return Rule(tuple(theirs.split()), "none", (), note)


def joint(theirs: str, ours: str, convert: Convert, *, verdict: Verdict = "maps", note: str = "") -> Rule:
    """Return the rule of keys that only together become some of ours; both separated by spaces."""
    return Rule(tuple(theirs.split()), verdict, tuple(ours.split()), note, convert)


def always(ours: Mapping[str, Any], note: str) -> Rule:
    """Return the rule of what their code does in any case, and a key of ours decides."""
    return Rule((), "differs", tuple(ours), note, lambda config: Converted(dict(ours)))


def _single(theirs: str, ours: str, value: Value | None) -> Convert:
    def convert(config: PeerConfig) -> Converted:
        found = config[theirs] if value is None else value(config[theirs])
        return found if isinstance(found, Converted) else Converted({ours: found})

    return convert


def lacking(note: str, values: Mapping[str, Any] | None = None) -> Converted:
    """Return that a value has no counterpart, and what to do instead; `values` are what is set in its place."""
    return Converted(values or {}, verdict="none", note=note)


def changed(values: Mapping[str, Any], note: str) -> Converted:
    """Return values of ours that mean something else than theirs."""
    return Converted(values, verdict="differs", note=note)


# ---- Conversions of one value


def positive(value: Any) -> Any:
    """Their 0 or negative number for none is our null."""
    return value if isinstance(value, int | float) and value > 0 else None


def at_least_zero(value: Any) -> Any:
    """Their null or -1 for none is our 0."""
    return max(0, value) if isinstance(value, int | float) else 0


def as_float(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def inverted(value: Any) -> Any:
    return not value


def full_or_none(value: Any) -> str:
    """Whether whole layers are recomputed, as `training.activation_checkpointing`."""
    return "full" if value else "none"
