"""Tasks that are made up by seed: prompts without a file.

Problem `index` of a task is a function of its arguments, its seed and that number alone, whatever was made before it
and under any version of any library; only tasks of reasoning-gym promise no more than that package does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from forge.data.tasks.arguments import Arguments
from forge.errors import ConfigError
from forge.registry import TASKS, call
from forge.types import Prompt


@runtime_checkable
class Task(Protocol):
    """A task whose problems are made by number.

    Attributes:
        name: names it in messages.
        num_problems: how many different problems there are, of which 0 to num_problems - 1 are all; None where that is
            not known, and then problems may repeat.
    """

    name: str
    num_problems: int | None

    def read(self, index: int) -> Prompt: ...


def open_task(name: str, *, args: Mapping[str, Any], seed: int, where: str, size: int) -> Task:
    """Return a task by its name.

    The class or function that makes it is called with its `Arguments`, and with those that its signature names of
    `seed`, `size` (how many numbers may be asked for) and `where` (the path of its source in the configuration).
    """
    factory = TASKS.find(name, path=f"{where}.task")
    arguments = Arguments(args, where=f"{where}.task_args", task=name)
    task: object = call(factory, arguments, args={}, offered={"seed": seed, "size": size, "where": where})
    if not isinstance(task, Task):
        raise ConfigError(
            f"{name} does not make a task: {type(task).__name__} lacks name, num_problems or read",
            path=f"{where}.task",
            value=name,
            rule="must be a class or function that returns a forge.data.tasks.Task",
            repair="add what is missing",
        )
    return task
