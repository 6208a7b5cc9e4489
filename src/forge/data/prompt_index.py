"""Going through a source of prompts once: which of them are usable, which are equal, and what they hold."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forge.data.mixing import Indices
from forge.errors import DataError
from forge.types import Task

logger = logging.getLogger("forge.data")

_PRINT_SIZE = 16
_LOGGED = 5
_REPORT_S = 10.0


class PromptSource(Protocol):
    """Prompts by number, as the source words them: nothing is around them yet."""

    name: str

    def read(self, index: int) -> Task: ...


Identify: TypeAlias = Callable[[Task], int]
"""Returns a hash of a prompt: equal ones ask the same."""


@dataclass(frozen=True, slots=True)
class PromptIndex:
    """N prompts of some sources, without their words: a few bytes of memory for each.

    Attributes:
        sources: where they come from.
        owners: int64 [N]: which source.
        numbers: int64 [N]: which number there.
        questions: uint64 [N]: a hash of what is asked; equal questions have equal ones.
        prints: uint8 [N, 16]: a hash of the whole prompt but its id.
        ids: uint64 [N]: a hash of its id.
        num_skipped: how many others of these sources could not be read.
    """

    sources: tuple[PromptSource, ...]
    owners: Indices
    numbers: Indices
    questions: NDArray[np.uint64]
    prints: NDArray[np.uint8]
    ids: NDArray[np.uint64]
    num_skipped: int

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, indices: Indices) -> PromptIndex:
        """Some of them, in the order of the indices."""
        return PromptIndex(
            self.sources,
            self.owners[indices],
            self.numbers[indices],
            self.questions[indices],
            self.prints[indices],
            self.ids[indices],
            self.num_skipped,
        )

    def read(self, index: int) -> Task:
        """One prompt, as its source words it; a DataError when the source no longer holds what it held."""
        prompt = self.sources[int(self.owners[index])].read(int(self.numbers[index]))
        if fingerprint(prompt) != self.prints[index].tobytes():
            raise DataError(
                f"{prompt.id}: this prompt changed after the run started",
                path=prompt.id,
                rule="files of prompts stay as they are while a run reads them",
                repair="start again, or restore the file and resume",
            )
        return prompt


def joined(indexes: Sequence[PromptIndex]) -> PromptIndex:
    """Several indexes as one, in order. Two prompts that differ may not have the same id."""
    starts = np.cumsum([0, *(len(prompt_index.sources) for prompt_index in indexes)])
    whole = PromptIndex(
        tuple(source for prompt_index in indexes for source in prompt_index.sources),
        np.concatenate([prompt_index.owners + start for prompt_index, start in zip(indexes, starts, strict=False)]),
        np.concatenate([prompt_index.numbers for prompt_index in indexes]),
        np.concatenate([prompt_index.questions for prompt_index in indexes]),
        np.concatenate([prompt_index.prints for prompt_index in indexes]),
        np.concatenate([prompt_index.ids for prompt_index in indexes]),
        sum(prompt_index.num_skipped for prompt_index in indexes),
    )
    _, first, same = np.unique(whole.ids, return_index=True, return_inverse=True)
    differing = np.flatnonzero((whole.prints != whole.prints[first[same]]).any(axis=1))
    if len(differing):
        name = whole.read(int(differing[0])).id
        raise DataError(
            f"two prompts that differ have the same id {name!r}",
            path=name,
            value=name,
            rule="an id names one prompt",
            repair="give each record a `prompt_id` of its own, or remove that key",
        )
    return whole


def gather(
    source: PromptSource,
    *,
    num_candidates: int,
    limit: int,
    distinct: bool,
    lenient: bool,
    identify: Identify,
) -> PromptIndex:
    """The first `limit` prompts among the candidates 0, 1, … that can be used.

    With `distinct`, what is asked a second time is passed over, and the search ends early when nothing new has come for
    long. With `lenient`, what cannot be read is passed over, counted and logged; otherwise it is raised. `identify`
    says which prompts ask the same.
    """
    numbers: list[int] = []
    questions: list[int] = []
    ids: list[int] = []
    prints = bytearray()
    seen: set[int] = set()
    num_bad = num_repeated = 0
    reported = time.monotonic()
    for number in range(num_candidates):
        if len(numbers) == limit or num_repeated > 100 + 10 * len(numbers):
            break
        if time.monotonic() - reported > _REPORT_S:
            reported = time.monotonic()
            logger.info("%s: %d of at most %d prompts are read", source.name, len(numbers), limit)
        try:
            prompt = source.read(number)
        except DataError as error:
            if not lenient:
                raise
            num_bad += 1
            if num_bad <= _LOGGED:
                logger.warning("skipped: %s", error.message)
            continue
        question = identify(prompt)
        if distinct and question in seen:
            num_repeated += 1
            continue
        if distinct:
            num_repeated = 0
            seen.add(question)
        numbers.append(number)
        questions.append(question)
        ids.append(_hash64(prompt.id))
        prints += fingerprint(prompt)
    if num_bad:
        logger.warning("%s: %d records could not be read and were skipped", source.name, num_bad)
    return PromptIndex(
        (source,),
        np.zeros(len(numbers), dtype=np.int64),
        np.array(numbers, dtype=np.int64),
        np.array(questions, dtype=np.uint64),
        np.frombuffer(bytes(prints), dtype=np.uint8).reshape(-1, _PRINT_SIZE),
        np.array(ids, dtype=np.uint64),
        num_bad,
    )


def question_hash(prompt: Task) -> int:
    """64 bits of what is asked. How it is spaced does not count, nor whether it is text or a user's only message."""
    turns = [(turn["role"], _squeezed(turn["content"])) for turn in prompt.messages]
    if not turns:
        turns = [("user", _squeezed(prompt.text or ""))]
    return _hash64(json.dumps(turns))


def task_hash(prompt: Task) -> int:
    """64 bits of what is asked, its answer and its metadata."""
    return _hash64(json.dumps([question_hash(prompt), prompt.answer, prompt.metadata], sort_keys=True))


def fingerprint(prompt: Task) -> bytes:
    """16 bytes of the whole prompt but its id, so that files may move."""
    text = json.dumps([prompt.messages, prompt.text, prompt.answer, prompt.metadata], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_PRINT_SIZE).digest()


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(text).encode(), digest_size=8).digest(), "little")


def _squeezed(text: str) -> str:
    return " ".join(text.split())
