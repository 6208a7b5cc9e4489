"""Rewards for the form of a completion: `tags` and `length`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge, MinLen

from forge.errors import OptionError
from forge.rewards.catalog import checks
from forge.types import Answer, Task

_TAG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def tags(
    prompt: Task,
    completion: Answer,
    *,
    tags: Annotated[Sequence[str], MinLen(1)] = ("think", "answer"),
    partial: bool = False,
    opened: bool = False,
    allow_empty: bool = False,
) -> float:
    """1 when the completion is <think>…</think><answer>…</answer>, each tag once, in order, nothing outside; else 0.

    `tags` names other tags. `partial` gives the fraction of the demands that are met: each tag opened once, closed
    once, the order, no text outside, and something inside each. `opened` says that the prompt already opened the first
    tag. `allow_empty` lets a tag have nothing inside.
    """
    text = f"<{tags[0]}>{completion.text}" if opened else completion.text
    met = [text.count(mark) == 1 for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    if not all(met):
        return sum(met) / (len(met) + 2 + (0 if allow_empty else len(tags))) if partial else 0.0
    outside, insides, in_order = _parts(text, tags)
    met += [in_order, in_order and not outside.strip()]
    if not allow_empty:
        met += [in_order and bool(inside.strip()) for inside in insides]
    return sum(met) / len(met) if partial else float(all(met))


def _parts(text: str, tags: Sequence[str]) -> tuple[str, list[str], bool]:
    """What stands outside the tags, what inside each, and whether they come in order. Each tag is there once."""
    position, outside, insides = 0, [], []
    for tag in tags:
        opening, closing = text.index(f"<{tag}>"), text.index(f"</{tag}>")
        start = opening + len(tag) + 2
        if opening < position or closing < start:
            return "", [""] * len(tags), False
        outside.append(text[position:opening])
        insides.append(text[start:closing])
        position = closing + len(tag) + 3
    return "".join([*outside, text[position:]]), insides, True


@checks(tags)
def check_tags(args: Mapping[str, Any]) -> None:
    """Refuse what is not a tag name, and the same tag twice."""
    names = args.get("tags", ("think", "answer"))
    for name in names:
        check_tag_name(name, path="tags")
    if len(set(names)) != len(names):
        raise OptionError(
            "A tag is named twice.",
            path="tags",
            value=list(names),
            rule="each tag may appear once",
            repair="remove one",
        )


def check_tag_name(name: str, *, path: str) -> None:
    """Refuse `<answer>`, `/answer` and the like: only the name is wanted."""
    if not _TAG_NAME.fullmatch(name):
        raise OptionError(
            "This is not a valid tag name.",
            path=path,
            value=name,
            rule="must be a letter, then letters, digits, - and _",
            repair="write only the name, such as answer, without < and >",
        )


def length(
    prompt: Task,
    completion: Answer,
    *,
    min_tokens: Annotated[int, Ge(0)] = 0,
    max_tokens: Annotated[int, Ge(0)] | None = None,
    target: Annotated[int, Ge(1)] | None = None,
    margin: Annotated[int, Ge(0)] = 0,
) -> float:
    """1 for a completion of a length between `min_tokens` and `max_tokens`, falling to 0 over `margin` tokens outside.

    With `target` instead: 1 at that length, falling to 0 over `margin` tokens on both sides. Length is the number of
    sampled tokens, the end token included.
    """
    size = len(completion.token_ids)
    if target is not None:
        off = abs(size - target)
    elif size < min_tokens:
        off = min_tokens - size
    else:
        off = max(0, size - max_tokens) if max_tokens is not None else 0
    if off == 0:
        return 1.0
    return max(0.0, 1.0 - off / margin) if margin else 0.0


@checks(length)
def check_length(args: Mapping[str, Any]) -> None:
    """Refuse bounds that cross, and bounds beside a target."""
    low, high, target = args.get("min_tokens", 0), args.get("max_tokens"), args.get("target")
    if target is not None and (low or high is not None):
        raise OptionError(
            "A target and limits exclude each other.",
            path="target",
            value=target,
            rule="cannot be combined with min_tokens and max_tokens",
            repair="remove the limits, and use margin for the allowed difference",
        )
    if target is None and not low and high is None:
        raise OptionError(
            "The reward `length` has no length to compare with.",
            path="target",
            value=None,
            rule="needs min_tokens, max_tokens or target",
            repair="add one of them",
        )
    if high is not None and low > high:
        raise OptionError(
            "The limits cross.",
            path="min_tokens",
            value=low,
            rule=f"at most max_tokens, which is {high}",
            repair="lower it",
        )
