"""Compile a file of C once per machine and load it.

The library lies in the user's cache under a name made of everything that its code depends on, so an upgrade or another
kind of processor gets a file of its own. Each file ends with the hash of what precedes it: a truncated or altered one
is replaced instead of loaded. Files appear by renaming, so processes that compile at the same time do no harm.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forge.errors import ForgeError
from forge.observe.phases import phase

COMPILERS: Final = ("cc", "gcc", "clang")
FLAG_SETS: Final = (("-O3", "-march=native"), ("-O3",))
EXACT_FLAG_SETS: Final = tuple((*flags, "-ffp-contract=off") for flags in FLAG_SETS)
"""With these the compiler fuses no multiplication with an addition unless the source says so."""
COMPILE_LIMIT_S: Final = 120
_SEAL_BYTES: Final = 32

_log = logging.getLogger("forge.kernels")


class NoNativeKernel(ForgeError, RuntimeError):
    """A kernel could not be compiled or loaded; the message says why, with the compiler's own words."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One file of C that makes a library.

    Attributes:
        source: the file. It may include headers of its folder. Libraries in the cache begin with its name.
        without: what a user has who cannot compile it, as the end of a sentence.
        libraries: what it is linked with, such as "-lm".
    """

    source: Path
    without: str
    libraries: tuple[str, ...] = ()

    @property
    def repair(self) -> str:
        return f"install gcc or set CC; without it {self.without}"


def build(
    kernel: Kernel, environ: Mapping[str, str], *, flag_sets: tuple[tuple[str, ...], ...] = FLAG_SETS
) -> ctypes.CDLL:
    """Return the loaded kernel, from the cache if it is there."""
    compiler = _find_compiler(kernel, environ)
    problems = []
    for flags in flag_sets:
        name = f"{kernel.source.stem}-{_fingerprint(kernel, compiler, flags)}.so"
        command = (compiler, *flags, "-std=c11", "-shared", "-fPIC", str(kernel.source), *kernel.libraries)
        try:
            return _from_cache(command, directory=cache_directory(environ), name=name)
        except OSError as error:
            problems.append(f"cache directory: {error}")
        except NoNativeKernel as error:
            problems.append(error.message)
            continue
        try:
            with tempfile.TemporaryDirectory(prefix="torchforge-") as private:
                return _from_cache(command, directory=Path(private), name=name)
        except (OSError, NoNativeKernel) as error:
            problems.append(str(error))
    raise NoNativeKernel(
        "the native kernel could not be built:\n" + "\n".join(problems),
        path="CC",
        value=compiler,
        rule="a working C compiler",
        repair=kernel.repair,
    )


def load(
    kernel: Kernel,
    functions: Sequence[str],
    *,
    flag_sets: tuple[tuple[str, ...], ...] = EXACT_FLAG_SETS,
    level: int = logging.WARNING,
) -> ctypes.CDLL | None:
    """Load a kernel whose functions each take one pointer and return an int.

    Returns None and logs one line where it cannot be built or `FORGE_NATIVE=0` forbids it: then torch computes.
    """
    name = kernel.source.stem
    if os.environ.get("FORGE_NATIVE") == "0":
        _log.log(level, "FORGE_NATIVE=0: the kernel %s is not used; %s", name, kernel.without)
        return None
    try:
        library = build(kernel, os.environ, flag_sets=flag_sets)
    except NoNativeKernel as error:
        _log.log(level, "the kernel %s could not be built, so torch is used instead: %s", name, error)
        return None
    for function in functions:
        entry = getattr(library, function)
        entry.argtypes, entry.restype = [ctypes.c_void_p], ctypes.c_int
    return library


def cache_directory(environ: Mapping[str, str]) -> Path:
    root = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    return Path(root) / "torchforge"


def find_compiler(environ: Mapping[str, str]) -> str | None:
    """Return the C compiler: `CC`, or the first on PATH; None where there is none."""
    asked = environ.get("CC")
    found = (shutil.which(name, path=environ.get("PATH")) for name in ((asked,) if asked else COMPILERS))
    return next(filter(None, found), None)


def _find_compiler(kernel: Kernel, environ: Mapping[str, str]) -> str:
    if (found := find_compiler(environ)) is not None:
        return found
    raise NoNativeKernel(
        "there is no C compiler",
        path="CC",
        value=environ.get("CC"),
        rule=f"one of {', '.join(COMPILERS)} on PATH, or CC naming one",
        repair=kernel.repair,
    )


def _read(source: Path) -> bytes:
    """Return the source and the headers beside it."""
    try:
        return b"\0".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    except OSError as error:
        raise NoNativeKernel(f"the kernel's source cannot be read: {error}", path=str(source)) from None


def _fingerprint(kernel: Kernel, compiler: str, flags: tuple[str, ...]) -> str:
    version = _tool([compiler, "--version"])
    parts = (
        _read(kernel.source),
        version.stdout,
        " ".join((*flags, *kernel.libraries)).encode(),
        platform.machine().encode(),
        _cpu_features(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _cpu_features() -> bytes:
    """Return what `-march=native` depends on: another processor with this home directory must not load this code."""
    try:
        text = Path("/proc/cpuinfo").read_bytes()
    except OSError:
        return platform.processor().encode()
    first = text.split(b"\n\n", 1)[0]
    kept = (b"flags", b"Features", b"model", b"cpu family", b"vendor_id", b"CPU ")
    return b"\n".join(line for line in first.splitlines() if line.startswith(kept))


def _tool(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env=environment,
            timeout=COMPILE_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNativeKernel(f"{command[0]}: {error}") from error


def _from_cache(command: tuple[str, ...], *, directory: Path, name: str) -> ctypes.CDLL:
    """Load the file, compiling it first if it is missing or not whole. OSError: this directory is of no use."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{directory} can be written by others, so code in it is not trusted")
    path = directory / name
    if not _is_whole(path):
        _compile(command, path)
    return ctypes.CDLL(str(path))


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return len(content) > _SEAL_BYTES and hashlib.sha256(content[:-_SEAL_BYTES]).digest() == content[-_SEAL_BYTES:]


def _compile(command: tuple[str, ...], path: Path) -> None:
    handle, draft = tempfile.mkstemp(prefix=f"{path.stem}-", suffix=".draft", dir=path.parent)
    os.close(handle)
    try:
        with phase("compiling kernels"):
            done = _tool([*command, "-o", draft])
        if done.returncode != 0:
            said = (done.stderr + done.stdout).decode(errors="replace").strip()
            raise NoNativeKernel(f"{' '.join(command)} -o {draft}: exit status {done.returncode}\n{said}")
        with open(draft, "r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)
