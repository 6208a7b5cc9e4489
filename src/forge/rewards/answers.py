r"""Rewards for right answers in mathematics: `number`, `math`, and `answer_in_tags`, which also pays for the form."""

from __future__ import annotations

import logging
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from forge.errors import DataError
from forge.rewards.numbers import last_number, only_number, plain_numbers, read_number
from forge.rewards.regions import boxed, marked, needed_answer, region
from forge.types import Answer, Task

NumberPlace = Literal["auto", "boxed", "marker", "last", "whole"]
"""Where the number of a completion stands."""

_MATH_TAIL = 4000


def number(
    prompt: Task,
    completion: Answer,
    *,
    take: NumberPlace = "auto",
    within: str | None = None,
    tolerance: Annotated[float, Ge(0)] = 0.0,
    percent_as_fraction: bool = False,
) -> float:
    r"""1 when the completion's number equals the answer's exactly (or up to `tolerance`), else 0.

    `take` says which number: `auto` the one in the last \boxed{}, else behind the last ####, else the last of all;
    `boxed`, `marker` and `last` only that; `whole` demands that the text is the number and nothing else. Values are
    compared as fractions: 0.1 + 0.2 is 0.3, and 1/3 is not 0.333. `percent_as_fraction` reads 50% as 0.5 instead of 50,
    on both sides. `within` looks only inside that tag.
    """
    answer = needed_answer(prompt, reward="number")
    right = _right_number(answer, percent_as_fraction=percent_as_fraction)
    if right is None:
        raise DataError(
            "The reward `number` cannot read the answer.",
            path=prompt.id,
            value=answer,
            rule="the answer must be one number",
            repair="use the reward `math` or `exact` for such answers",
        )
    text = region(completion.text, within=within)
    if text is None:
        return 0.0
    found = find_number(text, take=take, percent_as_fraction=percent_as_fraction)
    if found is None:
        return 0.0
    return float(abs(found - right) <= Fraction(repr(float(tolerance))))


@lru_cache(maxsize=256)
def _right_number(answer: str, *, percent_as_fraction: bool) -> Fraction | None:
    r"""The number of a prompt's answer: in \boxed{}, behind ####, or the only one there is."""
    if "\\boxed" in answer or "####" in answer:
        return find_number(answer, percent_as_fraction=percent_as_fraction)
    whole = read_number(answer, percent_as_fraction=percent_as_fraction)
    return only_number(answer, percent_as_fraction=percent_as_fraction) if whole is None else whole


def find_number(text: str, *, take: NumberPlace = "auto", percent_as_fraction: bool = False) -> Fraction | None:
    r"""The number of a text by the rule `take`, or None.

    With `auto` the first place that is there decides: what stands unread in \boxed{} is not looked for elsewhere. A
    line behind #### counts only if it is a number, so that a heading is not taken for an answer.
    """

    def read(part: str | None) -> Fraction | None:
        return None if part is None else read_number(part, percent_as_fraction=percent_as_fraction)

    if take == "whole":
        return read(text)
    if take == "boxed" or (take == "auto" and ("\\boxed" in text or "\\fbox" in text)):
        return read(boxed(text))
    if take == "marker":
        return read(marked(text))
    if take == "auto":
        marker = read(marked(text))
        if marker is not None:
            return marker
        whole = read(text)
        if whole is not None:
            return whole
    return last_number(text, percent_as_fraction=percent_as_fraction)


def math(
    prompt: Task,
    completion: Answer,
    *,
    within: str | None = None,
    digits: Annotated[int, Ge(1), Le(15)] = 6,
    strict: bool = True,
) -> float:
    r"""1 when the completion's answer is mathematically the same as the prompt's, by math-verify, else 0.

    Expressions, equations, sets, intervals and matrices are compared, in LaTeX or plain. The last \boxed{} counts, and
    without one what math-verify takes for the answer in the last 4,000 characters. Decimals are compared to `digits`
    places. With `strict: false` the names of variables do not matter, and sets equal tuples. There is no time limit in
    here: the process that runs rewards is killed when one takes too long.
    """
    right = _parsed_answer(needed_answer(prompt, reward="math"))
    if not right:
        raise DataError(
            "The reward `math` cannot read the answer.",
            path=prompt.id,
            value=prompt.answer,
            rule="the answer must be a mathematical expression, in LaTeX or plain",
            repair="use the reward `exact` or `fuzzy` for such answers",
        )
    text = region(completion.text, within=within)
    if text is None or not text.strip():
        return 0.0
    text = plain_numbers(text)
    answer = boxed(text)
    if answer is not None:
        found = _parse(f"\\boxed{{{answer}}}")
    else:
        marker = marked(text)
        found = _parse(marker if marker and read_number(marker) is not None else text[-_MATH_TAIL:])
    return float(_verifier().verify(list(right), found, float_rounding=digits, strict=strict, timeout_seconds=None))


@lru_cache(maxsize=256)
def _parsed_answer(answer: str) -> tuple[Any, ...]:
    """What a prompt's answer says. The completions of a group share it, so the last ones are kept."""
    if "%" not in answer and "percent" not in answer.lower():
        value = find_number(answer, take="auto" if "####" in answer else "whole")
        if value is not None:
            return tuple(_parse(f"${value}$"))
    if "$" in answer or "\\boxed" in answer:
        return tuple(_parse(answer))
    return tuple(_parse(f"${answer.strip()}$"))


def _parse(text: str) -> list[Any]:
    parsed: list[Any] = _verifier().parse(text, parsing_timeout=None)
    return parsed


@lru_cache(maxsize=1)
def _verifier() -> Any:
    """math-verify, loaded at first use: it brings sympy. Its warning that it has no time limit is meant for others."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def answer_in_tags(
    prompt: Task,
    completion: Answer,
    *,
    tag: str = "answer",
    match: Literal["number", "math", "exact"] = "number",
    form_credit: Annotated[float, Ge(0), Le(1)] = 0.0,
) -> float:
    """1 when the last <answer>…</answer> holds the right answer, `form_credit` when it holds another, 0 without one.

    `match` is the reward that compares. An empty answer earns nothing.
    """
    inside = region(completion.text, within=tag)
    if inside is None or not inside.strip():
        return 0.0
    compare: Callable[..., float]
    if match == "exact":
        from forge.rewards.matching import exact as compare
    else:
        compare = number if match == "number" else math
    return max(compare(prompt, completion, within=tag), float(form_credit))
