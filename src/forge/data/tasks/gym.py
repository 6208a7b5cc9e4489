"""Tasks of the package reasoning-gym, which the extra `reasoning-gym` installs."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping
from typing import Any

from forge.data.tasks import Arguments, unknown_argument
from forge.errors import ConfigError, DataError, did_you_mean
from forge.types import Task

_OURS = ("seed", "size")


class GymTask:
    """The problems of one task. Each is made once and kept: some take a tenth of a second and more.

    `metadata` has what the package's own `score_answer` reads of an entry, as plain values, always with
    `source_dataset`, the task's name. Under `reasoning_gym` it has the task's arguments and the question as the package
    worded it. So the entry to score with is
    `{"question": metadata["reasoning_gym"]["question"], "answer": prompt.answer, "metadata": metadata}`.
    """

    num_problems: int | None = None

    def __init__(self, arguments: Arguments, *, seed: int, where: str, size: int) -> None:
        name, args = arguments.task.partition("/")[2], arguments.values
        self._task = name
        self._seed = seed
        self._args = plain(args)
        self._made: dict[int, Task] = {}
        self.name = arguments.label
        self._dataset = _create(name, self._args, seed=seed, where=where, size=size)
        self._check_scoring(where)

    def read(self, index: int) -> Task:
        """Problem `index`."""
        if index not in self._made:
            self._made[index] = self._make(index)
        return self._made[index]

    def _make(self, index: int) -> Task:
        place = f"{self.name}:{self._seed}:{index}"
        try:
            entry = self._dataset[index]
        except Exception as error:
            raise DataError(
                f"{place}: the task failed to make this problem: {type(error).__name__}: {error}",
                path=place,
                rule="a task must make a problem for every number",
                repair="change task_args or the seed, or set prompts.on_bad_record to skip",
            ) from error
        metadata = {
            **plain(entry["metadata"]),
            "source_dataset": self._task,
            "reasoning_gym": {"args": self._args, "question": entry["question"]},
        }
        answer = entry["answer"]
        return Task(id=place, text=entry["question"], answer=None if answer is None else str(answer), metadata=metadata)

    def _check_scoring(self, where: str) -> None:
        """Refuse a task whose scoring reads values that plain data cannot hold: right answers would count as wrong."""
        try:
            entry = self._dataset[0]
            answer = entry["answer"]
            if answer is None:
                return
            kept = plain(entry)
            before, after = (self._dataset.score_answer(answer, each) for each in (entry, kept))
        except Exception as error:
            raise ConfigError(
                f"the task reasoning_gym/{self._task} cannot be used: {type(error).__name__}: {error}",
                path=f"{where}.task",
                value=self._task,
                rule="a task makes a problem and scores its own answer, from values that JSON can hold",
                repair="change task_args, or take another task",
            ) from error
        if before != after:
            raise ConfigError(
                f"the task reasoning_gym/{self._task} scores its own answer as {after:g}, not {before:g}, when its "
                "entries have crossed processes",
                path=f"{where}.task",
                value=self._task,
                rule="what a task's scoring reads are values that JSON can hold",
                repair="take another task",
            )


def plain(value: Any) -> Any:
    """The same as JSON gives it back: tuples are lists, and keys are texts. TypeError for what JSON cannot hold."""
    return json.loads(json.dumps(value))


def _create(name: str, args: Mapping[str, Any], *, seed: int, where: str, size: int) -> Any:
    try:
        gym = importlib.import_module("reasoning_gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        raise ConfigError(
            f"the package reasoning-gym cannot be imported: {error}",
            path=f"{where}.task",
            value=f"reasoning_gym/{name}",
            rule="tasks of reasoning-gym need that package",
            repair="pip install 'torchforge[reasoning-gym]'",
        ) from error
    if name not in known:
        raise ConfigError(
            f"reasoning-gym has no task {name!r}",
            path=f"{where}.task",
            value=f"reasoning_gym/{name}",
            rule=f"NAME of reasoning_gym/NAME is one of {', '.join(sorted(known))}",
            repair=did_you_mean(name, known, prefix="reasoning_gym/") or "write one of these",
        )
    fields = [field.name for field in dataclasses.fields(known[name][1]) if field.name not in _OURS]
    for key in args:
        if key not in fields:
            raise unknown_argument(key, where=f"{where}.task_args", value=args[key], known=fields)
    try:
        return gym.create_dataset(name, seed=seed, size=size, **args)
    except (AssertionError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the task reasoning_gym/{name} refuses its arguments: {error}",
            path=f"{where}.task_args",
            value=dict(args),
            rule=str(error) or "what the task itself demands of its arguments",
            repair="correct them",
        ) from error
