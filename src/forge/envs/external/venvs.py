"""Virtual environments for packages that cannot share ours.

A venv is made when it is first asked for, once per machine: it lies in the user's cache under a name made of its
requirements and the version of Python. Processes that ask at the same time wait for each other. A venv that was not
finished, because its maker was killed or pip failed, is made anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from forge.errors import ForgeError

INSTALL_LIMIT_S: Final = 1800.0
_FINISHED: Final = "forge-finished.json"
_LOOK_S: Final = 0.1
_SHOWN: Final = 4000
"""Characters of pip's output in an error."""


class VenvError(ForgeError, RuntimeError):
    """A venv could not be made; the message has the end of pip's output."""


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of this machine's venvs: `$FORGE_CACHE/venvs`, or `torchforge/venvs` in the user's cache."""
    own = environ.get("FORGE_CACHE")
    if own:
        return Path(own) / "venvs"
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchforge" / "venvs"


def python_of(requirements: Sequence[str], *, cache: Path | None = None, limit_s: float = INSTALL_LIMIT_S) -> Path:
    """Return the Python of a venv in which `requirements` are installed, and make the venv if there is none.

    Blocks while pip installs. In a coroutine, call it with `asyncio.to_thread`.
    """
    wanted = _sorted(requirements)
    if not wanted or not all(wanted):
        raise VenvError(
            "a venv needs requirements",
            path="requirements",
            value=list(requirements),
            rule='one or more requirements of pip, such as "openenv==0.10.0"',
            repair="name the package, or use this environment's own Python",
        )
    root = cache_folder() if cache is None else cache
    folder = root / _name_of(wanted)
    python = folder / "bin" / "python"
    if _is_finished(folder):
        return python
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(root / f"{folder.name}.lock", limit_s) as lock:
        if not _is_finished(folder):
            _make(folder, wanted, lock=lock, limit_s=limit_s)
    return python


def is_made(requirements: Sequence[str], *, cache: Path | None = None) -> bool:
    """Return whether there is a venv with these requirements already."""
    root = cache_folder() if cache is None else cache
    return _is_finished(root / _name_of(_sorted(requirements)))


def _sorted(requirements: Sequence[str]) -> list[str]:
    return sorted({" ".join(each.split()) for each in requirements})


def _name_of(requirements: Sequence[str]) -> str:
    key = json.dumps([requirements, platform.python_implementation(), sys.version_info[:2], platform.machine()])
    first = re.sub(r"[^a-z0-9]+", "-", re.split(r"[\[<>=!~;@ ]", requirements[0])[0].lower()).strip("-")[:32]
    return f"{first or 'venv'}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _is_finished(folder: Path) -> bool:
    """Whether a venv is whole, and the Python that it was made of is still there."""
    return (folder / _FINISHED).is_file() and (folder / "bin" / "python").exists()


@contextlib.contextmanager
def _locked(path: Path, limit_s: float) -> Iterator[int]:
    """Hold the lock of a venv. The lock ends with the last process that has it open: the maker, and its pip."""
    until = time.monotonic() + limit_s
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise VenvError(
                        "another process has been making this venv for too long",
                        path=str(path),
                        value=f"{limit_s:g} s",
                        rule="pip ends within the limit",
                        repair="end that process, then try again",
                    ) from None
                time.sleep(_LOOK_S)
        yield handle
    finally:
        os.close(handle)


def _has_pip() -> bool:
    """Return whether this environment has pip, without looking for the module.

    A search for the module makes setuptools leave distutils to Python, and setuptools, which vLLM needs, can then no
    longer be imported in this process.
    """
    try:
        importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _make(folder: Path, requirements: Sequence[str], *, lock: int, limit_s: float) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    python = str(folder / "bin" / "python")
    try:
        has_pip = _has_pip()  # a pip of its own would take seconds
        made = [sys.executable, "-m", "venv", *(["--without-pip"] if has_pip else []), str(folder)]
        _run(made, requirements, lock=lock, limit_s=limit_s)
        pip = [sys.executable, "-m", "pip", "--python", python] if has_pip else [python, "-m", "pip"]
        options = ["--disable-pip-version-check", "--no-input", "install", "--no-compile", "--quiet"]
        _run([*pip, *options, *requirements], requirements, lock=lock, limit_s=limit_s)
        draft = folder / f"{_FINISHED}.draft"
        draft.write_text(json.dumps({"requirements": list(requirements), "python": sys.version}))
        os.replace(draft, folder / _FINISHED)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _run(command: Sequence[str], requirements: Sequence[str], *, lock: int, limit_s: float) -> None:
    """Run a command to its end. What it starts has the lock open, so that it is held until all of that has ended."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**kept, "PYTHONNOUSERSITE": "1"},
        start_new_session=True,
        pass_fds=(lock,),
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        output = f"it took longer than {limit_s:g} s".encode()
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        text = output.decode("utf-8", "replace").strip()
        raise VenvError(
            f"a venv could not be made: {' '.join(command)}\n{text[-_SHOWN:]}",
            path="requirements",
            value=list(requirements),
            rule="packages that pip can install with this Python",
            repair="correct the requirements, or make an index reachable (pip's own settings are used)",
        )
