"""Tasks that are made up by seed: prompts without a file.

Problem `index` of a task is a function of its arguments, its seed and that number alone, whatever was made before it
and under any version of any library; only tasks of reasoning-gym promise no more than that package does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from forge.data.tasks.arguments import Arguments
from forge.data.tasks.arithmetic import Arithmetic
from forge.data.tasks.countdown import Countdown
from forge.errors import ConfigError, nearest
from forge.types import Prompt

GYM = "reasoning_gym/"


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


BUILT_IN: Mapping[str, Callable[..., Task]] = {"arithmetic": Arithmetic, "countdown": Countdown}


def open_task(name: str, *, args: Mapping[str, Any], seed: int, where: str, size: int) -> Task:
    """A task by its name.

    `where` is the path of its source in the configuration, for errors; `size` is how many numbers may be asked for,
    which some tasks of reasoning-gym must know.
    """
    if name in BUILT_IN:
        return BUILT_IN[name](Arguments(args, where=f"{where}.task_args", task=name), seed=seed)
    if name.startswith(GYM):
        from forge.data.tasks.gym import GymTask

        return GymTask(name.removeprefix(GYM), args=args, seed=seed, where=where, size=size)
    near = nearest(name, [*BUILT_IN, f"{GYM}NAME"])
    raise ConfigError(
        f"there is no task {name!r}",
        path=f"{where}.task",
        value=name,
        rule=f"a task is one of {', '.join(BUILT_IN)} and {GYM}NAME",
        repair=f"did you mean `{near[0]}`?" if near else "write one of these",
    )
