"""A pytest plugin: no test hangs the run, and a worker of pytest-xdist that crashes costs exactly one failed test.

- Each phase of a test (set-up, call, tear-down) may take `test_limit_s` seconds (in `pyproject.toml`), or up to 1 %
  less: arming the timer starts a thread, so it stays armed over phases that follow each other at once. Then the stacks
  of all threads are printed and the process exits, also when C code holds the GIL. Under xdist (`-n`) it is a crash.
- `crash_safe_scheduling` replaces xdist's own scheduler for `--dist loadfile`, which hangs after a crash.
- The garbage collector leaves collected tests and imported modules alone. Most of its work would be to visit them.
- What a worker started ends with it. A forked child would otherwise hold the worker's pipe open, and xdist would wait
  for its end for ever.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

    from crash_safe_scheduling import CrashSafeScheduling

_stderr = pytest.StashKey[int]()
_watchers = pytest.StashKey[list[threading.Thread]]()
_armed_at = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("test_limit_s", "seconds that a phase of a test may take; 0: no limit", type="string", default="0")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # in a test, pytest redirects 2
    config.stash[_watchers] = []
    config.stash[_armed_at] = float("-inf")
    config.pluginmanager.register(RunningTests())
    if hasattr(config, "workerinput"):
        os.setsid()  # so that the processes it forks can be told from those of other workers


def pytest_unconfigure(config: pytest.Config) -> None:
    for watcher in config.stash[_watchers]:
        watcher.join(30)
    os.close(config.stash[_stderr])
    gc.unfreeze()  # at its end, the interpreter frees what is not frozen, and C++ bindings report the rest as leaked


# ---- Time limit --------------------------------------------------------------------------------------------------


def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Arm the timer anew in the next phase: pytest's own plugin of this name cancels every one when a test fails."""
    node.config.stash[_armed_at] = float("-inf")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        item.config.stash[_armed_at] = float("-inf")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _limit(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    _limit(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    _limit(item)


def _limit(item: pytest.Item) -> None:
    """Start the time of a phase, unless it has only just been started."""
    limit_s, now = float(item.config.getini("test_limit_s")), time.monotonic()
    if limit_s > 0 and now - item.config.stash[_armed_at] > limit_s / 100:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[_stderr])
        item.config.stash[_armed_at] = now


# ---- Garbage collection ------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


# ---- Crashes -----------------------------------------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> CrashSafeScheduling | None:
    from crash_safe_scheduling import CrashSafeScheduling

    return CrashSafeScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController, error: object | None) -> None:
    """End the run if no test is to blame: a new worker would crash at the same place."""
    from crash_safe_scheduling import CrashSafeScheduling

    scheduler = node.config.pluginmanager.getplugin("dsession").sched
    if error and isinstance(scheduler, CrashSafeScheduling) and node not in scheduler.registered_collections:
        pytest.exit(f"Worker {node.gateway.id} died while it collected the tests ({how_it_ended(node)}).", returncode=3)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport) -> None:
    report.longrepr = f"{report.longrepr} ({how_it_ended(report.node)})"  # type: ignore[attr-defined]


def how_it_ended(node: WorkerController) -> str:
    """Say how a worker's process ended."""
    try:
        status = node.gateway._io.popen.wait(timeout=10)
    except subprocess.TimeoutExpired:
        return "its process is still there"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}; a test that exceeds test_limit_s has its stacks printed above"


class RunningTests:
    """Knows which tests are running, and names them in the summary of a run that was stopped."""

    def __init__(self) -> None:
        self._tests: dict[str, None] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tests[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._tests.pop(nodeid, None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        self._tests.pop(crashitem, None)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in self._tests:
            terminalreporter.write_line(f"RUNNING when stopped: {test}")


# ---- What a worker leaves behind ---------------------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    names = (node.gateway._io.popen.pid, node.workerinput["testrunuid"], node.gateway.id)
    watcher = threading.Thread(target=_end_with, args=names, name=f"watch {node.gateway.id}", daemon=True)
    watcher.start()
    node.config.stash[_watchers].append(watcher)


def _end_with(worker: int, run: str, name: str) -> None:
    """Wait for the end of a worker, then kill what it started: its session, and what carries its name."""
    watched = os.pidfd_open(worker)
    try:
        waiting = select.poll()
        waiting.register(watched, select.POLLIN)
        waiting.poll()
    finally:
        os.close(watched)
    marks = {f"PYTEST_XDIST_TESTRUNUID={run}".encode(), f"PYTEST_XDIST_WORKER={name}".encode()}
    killed = {worker}
    while left := [pid for pid in _processes() if pid not in killed and _belongs(pid, worker, marks)]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(left)


def _processes() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))


def _belongs(pid: int, session: int, marks: set[bytes]) -> bool:
    try:
        state, _, _, of_session, _ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split(maxsplit=4)
        if state in "ZX":
            return False
        return int(of_session) == session or marks <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:  # it has ended, or it is another user's
        return False
