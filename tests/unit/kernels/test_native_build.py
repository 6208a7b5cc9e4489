"""Compiling any file of C: what a kernel says about itself ends up in names, commands and messages."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from forge.kernels.native_build import FLAG_SETS, Kernel, NoNativeKernel, build, cache_directory


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "cache")}


def kernel(tmp_path: Path, text: str, *, libraries: tuple[str, ...] = ()) -> Kernel:
    source = tmp_path / "squares.c"
    source.write_text(text)
    return Kernel(source, without="squares are slower", libraries=libraries)


def test_a_library_is_named_after_its_source(environ: dict[str, str], tmp_path: Path) -> None:
    text = "#include <math.h>\ndouble root(double x) { return sqrt(x) + cbrt(x); }"
    library = build(kernel(tmp_path, text, libraries=("-lm",)), environ)
    library.root.argtypes, library.root.restype = [ctypes.c_double], ctypes.c_double
    assert library.root(64.0) == 12.0
    [path] = cache_directory(environ).iterdir()
    assert path.name.startswith("squares-")
    build(kernel(tmp_path, text), environ)
    assert len(list(cache_directory(environ).iterdir())) == 2, "other libraries make another file"


def test_a_changed_header_makes_another_library(environ: dict[str, str], tmp_path: Path) -> None:
    found = []
    for number in (1, 2):
        (tmp_path / "number.h").write_text(f"#define NUMBER {number}")
        library = build(kernel(tmp_path, '#include "number.h"\nint number(void) { return NUMBER; }'), environ)
        found.append(library.number())
    assert found == [1, 2]


def test_the_repair_says_what_is_lost(environ: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(NoNativeKernel, match="exit status 1") as caught:
        build(kernel(tmp_path, "this is not C"), environ, flag_sets=FLAG_SETS[1:])
    assert caught.value.repair == "install gcc or set CC; without it squares are slower"
    assert (caught.value.path, caught.value.rule) == ("CC", "a working C compiler")


def test_a_source_that_is_missing(environ: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(NoNativeKernel, match="source cannot be read") as caught:
        build(Kernel(tmp_path / "none.c", without="nothing changes"), environ)
    assert caught.value.path == str(tmp_path / "none.c")
