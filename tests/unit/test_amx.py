"""Where AMX instructions trap, libraries are kept from them: how that is found out, and what is set."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forge import _amx
from forge._amx import LIMITS, VARIABLE, apply, detect, probe_command

HERE = os.uname().nodename
TRAPS = ("/bin/sh", "-c", "kill -ILL $$")
MULTIPLY = """
import ctypes
from forge import _amx_probe
_amx_probe._function(_amx_probe._MULTIPLY, ctypes.c_char_p)(bytes(64))
"""


def ends_with(code: int) -> tuple[str, ...]:
    return ("/bin/sh", "-c", f"exit {code}")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (TRAPS, "traps"),
        (ends_with(11), "traps"),
        (ends_with(0), "works"),
        (ends_with(10), "absent"),
        (ends_with(1), "unknown"),
        (("/bin/sh", "-c", "kill -SEGV $$"), "unknown"),
        (("/no/such/program",), "unknown"),
    ],
)
def test_how_the_program_ends_is_the_verdict(command: tuple[str, ...], expected: str) -> None:
    assert detect(command) == expected


def test_the_program_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert detect(("/bin/sh", "-c", "echo loud; echo loud >&2; exit 10")) == "absent"
    assert capfd.readouterr() == ("", "")


def test_the_real_program_gives_a_verdict_here() -> None:
    command = probe_command()
    if not command:
        pytest.skip("this processor is not an Intel with AVX-512: there is nothing to try")
    is_shown = " amx_tile" in Path("/proc/cpuinfo").read_text()
    assert detect(command) in (("works", "traps") if is_shown else ("absent", "traps"))


def test_the_instructions_trap_where_the_processor_has_none() -> None:
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip("the instructions are those of x86-64")
    if " amx_tile" in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has AMX")
    ended = subprocess.run([sys.executable, "-c", MULTIPLY], check=False, timeout=600)
    assert ended.returncode == -signal.SIGILL


def test_trapping_amx_limits_the_libraries() -> None:
    environment: dict[str, str] = {}
    assert apply(environment, TRAPS) == "traps"
    assert environment == {**LIMITS, VARIABLE: f"traps@{HERE}"}
    assert LIMITS["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"


@pytest.mark.parametrize("code", [0, 10, 1])
def test_nothing_is_limited_otherwise(code: int) -> None:
    environment: dict[str, str] = {}
    apply(environment, ends_with(code))
    assert list(environment) == [VARIABLE]


def test_what_the_user_has_set_stays() -> None:
    theirs = {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    environment = dict(theirs)
    assert apply(environment, TRAPS) == "traps"
    assert environment == {**theirs, VARIABLE: f"traps@{HERE}"}
    older = {"DNNL_MAX_CPU_ISA": "AVX2"}
    apply(older, TRAPS)
    assert "ONEDNN_MAX_CPU_ISA" not in older


def test_it_is_found_out_once(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    command = ("/bin/sh", "-c", f"touch '{ran}'; kill -ILL $$")
    environment: dict[str, str] = {}
    assert apply(environment, command) == "traps"
    assert ran.exists()
    ran.unlink()
    assert apply(environment, command) == "traps"
    assert _amx.verdict(environment) == "traps"
    assert not ran.exists()


def test_what_holds_for_another_machine_is_found_out_anew() -> None:
    environment = {**LIMITS, VARIABLE: "traps@elsewhere", "OTHER": "1"}
    assert apply(environment, ends_with(0)) == "works"
    assert environment == {VARIABLE: f"works@{HERE}", "OTHER": "1"}
    theirs = {"ONEDNN_MAX_CPU_ISA": "AVX2", VARIABLE: "traps@elsewhere"}
    apply(theirs, ends_with(0))
    assert theirs["ONEDNN_MAX_CPU_ISA"] == "AVX2"


@pytest.mark.parametrize("value", ["", "broken", f"broken@{HERE}", "traps"])
def test_a_damaged_verdict_is_found_out_anew(value: str) -> None:
    environment = {VARIABLE: value}
    assert apply(environment, ends_with(10)) == "absent"


def test_importing_the_library_does_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    program = "import forge, os; print(os.environ['FORGE_AMX'])"
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=600
    ).stdout
    assert printed.strip() == f"{_amx.verdict()}@{HERE}"
