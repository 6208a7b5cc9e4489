"""Sandboxes as an agent and a program see them, with a stand-in for what runs code."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import forge
from forge.envs.limits import Fault
from forge.envs.sandbox import SandboxTools, _collide
from forge.envs.tool_calls import ToolCall
from forge.envs.tools import as_tools, run_call
from forge.runtime.sandbox import CommandResult, PythonResult, SandboxError, SandboxLimits


class StandIn:
    """Answers as a sandbox would."""

    limits, work = SandboxLimits(open_s=77), "/sandbox"

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.files: dict[str, bytes] = {}
        self.timeouts: list[float | None] = []

    async def bash(self, command: str, *, timeout_s: float | None = None) -> CommandResult:
        self.timeouts.append(timeout_s)
        if self.failure is not None:
            raise self.failure
        return CommandResult(f"ran {command}\n", 3)

    async def python(self, code: str, *, timeout_s: float | None = None) -> PythonResult:
        self.timeouts.append(timeout_s)
        return PythonResult("", code)

    async def write_file(self, path: str, content: str) -> None:
        self.files[path] = content.encode()

    async def read_file(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self.files[path] + b"\xff"


def tools_of(box: Any) -> SandboxTools:
    return SandboxTools(box, lambda snapshot: pytest.fail("nothing is opened here"))


def ask(tools: SandboxTools, name: str, **arguments: Any) -> Any:
    every = as_tools([tools.bash, tools.python, tools.write_file, tools.read_file])
    return asyncio.run(run_call(ToolCall("1", name, arguments), every, timeout_s=60))


def test_the_policy_sees_schemas_and_reads_text() -> None:
    tools = tools_of(StandIn())
    schema = tools.bash.schema["function"]
    assert schema["name"] == "bash"
    assert list(schema["parameters"]["properties"]) == ["command"], "not the time limit"
    assert list(tools.write_file.schema["function"]["parameters"]["properties"]) == ["path", "text"]
    assert "\n" not in "".join(each.description for each in (tools.bash, tools.python, tools.read_file))
    assert tools.bash.timeout_s == 77, "calls that wait for each other have their own limits"
    assert ask(tools, "bash", command="ls").text == "ran ls\n[exit code 3]"
    assert ask(tools, "python", code="42").text == "42"
    assert ask(tools, "write_file", path="a", text="ö").text == "Wrote a."
    assert ask(tools, "read_file", path="a").text == "ö\ufffd"
    missing = ask(tools, "read_file", path="b")
    assert (missing.error, "No such file" in missing.text) == ("raised", True)
    assert ask(tools, "bash", command="ls", timeout_s=1).error == "bad_arguments"


def test_a_program_gets_results_and_sets_time_limits() -> None:
    box = StandIn()
    tools = tools_of(box)

    async def program() -> None:
        assert (await tools.bash("ls", timeout_s=5)).exit_code == 3
        assert (await tools.python("1")).value == "1"

    asyncio.run(program())
    assert box.timeouts == [5, None]


def test_sandboxes_do_not_share_their_tools() -> None:
    first, second = StandIn(), StandIn()
    for box, text in ((tools_of(first), "1"), (tools_of(second), "2")):
        ask(box, "write_file", path="a", text=text)
    assert (first.files, second.files) == ({"a": b"1"}, {"a": b"2"})


def test_failures_of_the_infrastructure_are_faults() -> None:
    tools = tools_of(StandIn(SandboxError("it died", kind="sandbox_died")))
    with pytest.raises(Fault, match="it died") as caught:
        ask(tools, "bash", command="ls")
    assert caught.value.kind == "sandbox_died"
    other = ask(tools_of(StandIn(OSError("no"))), "bash", command="ls")
    assert other.error == "raised"


def test_files_of_the_grader_replace_those_of_the_policy() -> None:
    assert _collide("tests/a.py", "tests/a.py")
    assert _collide("tests", "tests/a.py")
    assert _collide("tests/a.py/x", "tests/a.py")
    assert not _collide("tests/a.pyc", "tests/a.py")


def test_it_is_public() -> None:
    assert forge.sandbox.__module__ == "forge.envs.sandbox"
