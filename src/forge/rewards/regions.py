r"""Where in a completion the answer stands: after the thinking, in a tag, in \boxed{…}, behind ####, on the last line.

Every function takes time in proportion to the text, whatever the text is.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from forge.errors import DataError
from forge.types import Task

Take = Literal["all", "boxed", "marker", "last_line"]
"""Which part of a text is the answer."""

LONGEST_GROUP = 4000
"""How many characters \\boxed{…} may hold. A longer one does not count as an answer."""

_BOXED = re.compile(r"\\f?boxed\s{0,9}\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def needed_answer(prompt: Task, *, reward: str) -> str:
    """The prompt's answer, or an error that says which prompt has none and which reward needs it."""
    if prompt.answer is None or not prompt.answer.strip():
        raise DataError(
            f"The reward `{reward}` has nothing to compare with.",
            path=prompt.id,
            value=prompt.answer,
            rule="the prompt must have an answer",
            repair="give the records an `answer`, name its column in `prompts.sources[].columns`, or drop the reward",
        )
    return prompt.answer


def needed_metadata(prompt: Task, key: str, *, reward: str) -> Any:
    """A value of the prompt's metadata, or an error that says which prompt lacks it and which reward needs it."""
    if key not in prompt.metadata:
        raise DataError(
            f"The reward `{reward}` needs {key!r} in the prompt's metadata.",
            path=prompt.id,
            value=sorted(prompt.metadata),
            rule=f"the metadata must have the key {key!r}",
            repair=f"use prompts of a task that gives it, or drop the reward `{reward}`",
        )
    return prompt.metadata[key]


def spoken(text: str) -> str:
    """What was said after thinking: all behind the last </think>, and nothing where <think> was never closed."""
    said = text.rpartition("</think>")[2]
    return "" if "<think>" in said else said


def tagged(text: str, tag: str) -> str | None:
    """What stands in the last whole <tag>…</tag>, or None."""
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside if closing and opening else None


def boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{…}, with its braces balanced; None where there is none, or it was cut off."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    found = _BOXED.match(text, start) if start >= 0 else None
    if found is None:
        return None
    end = closing_brace(text, found.end())
    return None if end is None else text[found.end() : end]


def closing_brace(text: str, start: int, *, limit: int = LONGEST_GROUP) -> int | None:
    """Where the brace closes that was opened before `start`; None where it does not within `limit` characters."""
    depth = 1
    for found in _BRACES.finditer(text, start, start + limit):
        if found[0] == "{":
            depth += 1
        elif found[0] == "}":
            depth -= 1
            if depth == 0:
                return found.start()
    return None


def marked(text: str) -> str | None:
    """The rest of the line behind the last ####, as in GSM8K; None where there is none."""
    _, mark, rest = text.rpartition("####")
    return rest.partition("\n")[0].strip() if mark else None


def last_line(text: str) -> str | None:
    """The last line that is not blank."""
    return text.rstrip().rpartition("\n")[2].strip() or None


def region(text: str, *, within: str | None = None) -> str | None:
    """The part of a completion's text that a reward looks at: inside the tag `within`, or all of it, without thinking.

    A tag inside unfinished or finished thinking does not count, unless the tag asked for is `think` itself.
    """
    if within == "think":
        return tagged(text, within)
    said = spoken(text)
    return said if within is None else tagged(said, within)


def answer_text(text: str, *, within: str | None = None, take: Take = "all") -> str | None:
    """The answer of a completion by the rule `take`; None where there is no such place."""
    part = region(text, within=within)
    if part is None or take == "all":
        return part
    return {"boxed": boxed, "marker": marked, "last_line": last_line}[take](part)
