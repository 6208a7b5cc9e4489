"""The error hierarchy.

Every error that a user can cause says four things where they apply: the *path* of what is wrong (a configuration key, a
file, an option), the *value* found there, the *rule* it breaks and the *repair*. They are fields as well as text, so
that a program can act on them and a person can read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Self


class _Missing:
    """Stands for "no value was given", which differs from a value of None."""

    def __repr__(self) -> str:
        return "<missing>"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()


class ForgeError(Exception):
    """Base of everything that the library raises on purpose."""

    log: tuple[str, tuple[str, ...]] | None = None
    """The log file of the process that failed, and its last lines."""

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        value: object = MISSING,
        rule: str | None = None,
        repair: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.value = value
        self.rule = rule
        self.repair = repair

    def __str__(self) -> str:
        lines = [self.message]
        if self.path is not None:
            lines.append(f"  path:   {self.path}")
        if self.value is not MISSING:
            lines.append(f"  value:  {_short(self.value)}")
        if self.rule is not None:
            lines.append(f"  rule:   {self.rule}")
        if self.repair is not None:
            lines.append(f"  repair: {self.repair}")
        if self.log is not None:
            path, last = self.log
            lines.append(f"  log:    {path}" + (", which ends with" if last else ""))
            lines += [f"    | {line}" for line in last]
        return "\n".join(lines)

    def with_log(self, log: tuple[str, tuple[str, ...]] | None) -> Self:
        """Return this error with the log file of the process that failed."""
        if log is not None:
            self.log = log
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross processes: rebuild from the fields, whatever a subclass's constructor takes.
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(cls: type[ForgeError], args: tuple[Any, ...], fields: dict[str, Any]) -> ForgeError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


def _short(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


class _InputError(ForgeError):
    """What a user fixes without looking at the program. A notebook shows its text and the lines of cells that it
    passed, without the library's own lines."""

    def _render_traceback_(self) -> list[str]:
        import traceback

        frames = traceback.extract_tb(self.__traceback__)
        cells = [frame.line for frame in frames if "ipykernel" in frame.filename or "<ipython" in frame.filename]
        return [
            f"{type(self).__name__}: {self}",
            *(f"  cell:   {line}" for line in cells if line),
            "All lines of the traceback: import sys, traceback; traceback.print_exception(sys.last_value)",
        ]


class ConfigError(_InputError, ValueError):
    """A configuration key, value or file that breaks a rule."""


class InsecureBindError(ConfigError):
    """A listener that other machines could reach, without TLS and a secret, and that the user has not allowed."""


class OptionError(_InputError, ValueError):
    """An option of an actor, a service or an endpoint that is unknown or out of range."""


class PlacementError(ForgeError, RuntimeError):
    """More GPUs or hosts were asked for than there are."""


class LaunchError(ForgeError, RuntimeError):
    """A process, a host or a job could not be started."""


class DownloadError(ForgeError, RuntimeError):
    """A file of a model repository could not be fetched."""


class RemoteError(ForgeError, RuntimeError):
    """Stands for a remote exception that cannot itself be sent (not picklable, or an exit request).

    `type_name` is the original's qualified class name; its text and traceback are in the message and the notes.
    """

    def __init__(self, message: str, *, type_name: str) -> None:
        super().__init__(message)
        self.type_name = type_name


class ActorFailure(ForgeError, RuntimeError):
    """The process that was to answer died, hung, or was replaced before it did.

    The request may or may not have run. Endpoints that are safe to run twice can say `@endpoint(retry=True)`; a service
    then sends such a request to another replica instead of raising this.
    """


class CallTimeout(ForgeError, TimeoutError):
    """A call took longer than the caller allowed. The request was cancelled; the replica continues."""


class Overloaded(ForgeError, RuntimeError):
    """Every replica is at its concurrency limit and the queue is full: slow down, or raise a limit."""


class ServiceStopped(ForgeError, RuntimeError):
    """A call reached a service after its shutdown, or one whose replicas were all given up."""


class ResizeError(ForgeError, RuntimeError):
    """A service could not get all the replicas that were asked for. It keeps those that it has; `num_replicas` says how
    many these are."""

    def __init__(self, message: str, *, num_replicas: int = 0, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.num_replicas = num_replicas


class FanoutError(ForgeError, RuntimeError):
    """At least one replica did not complete a fanout. `outcomes` holds what every replica answered."""

    def __init__(self, message: str, *, outcomes: Sequence[Any]) -> None:
        super().__init__(message)
        self.outcomes = tuple(outcomes)


class ModelError(_InputError, ValueError):
    """A model folder that cannot be used: a family that is not known, a tensor missing or of another shape."""


class LayoutError(ConfigError):
    """A layout over ranks that the model, or the number of ranks, does not admit."""


class DataError(_InputError, ValueError):
    """A record or a file of data that cannot be read. `path` names file and line."""


class CheckpointError(_InputError, RuntimeError):
    """A checkpoint that is missing, incomplete, or not of this model."""


class SaveError(ForgeError, RuntimeError):
    """A checkpoint, or a pinned version of weights, that could not be written. Those before it are complete."""


class RecordError(ForgeError, RuntimeError):
    """A file that a run writes beside its checkpoints (ledger, rollouts, trace) cannot be written: a full disk, say."""


class ReplayError(_InputError, RuntimeError):
    """A step or a group of a run that cannot be replayed: it is not recorded, its record is damaged, or runs of this
    kind cannot be replayed. A step that is replayed and differs is no error but the answer."""


class StepAbandoned(ForgeError, RuntimeError):
    """A training step was given up on request. Training state is as it was before the step."""


class RecoveryError(ForgeError, RuntimeError):
    """A worker died, and was not restored: it died twice in the same step, or too often. `path` names the files that
    show the step, where it died twice in one."""


class NonFiniteError(ForgeError, FloatingPointError):
    """Loss, gradient or logits are NaN or infinite. Training state is as it was before the step."""


class PromptError(_InputError, ValueError):
    """A request that no generator can answer: a prompt that is empty, too long, or of tokens that do not exist."""


class EngineDead(ForgeError, RuntimeError):
    """The process of a generation engine ended. The replica is replaced; requests may be sent again."""


class SyncError(ForgeError, RuntimeError):
    """Trainer and generator do not compute with the same weights; generation has stopped. `tensors` names what
    differs."""

    def __init__(self, message: str, *, tensors: Sequence[str] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.tensors = tuple(tensors)


class RewardError(ForgeError, RuntimeError):
    """A reward failed, and the configuration says that this ends the run."""


class RolloutError(ForgeError, RuntimeError):
    """Rollouts bring nothing to learn from: every group lacks signal, or its rewards fail."""


class GroupFailed(ForgeError, RuntimeError):
    """A group was tried as often as the configuration allows, and failed each time for reasons that are not the
    policy's. It is dropped."""


class EvalError(ForgeError, RuntimeError):
    """An evaluation that cannot be continued or compared: its settings or tasks are others, or faults ended it."""


INPUT_ERRORS: Final = (ConfigError, OptionError, ModelError, DataError, CheckpointError, PromptError, ReplayError)
"""What a user fixes without looking at the program: the text says all, and a command ends with exit code 2."""


class StoreError(ForgeError, RuntimeError):
    """The tensor store could not do what was asked."""


class StoreKeyError(StoreError, KeyError):
    """There is nothing under that key, or no such version of it."""

    __str__ = ForgeError.__str__


class WeightMismatch(StoreError):
    """The weights that arrived are not those that were published. `tensors` names the ones that differ."""

    def __init__(self, message: str, *, tensors: Sequence[str] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.tensors = tuple(tensors)


def nearest(word: str, known: Iterable[str], *, count: int = 1) -> list[str]:
    """Return up to `count` known words that look like this one, best first."""
    import difflib

    folded: dict[str, str] = {}
    for candidate in known:
        folded.setdefault(_fold(candidate), candidate)
    return [folded[match] for match in difflib.get_close_matches(_fold(word), folded, n=count, cutoff=0.6)]


def did_you_mean(word: str, known: Iterable[str], *, prefix: str = "") -> str | None:
    """Return a repair that names the nearest known word, or None when none is near."""
    matches = nearest(word, known)
    return f"did you mean `{prefix}{matches[0]}`?" if matches else None


def _fold(word: str) -> str:
    return word.lower().replace("-", "_")
