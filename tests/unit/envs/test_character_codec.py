"""The codec without a tokenizer: exact continuations, and messages that can be read back."""

from __future__ import annotations

import pytest

from forge.envs.character_codec import END_TOKEN, CharacterCodec
from forge.envs.history import History
from forge.envs.template_check import check_template

CODEC = CharacterCodec()
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


@pytest.mark.parametrize("tool_format", ["hermes", "llama", "json"])
def test_every_continuation_is_exact(tool_format: str) -> None:
    found = check_template(CODEC, tool_format=tool_format, end=chr(END_TOKEN))
    assert [each.name for each in found if not each.is_exact] == []


def test_messages_and_tools_are_read_back_as_they_were() -> None:
    messages = (
        {"role": "system", "content": 'a "b"\n{c} ä 🙂'},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "", "name": "look", "tool_call_id": "1"},
    )
    prompt = CODEC.read_prompt(CODEC.encode_rendered(CODEC.render_prompt(messages, tools=TOOLS, x=None)))
    assert prompt.messages == messages
    assert prompt.template == {"tools": TOOLS}
    assert prompt.tools == TOOLS
    assert CODEC.read_prompt(CODEC.encode_rendered(CODEC.render_prompt([]))).tools == ()


def test_sampled_answers_are_read_back_after_a_continuation() -> None:
    first = [{"role": "user", "content": "Hi"}]
    opened = History().extend(first, CODEC)
    answer = CODEC.encode_answer("Hello\nthere", max_tokens=None)
    assert answer[-1] == END_TOKEN
    history = History().after(opened, first, answer, CODEC)
    later = history.extend([{"role": "user", "content": "And?"}], CODEC)
    assert not later.starts_over
    prompt = CODEC.read_prompt((*opened.appended_ids, *answer, *later.appended_ids))
    assert [message["content"] for message in prompt.messages] == ["Hi", "Hello\nthere", "And?"]


def test_marks_in_a_text_do_not_end_a_message() -> None:
    marks = "a\U000f0001b\U000f0002c\U000f0003d"
    prompt = CODEC.read_prompt(CODEC.encode_rendered(CODEC.render_prompt([{"role": "user", "content": marks}])))
    assert prompt.messages == ({"role": "user", "content": "a\ufffdb\ufffdc\ufffdd"},)
    assert CODEC.encode_answer(marks, max_tokens=None).count(END_TOKEN) == 1


def test_an_answer_that_is_cut_off_has_no_end() -> None:
    assert CODEC.decode(CODEC.encode_answer("abcdef", max_tokens=3)) == "abc"
    assert CODEC.encode_answer("abc", max_tokens=3)[-1] != END_TOKEN
