"""Tools in processes of their own: whatever they do affects their own call."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

import own_tools
from forge.envs.tools import Tool, as_tools, run_call, tool
from forge.errors import OptionError
from forge.types import ToolCall
from leftovers import has_ended


def run(made: Tool, timeout_s: float = 120.0, **arguments: object) -> tuple[str, str | None]:
    before = set(psutil.Process().children())  # such as Python's own tracker of shared memory, of another test

    async def body() -> tuple[str, str | None]:
        call = ToolCall("c_0", made.name, arguments)
        result = await run_call(call, as_tools([made]), timeout_s=timeout_s)
        assert set(psutil.Process().children()) <= before
        return result.text, result.error

    return asyncio.run(body())


def test_a_call_runs_elsewhere_with_typed_arguments_and_what_it_prints_is_not_its_answer() -> None:
    assert run(own_tools.add, one="2", other=3) == ("5", None)


def test_one_that_blocks_is_killed_when_its_time_is_up() -> None:
    text, error = run(own_tools.wait, timeout_s=0.5)
    assert (text, error) == ("Error: wait took longer than 0.5 s.", "timeout")


def test_what_it_started_goes_with_it(tmp_path: Path) -> None:
    marker = tmp_path / "pid"

    async def body() -> None:
        call = ToolCall("c_0", "leave", {"marker": str(marker)})
        running = asyncio.create_task(run_call(call, as_tools([own_tools.leave]), timeout_s=None))
        while not marker.exists():  # noqa: ASYNC110 - a file of another process
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(body())
    assert has_ended(int(marker.read_text()))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "Error: fail failed: KeyError: 'nothing there'"),
        ("exit", "Error: fail failed: SystemExit: 3"),
        ("kill", "Error: fail failed: its process ended without an answer (exit status -9)"),
        ("abort", "Error: fail failed: its process ended without an answer (exit status 7)"),
        ("large", "Error: fail failed: it returned more than 4194304 bytes"),
    ],
)
def test_whatever_goes_wrong_comes_back_as_text(how: str, text: str) -> None:
    assert run(own_tools.fail, how=how) == (text, "raised")


def test_bytes_come_back_as_text() -> None:
    assert run(own_tools.fail, how="bytes") == ("\ufffd\x00bytes", None)


def test_a_function_that_no_other_process_can_import_is_refused() -> None:
    with pytest.raises(OptionError, match="must be importable there") as refused:

        @tool(process=True)
        def inner(text: str) -> str:
            """Only here."""
            return text

    assert refused.value.path == "tool inner: process"
