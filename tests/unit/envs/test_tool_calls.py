"""Tool calls in sampled text."""

from __future__ import annotations

import pytest

from forge.envs.tool_calls import MalformedCall, ToolCall, detect_format, opens_reasoning, parse_answer

CALL = '{"name": "add", "arguments": {"x": 1, "y": "zwei"}}'


def parse(text: str, tool_format: str = "hermes"):
    return parse_answer(text, tool_format, id_prefix="c")


def test_hermes_calls_with_text_around_them():
    answer = parse(f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call> So.")
    assert answer.text == "Let me see.\n\n So."
    assert answer.calls == tuple(ToolCall(f"c_{number}", "add", {"x": 1, "y": "zwei"}) for number in range(2))
    assert parse("Nothing to call.").calls == ()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "name"),
        ('{"name": ""}', "name"),
        ('{"name": 3}', "name"),
        ('{"name": "a", "arguments": [1]}', "arguments"),
        ("[" * 100_000, "not JSON"),
        ('{"name": "a", "parameters": {"x": 1}}', 'must be in "arguments"'),
    ],
)
def test_malformed_calls_say_why(body, reason):
    (call,) = parse(f"<tool_call>{body}</tool_call>").calls
    assert isinstance(call, MalformedCall)
    assert reason in call.reason
    assert call.id == "c_0"


def test_a_call_that_was_cut_off_is_malformed_and_those_before_it_are_not():
    answer = parse(f"<tool_call>{CALL}</tool_call><tool_call>{CALL[:10]}")
    assert isinstance(answer.calls[0], ToolCall)
    assert isinstance(answer.calls[1], MalformedCall)
    assert "</tool_call>" in answer.calls[1].reason


def test_llama_calls():
    call = '{"name": "add", "parameters": {"x": 1}}'
    expected = ToolCall("c_0", "add", {"x": 1})
    assert parse(call, "llama").calls == (expected,)
    assert parse(f"<|python_tag|>{call}", "llama").calls == (expected,)
    assert parse(f"{call}; {call}", "llama").calls == (expected, ToolCall("c_1", "add", {"x": 1}))
    assert parse("The answer is {4}.", "llama") == parse("The answer is {4}.", "llama")
    assert parse("The answer is {4}.", "llama").calls == ()
    assert isinstance(parse("<|python_tag|>print(1)", "llama").calls[0], MalformedCall)
    assert isinstance(parse(call[:-1], "llama").calls[0], MalformedCall)
    assert 'must be in "parameters"' in parse(CALL, "llama").calls[0].reason


@pytest.mark.parametrize("text", [CALL, f"```json\n{CALL}\n```", f"```\n{CALL}```", f"[{CALL}]", f"  {CALL}\n"])
def test_json_calls(text):
    assert parse(text, "json").calls == (ToolCall("c_0", "add", {"x": 1, "y": "zwei"}),)


@pytest.mark.parametrize("tool_format", ["json", "llama"])
@pytest.mark.parametrize(
    "text",
    [
        *("Four.", "{", "[]", "[1, 2]", '{"answer": 3}', '{"name": "Oslo"}', '[{"answer": 3}]', '{"answer": 3} is it.'),
        *('{"answer": ', "{4}", '```json\n{"answer": 3}\n```'),
    ],
)
def test_json_that_is_no_call(text, tool_format):
    answer = parse(text, tool_format)
    assert answer.calls == ()
    assert answer.text == text


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "add", "arguments": {"x": 1}',
        "{'name': 'add', 'arguments': {'x': 1}}",
        '{"type": "function", "name": "add", "arguments": {"x": }}',
        '{"name": 3, "arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        f"[{CALL}, 3]",
    ],
)
def test_json_with_the_shape_of_a_call_that_cannot_be_read(text):
    assert isinstance(parse(text, "json").calls[-1], MalformedCall)


def test_a_call_as_part_of_a_message():
    part = ToolCall("c_0", "add", {"x": "ü"}).as_message_part()
    assert part == {"id": "c_0", "type": "function", "function": {"name": "add", "arguments": '{"x": "ü"}'}}


def test_the_format_of_a_template():
    assert detect_format("… <tool_call>\n{{ call }}") == "hermes"
    assert detect_format("<|python_tag|>") == "llama"
    assert detect_format("{{ messages }}") == "json"


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"'])
def test_numbers_and_characters_that_json_does_not_allow_are_malformed(value):
    (call,) = parse_answer(
        f'<tool_call>{{"name": "f", "arguments": {{"x": {value}}}}}</tool_call>', "hermes", id_prefix="c"
    ).calls
    assert isinstance(call, MalformedCall)
    assert "JSON does not allow" in call.reason


THOUGHT = f"I could write <tool_call>{CALL}</tool_call>, or not."


def test_a_call_in_the_reasoning_is_not_a_call():
    answer = parse(f"<think>{THOUGHT}</think>\n\nIt is 3.")
    assert answer.calls == ()
    assert answer.text == f"<think>{THOUGHT}</think>\n\nIt is 3."


def test_a_call_after_the_reasoning_is_one():
    answer = parse(f"<think>{THOUGHT}</think>\n\n<tool_call>{CALL}</tool_call>")
    assert [call.name for call in answer.calls] == ["add"]
    assert answer.text == f"<think>{THOUGHT}</think>"


def test_reasoning_that_is_never_closed_has_no_calls():
    text = f"<think>{THOUGHT}\n<tool_call>{CALL}</tool_call>\n"
    assert parse(text).calls == ()
    assert parse(text).text == text


def test_reasoning_that_the_prompt_opened():
    text = f"{THOUGHT}</think><tool_call>{CALL}</tool_call>"
    assert [call.name for call in parse_answer(text, "hermes", id_prefix="c", is_reasoning=True).calls] == ["add"]
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_reasoning_in_the_arguments_of_a_call_is_an_argument():
    (call,) = parse('<tool_call>{"name": "say", "arguments": {"text": "<think>"}}</tool_call>').calls
    assert call == ToolCall("c_0", "say", {"text": "<think>"})
