"""A run that is running on this machine, as another program sees it: what `forge control` does, in Python.

It imports neither torch nor Monarch. Every call opens a connection of its own, so it may be used from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.loops.run_control import RunRefused, ask_run


@dataclass(frozen=True, slots=True)
class LiveSetting:
    """A setting of a live run.

    Attributes:
        value: the value in force.
        configured: what the configuration says.
        meaning: what a change means while the run runs.
    """

    value: Any
    configured: Any
    meaning: str


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """A change that a resumed run makes again: `key` is `after` from step `from_step` on."""

    from_step: int
    key: str
    after: Any


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where a live run is.

    Attributes:
        kind: what kind of run it is, in words.
        step: the steps that it has taken.
        max_steps: how many it is to take; None where that depends on the data.
        waits_for: what it is doing or waiting for, the longest first.
        is_stopping: whether it was asked to stop.
        settings: what can be changed, by key.
        planned: changes of steps to come.
        commands: how many commands wait for the end of the step, by name.
        workers: the workers by kind; None in a supervised run.
    """

    kind: str
    step: int
    max_steps: int | None
    waits_for: tuple[str, ...]
    is_stopping: bool
    settings: Mapping[str, LiveSetting]
    planned: tuple[PlannedChange, ...]
    commands: Mapping[str, int]
    workers: Mapping[str, int] | None

    @classmethod
    def read(cls, reply: Mapping[str, Any]) -> RunStatus:
        """Return the status that an answer describes."""
        names = ("kind", "step", "max_steps", "is_stopping", "commands")
        return cls(
            **{name: reply[name] for name in names},
            waits_for=tuple(reply["waits_for"]),
            settings={key: LiveSetting(**fields) for key, fields in reply["settings"].items()},
            planned=tuple(PlannedChange(**fields) for fields in reply["planned"]),
            workers=reply.get("workers"),
        )


@dataclass(frozen=True, slots=True)
class ChangedValue:
    """A key whose value was changed."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """What a command changed: from step `from_step` on. A key that had the value already is not among `changes`."""

    from_step: int
    changes: tuple[ChangedValue, ...]


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is complete: of which step, and where."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class LiveEvaluation:
    """What an evaluation found after a step: the fields of `Evaluation` in reinforcement learning, else `loss` and the
    metrics of the loss."""

    step: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """The profiles of a step: the files, and which processes have none, with the reason."""

    step: int
    files: tuple[Path, ...]
    failed: Mapping[str, str]


class RunClient:
    """Commands for a run that is running on this machine.

    Every method raises `ConfigError` if the run is not active, and `RunRefused` with the run's own error if it refuses.

    Args:
        folder: the run's folder.
        timeout_s: how long an answer may take; None for no limit. `set`, `save` and `evaluate` are answered after the
            step in progress, `profile` after the next one.

    Example:
        >>> run = RunClient("runs/first")
        >>> run.show().settings["training.learning_rate"].value
        >>> run.set({"training.learning_rate": 5e-6}).from_step
        >>> run.save().path
    """

    def __init__(self, folder: str | Path, *, timeout_s: float | None = None) -> None:
        self.folder, self._timeout_s = Path(folder), timeout_s

    def ask(self, command: str, **fields: Any) -> Mapping[str, Any]:
        """Send any command, and return the run's answer as it is."""
        return ask_run(self.folder, {"command": command, **fields}, timeout_s=self._timeout_s)

    def show(self) -> RunStatus:
        """Return where the run is."""
        return RunStatus.read(self.ask("show"))

    def stop(self) -> int:
        """Let the run finish its step, save and end, as the first Ctrl-C does. Returns the exit code that it will have.

        The run ends after this returns.
        """
        return int(self.ask("stop")["exit_code"])

    def set(self, values: Mapping[str, Any], *, by: str = "forge control") -> SettingsChange:
        """Change settings, all of them or none; `by` is recorded. Returns when they hold."""
        reply = self.ask("set", values=dict(values), by=by)
        return SettingsChange(reply["from_step"], tuple(ChangedValue(**each) for each in reply["changes"]))

    def save(self) -> SavedCheckpoint:
        """Save after the step in progress. Returns when the checkpoint is complete."""
        reply = self.ask("save")
        return SavedCheckpoint(reply["step"], Path(reply["checkpoint"]))

    def profile(self) -> ProfiledStep:
        """Profile the step after the one in progress. Returns when its profiles are written."""
        reply = self.ask("profile")
        return ProfiledStep(reply["profiled_step"], tuple(map(Path, reply["files"])), reply["failed"])

    def evaluate(self) -> LiveEvaluation:
        """Evaluate after the step in progress. Returns what was found."""
        reply = self.ask("evaluate")
        if reply["evaluation"] is None:
            raise RunRefused(
                "the run was asked to stop during the evaluation",
                rule="an evaluation that is cut short has no result",
                repair="evaluate its last checkpoint: forge eval",
            )
        return LiveEvaluation(reply["step"], reply["evaluation"])
