"""The isolations that are a security boundary, as far as this machine has them."""

from __future__ import annotations

import os
import shutil

import psutil
import pytest

from forge.errors import LaunchError
from forge.runtime.sandbox import find
from forge.runtime.sandbox.detection import _make
from forge.runtime.sandbox.runner import LaunchedSandbox

BOUNDARIES = ("namespaces", "user namespaces", "bubblewrap")


def boundary(kind: str) -> LaunchedSandbox:
    """Return what runs programs behind a boundary. Skip the test where this machine does not have it."""
    if kind == "user namespaces":
        return _in_user_namespaces()
    isolation = "bubblewrap" if kind == "bubblewrap" else "namespaces"
    finding = find(isolation)
    if not finding.works:
        pytest.skip(f"{kind} does not work here: {finding.detail}")
    return _make(isolation, None)


def launcher_server() -> psutil.Process:
    """Return the process of ours that forks launchers, while a sandbox is open."""
    (found,) = (each for each in psutil.Process().children() if _is_launcher_server(each))
    return found


def _is_launcher_server(process: psutil.Process) -> bool:
    try:
        return "launcher_server" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # of another test, and it has ended
        return False


def _in_user_namespaces() -> LaunchedSandbox:
    """Return what a user without root gets. Root has to be told, and needs an interpreter that everybody may read."""
    if os.geteuid() != 0:
        pytest.skip("the isolation `namespaces` uses them already")
    python = shutil.which("python3", path="/usr/bin")
    if python is None:
        pytest.skip("there is no interpreter in /usr/bin")
    plan = {**_make("namespaces", python)._plan, "with_user": True}
    found = LaunchedSandbox("namespaces", plan, python=python)
    try:
        found.run("pass")
    except LaunchError as error:
        pytest.skip(f"no user namespaces here: {error.message}")
    return found
