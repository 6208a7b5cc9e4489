"""`forge run --supervise`: start a run again after a crash.

A small parent, which imports no torch, runs the same command as a child process with `--resume auto`. A run that
finished, was stopped by a signal or refused its input ends the command with the run's own exit status. Anything else is
a crash: what the run left behind is killed, and the run starts again from its newest checkpoint that is whole.
`next_action` alone decides whether and when.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal

from forge.cli.run_folder import EVENTS_NAME, RunFolder, only_supervisor, remove_dead_sockets, report

SUPERVISOR_VARIABLE: Final = "FORGE_SUPERVISOR"
_FORK_SCOPE: Final = "FORGE_FORK_SCOPE"
"""`forge.runtime.forking.SCOPE`. Ranks that are forks of a server outside of the run would not be below the supervisor,
which could not wait for their end, or bring it about."""
_COPY_S: Final = 3.0
"""A scheduler may send one request to the supervisor and to what started it. A second SIGTERM or SIGHUP within this
time of the first is a copy."""
WRONG_INPUT: Final = 2
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON: Final = (*STOP_SIGNALS, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_TAIL_BYTES: Final = 16_384
_TAIL_LINES: Final = 40
_LEFTOVER_S: Final = 5.0
"""How long what a crashed run left behind has between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How often, and how soon, a run is started again.

    Attributes:
        max_restarts: restarts in a row without a new checkpoint.
        max_same_step: crashes in a row after the same step, and with the same checkpoint.
        backoff_s: the wait before the first restart; it doubles with each one until there is a new checkpoint.
        max_backoff_s: the longest wait.
    """

    max_restarts: int = 10
    max_same_step: int = 3
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Crash:
    """One crash of a run.

    Attributes:
        status: the exit code; negative for the signal that killed it.
        checkpoint: sequence number and step of the newest checkpoint then; None if there was none.
        step: the last step in the run's metrics; None if there was none.
    """

    status: int
    checkpoint: tuple[int, int] | None
    step: int | None


@dataclass(frozen=True, slots=True)
class Action:
    """What happens after a crash: `restart` after `delay_s`, or `stop` because of `reason`."""

    kind: Literal["restart", "stop"]
    delay_s: float = 0.0
    reason: str = ""


def next_action(crashes: Sequence[Crash], limits: Limits) -> Action:
    """Return what to do after the last of these crashes. A new checkpoint between two crashes resets every count."""
    last = crashes[-1]
    num_same_step = num_in_row = 0
    for crash in reversed(crashes):
        if crash.checkpoint != last.checkpoint:
            break
        num_same_step += crash.step == last.step and num_same_step == num_in_row
        num_in_row += 1
    if num_same_step >= limits.max_same_step and limits.max_restarts > 0:
        where = "before its first step" if last.step is None else f"after step {last.step}"
        reason = f"it crashed {num_same_step} times in a row {where}, without a new checkpoint"
        return Action("stop", reason=reason)
    if num_in_row > limits.max_restarts:
        times = "once" if num_in_row == 1 else f"{num_in_row} times in a row"
        reason = f"it crashed {times} without a new checkpoint, and --max-restarts is {limits.max_restarts}"
        return Action("stop", reason=reason)
    return Action("restart", delay_s=min(limits.backoff_s * 2.0 ** (num_in_row - 1), limits.max_backoff_s))


def is_final(status: int) -> bool:
    """Return whether a child's status ends the command: it finished, refused its input, or was stopped by a signal."""
    return status in (0, WRONG_INPUT) or any(status in (-number, 128 + number) for number in STOP_SIGNALS)


def describe(status: int) -> str:
    """Return how a child ended, in words."""
    if status >= 0:
        return f"exit code {status}"
    number = signal.Signals(-status)
    hint = " (the kernel kills a process so when memory runs out)" if number is signal.SIGKILL else ""
    return f"{number.name}{hint}"


# ---- The child ----------------------------------------------------------------------------------------------------


class _Tail:
    """Passes a child's standard error on, and keeps the end of it."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._kept = pipe, b""
        self._thread = threading.Thread(target=self._pump, name="stderr of the run", daemon=True)
        self._thread.start()

    def _pump(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self._pipe, 65_536):
                self._kept = (self._kept + data)[-_TAIL_BYTES:]
                with contextlib.suppress(OSError):  # a terminal that is gone: the run continues without printing
                    os.write(2, data)

    def lines(self) -> list[str]:
        """Return the last lines. Called when the child has ended; what it started may still hold the pipe."""
        self._thread.join(timeout=2.0)
        return self._kept.decode(errors="replace").splitlines()[-_TAIL_LINES:]


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _descendants() -> list[int]:
    """Return the processes below this one. With this process as their subreaper, orphans are among them."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry)] = int(parent)
    found, above = [], {os.getpid()}
    while above:
        above = {pid for pid, parent in parents.items() if parent in above}
        found += sorted(above)
    return found


def kill_leftovers(grace_s: float = _LEFTOVER_S) -> int:
    """End every process below this one, with SIGTERM and then SIGKILL. Returns how many there were."""
    num_found, until = 0, time.monotonic() + grace_s
    told: set[int] = set()
    while pids := _descendants():
        is_late = time.monotonic() >= until
        handles = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                handles.append(os.pidfd_open(pid))
                if is_late or pid not in told:
                    os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
        num_found += len(set(pids) - told)
        told |= set(pids)
        if handles:
            select.select(handles, [], [], 1.0 if is_late else max(0.0, until - time.monotonic()))
        for handle in handles:
            os.close(handle)
        _reap()
    return num_found


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


class Supervisor:
    """Runs one command until it is done. Lives in the main thread, where signals arrive.

    Args:
        command: what is run; `--resume auto` is added to it.
        folder: where the run writes; None where that is not known.
        limits: how often, and how soon, it is started again.
        keeps_resume: whether the command says itself what it resumes from. Then `--resume auto` is added only when
            there is a new checkpoint.
    """

    def __init__(
        self, command: Sequence[str], folder: RunFolder | None, *, limits: Limits, keeps_resume: bool = False
    ) -> None:
        self._command, self._folder, self._limits = tuple(command), folder, limits
        self._keeps_resume = keeps_resume
        self._child: subprocess.Popen[bytes] | None = None
        self._received: list[int] = []
        self._asked: signal.Signals | None = None
        self._asked_at = 0.0
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_in, False)

    def run(self) -> int:
        """Run the command, again after crashes, and return the exit code."""
        _prctl(_SET_CHILD_SUBREAPER, 1)
        before = {number: signal.getsignal(number) for number in _PASSED_ON}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # as SIGHUP is under nohup: then the child ignores it too
                signal.signal(number, self._receive)
        try:
            return self._until_done()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._wake_out)
            os.close(self._wake_in)

    def _until_done(self) -> int:
        crashes: list[Crash] = []
        first, began = self._newest_checkpoint(), time.time()
        while True:
            keeps = self._keeps_resume and self._newest_checkpoint() == first
            status, tail = self._run_once(() if keeps else ("--resume", "auto"))
            if self._asked is not None or (is_final(status) and not (status == WRONG_INPUT and self._has_set_aside())):
                if crashes:  # a kernel may have closed a socket of a killed process only after that was looked for
                    remove_dead_sockets(began)
                self._record("end", status=status)
                return 128 - status if status < 0 else status
            num_left = kill_leftovers()
            remove_dead_sockets(began)
            self._has_set_aside()
            step = None if self._folder is None else self._folder.last_step()
            crashes.append(Crash(status, self._newest_checkpoint(), step))
            action = next_action(crashes, self._limits)
            self._record("crash", **asdict(crashes[-1]), num_killed=num_left, action=action.kind, tail=tail)
            if action.kind == "stop":
                return self._give_up(status, action, tail)
            self._report_restart(crashes, action)
            if (asked := self._wait(action.delay_s)) is not None:
                return 128 + asked

    def _run_once(self, words: Sequence[str]) -> tuple[int, list[str]]:
        """Run the child to its end, and return its status and the last lines of its standard error."""
        child = subprocess.Popen(
            [*self._command, *words],
            env={name: value for name, value in os.environ.items() if name != _FORK_SCOPE}
            | {SUPERVISOR_VARIABLE: str(os.getpid())},
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,
            preexec_fn=_stop_with_parent,
        )
        assert child.stderr is not None
        tail = _Tail(child.stderr.fileno())
        self._child = child
        self._pass_on()
        status: int | None = None
        while status is None:  # orphans of the run become children of this process
            pid, value = os.waitpid(-1, 0)
            if pid == child.pid:
                status = child.returncode = os.waitstatus_to_exitcode(value)
        self._child = None
        lines = tail.lines()
        child.stderr.close()
        return status, lines

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_late = time.monotonic() - self._asked_at > _COPY_S
        if self._asked is not None and number in (signal.SIGTERM, signal.SIGHUP) and not is_late:
            return
        if number in STOP_SIGNALS and self._asked is None:
            self._asked, self._asked_at = signal.Signals(number), time.monotonic()
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_in, b"\0")
        self._received.append(number)
        self._pass_on()

    def _pass_on(self) -> None:
        while self._received and self._child is not None and self._child.returncode is None:
            with contextlib.suppress(IndexError, ProcessLookupError):  # another signal has sent it
                os.kill(self._child.pid, self._received.pop(0))

    def _wait(self, seconds: float) -> signal.Signals | None:
        """Wait before a restart. Returns the signal that asked the run to stop meanwhile, if there was one."""
        select.select([self._wake_out], [], [], seconds)
        return self._asked

    def _has_set_aside(self) -> bool:
        """Set damaged checkpoints aside, if an older one is whole. Return whether there were any."""
        moved = [] if self._folder is None else self._folder.set_damaged_aside()
        for path in moved:
            report(f"a checkpoint is damaged, and an older one is used: it is kept as {path}")
            self._record("damaged", checkpoint=path.name)
        return bool(moved)

    def _newest_checkpoint(self) -> tuple[int, int] | None:
        return None if self._folder is None else self._folder.newest_checkpoint()

    def _record(self, event: str, **facts: Any) -> None:
        if self._folder is not None:
            self._folder.record(event, **facts)

    def _report_restart(self, crashes: Sequence[Crash], action: Action) -> None:
        last = crashes[-1]
        at = "from the start" if last.checkpoint is None else f"from the checkpoint of step {last.checkpoint[1]}"
        report(
            f"the run ended with {describe(last.status)}; restart {len(crashes)}, {at}, in {action.delay_s:g} s",
        )

    def _give_up(self, status: int, action: Action, tail: Sequence[str]) -> int:
        shown = "\n".join(f"  | {line}" for line in tail) or "  | (nothing)"
        report(
            f"the run is not started again: {action.reason}. It ended with {describe(status)}. "
            f"The last lines of its standard error:\n{shown}"
        )
        if self._folder is not None:
            report(f"all crashes are in {self._folder.path / EVENTS_NAME}")
        return 128 - status if status < 0 else status


def _stop_with_parent() -> None:
    """In the child, before it starts: SIGTERM, which saves and ends, if the supervisor is killed."""
    _prctl(_SET_PDEATHSIG, signal.SIGTERM)


def supervise(command: Sequence[str], *, files: Sequence[str], words: Sequence[str], limits: Limits) -> int:
    """Run `command` under a supervisor. `files` and `words` are the program's own, which say where it writes.

    A `--resume` among them, or a checkpoint that the configuration names, holds until there is a new checkpoint.
    """
    from forge.config.command_line import detect_kind
    from forge.config.layers import split_words
    from forge.config.loading import merge_layers

    more_files, overrides = split_words([word for word in words if not word.startswith("-")])
    files = [*files, *(file for file in more_files if os.path.isfile(file))]
    merged = merge_layers(detect_kind(files, overrides).schema, files=files, overrides=overrides)
    folder = RunFolder.of(merged)
    section = merged.get("checkpointing")
    named = section.get("resume") if isinstance(section, dict) else None
    has_resume = any(word == "--resume" or word.startswith("--resume=") for word in words)
    keeps = has_resume or named not in (None, "never", "auto")
    with contextlib.nullcontext() if folder is None else only_supervisor(folder.path):
        return Supervisor(command, folder, limits=limits, keeps_resume=keeps).run()
