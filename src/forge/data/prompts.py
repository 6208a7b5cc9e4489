"""The prompts of a run: from files, datasets and tasks, by number, with what is held out for evaluation.

    sets = open_prompts(config.prompts, evaluation=config.evaluation, seed=config.run.seed)
    order = PromptOrder(sets.train, seed=config.run.seed, shuffle=config.prompts.shuffle)
    epoch, prompt = order.at(0)

Everything is checked when it is opened: each source is gone through once, and a record without a prompt, a task without
enough problems or a split without a side ends it there, before anything else has started.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from forge.config import EvaluationConfig, PromptsConfig, PromptSourceConfig
from forge.data.mixing import Indices, derive, shuffled
from forge.data.prompt_files import ID, RecordPrompts
from forge.data.prompt_index import Identify, PromptIndex, gather, joined, question_hash, task_hash
from forge.data.tasks import open_task
from forge.errors import ConfigError, DataError
from forge.types import Task

__all__ = ["PromptDataset", "PromptOrder", "PromptSplit", "Wording", "open_prompts", "save_prompts"]

logger = logging.getLogger("forge.data")

DEFAULT_NUM_PROMPTS = 1000


@dataclass(frozen=True, slots=True)
class Wording:
    """What is put around every prompt. It is part of what makes two datasets equal."""

    system_prompt: str | None = None
    template: str | None = None
    chat: bool = True

    def render(self, prompt: Task) -> Task:
        """A prompt as the policy is asked it.

        The template goes around a text, and around the last message of a conversation where a user says it. A
        conversation that has a system message keeps its own.
        """
        if prompt.text is not None and not self.chat:
            return Task(prompt.id, text=self._framed(prompt.text), answer=prompt.answer, metadata=prompt.metadata)
        turns = prompt.messages or ({"role": "user", "content": prompt.text},)
        if turns[-1]["role"] == "user":
            turns = (*turns[:-1], {**turns[-1], "content": self._framed(turns[-1]["content"])})
        if self.system_prompt is not None and all(turn["role"] not in ("system", "developer") for turn in turns):
            turns = ({"role": "system", "content": self.system_prompt}, *turns)
        return Task(prompt.id, messages=turns, answer=prompt.answer, metadata=prompt.metadata)

    def _framed(self, text: str) -> str:
        return text if self.template is None else self.template.replace("{prompt}", text)


class PromptDataset:
    """Prompts by number. Reading one needs no other, and any number of readers may ask.

    `digest` is of all the prompts in their order: what is asked, the answers, the metadata and what is put around them.
    Where files lie, and whether a set was made by a task or read from a file, does not matter. `num_skipped` is how
    many records of its sources could not be read and were passed over.
    """

    def __init__(self, prompt_index: PromptIndex, *, wording: Wording) -> None:
        self._index = prompt_index
        self._wording = wording
        self.num_skipped = prompt_index.num_skipped
        text = json.dumps([wording.system_prompt, wording.template, wording.chat])
        self.digest = hashlib.blake2b(text.encode() + prompt_index.prints.tobytes(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def formats(self) -> dict[str, str]:
        """The format of each source, by its name; `task` for one that makes its prompts up."""
        return {source.name: getattr(source, "format", "task") for source in self._index.sources}

    def read(self, index: int) -> Task:
        """One prompt, as the policy is asked it."""
        return self._wording.render(self.read_bare(index))

    def read_bare(self, index: int) -> Task:
        """One prompt as its source words it: without system prompt and template."""
        if not 0 <= index < len(self):
            raise IndexError(f"there is no prompt {index}: there are {len(self)}")
        return self._index.read(index)


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """The prompts to learn from, and those to evaluate on, if any. No question is in both."""

    train: PromptDataset
    heldout: PromptDataset | None


def open_prompts(
    config: PromptsConfig, *, evaluation: EvaluationConfig, seed: int, for_episodes: bool = False
) -> PromptSplit:
    """Open the prompts of a configuration.

    What is held out by fraction goes by what is asked and by the seed: not by the order of the records, and equal
    questions are on the same side. Where evaluation has sources of its own, what they ask is left out of training. With
    `for_episodes`, tasks that ask the same are different ones if their answers or metadata differ: what a program hides
    at first (a number to guess, a table that a tool reads) is part of its task.
    """
    wording = Wording(config.system_prompt, config.template, config.chat)
    identify = task_hash if for_episodes else question_hash
    prompt_index = _open_index(config.sources, config=config, section="prompts", seed=seed, identify=identify)
    if not evaluation.enabled:
        return PromptSplit(PromptDataset(prompt_index, wording=wording), None)
    if evaluation.sources:
        held = _open_index(evaluation.sources, config=config, section="evaluation", seed=seed, identify=identify)
        questions = np.unique(held.questions)
    else:
        held = prompt_index
        questions = _held_questions(prompt_index, fraction=evaluation.fraction, seed=seed)
    train = prompt_index.take(np.flatnonzero(~np.isin(prompt_index.questions, questions)))
    if not len(train):
        raise ConfigError(
            "every training prompt is also an evaluation prompt",
            path="evaluation.sources",
            value=len(questions),
            rule="what evaluation asks is left out of training, and something must remain",
            repair="give evaluation other sources, or a task another seed, or use evaluation.fraction",
        )
    if evaluation.sources and len(train) < len(prompt_index):
        logger.info("%d prompts are used for evaluation and left out of training", len(prompt_index) - len(train))
    chosen = _ranked(questions, key=derive(seed, "held out"))[: evaluation.max_prompts]
    _, first = np.unique(held.questions, return_index=True)
    picks = np.sort(first[np.isin(held.questions[first], chosen)])
    return PromptSplit(PromptDataset(train, wording=wording), PromptDataset(held.take(picks), wording=wording))


def save_prompts(dataset: PromptDataset, path: str | Path) -> int:
    """Write a dataset as a .jsonl file and return how many prompts it has. The file appears whole or not at all.

    What is written are the prompts as their sources word them. A configuration that has this file as its only source,
    and the same system prompt and template, gives the same prompts again, with the same ids and the same digest.
    """
    target = Path(path)
    if target.suffix != ".jsonl":
        raise DataError(
            f"{target} would not be read again",
            path=str(target),
            value=target.suffix,
            rule="a file of prompts that are saved ends in .jsonl",
            repair="name it so",
        )
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            for index in range(len(dataset)):
                file.write(json.dumps(_record(dataset.read_bare(index))) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return len(dataset)


def _record(prompt: Task) -> dict[str, object]:
    words = {"messages": prompt.messages} if prompt.text is None else {"prompt": prompt.text}
    return {ID: prompt.id, **words, "answer": prompt.answer, "metadata": prompt.metadata}


def _open_index(
    sources: Sequence[PromptSourceConfig], *, config: PromptsConfig, section: str, seed: int, identify: Identify
) -> PromptIndex:
    if not sources:
        raise ConfigError(
            "there are no prompts",
            path=f"{section}.sources",
            value=(),
            rule="at least one source",
            repair="add one, such as {path: train.jsonl} or {task: arithmetic}",
        )
    indexes = []
    for number, source in enumerate(sources):
        if source.task is None:
            indexes.append(_open_records(source, config=config, identify=identify))
        else:
            own = source.seed if source.seed is not None else derive(seed, section, number) % 2**31
            where = f"{section}.sources[{number}]"
            lenient = config.on_bad_record == "skip"
            indexes.append(_open_task(source, where=where, seed=own, lenient=lenient, identify=identify))
    return joined(indexes)


def _open_records(source: PromptSourceConfig, *, config: PromptsConfig, identify: Identify) -> PromptIndex:
    lenient = config.on_bad_record == "skip"
    records = RecordPrompts(source, chat=config.chat, lenient=lenient)
    limit = min(source.num_prompts or len(records), len(records))
    prompt_index = gather(
        records, num_candidates=len(records), limit=limit, distinct=False, lenient=lenient, identify=identify
    )
    if not len(prompt_index):
        raise DataError(
            f"there is no usable prompt in {records.name}",
            path=records.name,
            value=len(records),
            rule="a source has at least one record that can be read",
            repair="set prompts.on_bad_record to error to see what is wrong with its records",
        )
    return prompt_index


def _open_task(source: PromptSourceConfig, *, where: str, seed: int, lenient: bool, identify: Identify) -> PromptIndex:
    wanted = source.num_prompts or DEFAULT_NUM_PROMPTS
    num_candidates = 20 * wanted + 1000
    task = open_task(str(source.task), args=source.task_args, seed=seed, where=where, size=num_candidates)
    limit = wanted
    if task.num_problems is not None:
        limit = num_candidates = min(wanted, task.num_problems)
    prompt_index = gather(
        task, num_candidates=num_candidates, limit=limit, distinct=True, lenient=lenient, identify=identify
    )
    if not len(prompt_index) or (source.num_prompts is not None and len(prompt_index) < source.num_prompts):
        found = task.num_problems if task.num_problems is not None else len(prompt_index)
        raise ConfigError(
            f"{task.name} has fewer different problems than requested",
            path=f"{where}.num_prompts",
            value=source.num_prompts,
            rule=f"at most {found}" if task.num_problems is not None else f"about {found}: no more were found",
            repair="lower it, or widen the task by its level or its arguments",
        )
    return prompt_index


def _held_questions(prompt_index: PromptIndex, *, fraction: float, seed: int) -> NDArray[np.uint64]:
    """Which questions are held out: at least one, and never all."""
    questions = np.unique(prompt_index.questions)
    if len(questions) < 2:
        raise ConfigError(
            "the prompts cannot be split",
            path="evaluation.fraction",
            value=fraction,
            rule="at least two different questions, so that each side has one",
            repair="add prompts, or give evaluation sources of its own",
        )
    count = min(max(1, round(fraction * len(questions))), len(questions) - 1)
    return _ranked(questions, key=derive(seed, "held out"))[:count]


def _ranked(questions: NDArray[np.uint64], *, key: int) -> NDArray[np.uint64]:
    """Questions in an order that only they and the key decide."""
    bits = questions ^ np.uint64(key)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return questions[np.argsort(bits ^ (bits >> np.uint64(31)), kind="stable")]


_EPOCHS_KEPT = 2


class Readable(Protocol):
    """Prompts by number, and a digest that changes when they do."""

    digest: str

    def __len__(self) -> int: ...

    def read(self, index: int) -> Task: ...


class PromptOrder:
    """Prompts one after the other, without end: every epoch has each of them once, in an order of its own.

    The place in the order is a number that counts on over epochs, and a prompt is found by it alone. So there is no
    state: a run that resumes needs the next number, and may ask for those in between again. `digest` changes when any
    number could mean another prompt.
    """

    def __init__(self, dataset: Readable, *, seed: int, shuffle: bool = True) -> None:
        self.dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[int, Indices] = {}
        text = repr((dataset.digest, seed if shuffle else None))
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self.dataset)

    def at(self, number: int) -> tuple[int, Task]:
        """The epoch and the prompt of the number-th group; both count from 0."""
        epoch, index = self.place(number)
        return epoch, self.dataset.read(index)

    def place(self, number: int) -> tuple[int, int]:
        """The epoch, and the prompt's index in its dataset."""
        if number < 0:
            raise IndexError(f"prompts are numbered from 0, and {number} is below")
        epoch, turn = divmod(number, len(self.dataset))
        return epoch, int(self._order(epoch)[turn]) if self._shuffle else turn

    def _order(self, epoch: int) -> Indices:
        if epoch not in self._orders:
            self._orders[epoch] = shuffled(len(self.dataset), derive(self._seed, "prompts", epoch))
            for old in sorted(self._orders, key=lambda kept: abs(kept - epoch))[_EPOCHS_KEPT:]:
                del self._orders[old]
        return self._orders[epoch]
