"""What a long-lived sandbox gives back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from forge.errors import LaunchError, OptionError

Content: TypeAlias = str | bytes
FailureKind: TypeAlias = Literal["sandbox_start", "sandbox_died", "sandbox_hung", "sandbox_open_time"]


class SandboxError(LaunchError):
    """A long-lived sandbox failed, through no doing of what runs in it.

    Attributes:
        kind: `sandbox_start`: it could not be started; `sandbox_died`: its processes were ended from outside;
            `sandbox_hung`: it does not answer; `sandbox_open_time`: it was open for longer than `open_s`.
    """

    def __init__(self, message: str, *, kind: FailureKind, repair: str | None = None) -> None:
        super().__init__(message, path="sandbox", repair=repair)
        self.kind: FailureKind = kind


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended. As text, it is what the policy reads.

    Attributes:
        output: what it wrote to both outputs, as UTF-8; where that is more than `output_bytes`, without the middle.
        exit_code: its exit code, or that of the shell if the shell ended; negative for a signal, None if it was killed.
        timed_out: whether it was killed because `wall_s` was over.
        note: what became of the shell, for the policy; empty if nothing did.
        seconds: how long it took.
    """

    output: str
    exit_code: int | None
    timed_out: bool = False
    note: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = [self.output.rstrip("\n")] if self.output else []
        if self.exit_code:
            parts.append(f"[exit code {self.exit_code}]")
        return "\n".join([*parts, *([f"[{self.note}]"] if self.note else [])]) or "[no output]"


@dataclass(frozen=True, slots=True)
class PythonResult:
    """How a piece of Python code ended. As text, it is what the policy reads.

    Attributes:
        output: what it wrote to both outputs, as UTF-8; where that is more than `output_bytes`, without the middle.
        value: the `repr` of its last expression; None if it has none or that is None.
        error: the traceback, if it raised.
        timed_out: whether it was interrupted because `wall_s` was over.
        note: what became of the Python process, for the policy; empty if nothing did.
        seconds: how long it took.
    """

    output: str
    value: str | None = None
    error: str | None = None
    timed_out: bool = False
    note: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = [self.output.rstrip("\n") if self.output else None, self.value, self.error]
        return "\n".join([*filter(None, parts), *([f"[{self.note}]"] if self.note else [])]) or "[no output]"


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a command that ran in a process of its own ended.

    Attributes:
        stdout, stderr: what it wrote, as UTF-8; where that is more than `output_bytes`, without the middle.
        exit_code: its exit code; negative for a signal, None if it was killed because its time was over.
        timed_out: whether its time was over.
        seconds: how long it took.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool = False
    seconds: float = 0.0


class Files(dict[str, Content]):
    """Files by their path in the work folder: text where they are UTF-8, else bytes.

    Attributes:
        left_out: the paths that are not among them, with the reason: links, what is not a file, what does not fit.
    """

    def __init__(self, files: Mapping[str, Content] = {}, *, left_out: Mapping[str, str] = {}) -> None:
        super().__init__(files)
        self.left_out = dict(left_out)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The work folder of a sandbox at one moment: files with their modes, folders and links. Processes, the shell and
    Python's variables are not part of it.

    Attributes:
        entries: path, kind (`file`, `folder`, `link`), mode and number of bytes of each.
        data: the bytes of all entries, one after the other.
        left_out: the paths that are not part of it, with the reason.
    """

    entries: tuple[tuple[str, str, int, int], ...]
    data: bytes = field(repr=False)
    left_out: Mapping[str, str] = field(default_factory=dict)

    def files(self) -> Files:
        """Return the files alone."""
        found: dict[str, Content] = {}
        left_out, place = dict(self.left_out), 0
        for path, kind, _, size in self.entries:
            data, place = self.data[place : place + size], place + size
            if kind == "file":
                found[path] = as_content(data)
            elif kind == "link":
                left_out[path] = f"a link to {os.fsdecode(data)}"
        return Files(found, left_out=left_out)


def as_snapshot(files: Mapping[str, Content] | Snapshot) -> Snapshot:
    """Return files as a snapshot of nothing but them."""
    if isinstance(files, Snapshot):
        return files
    contents = {path: as_bytes(content) for path, content in files.items()}
    entries = tuple((path, "file", 0o644, len(data)) for path, data in contents.items())
    return Snapshot(entries, b"".join(contents.values()))


def as_bytes(content: Content) -> bytes:
    """Return what a file holds."""
    return content.encode("utf-8", "replace") if isinstance(content, str) else bytes(content)


def as_content(data: bytes) -> Content:
    """Return bytes as text where they are UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def read_output(answer: Mapping[str, Any], payload: bytes) -> str:
    """Return the output of a call as text, with a note where its middle is left out."""
    head, tail = payload[: answer["num_head"]], payload[answer["num_head"] :]
    if not answer["left_out"]:
        return payload.decode("utf-8", "replace")
    note = f"\n[… {answer['left_out']} bytes left out …]\n"
    return head.decode("utf-8", "replace") + note + tail.decode("utf-8", "replace")


def command_result(answer: Mapping[str, Any], payload: bytes, *, timeout_s: float) -> CommandResult:
    """Return the result of a command."""
    notes = []
    if answer["lost"]:
        notes.append(f"the shell had ended ({answer['lost']}); this command ran in a new one")
    if answer["timed_out"]:
        notes.append(f"killed after {timeout_s:g} s, with everything that ran in the background")
    elif answer.get("ended"):
        notes.append(f"the shell ended ({answer['ended']})")
    if answer["timed_out"] or answer.get("ended"):
        notes.append("the next command gets a new shell, with the folder and the exported variables from before")
    output, code = read_output(answer, payload), answer.get("exit_code")
    return CommandResult(output, code, answer["timed_out"], "; ".join(notes), answer["seconds"])


def program_result(answer: Mapping[str, Any], payload: bytes) -> ProgramResult:
    """Return the result of a command that ran in a process of its own."""
    output, errors = payload[: answer["num_output"]], payload[answer["num_output"] :]
    code = None if answer["timed_out"] else answer.get("exit_code")
    texts = read_output(answer, output), read_output(answer["errors"], errors)
    return ProgramResult(*texts, code, answer["timed_out"], answer["seconds"])


def check_command(command: Sequence[Any], environ: Mapping[Any, Any]) -> None:
    """Refuse what cannot be a command and its environment."""
    words = [*command, *environ, *environ.values()]
    if command and all(isinstance(word, str) and "\0" not in word for word in words) and not _has_bad_name(environ):
        return
    raise OptionError(
        "this is not a command",
        path="run(command=, environ=)",
        value=[*command, *(f"{name}=…" for name in environ)],
        rule="texts without NUL bytes, at least one, and names of variables without `=`",
        repair='["python3", "agent.py"]',
    )


def _has_bad_name(environ: Mapping[str, Any]) -> bool:
    return any(not name or "=" in name for name in environ)


def python_result(answer: Mapping[str, Any], payload: bytes, *, timeout_s: float) -> PythonResult:
    """Return the result of a piece of Python code."""
    notes = []
    if answer["lost"]:
        notes.append(f"the Python process had ended ({answer['lost']}); this ran in a new one, without its variables")
    if answer["timed_out"]:
        notes.append(f"interrupted after {timeout_s:g} s")
    if answer.get("ended"):
        notes.append(f"the Python process ended ({answer['ended']}); its variables are lost")
    output = read_output(answer, payload)
    value, error = answer.get("value"), answer.get("error")
    return PythonResult(output, value, error, answer["timed_out"], "; ".join(notes), answer["seconds"])
