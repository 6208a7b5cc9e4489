"""How evidence reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge.observe.diagnosis.evidence import Evidence, Trend

_MOST_CHARACTERS = 72


def moved(name: str, trend: Trend) -> str:
    """`train/entropy 0.346 -> 0.012`: the means of the first and of the last steps."""
    return f"{name} {trend.first:.3g} -> {trend.last:.3g}"


def solved_text(run: Evidence) -> str:
    """`evaluation/avg@1 23.4% -> 97.4% of 192 prompts`; the largest number of samples where there are several."""
    (_, first), (_, last) = run.evaluations[0], run.evaluations[-1]
    names = [name for name in last if name.startswith("evaluation/avg@")]
    name = next((name for name in names if name in first), names[0] if names else "solved")
    (_, begin), (_, end) = run.solved()[0], run.solved()[-1]
    count = last.get("evaluation/num_prompts")
    of = "" if count is None else f" of {count:.0f} prompts"
    return f"{name} {first.get(name, begin):.1%} -> {last.get(name, end):.1%}{of}"


def excerpt(episode: Mapping[str, Any]) -> str:
    """Return the beginning of what was sampled, as one line in quotes."""
    text = repr(str(episode.get("text", "")))
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
