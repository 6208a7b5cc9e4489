"""Tools: their schema, their arguments, and what a policy reads when something is wrong."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Annotated, Literal

import pytest
from pydantic import Field

from forge.envs.limits import EpisodeOver, Fault, ReplayMismatch
from forge.envs.tool_calls import MalformedCall, ToolCall
from forge.envs.tools import Tool, as_text, as_tools, cut_middle, run_call, tool
from forge.errors import ActorFailure, OptionError


@tool(timeout_s=5)
async def search(query: str, limit: int = 3, order: Literal["new", "old"] = "new") -> list[str]:
    """Search the corpus.

    Args:
        query: what to look for,
            in words.
        limit (int): how many to return.

    Returns:
        texts: what was found.
    """
    return [query] * limit


def call(name: str = "search", **arguments: object) -> ToolCall:
    return ToolCall("c_0", name, arguments)


def run(made: ToolCall | MalformedCall, *tools: object, timeout_s: float | None = 60.0):
    return asyncio.run(run_call(made, as_tools(tools or [search]), timeout_s=timeout_s))


def test_the_schema_comes_from_annotations_and_docstring():
    function = search.schema["function"]
    assert (function["name"], function["description"]) == ("search", "Search the corpus.")
    assert function["parameters"]["required"] == ["query"]
    assert function["parameters"]["properties"]["query"] == {
        "type": "string",
        "description": "what to look for, in words.",
    }
    assert function["parameters"]["properties"]["limit"]["description"] == "how many to return."
    assert function["parameters"]["properties"]["order"]["enum"] == ["new", "old"]
    assert asyncio.run(search("a", limit=1)) == ["a"]  # it is still the function


def test_calls_with_good_arguments():
    result = run(call(query="a", limit="2"))
    assert (result.text, result.error) == ('["a", "a"]', None)
    assert result.as_message() == {"role": "tool", "tool_call_id": "c_0", "name": "search", "content": '["a", "a"]'}


@pytest.mark.parametrize(
    ("made", "error", "said"),
    [
        (call(), "bad_arguments", "query"),
        (call(query="a", limit="many"), "bad_arguments", "limit"),
        (call(query="a", order="any"), "bad_arguments", "order"),
        (call(query="a", more=1), "bad_arguments", "more"),
        (call("find", query="a"), "unknown_tool", "Tools: search"),
        (MalformedCall("c_0", "{", "it is not JSON"), "malformed", "it is not JSON"),
    ],
)
def test_what_the_policy_did_wrong_comes_back_as_text(made, error, said):
    result = run(made)
    assert result.error == error
    assert said in result.text
    assert result.as_message()["content"] == result.text


def test_a_tool_that_raises_or_hangs_answers_its_own_call_only():
    async def raises() -> str:
        raise KeyError("x")

    async def hangs() -> str:
        await asyncio.Event().wait()
        return ""

    async def times_out_itself() -> str:
        raise TimeoutError("upstream")

    assert run(call("raises"), raises).error == "raised"
    hung = run(call("hangs"), hangs, timeout_s=0.01)
    assert (hung.error, "0.01 s" in hung.text) == ("timeout", True)
    assert run(call("times_out_itself"), times_out_itself).error == "raised"


def test_a_fault_is_not_an_answer():
    async def lost() -> str:
        raise Fault("the server is gone", kind="server")

    with pytest.raises(Fault, match="gone"):
        run(call("lost"), lost)

    async def asks_a_service() -> str:
        raise ActorFailure("the judge died")

    with pytest.raises(Fault, match="asks_a_service lost a process: the judge died") as fault:
        run(call("asks_a_service"), asks_a_service)
    assert fault.value.kind == "service"


def test_plain_functions_run_and_methods_can_be_tools():
    def double(x: int) -> int:
        "Double."
        return 2 * x

    class Box:
        def __init__(self) -> None:
            self.seen: list[str] = []

        @tool
        async def write(self, text: str) -> str:
            "Write."
            self.seen.append(text)
            return "done"

    assert run(call("double", x=4), double).text == "8"
    box = Box()
    assert isinstance(box.write, Tool)
    assert run(call("write", text="a"), box.write).text == "done"
    assert box.seen == ["a"]


def test_answers_of_any_kind_become_text():
    assert as_text("a\ud800") == "a?"
    assert as_text(b"\xff\xfea") == "\ufffd\ufffda"
    assert as_text({"a": [1, None]}) == '{"a": [1, null]}'
    assert as_text(None) == "null"
    assert as_text({1, 2} - {1}) == "{2}"


def test_a_long_output_keeps_its_ends(codec):
    assert cut_middle("short", 8, codec) == "short"
    assert cut_middle("x" * 10_000_000, None, codec) == "x" * 10_000_000
    text = "begin " + "x" * 100_000_000 + " end"
    cut = cut_middle(text, 8, codec)
    assert cut.startswith("begin")
    assert cut.endswith("end")
    assert "100000010 characters" in cut
    assert len(codec.encode_rendered(cut)) < 80


def test_tools_that_cannot_be():
    def unannotated(x) -> str:
        return ""

    def many(*x: int) -> str:
        return ""

    for function in (unannotated, many):
        with pytest.raises(OptionError) as error:
            Tool(function)
        assert error.value.path == f"tool {function.__name__}: x"
    with pytest.raises(OptionError, match="name"):
        Tool(unannotated, name="9 lives")
    with pytest.raises(OptionError, match="positive"):
        tool(timeout_s=0)(search.function)
    with pytest.raises(OptionError, match="same name"):
        as_tools([search, search])


def test_descriptions_and_names_of_parameters_are_free():
    @tool
    def look(
        json: Annotated[str, Field(description="the query", min_length=1)],
        copy: Annotated[int, "how many"] = 1,
        _raw: bool = False,
        model_config: str | None = None,
    ) -> str:
        "Look."
        return f"{json} {copy} {_raw} {model_config}"

    properties = look.schema["function"]["parameters"]["properties"]
    assert list(properties) == ["json", "copy", "_raw", "model_config"]
    assert properties["json"] == {"description": "the query", "minLength": 1, "type": "string"}
    assert properties["copy"]["description"] == "how many"
    assert run(call("look", json="a", _raw=True), look).text == "a 1 True None"
    assert run(call("look", json=""), look).text.startswith("Error: bad arguments of look: json: ")


def test_objects_and_partial_functions_have_names():
    class Finder:
        "Find things."

        async def __call__(self, word: str) -> str:
            return f"found {word}"

    assert run(call("Finder", word="a"), Finder()).text == "found a"

    def add(a: int, b: int) -> int:
        "Add."
        return a + b

    made = Tool(partial(add, b=2))
    assert (made.name, made.description) == ("add", "Add.")
    assert run(call("add", a=1), made).text == "3"


def test_annotations_without_a_schema_are_named():
    def take(x: threading.Event) -> str:
        return ""

    def undefined(x: Missing) -> str:  # noqa: F821
        return ""

    for function in (take, undefined):
        with pytest.raises(OptionError, match="cannot be described") as error:
            Tool(function)
        assert error.value.path == f"tool {function.__name__}"
    with pytest.raises(OptionError, match="a tool is a function"):
        tool("search")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), StopIteration(1), GeneratorExit(), asyncio.CancelledError(), Mute()]
)
def test_whatever_a_plain_function_raises_ends_only_its_call(error):
    def raises() -> str:
        raise error

    result = run(call("raises"), raises)
    assert result.error == "raised"
    assert result.text.startswith(f"Error: raises failed: {type(error).__name__}")


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), BaseExceptionGroup("x", [SystemExit()])])
def test_whatever_a_coroutine_function_raises_ends_only_its_call(error):
    async def raises() -> str:
        raise error

    result = run(call("raises"), raises)
    assert result.error == "raised"
    assert result.text.startswith(f"Error: raises failed: {type(error).__name__}")


def test_plain_functions_that_hang_keep_no_other_waiting():
    ended = threading.Event()

    def hangs() -> str:
        ended.wait()
        return ""

    async def body() -> None:
        tools = as_tools([hangs, quick])
        stuck = [asyncio.create_task(run_call(call("hangs"), tools, timeout_s=None)) for _ in range(40)]
        assert (await run_call(call("quick"), tools, timeout_s=None)).text == "done"
        ended.set()
        assert {(await each).error for each in stuck} == {None}

    def quick() -> str:
        return "done"

    asyncio.run(body())


def test_a_tool_that_exits_or_stops_an_iteration_answers_its_own_call_only():
    def exits() -> str:
        raise SystemExit(3)

    def stops() -> str:
        return next(iter(()))

    async def exits_itself() -> str:
        raise SystemExit(3)

    for each in (exits, stops, exits_itself):
        assert run(call(each.__name__), each, timeout_s=5.0).error == "raised"


def test_what_ends_the_episode_of_an_agent_in_a_tool_is_not_an_answer():
    async def asks_in_a_group() -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(lost())
        return ""

    async def lost() -> None:
        raise Fault("gone", kind="server")

    async def asks_too_often() -> str:
        raise EpisodeOver("turn_limit", "3 turns")

    async def replays() -> str:
        raise ReplayMismatch("turn 0")

    with pytest.raises(Fault, match="gone"):
        run(call("asks_in_a_group"), asks_in_a_group)
    with pytest.raises(EpisodeOver):
        run(call("asks_too_often"), asks_too_often)
    with pytest.raises(ReplayMismatch):
        run(call("replays"), replays)


GOOGLE = """Find a page.

Args:
    query (str): what to look for,
        in English.
    limit: how many.

Returns:
    query: not an argument.
"""
NUMPY = """Find a page.

Parameters
----------
query : str
    what to look for,
    in English.
limit
    how many.

Returns
-------
query
    not an argument.
"""
REST = """Find a page.

:param str query: what to look for,
    in English.
:type limit: int
:param limit: how many.
:returns: query: not an argument.
"""


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, REST])
def test_arguments_are_described_in_every_common_style(text):
    async def find(query: str, limit: int = 3) -> str:
        return query

    find.__doc__ = text
    made = tool(find)
    assert made.description == "Find a page."
    described = made.schema["function"]["parameters"]["properties"]
    assert described["query"]["description"] == "what to look for, in English."
    assert described["limit"]["description"] == "how many."
