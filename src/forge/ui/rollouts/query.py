"""Which rollouts are wanted, and in what order: filters and sorting over the columns of an index."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from forge.envs.chat_api.errors import parameter_error
from forge.ui.rollouts.columns import Array
from forge.ui.rollouts.files import KINDS, Place
from forge.ui.rollouts.index import RolloutRows
from forge.ui.rollouts.lines import FLAGS, NO_VERSION, prompt_digest

RANGES: Final = ("step", "reward", "tokens", "version", "advantage", "turns", "gap")
PLOTTED: Final = ("step", "reward", "tokens")
"""What histograms are made of."""
MAX_QUERY: Final = 400
_NUM_BINS: Final = 48
_MAX_WORD: Final = 500
LEARNED, TAUGHT_NOTHING, HELD_OUT = "trained", "fruitless", "evaluation"

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Filters:
    """What a reader wants to see. All that is given must hold.

    Attributes:
        ranges: names in `RANGES`, each with the smallest and largest value, both included.
        outcome: `trained`, `evaluation`, `fruitless` for all others, or another outcome; empty for all.
        flags: names in `forge.ui.rollouts.lines.FLAGS`.
        ending, tool, prompt: how it ended, a tool that it called, the name of its prompt; empty for any.
        text: what its texts must have; empty for anything.
    """

    ranges: tuple[tuple[str, Range], ...] = ()
    outcome: str = ""
    flags: tuple[str, ...] = ()
    ending: str = ""
    tool: str = ""
    prompt: str = ""
    text: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Filters:
        """Return the filters of a request. Raise an error that names the parameter for one that has no meaning."""
        flags = tuple(word for word in query.get("flags", "").split(",") if word)
        if any(flag not in FLAGS for flag in flags):
            raise parameter_error("flags", f"must be some of {', '.join(FLAGS)}, with commas between them")
        words = {name: query.get(name, "") for name in ("outcome", "ending", "tool", "prompt")}
        for name, word in words.items():
            if len(word) > _MAX_WORD:
                raise parameter_error(name, f"must have at most {_MAX_WORD} characters")
        text = query.get("q", "")
        if len(text) > MAX_QUERY:
            raise parameter_error("q", f"must have at most {MAX_QUERY} characters")
        ranges = tuple((name, _range(name, query[name])) for name in RANGES if query.get(name))
        return cls(ranges=ranges, flags=flags, text=text, **words)


def _range(name: str, text: str) -> Range:
    """Return the bounds that `low~high`, `low~`, `~high` or a single number describe."""
    low, separator, high = text.partition("~")
    try:
        bounds = (float(low or "-inf"), float((high if separator else low) or "inf"))
    except ValueError:
        bounds = (math.nan, math.nan)
    if any(map(math.isnan, bounds)):
        raise parameter_error(name, "must be a number, or two with ~ between them, of which one may be missing")
    return bounds


def conditions(rows: RolloutRows, filters: Filters) -> dict[str, Array]:
    """Return for each filter that is set which rows it lets pass."""
    columns, words = rows.columns, rows.vocabulary
    found = {name: _within(rows, name, bounds) for name, bounds in filters.ranges}
    if filters.outcome:
        found["outcome"] = _outcome(rows, filters.outcome)
    if filters.flags:
        bits = sum(FLAGS[flag] for flag in set(filters.flags))
        found["flags"] = (columns["flags"] & bits) == bits
    if filters.ending:
        found["ending"] = _is_word(columns["ending"], words.endings.find(filters.ending))
    if filters.tool:
        number = words.tools.find(filters.tool)
        found["tool"] = (columns["tools"] & np.uint32(0 if number is None else 1 << number)) != 0
    if filters.prompt:
        found["prompt"] = columns["prompt"] == np.uint64(prompt_digest(filters.prompt))
    return found


def all_of(rows: RolloutRows, found: Mapping[str, Array], *, without: str = "") -> Array:
    """Return which rows pass all conditions, or all but one."""
    kept = np.ones(len(rows), np.bool_)
    for name, condition in found.items():
        if name != without:
            kept &= condition
    return kept


def _within(rows: RolloutRows, name: str, bounds: Range) -> Array:
    (low, high), columns = bounds, rows.columns
    is_version = name == "version"
    newest, oldest = (columns["newest"], columns["oldest"]) if is_version else (column(rows, name),) * 2
    found: Array = (newest >= low) & (oldest <= high)
    return found & (oldest != NO_VERSION) if is_version else found


def column(rows: RolloutRows, name: str) -> Array:
    """Return what a range is of."""
    return rows.step_column() if name == "step" else rows.columns[name]


def _outcome(rows: RolloutRows, outcome: str) -> Array:
    values, words = rows.columns["outcome"], rows.vocabulary.outcomes
    if outcome != TAUGHT_NOTHING:
        return _is_word(values, words.find(outcome))
    return ~_is_word(values, words.find(LEARNED)) & ~_is_word(values, words.find(HELD_OUT))


def _is_word(values: Array, number: int | None) -> Array:
    return np.zeros(len(values), np.bool_) if number is None else values == number


# ---- Order -----------------------------------------------------------------------------------------------------------

SORTS: Final[Mapping[str, Callable[[RolloutRows], Array] | None]] = {
    "newest": None,
    "oldest": None,
    "best": lambda rows: -rows.columns["reward"],
    "worst": lambda rows: rows.columns["reward"],
    "advantage": lambda rows: -np.abs(rows.columns["advantage"]),
    "gap": lambda rows: -rows.columns["gap"],
    "long": lambda rows: -rows.columns["tokens"],
    "short": lambda rows: rows.columns["tokens"],
    "turns": lambda rows: -rows.columns["turns"],
}


def arrange(rows: RolloutRows, is_wanted: Array, sort: str) -> Array:
    """Return the numbers of the wanted rows in an order. Of equal rows the newest steps come first."""
    order = in_time(rows, newest_first=sort != "oldest")
    order = order[is_wanted[order]]
    key = SORTS[sort]
    return order if key is None else order[np.argsort(key(rows)[order], kind="stable")]


def in_time(rows: RolloutRows, *, newest_first: bool) -> Array:
    """Return all rows in the order of steps; of one step in the order of groups and their members."""
    segments, count = rows.segments, len(rows)
    if not count:
        return np.zeros(0, np.int64)
    sign = -1 if newest_first else 1
    files = segments["file"]
    steps, kinds = sign * rows.steps[files], sign * rows.kinds[files].astype(np.int64)
    by_time = np.lexsort((np.arange(len(files)), kinds, steps))
    counts = segments["count"][by_time].astype(np.int64)
    starts = segments["first"][by_time] - (np.cumsum(counts) - counts)
    order: Array = np.repeat(starts, counts) + np.arange(count)
    if rows.is_ordered:
        return order
    in_file = rows.columns["file"][order]
    keys = (rows.columns["index"][order], rows.columns["group"][order], sign * rows.kinds[in_file])
    in_files: Array = order[np.lexsort((*keys, sign * rows.steps[in_file]))]
    return in_files


# ---- What there is ---------------------------------------------------------------------------------------------------


def histograms(rows: RolloutRows, found: Mapping[str, Array]) -> dict[str, Any]:
    """Return how the rows are spread over what can be plotted: each without the condition on itself."""
    return {name: _histogram(column(rows, name)[all_of(rows, found, without=name)]) for name in PLOTTED}


def _histogram(values: Array) -> dict[str, Any] | None:
    """Return counts between the smallest and the largest value. Bars of whole numbers have whole widths, from a half
    on."""
    is_whole = values.dtype.kind != "f"
    known = values if is_whole else values[np.isfinite(values)]
    if not len(known):
        return None
    low, high = float(known.min()), float(known.max())
    num_bins = _NUM_BINS
    if is_whole:
        width = math.ceil((high - low + 1) / _NUM_BINS)
        num_bins, low = math.ceil((high - low + 1) / width), low - 0.5
        high = low + num_bins * width
    elif high - low <= _NUM_BINS * np.spacing(max(abs(low), abs(high))):  # too close for bars of their own
        return {"low": low, "high": high, "counts": [len(known)]}
    counts, _ = np.histogram(known, bins=num_bins, range=(low, high))
    return {"low": low, "high": high, "counts": counts.tolist()}


def counts_of(rows: RolloutRows) -> dict[str, Any]:
    """Return the words that rows have, with how many rows have them."""
    words = rows.vocabulary
    outcomes, endings = (np.bincount(rows.columns[name], minlength=256).tolist() for name in ("outcome", "ending"))
    return {
        "outcomes": {word: outcomes[number] for number, word in enumerate(words.outcomes.all()) if outcomes[number]},
        "endings": {word: endings[number] for number, word in enumerate(words.endings.all()) if endings[number]},
        "tools": words.tools.all(),
        "flags": {name: int(((rows.columns["flags"] & bit) != 0).sum()) for name, bit in FLAGS.items()},
    }


# ---- One row ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampleName:
    """What an address calls a sample."""

    place: Place
    group: int
    index: int

    @classmethod
    def of(cls, text: str, *, parameter: str) -> SampleName:
        """Read `step.17.3.2`: the kind of file, the step, the group's number, the place in the group."""
        kind, *numbers = text.split(".")
        if kind not in KINDS or len(numbers) != 3 or not all(_is_whole(number) for number in numbers):
            raise parameter_error(parameter, f"must be like step.17.3.2, with one of {', '.join(KINDS)} before it")
        step, group, index = map(int, numbers)
        return cls((kind, step), group, index)


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def name_row(rows: RolloutRows, row: int) -> str:
    """Return what an address calls a row."""
    kind, step = rows.place(row)
    return f"{kind}.{step}.{int(rows.columns['group'][row])}.{int(rows.columns['index'][row])}"
