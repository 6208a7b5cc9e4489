"""Rewards that compare texts: `exact`, `fuzzy`, `contains` and `regex`."""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen

from forge.errors import OptionError
from forge.rewards.catalog import checks
from forge.rewards.regions import Take, answer_text, needed_answer, region, tagged
from forge.types import Answer, Task

Ignored = Literal["case", "space", "punctuation", "accents", "articles"]
"""A difference between two texts that does not count."""

_LONGEST_COMPARED = 20_000
_GAP = "[\u00a0\u2007\u2009\u202f'’]"
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "THAI", "LAO", "KHMER", "MYANMAR")


def exact(
    prompt: Task,
    completion: Answer,
    *,
    take: Take = "all",
    within: str | None = None,
    ignore: Sequence[Ignored] = ("space",),
) -> float:
    r"""1 when the completion is the answer, word for word, else 0.

    `take` says which part of the completion: `all`, the last `\boxed{}`, what stands behind the last #### (`marker`),
    or the `last_line`; `within` looks only inside that tag. `ignore` lists differences that do not count: `space` (how
    much of it, and around the text), `case`, `punctuation`, `accents`, and the `articles` a, an and the.
    """
    answer = normalised(needed_answer(prompt, reward="exact"), ignore=ignore)
    text = answer_text(completion.text, within=within, take=take)
    return float(text is not None and normalised(text, ignore=ignore) == answer)


def fuzzy(
    prompt: Task,
    completion: Answer,
    *,
    take: Take = "all",
    within: str | None = None,
    ignore: Sequence[Ignored] = ("space", "case"),
    threshold: Annotated[float, Ge(0), Le(1)] = 0.0,
) -> float:
    """How alike completion and answer are, from 0 to 1: twice the characters they share in order, over all of both.

    A likeness below `threshold` counts as 0. The other arguments are those of `exact`.
    """
    answer = normalised(needed_answer(prompt, reward="fuzzy"), ignore=ignore)
    text = answer_text(completion.text, within=within, take=take)
    if text is None:
        return 0.0
    ratio = likeness(normalised(text, ignore=ignore), answer)
    return ratio if ratio >= threshold else 0.0


def likeness(one: str, other: str) -> float:
    """2 × the length of the longest common subsequence / the sum of both lengths; 1 for two empty texts.

    Characters beyond the first 20,000 of a text count as different. The bits of one integer are the cells of a row of
    the table (Hyyrö 2004), so 20,000 characters against as many take about a twentieth of a second.
    """
    total = len(one) + len(other)
    if one == other:
        return 1.0
    short, long = sorted((one[:_LONGEST_COMPARED], other[:_LONGEST_COMPARED]), key=len)
    places: dict[str, int] = {}
    for index, character in enumerate(short):
        places[character] = places.get(character, 0) | 1 << index
    full = (1 << len(short)) - 1
    row = full
    for character in long:
        matches = row & places.get(character, 0)
        row = ((row + matches) | (row - matches)) & full
    return 2.0 * (len(short) - row.bit_count()) / total


def normalised(text: str, *, ignore: Sequence[Ignored] = ("space",)) -> str:
    """The text without the differences that do not count, in Unicode's composed form."""
    if "case" in ignore:
        text = text.casefold()
    if "accents" in ignore:
        text = "".join(one for one in unicodedata.normalize("NFD", text) if unicodedata.category(one) != "Mn")
    text = unicodedata.normalize("NFC", text)
    if "punctuation" in ignore:
        text = "".join(one for one in text if not unicodedata.category(one).startswith("P"))
    if "articles" in ignore:
        text = re.sub(r"\b(?:a|an|the)\b", " ", text, flags=re.IGNORECASE)
    return " ".join(text.split()) if "space" in ignore or "articles" in ignore else text


def contains(
    prompt: Task,
    completion: Answer,
    *,
    phrases: Annotated[Sequence[Annotated[str, MinLen(1)]], MinLen(1)] | None = None,
    need: Literal["all", "any", "fraction"] = "all",
    ignore_case: bool = True,
    within: str | None = None,
) -> float:
    """1 when the completion has the answer in it as whole words, else 0: "2" is neither in "12" nor in "2.5".

    `phrases` are looked for instead of the answer: `need` all of them, any of them, or count the fraction found. Mind
    that a completion which lists every possible answer has the right one in it: give it a length, or use `exact`.
    """
    wanted = [needed_answer(prompt, reward="contains").strip()] if phrases is None else list(phrases)
    text = region(completion.text, within=within)
    if text is None:
        return 0.0
    found = [has_words(text, phrase, ignore_case=ignore_case) for phrase in wanted]
    if need == "fraction":
        return sum(found) / len(found)
    return float(all(found) if need == "all" else any(found))


def has_words(text: str, phrase: str, *, ignore_case: bool = True) -> bool:
    """Whether the phrase stands in the text as words of its own.

    A word ends where no letter or digit follows. A number also is not part of another one (2.5, 1,200, -2, minus 2,
    1/2, 2%, and 1'200 or 1 200 with an apostrophe or a space that does not break). A plain space separates numbers.
    Scripts that do not put spaces between words have no such borders.
    """
    words = unicodedata.normalize("NFC", phrase).split()
    if not words:
        return False
    first, last = words[0][0], words[-1][-1]
    before = "" if not _is_word(first) else r"(?<!\w)"
    after = "" if not _is_word(last) else r"(?!\w)"
    if first.isdecimal():
        before += rf"(?<![0-9][,:])(?<![-−./])(?<![0-9]{_GAP})(?<!\bminus\s)(?<!\bnegative\s)"
    if last.isdecimal():
        after += rf"(?![.,:/][0-9])(?!\s?%)(?!{_GAP}[0-9])"
    pattern = before + r"\s+".join(re.escape(word) for word in words) + after
    return re.search(pattern, unicodedata.normalize("NFC", text), re.IGNORECASE if ignore_case else 0) is not None


def _is_word(character: str) -> bool:
    """Whether a word's border can be seen beside this character."""
    if not (character.isalnum() or character == "_"):
        return False
    return character.isascii() or not unicodedata.name(character, "").startswith(_UNSPACED)


def regex(
    prompt: Task,
    completion: Answer,
    *,
    pattern: str,
    whole: bool = False,
    group: int | str | None = None,
    within: str | None = None,
) -> float:
    """1 when the pattern is found in the completion's text, thinking included, else 0.

    With `whole` it must match all of the text. With `group` the text of that group must be the prompt's answer, up to
    space around it, in the last match. A pattern that backtracks without end is stopped with its process.
    """
    text = completion.text if within is None else tagged(completion.text, within)
    if text is None:
        return 0.0
    compiled = re.compile(pattern)
    if whole:
        found = compiled.fullmatch(text)
    elif group is None:
        found = compiled.search(text)
    else:
        last = deque(compiled.finditer(text), maxlen=1)
        found = last[0] if last else None
    if found is None:
        return 0.0
    if group is None:
        return 1.0
    answer = needed_answer(prompt, reward="regex").strip()
    return float((found[group] or "").strip() == answer)


@checks(regex)
def check_regex(args: Mapping[str, Any]) -> None:
    """Refuse a pattern that is not a regular expression, and a group that it does not have."""
    try:
        compiled = re.compile(args["pattern"])
    except re.error as error:
        raise OptionError(
            "The pattern cannot be read.",
            path="pattern",
            value=args["pattern"],
            rule=f"must be a regular expression of Python's re: {error}",
            repair="correct the pattern; in YAML, put it in single quotes",
        ) from error
    group = args.get("group")
    if group is None:
        return
    known = [*range(compiled.groups + 1), *compiled.groupindex]
    if group not in known:
        raise OptionError(
            "The pattern has no such group.",
            path="group",
            value=group,
            rule=f"must be one of {', '.join(map(str, known))}",
            repair="write the group in parentheses, or name another",
        )
