"""Tool calls in text: the same whatever the pieces that the text comes in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.generator.openai.tool_calls import CallReader, ToolCall, message_key

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def plain(parts: list[str | ToolCall]) -> list[str | tuple[str, str]]:
    """The parts without their ids, neighbouring texts joined."""
    found: list[str | tuple[str, str]] = []
    for part in parts:
        if isinstance(part, ToolCall):
            found.append((part.name, part.arguments))
        elif found and isinstance(found[-1], str):
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
        (f"{CALL} then more ", "then more ", ["f"]),
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
    reader = CallReader()
    parts = [*reader.add(text), *reader.finish()]
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert "".join(part for part in parts if isinstance(part, str)) == said
    assert [call.name for call in calls] == names
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


PIECES = st.sampled_from(
    [CALL, "<tool_call>", "</tool_call>", "<tool", "word", " ", "\n", "<", '{"name": "f"}', "{", "</tool_call", "é"]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=8).map("".join), st.data())
def test_the_pieces_do_not_matter(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    reader = CallReader()
    parts: list[str | ToolCall] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += reader.add(text[start:end])
    parts += reader.finish()
    whole = CallReader()
    assert plain(parts) == plain([*whole.add(text), *whole.finish()])


def test_text_is_given_out_as_soon_as_it_is_sure() -> None:
    reader = CallReader()
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
