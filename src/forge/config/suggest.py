"""Did you mean: the nearest of the words that would have been right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], *, count: int = 1) -> list[str]:
    """Up to `count` known words that look like this one, best first."""
    folded: dict[str, str] = {}
    for candidate in known:
        folded.setdefault(_fold(candidate), candidate)
    return [folded[match] for match in difflib.get_close_matches(_fold(word), folded, n=count, cutoff=0.6)]


def did_you_mean(word: str, known: Iterable[str], *, prefix: str = "") -> str | None:
    """A question that names the nearest known word, or None when none is near."""
    matches = nearest(word, known)
    return f"did you mean `{prefix}{matches[0]}`?" if matches else None


def _fold(word: str) -> str:
    return word.lower().replace("-", "_")
