"""Tasks that are made up by seed: prompts without a file.

Problem `index` of a task is a function of its arguments, its seed and that number alone, whatever was made before it
and under any version of any library; only tasks of reasoning-gym promise no more than that package does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from forge.data.mixing import derive
from forge.errors import ConfigError, did_you_mean
from forge.registry import TASKS, call
from forge.types import Task

_LONGEST_LABEL = 48


class Arguments:
    """What a user wrote under `task_args`. Every value is checked where it is read, and refused by its path."""

    def __init__(self, values: Mapping[str, Any], *, where: str, task: str) -> None:
        self.task, self.values = task, values
        self._where = where
        self.label = label_of(task, values)

    def only(self, known: Sequence[str]) -> None:
        """Refuse arguments that the task does not have."""
        for name in self.values:
            if name not in known:
                raise unknown_argument(name, where=self._where, value=self.values[name], known=known)

    def has(self, name: str) -> bool:
        """Whether the user wrote it."""
        return name in self.values

    def whole(self, name: str, *, default: int, low: int, high: int) -> int:
        """A whole number from low to high."""
        value = self.values.get(name, default)
        if not _is_whole(value) or not low <= value <= high:
            raise self.refusal(name, f"a whole number from {low} to {high}")
        return int(value)

    def span(self, name: str, *, default: tuple[int, int], low: int, high: int) -> tuple[int, int]:
        """A number, or the two ends of a range, both included."""
        value = self.values.get(name, default)
        ends = (value, value) if _is_whole(value) else value
        if (
            not isinstance(ends, list | tuple)
            or len(ends) != 2
            or not all(map(_is_whole, ends))
            or not low <= ends[0] <= ends[1] <= high
        ):
            raise self.refusal(name, f"a whole number, or [lowest, highest], from {low} to {high}")
        return int(ends[0]), int(ends[1])

    def operators(self, name: str, *, default: str, known: str) -> str:
        """Operators, as text or as a list; in the order of `known`."""
        value = self.values.get(name, default)
        signs = list(value) if isinstance(value, str | list | tuple) else []
        if not signs or len(set(map(str, signs))) != len(signs) or any(sign not in list(known) for sign in signs):
            raise self.refusal(name, f"some of {' '.join(known)}, each once, as text or as a list")
        return "".join(sign for sign in known if sign in signs)

    def wording(self, name: str, *, default: str, needed: Sequence[str]) -> str:
        """Text with places to fill in, each of which must be there."""
        value = self.values.get(name, default)
        if not isinstance(value, str) or any(f"{{{place}}}" not in value for place in needed):
            raise self.refusal(name, f"text in which {' and '.join(f'{{{place}}}' for place in needed)} stands")
        return value

    def refusal(
        self, name: str, rule: str, *, repair: str = "correct it, or remove it for the level's own"
    ) -> ConfigError:
        """The error for one argument."""
        return ConfigError(
            f"{self._where}.{name} is not a valid value for the task",
            path=f"{self._where}.{name}",
            value=self.values.get(name),
            rule=rule,
            repair=repair,
        )


def unknown_argument(name: str, *, where: str, value: object, known: Sequence[str]) -> ConfigError:
    """The error for an argument that a task does not have; it lists those that it has."""
    return ConfigError(
        f"{where}.{name}: the task has no such argument",
        path=f"{where}.{name}",
        value=value,
        rule=f"an argument is one of {', '.join(known)}",
        repair=did_you_mean(name, known) or "write one of these, or remove it",
    )


def label_of(task: str, args: Mapping[str, Any]) -> str:
    """A task's name with its arguments, so that problems of two sources have the same id only if they are equal."""
    if not args:
        return task
    text = ",".join(f"{key}={json.dumps(args[key], separators=(',', ':'), default=str)}" for key in sorted(args))
    if len(text) > _LONGEST_LABEL:
        return f"{task}({hashlib.blake2b(text.encode(), digest_size=6).hexdigest()})"
    return f"{task}({text})"


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_ROUNDS = 6


class Draws:
    """A sequence of numbers that a key gives, the same on every machine and under every version of Python."""

    def __init__(self, key: int) -> None:
        self._key = key
        self._count = 0

    def below(self, count: int) -> int:
        """A number from 0 to count - 1."""
        self._count += 1
        return derive(self._key, self._count) % count

    def between(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return low + self.below(high - low + 1)


def permuted(value: int, *, count: int, key: int) -> int:
    """Where the key's permutation of 0 to count - 1 takes a value. None of the others is computed.

    A Feistel network over the next even number of bits, gone through again until the result is below `count`.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = value >> half, value & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (derive(key, number, right) & mask)
        value = left << half | right
        if value < count:
            return value


@runtime_checkable
class TaskGenerator(Protocol):
    """A task whose problems are made by number.

    Attributes:
        name: names it in messages.
        num_problems: how many different problems there are, of which 0 to num_problems - 1 are all; None where that is
            not known, and then problems may repeat.
    """

    name: str
    num_problems: int | None

    def read(self, index: int) -> Task: ...


def open_task(name: str, *, args: Mapping[str, Any], seed: int, where: str, size: int) -> TaskGenerator:
    """Return a task by its name.

    The class or function that makes it is called with its `Arguments`, and with those that its signature names of
    `seed`, `size` (how many numbers may be asked for) and `where` (the path of its source in the configuration).
    """
    factory = TASKS.find(name, path=f"{where}.task")
    arguments = Arguments(args, where=f"{where}.task_args", task=name)
    task: object = call(factory, arguments, args={}, offered={"seed": seed, "size": size, "where": where})
    if not isinstance(task, TaskGenerator):
        raise ConfigError(
            f"{name} does not make a task: {type(task).__name__} lacks name, num_problems or read",
            path=f"{where}.task",
            value=name,
            rule="must be a class or function that returns a forge.data.tasks.TaskGenerator",
            repair="add what is missing",
        )
    return task
