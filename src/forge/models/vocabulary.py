"""Whether two tokenizers give the same numbers to the same tokens: what one model says of another's tokens needs it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from forge.errors import ConfigError
from forge.models.tokenizer import ChatTokenizer


def vocabulary_digest(tokenizer: ChatTokenizer) -> str:
    """Return a digest of all tokens with their numbers, special and other added tokens included.

    Chat templates and the token that ends a text are no part of it: a base model and its chat version have the same.
    """
    return digest_of(tokenizer.vocabulary)


def digest_of(vocabulary: Mapping[str, int]) -> str:
    """Return the digest of tokens with their numbers."""
    lines = (f"{number}\t{json.dumps(token)}\n" for token, number in sorted(vocabulary.items(), key=_by_number))
    found = hashlib.sha256()
    for line in lines:
        found.update(line.encode())
    return found.hexdigest()[:32]


def _by_number(item: tuple[str, int]) -> tuple[int, str]:
    return item[1], item[0]


def check_same_vocabulary(
    student: ChatTokenizer, teacher: ChatTokenizer, *, path: str, names: tuple[str, str] = ("student", "teacher")
) -> None:
    """Refuse a teacher whose tokenizer is not the student's. `path` is the key that names the teacher; `names` are what
    messages call the two."""
    own, other = student.vocabulary, teacher.vocabulary
    if own == other:
        return
    raise ConfigError(
        f"{names[1]} and {names[0]} have different tokenizers",
        path=path,
        value=teacher.name,
        rule=f"the tokens and numbers of {student.name}: {_first_difference(own, other, names)}",
        repair=f"choose a {names[1]} of the same model family; models with different tokenizers cannot be compared "
        "token by token",
    )


def _first_difference(own: Mapping[str, int], other: Mapping[str, int], names: tuple[str, str]) -> str:
    """Return which token, by number, the two disagree on first."""
    ours = {number: token for token, number in own.items()}
    theirs = {number: token for token, number in other.items()}
    number = min(each for each in ours.keys() | theirs.keys() if ours.get(each) != theirs.get(each))
    student, teacher = (_shown(each.get(number)) for each in (ours, theirs))
    return f"token {number} is {student} in the {names[0]}, and {teacher} in the {names[1]}"


def _shown(token: str | None) -> str:
    return "missing" if token is None else json.dumps(token, ensure_ascii=False)
