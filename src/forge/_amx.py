"""Keeps libraries away from AMX instructions where they trap.

Some virtual machines advertise AMX and kill the program that uses it: a bfloat16 product on the CPU then ends in
"Illegal instruction". Whether that is so is found out once by a child process, and remembered in the environment, so
that a whole tree of processes pays for it once. oneDNN and MKL, which compute torch's products, read from the
environment what they may use; `import forge` sets it, before either of them computes anything. What a user has set
stays.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import MutableMapping, Sequence
from typing import Final, Literal, get_args

Verdict = Literal["absent", "works", "traps", "unknown"]
"""`absent`: not advertised. `unknown`: the child process could not find out; nothing is changed then."""

VARIABLE: Final = "FORGE_AMX"
"""Holds the verdict and the machine that it is about: an environment may travel to another one."""
LIMITS: Final = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3"}
"""The newest instructions below AMX, as each library calls them."""

_ALIASES: Final = {"ONEDNN_MAX_CPU_ISA": "DNNL_MAX_CPU_ISA"}
_PROBE: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_amx_probe.py")
_ABSENT, _REFUSED = 10, 11
_LIMIT_MS: Final = 20_000


def probe_command() -> tuple[str, ...]:
    """Return the command that tries AMX instructions; empty where it need not or cannot be run.

    Only Intel processors with AVX-512 have AMX.
    """
    if sys.platform != "linux" or os.uname().machine != "x86_64" or not sys.executable:
        return ()
    try:
        with open("/proc/cpuinfo", "rb") as file:
            first = file.read(4096)
    except OSError:
        return ()
    is_candidate = b"GenuineIntel" in first and b" avx512f" in first
    return (sys.executable, "-I", "-S", _PROBE) if is_candidate else ()


def apply(environ: MutableMapping[str, str], command: Sequence[str] | None = None) -> Verdict:
    """Find out whether AMX works, unless `environ` says so already, and limit the libraries where it traps.

    `command` is what is run to find out, `probe_command()` by default.
    """
    known, node = environ.get(VARIABLE, "").partition("@")[::2]
    if known in get_args(Verdict) and node == os.uname().nodename:
        return known  # type: ignore[return-value]
    if known == "traps":  # found out about another machine, whose limits came along
        for name, value in LIMITS.items():
            if environ.get(name) == value:
                del environ[name]
    chosen = probe_command() if command is None else command
    verdict = detect(chosen) if chosen else "absent"
    if verdict == "traps":
        for name, value in LIMITS.items():
            if _ALIASES.get(name, name) not in environ:
                environ.setdefault(name, value)
    environ[VARIABLE] = f"{verdict}@{os.uname().nodename}"
    return verdict


def detect(command: Sequence[str]) -> Verdict:
    """Run a program that uses AMX, and tell from how it ends whether that works."""
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    try:
        pid = os.posix_spawn(command[0], list(command), os.environ, file_actions=null)
    except OSError:
        return "unknown"
    code = _wait(pid)
    if code in (_REFUSED, -signal.SIGILL):
        return "traps"
    return {0: "works", _ABSENT: "absent"}.get(code, "unknown")  # type: ignore[return-value]


def _wait(pid: int) -> int:
    """Return how a child ended, as `subprocess` says it. One that does not end is killed."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        if not poll.poll(_LIMIT_MS):
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def verdict(environ: MutableMapping[str, str] = os.environ) -> Verdict:
    """Return what is known about AMX on this machine."""
    return apply(environ)
