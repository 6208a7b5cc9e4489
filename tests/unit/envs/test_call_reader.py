"""Tool calls in text: the same whatever the pieces that the text comes in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.envs.chat_api.requests import message_key
from forge.envs.tool_calls import CallReader, ToolFormat, parse_answer
from forge.types import MalformedCall, ToolCall

JSON = '{"name": "f", "arguments": {"x": 1}}'
LLAMA = '{"name": "f", "parameters": {"x": 1}}'
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


Parts = list[str | ToolCall | MalformedCall]


def read(text: str, tool_format: ToolFormat = "hermes", cuts: Sequence[int] = ()) -> Parts:
    reader = CallReader(tool_format, id_prefix="c")
    parts: Parts = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += reader.add(text[start:end])
    return [*parts, *reader.finish()]


def joined(parts: Parts) -> Parts:
    """The parts with neighbouring texts joined."""
    found: Parts = []
    for part in parts:
        if found and isinstance(part, str) and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


@pytest.mark.parametrize(
    ("text", "said", "names"),
    [
        ("", "", []),
        ("  a < b  \n", "  a < b  \n", []),
        (CALL, "", ["f"]),
        (f"first\n\n{CALL}\n{CALL}\n", "first", ["f", "f"]),
        (f"first\n{CALL} then more ", "first\n then more ", ["f"]),
        (f"{CALL} then more ", "then more ", ["f"]),
        (f"{CALL} <tool_ca", "<tool_ca", ["f"]),
        (f" {CALL} <tool_call>{{no</tool_call>", "  <tool_call>{no</tool_call>", ["f"]),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', "", ["f"]),
        ("a <tool_call>{no</tool_call> b", "a <tool_call>{no</tool_call> b", []),
        ('a \n<tool_call>{"name": "f", ', 'a \n<tool_call>{"name": "f", ', []),
        (f"a <tool_call>[]</tool_call> {CALL}", "a <tool_call>[]</tool_call>", ["f"]),
        ('<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>',) * 2 + ([],),
        ("ends with <tool_ca", "ends with <tool_ca", []),
    ],
)
def test_what_is_said_and_what_is_called(text: str, said: str, names: list[str]) -> None:
    parts = read(text)
    calls = [part for part in parts if isinstance(part, ToolCall)]
    as_text = (part.text if isinstance(part, MalformedCall) else part for part in parts)
    assert "".join(part for part in as_text if isinstance(part, str)) == said
    assert [call.name for call in calls] == names


@pytest.mark.parametrize(
    ("tool_format", "text", "expected"),
    [
        ("llama", "Plain { text }", ["Plain { text }"]),
        ("llama", LLAMA, [ToolCall("c_0", "f", {"x": 1})]),
        ("llama", f" <|python_tag|>{LLAMA}; {LLAMA}", [ToolCall("c_0", "f", {"x": 1}), ToolCall("c_1", "f", {"x": 1})]),
        ("llama", "<|pyth", ["<|pyth"]),
        ("json", " \n", [" \n"]),
        ("json", "```python\nprint()\n```", ["```python\nprint()\n```"]),
        ("json", f"```json\n[{JSON}]\n```", [ToolCall("c_0", "f", {"x": 1})]),
    ],
)
def test_formats_in_which_the_whole_answer_is_a_call(tool_format: ToolFormat, text: str, expected: Parts) -> None:
    assert joined(read(text, tool_format)) == expected


@pytest.mark.parametrize("tool_format", ["llama", "json"])
def test_what_cannot_be_read_keeps_its_text(tool_format: ToolFormat) -> None:
    (part,) = read(' {"name": "f", ', tool_format)
    assert isinstance(part, MalformedCall)
    assert part.text == ' {"name": "f", '


def test_plain_answers_of_other_formats_are_given_out_at_once() -> None:
    reader = CallReader("json", id_prefix="c")
    assert reader.add(" ") == []
    assert reader.add("The ") == [" The "]
    assert reader.add("{") == ["{"]
    assert reader.finish() == []


PIECES = st.sampled_from(
    [
        *(CALL, "<tool_call>", "</tool_call>", "<tool", "word", " ", "\n", "<", '{"name": "f"}', "{", "</tool_call"),
        *("<think>", "</think>", "<thi", "</"),
        *("é", "<|python_tag|>", "<|py", LLAMA, JSON, "```", "[", "]", ";"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["hermes", "llama", "json"]), st.lists(PIECES, max_size=8).map("".join), st.data())
def test_the_pieces_do_not_matter(tool_format: ToolFormat, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert joined(read(text, tool_format, cuts)) == joined(read(text, tool_format))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["hermes", "llama", "json"]), st.lists(PIECES, max_size=8).map("".join))
def test_an_answer_without_calls_stays_as_it_is(tool_format: ToolFormat, text: str) -> None:
    parts = read(text, tool_format)
    if not any(isinstance(part, ToolCall) for part in parts) and not (tool_format != "hermes" and len(parts) > 1):
        assert "".join(part if isinstance(part, str) else part.text for part in parts) == text
    if all(isinstance(part, str) for part in parts):
        assert parse_answer(text, tool_format, id_prefix="c").text == text


def test_text_is_given_out_as_soon_as_it_is_sure() -> None:
    reader = CallReader(id_prefix="c")
    assert reader.add("Hello <b") == ["Hello <b"]
    assert reader.add(" <tool") == []
    assert reader.add("box> ") == [" <toolbox>"]


def test_a_message_has_the_same_key_however_its_json_is_written() -> None:
    def message(arguments: str, **more: object) -> dict[str, object]:
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call], **more}

    key = message_key(message('{"a": 1, "b": 2}'))
    assert key is not None
    assert message_key(message('{"b":2,"a":1}', content="")) == key
    assert message_key(message('{"a": 1, "b": 3}')) != key
    assert message_key(message('{"a": 1, "b": 2}', content="Let me see.")) != key
    assert message_key({"role": "assistant", "content": "no calls"}) is None
    assert message_key(message("{}", tool_calls=["strange"])) is None
