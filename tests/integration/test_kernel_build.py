"""Compiling the kernel: what can go wrong with compilers and cache directories, and that nobody notices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forge.errors import StoreError
from forge.kernels import native_build
from forge.kernels.native_build import NoNativeKernel
from forge.store import kernel
from forge.store.copy_table import CopyTable
from forge.store.kernel import build
from kernel_reference import digest_of_bytes

COMPILER = shutil.which("cc") or "cc"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "cache")}


def cached(environ: dict[str, str]) -> list[Path]:
    directory = native_build.cache_directory(environ)
    return sorted(directory.iterdir()) if directory.is_dir() else []


def assert_works(environ: dict[str, str]) -> None:
    data = np.arange(100, dtype=np.uint8)
    rects = CopyTable()
    rects.add((100,), itemsize=1, src=(0, 0, (1,)), image=(0, 3, (1,)))
    engine = kernel.Native(build(environ))
    assert kernel.digest_only(rects, [data.ctypes.data], using=engine) == [digest_of_bytes(data.tobytes(), 3)]


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_it_is_compiled_once_and_silently(environ: dict[str, str], tmp_path: Path, capfd) -> None:
    log = tmp_path / "calls"
    environ["CC"] = script(
        tmp_path / "counting", f'echo "$@" >> "{log}"; echo noise; echo noise >&2; exec {COMPILER} "$@"'
    )
    assert_works(environ)
    [library] = cached(environ)
    assert library.suffix == ".so"
    assert_works(environ)
    assert [line for line in log.read_text().splitlines() if "kernel.c" in line] == [
        line for line in log.read_text().splitlines() if "-march=native" in line
    ]
    assert log.read_text().count("kernel.c") == 1
    assert capfd.readouterr() == ("", "")


def test_a_compiler_that_does_not_know_this_processor_gets_plain_flags(environ: dict[str, str], tmp_path: Path) -> None:
    body = f'case "$*" in *march=native*) echo unknown processor >&2; exit 1;; esac; exec {COMPILER} "$@"'
    environ["CC"] = script(tmp_path / "old", body)
    assert_works(environ)


def test_a_broken_compiler_is_quoted(environ: dict[str, str], tmp_path: Path) -> None:
    environ["CC"] = script(tmp_path / "broken", "echo the disk is full >&2; exit 7")
    with pytest.raises(NoNativeKernel, match=r"exit status 7\nthe disk is full") as caught:
        build(environ)
    assert caught.value.repair
    assert cached(environ) == []


def test_a_compiler_that_writes_no_library(environ: dict[str, str], tmp_path: Path) -> None:
    environ["CC"] = script(tmp_path / "lying", "exit 0")
    with pytest.raises(NoNativeKernel):
        build(environ)


@pytest.mark.parametrize("changes", [{"CC": "no-such-compiler"}, {"PATH": "/nonexistent"}])
def test_no_compiler(environ: dict[str, str], changes: dict[str, str]) -> None:
    with pytest.raises(NoNativeKernel, match="no C compiler") as caught:
        build(environ | changes)
    assert caught.value.path == "CC"


def test_a_cache_that_cannot_be_made(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_works(environ | {"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert_works(environ | {"XDG_CACHE_HOME": "/proc"})
    assert_works({"PATH": environ["PATH"], "HOME": str(tmp_path / "file")})


def test_a_cache_that_others_can_write_is_not_used(environ: dict[str, str]) -> None:
    directory = native_build.cache_directory(environ)
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    assert_works(environ)
    assert cached(environ) == []


@pytest.mark.parametrize("harm", ["cut", "garbage", "empty", "other code"])
def test_a_damaged_file_is_replaced(environ: dict[str, str], harm: str) -> None:
    assert_works(environ)
    [library] = cached(environ)
    content = library.read_bytes()
    library.unlink()  # not overwritten: this process has it mapped
    middle = len(content) // 2
    library.write_bytes(
        {
            "cut": content[:middle],
            "garbage": b"garbage",
            "empty": b"",
            "other code": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        }[harm]
    )
    assert_works(environ)
    assert library.read_bytes()[:4] == b"\x7fELF"
    assert len(library.read_bytes()) == len(content)


def test_processes_that_compile_at_once(environ: dict[str, str]) -> None:
    program = "from forge.store import kernel; assert kernel.native(), kernel.why_not()"
    everything = {**os.environ, **environ}
    running = [subprocess.Popen([sys.executable, "-c", program], env=everything) for _ in range(3)]
    assert [process.wait(600) for process in running] == [0, 0, 0]
    assert [path.suffix for path in cached(environ)] == [".so"]


def test_the_switch() -> None:
    engine, reason = kernel.choose("0")
    assert (engine.name, reason) == ("portable", "FORGE_NATIVE=0")
    engine, reason = kernel.choose("1")
    assert (engine.name, reason) == ("native", None)
    with pytest.raises(StoreError) as caught:
        kernel.choose("yes")
    assert (caught.value.path, caught.value.value) == ("FORGE_NATIVE", "yes")


def test_a_process_without_a_compiler_says_why(environ: dict[str, str]) -> None:
    program = "from forge.store import kernel; assert not kernel.native(); print(kernel.why_not())"
    everything = {**os.environ, **environ, "CC": "no-such-compiler"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=everything, capture_output=True, text=True, check=True, timeout=600
    )
    assert "there is no C compiler" in done.stdout
    assert "no-such-compiler" in done.stdout
