"""The parts of the sandbox that start no process."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from typing import Any

import pytest

from forge.errors import OptionError
from forge.runtime.sandbox import ISOLATIONS, Limits, open_sandbox
from forge.runtime.sandbox.confine import calls_filter
from forge.runtime.sandbox.launcher import _parents

ALLOW, KILL, REFUSE, UNKNOWN = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wall_s", 0),
        ("wall_s", float("inf")),
        ("cpu_s", "1"),
        ("memory_bytes", 1024),
        ("processes", 0),
        ("processes", 2.0),
        ("file_bytes", True),
        ("output_bytes", -1),
        ("open_files", 3),
    ],
)
def test_limits_that_cannot_hold_are_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        Limits(**{name: value})
    assert caught.value.path == f"Limits({name}=)"
    assert caught.value.value == value
    assert caught.value.rule
    assert f"Limits({name}=" in str(caught.value.repair)


def test_an_unknown_isolation_is_refused() -> None:
    with pytest.raises(OptionError) as caught:
        open_sandbox("docker")
    assert caught.value.path == "open_sandbox(isolation=)"
    assert caught.value.value == "docker"
    assert all(name in str(caught.value.rule) for name in ("auto", *ISOLATIONS))
    assert caught.value.repair == "isolation: auto"


def answer(machine: str, *, number: int, architecture: int, argument: int = 0) -> int:
    """What the kernel would make of the filter: classic BPF, as far as it is used."""
    data = struct.pack("<IIQQ", number, architecture, 0, argument)
    program = list(struct.iter_unpack("HBBI", calls_filter(machine)))
    place = value = 0
    while True:
        code, if_true, if_false, constant = program[place]
        place += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, constant)
        elif code == 0x06:
            return int(constant)
        else:
            holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
            place += if_true if holds else if_false


@pytest.mark.parametrize(
    ("machine", "architecture", "calls"),
    [
        (
            "x86_64",
            0xC000003E,
            {"read": 0, "clone": 56, "socket": 41, "ptrace": 101, "mount": 165, "unshare": 272, "prlimit64": 302},
        ),
        (
            "aarch64",
            0xC00000B7,
            {"read": 63, "clone": 220, "socket": 198, "ptrace": 117, "mount": 40, "unshare": 97, "prlimit64": 261},
        ),
    ],
)
def test_the_filter_refuses_what_reaches_out(machine: str, architecture: int, calls: dict[str, int]) -> None:
    def of(name: str, argument: int = 0) -> int:
        return answer(machine, number=calls[name], architecture=architecture, argument=argument)

    assert of("read") == ALLOW
    assert [of(name) for name in ("ptrace", "mount", "unshare")] == [REFUSE] * 3
    assert of("clone", 0x003D0F00) == ALLOW, "a thread"
    assert of("clone", 17) == ALLOW, "a fork"
    assert [of("clone", 17 | space) for space in (0x10000000, 0x00020000, 0x40000000)] == [REFUSE] * 3
    assert [of("socket", family) for family in (1, 2, 10, 16, 17)] == [ALLOW] + [REFUSE] * 4
    assert [of("prlimit64", pid) for pid in (0, 1, 77)] == [ALLOW, REFUSE, REFUSE], "limits of others"
    assert answer(machine, number=435, architecture=architecture) == UNKNOWN, "glibc then uses clone"
    assert answer(machine, number=425, architecture=architecture) == REFUSE
    assert answer(machine, number=calls["read"], architecture=0x40000003) == KILL, "calls of 32 bits"


def test_the_other_interface_of_x86_is_refused() -> None:
    assert answer("x86_64", number=0x40000000, architecture=0xC000003E) == UNKNOWN
    with pytest.raises(OSError, match="no system call filter for riscv64"):
        calls_filter("riscv64")


def test_the_library_is_not_in_the_way() -> None:
    """A launcher starts for every run: what it imports is the standard library, and little of that."""
    code = "import sys; sys.path.append(sys.argv[1]); import forge.runtime.sandbox.launcher; print(*sys.modules)"
    home = os.path.dirname(os.path.dirname(__import__("forge").__file__))
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, home], capture_output=True, text=True, check=True, timeout=600
    )
    assert {"torch", "pydantic", "monarch", "asyncio", "numpy", "subprocess", "inspect"} & set(
        ended.stdout.split()
    ) == set()


def test_parents_come_from_the_outside_in() -> None:
    assert _parents("/a/b/c") == ["/a", "/a/b"]
    assert _parents("/usr") == []
