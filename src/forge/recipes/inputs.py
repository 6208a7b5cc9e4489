"""What a recipe reads and a command makes: the files of a task, and the model that an earlier stage has trained.

`apps/recipes.toml` says which command makes which path. A path that a configuration names, and that is not there, is
made in the working directory before the run; what is there is used as it is.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from forge.recipes.catalogue import apps_folder, read_list
from forge.recipes.command import texts


@dataclass(frozen=True, slots=True)
class Step:
    """A command that makes a path: `python SCRIPT …` with a script of the recipes, or `forge …`."""

    path: str
    command: str

    @property
    def words(self) -> list[str]:
        """The words behind `python` or `forge`."""
        return shlex.split(self.command)[1:]

    @property
    def is_run(self) -> bool:
        """Whether it is a `forge run`, which trains a model, and not a script, which writes files."""
        return self.command.startswith("forge run ")

    @property
    def arguments(self) -> list[str]:
        """The command line of the process."""
        if self.is_run:  # of a stage that was interrupted, the rest
            return [sys.executable, "-m", "forge.cli", *self.words, "checkpointing.resume=auto"]
        script, *rest = self.words
        return [sys.executable, str(apps_folder() / script), *rest]


def missing_inputs(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the dotted path and the value of every key that names a path which can be made and is not there."""
    return [(path, text) for path, text in texts(settings) if steps_for(text) and not os.path.exists(text)]


def all_steps(settings: Mapping[str, Any]) -> list[Step]:
    """Return the commands that make what a configuration names, in the order to run them."""
    found = {step.path: step for _, text in texts(settings) for step in steps_for(text)}
    return [found[path] for path in read_list()["made"] if path in found]


def missing_steps(settings: Mapping[str, Any]) -> list[Step]:
    """Return the commands that make what a configuration names and what is not there, in the order to run them."""
    found: set[Step] = set()
    for _, text in missing_inputs(settings):
        *outer, last = steps_for(text)
        found |= {last, *(step for step in outer if not os.path.exists(step.path))}
    return [step for step in all_steps(settings) if step in found]


def steps_for(text: str) -> list[Step]:
    """Return the commands that make a path and the folders that it lies in, the outermost first."""
    made: Mapping[str, str] = read_list()["made"]
    inside = [path for path in made if text == path or text.startswith(f"{path}/")]
    return [Step(path, made[path]) for path in sorted(inside, key=len)]


def make_inputs(settings: Mapping[str, Any] | None, *, command: str) -> int:
    """Make what a run needs and what is not there, and return an exit code: that of the first command that failed."""
    for step in [] if settings is None else missing_steps(settings):
        print(f"{command}: {step.path} is made first: {step.command}", file=sys.stderr, flush=True)
        status = _run(step.arguments)
        if status != 0:
            print(f"{command}: `{step.command}` ended with exit code {status}", file=sys.stderr)
            return status
    return 0


def _run(arguments: Sequence[str]) -> int:
    """Run a process to its end, and return its exit code. What asks this process to stop asks that one instead."""
    child = subprocess.Popen(arguments, process_group=0)

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, pass_on)
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status
