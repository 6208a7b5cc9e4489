"""Stand-ins for what a recipe reads and no command has made yet: it can be checked before anything is run."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.errors import ConfigError
from forge.recipes.command import Command, merged, read_command
from forge.recipes.inputs import Step, missing_inputs, missing_steps, steps_for


@dataclass(frozen=True, slots=True)
class StandIns:
    """Inputs in a temporary folder.

    Attributes:
        folder: the folder; None where everything is there already.
        overrides: what puts the stand-ins in the place of the inputs.
        steps: the commands that a run would begin with.
    """

    folder: Path | None = None
    overrides: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()

    def named(self, text: str) -> str:
        """Return a text about the stand-ins as one about the inputs that they stand for."""
        return text if self.folder is None else text.replace(f"{self.folder}/", "")


@contextmanager
def stand_ins(settings: Mapping[str, Any] | None) -> Iterator[StandIns]:
    """Make stand-ins for the missing inputs of a recipe: the same files, and models of the same shape, untrained."""
    missing = [] if settings is None else missing_inputs(settings)
    if settings is None or not missing:
        yield StandIns()
        return
    with tempfile.TemporaryDirectory(prefix="forge-recipe-") as place:
        folder = Path(place)
        for text in dict.fromkeys(text for _, text in missing):
            _make(text, folder)
        overrides = tuple(f"{path}={json.dumps(str(folder / text))}" for path, text in missing)
        yield StandIns(folder, overrides, tuple(missing_steps(settings)))


def _make(text: str, folder: Path) -> None:
    for step in steps_for(text):
        if step.is_run:
            _write_model(step, folder / text)
        elif not (folder / text).exists():
            _write_files(step, folder)


def _write_files(step: Step, folder: Path) -> None:
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(step.arguments, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise ConfigError(
            "the files of the recipe cannot be made",
            path=step.path,
            value=step.command,
            rule=ran.stderr.strip().rpartition("\n")[2],
            repair="run the command by itself to see all of its output",
        )


def _write_model(step: Step, folder: Path) -> None:
    from forge.config import ModelConfig
    from forge.models.architecture import complete
    from forge.models.tiny import write_tiny

    command = _command_of(step)
    head = "scalar" if command.settings is not None and "reward_model" in command.settings else "language"
    model = complete(ModelConfig.model_validate(_model_section(command)))
    write_tiny(model.model_copy(update={"head": head}), folder)


def _command_of(step: Step) -> Command:
    """What the step `forge run RECIPE …` runs."""
    _, recipe, *words = step.words
    return read_command([recipe], words)


def _model_section(command: Command) -> Mapping[str, Any]:
    """Return the model that a step begins with; if an earlier step trains it, the model that this one begins with."""
    section: Mapping[str, Any] = merged(command.files, command.words)["model"]
    earlier = [step for step in steps_for(str(section.get("path"))) if step.is_run]
    return _model_section(_command_of(earlier[-1])) if earlier else section
