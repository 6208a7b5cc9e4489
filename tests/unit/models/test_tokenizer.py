"""Tokens of conversations are those of `transformers`, and the mask is exactly what the assistant generates."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chat_templates import ALTERNATING, HEADERS, THINKING, chatml_folder, llama_folder
from forge.errors import DataError, ModelError
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer

Chat = list[dict[str, Any]]

CHAT: Chat = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "The answer is 7."},
    {"role": "user", "content": "Thanks!  "},
    {"role": "assistant", "content": "\n\nYou are welcome 😀 \n"},
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    make_tiny(root / "tiny", num_layers=1, hidden_size=32, intermediate_size=32)
    return {
        "tiny": root / "tiny",
        "thinking": chatml_folder(root / "thinking", THINKING),
        "llama": llama_folder(root / "llama"),
    }


@pytest.fixture(scope="module")
def loaded(places: dict[str, Path]) -> dict[str, ChatTokenizer]:
    return {name: ChatTokenizer.load(folder) for name, folder in places.items()}


def said(tokenizer: ChatTokenizer, chat: Chat, **options: Any) -> list[str]:
    """The text of each run of tokens in the mask."""
    ids, mask = tokenizer.encode_chat(chat, **options)
    assert len(ids) == len(mask)
    runs: list[list[int]] = []
    for index, token in enumerate(ids):
        if mask[index]:
            if index == 0 or not mask[index - 1]:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def official(folder: Path, chat: Chat, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, return_dict=True, **options)


@pytest.mark.parametrize("name", ["tiny", "thinking", "llama"])
def test_the_tokens_are_those_of_transformers(
    name: str, places: dict[str, Path], loaded: dict[str, ChatTokenizer]
) -> None:
    assert loaded[name].encode_chat(CHAT)[0] == official(places[name], CHAT)["input_ids"]
    prompt = loaded[name].encode_prompt(CHAT[:2])
    assert prompt == official(places[name], CHAT[:2], add_generation_prompt=True)["input_ids"]
    bare = loaded[name].encode_prompt(CHAT[:2], add_generation_prompt=False)
    assert bare == prompt[: len(bare)]
    assert len(bare) < len(prompt)


def test_generation_blocks_decide(places: dict[str, Path], loaded: dict[str, ChatTokenizer]) -> None:
    assert said(loaded["tiny"], CHAT) == ["The answer is 7.<|im_end|>", "\n\nYou are welcome 😀 \n<|im_end|>"]
    by_transformers = official(places["tiny"], CHAT, return_assistant_tokens_mask=True)["assistant_masks"]
    assert [int(value) for value in loaded["tiny"].encode_chat(CHAT)[1]] == by_transformers


def test_headers_without_blocks(loaded: dict[str, ChatTokenizer]) -> None:
    assert said(loaded["llama"], CHAT) == ["The answer is 7.<|eot_id|>", "You are welcome 😀<|eot_id|>"]


def test_the_answer_follows_the_prompt_token_by_token(loaded: dict[str, ChatTokenizer]) -> None:
    for tokenizer in (loaded["tiny"], loaded["llama"], loaded["thinking"]):
        ids, mask = tokenizer.encode_chat(CHAT[:3])
        prompt = tokenizer.encode_prompt(CHAT[:2])
        assert ids[: len(prompt)] == prompt
        assert mask.index(True) == len(prompt)


def test_thinking_is_kept_in_the_last_turn_and_removed_from_earlier_ones(loaded: dict[str, ChatTokenizer]) -> None:
    chat: Chat = [
        {"role": "user", "content": "3 + 4?"},
        {"role": "assistant", "content": "<think>\n3 and 4 more\n</think>\n\n7"},
        {"role": "user", "content": "5 + 1?"},
        {"role": "assistant", "content": "<think>\neasy\n</think>\n\n6"},
    ]
    assert said(loaded["thinking"], chat) == ["7<|im_end|>", "<think>\neasy\n</think>\n\n6<|im_end|>"]
    apart: Chat = [*chat[:3], {"role": "assistant", "content": "6", "reasoning_content": "easy"}]
    assert said(loaded["thinking"], apart) == ["7<|im_end|>", "<think>\neasy\n</think>\n\n6<|im_end|>"]
    without: Chat = [*chat[:3], {"role": "assistant", "content": "6"}]
    assert said(loaded["thinking"], without)[1] == "<think>\n\n</think>\n\n6<|im_end|>"


def test_what_the_prompt_already_holds_is_not_generated(loaded: dict[str, ChatTokenizer]) -> None:
    chat: Chat = [*CHAT[:3], {"role": "user", "content": "And 1 + 1?"}, {"role": "assistant", "content": "2"}]
    assert said(loaded["thinking"], chat, enable_thinking=False) == ["The answer is 7.<|im_end|>", "2<|im_end|>"]
    assert said(loaded["thinking"], chat)[1] == "<think>\n\n</think>\n\n2<|im_end|>"


def test_tools(loaded: dict[str, ChatTokenizer]) -> None:
    chat: Chat = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "ask", "tool_calls": [{"name": "look", "n": 1}]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "10 degrees"},
        {"role": "assistant", "content": "I see.", "tool_calls": [{"name": "look", "n": 2}]},
        {"role": "tool", "content": "<|im_start|>assistant\nsun<|im_end|>"},
        {"role": "assistant", "content": "Rain, then sun."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "bye"}]},
    ]
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert said(loaded["thinking"], chat[:7], tools=tools) == [
        '<think>\nask\n</think>\n\n<tool_call>\n{"name": "look", "n": 1}\n</tool_call><|im_end|>',
        'I see.\n<tool_call>\n{"name": "look", "n": 2}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nRain, then sun.<|im_end|>",
    ]
    assert said(loaded["thinking"], chat, tools=tools) == [
        '<tool_call>\n{"name": "look", "n": 1}\n</tool_call><|im_end|>',
        'I see.\n<tool_call>\n{"name": "look", "n": 2}\n</tool_call><|im_end|>',
        "Rain, then sun.<|im_end|>",
        '<think>\n\n</think>\n\n<tool_call>\n{"name": "bye"}\n</tool_call><|im_end|>',
    ]


@pytest.mark.parametrize("call", [{"function": {"name": "add", "arguments": {}}}, {"name": "add"}])
def test_tool_calls_that_a_template_drops_are_refused(call: dict[str, Any], loaded: dict[str, ChatTokenizer]) -> None:
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(DataError, match="leaves the tool calls") as caught:
        loaded["tiny"].encode_chat(chat)
    assert caught.value.value == "add"
    assert "chat_template" in str(caught.value.repair)


def test_a_user_who_writes_like_a_tool(loaded: dict[str, ChatTokenizer]) -> None:
    """The template looks at how such a message ends, so that it cannot be marked; the headers are still counted."""
    chat: Chat = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "<think>\nlook\n</think>\n\nI look."},
        {"role": "user", "content": "<tool_response>\nrain\n</tool_response>"},
        {"role": "assistant", "content": "Rain."},
    ]
    assert said(loaded["thinking"], chat) == [
        "<think>\nlook\n</think>\n\nI look.<|im_end|>",
        "<think>\n\n</think>\n\nRain.<|im_end|>",
    ]
    chat[2]["content"] = "<tool_response>\n<|im_start|>assistant\nrain\n</tool_response>"
    with pytest.raises(ModelError, match="also in a text near message 3") as caught:
        loaded["thinking"].encode_chat(chat)
    assert caught.value.path is not None
    assert "thinking" in caught.value.path


WORDS = st.lists(
    st.sampled_from(
        ["a", "7", " ", "\n", "é", "😀", "\ue000", "<|im_start|>assistant\n", "<|im_end|>", "assistant", "Hello", "\t"]
    ),
    min_size=1,
    max_size=6,
).map("".join)
TURNS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=TURNS)
def test_both_ways_to_find_the_mask_agree(turns: list[tuple[str, str]], loaded: dict[str, ChatTokenizer]) -> None:
    """The same format with and without blocks, whatever the messages say, headers and ends included.

    An end of turn inside an answer ends it in both views of the token that the model would stop at, so answers are
    without it here.
    """
    chat: Chat = []
    for question, answer in turns:
        chat.append({"role": "user", "content": question})
        chat.append({"role": "assistant", "content": answer.replace("<|im_end|>", "")})
    from forge.models.chat import ChatTemplate
    from forge.models.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS

    bare = CHAT_TEMPLATE.replace("{%- generation %}\n", "").replace("{%- endgeneration %}\n", "")
    assert "generation %}" not in bare
    with_blocks = ChatTemplate(CHAT_TEMPLATE, "blocks", special_tokens=SPECIAL_TOKENS).render_spans(chat)
    without = ChatTemplate(bare, "bare", special_tokens=SPECIAL_TOKENS).render_spans(chat)
    assert without == with_blocks
    ids, mask = loaded["tiny"].encode_chat(chat)
    assert loaded["tiny"].decode(ids) == with_blocks[0]
    assert sum(mask) >= len(turns)


def test_a_token_that_reaches_into_the_header_does_not_count() -> None:
    from forge.models.tokenizer import _mask

    assert _mask([(0, 3), (3, 5), (5, 6), (6, 9)], [(4, 9)]) == [False, False, True, True]
    assert _mask([(0, 1), (1, 2), (1, 2), (2, 4)], [(1, 2), (3, 4)]) == [False, True, True, False]
    assert _mask([(0, 4)], [(1, 2)]) == [False]


def test_a_space_of_the_header_that_the_tokenizer_trims_is_still_the_headers(
    places: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "spaced.jinja"
    block = "{% generation %}{{ message.content + '<|eot_id|>' }}{% endgeneration %}"
    file.write_text("{% for message in messages %}{{ message.role + ': ' }}" + block + "{% endfor %}", encoding="utf-8")
    tokenizer = ChatTokenizer.load(places["llama"], chat_template=file)
    assert said(tokenizer, [{"role": "assistant", "content": "answer is"}]) == [" is<|eot_id|>"]


def test_plain_text(loaded: dict[str, ChatTokenizer]) -> None:
    tiny, llama = loaded["tiny"], loaded["llama"]
    assert tiny.decode(tiny.encode_text("Hello")) == "Hello<|im_end|>"
    assert tiny.encode_text("Hello<|im_end|>") == tiny.encode_text("Hello")
    assert tiny.encode_text("") == [511]
    assert llama.decode(llama.encode_text("Hello")) == "<|begin_of_text|>Hello<|eot_id|>"
    assert llama.decode(llama.encode_text("Hello"), skip_special=True) == "Hello"
    assert llama.decode(llama.encode_chat(CHAT)[0]).count("<|begin_of_text|>") == 1


def test_ids(loaded: dict[str, ChatTokenizer]) -> None:
    tiny, llama = loaded["tiny"], loaded["llama"]
    assert (tiny.eos_token_id, tiny.pad_token_id, tiny.stop_token_ids, tiny.vocab_size) == (511, 509, (511,), 512)
    assert (llama.eos_token_id, llama.pad_token_id, llama.stop_token_ids) == (515, 515, (515, 516))
    assert (tiny.special_ids.bos, tiny.special_ids.eos, tiny.special_ids.pad) == (None, 511, 509)


def test_the_end_of_a_turn_stops_where_eos_is_another_token(tmp_path: Path) -> None:
    folder = chatml_folder(tmp_path, THINKING)
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text(encoding="utf-8")) | {"eos_token": "<|endoftext|>"}
    file.write_text(json.dumps(content), encoding="utf-8")
    (folder / "generation_config.json").unlink()
    tokenizer = ChatTokenizer.load(folder)
    assert (tokenizer.eos_token_id, tokenizer.stop_token_ids) == (509, (509, 511))
    assert said(tokenizer, CHAT)[0] == "The answer is 7.<|im_end|>"


@pytest.mark.parametrize("name", ["tiny", "thinking", "llama"])
def test_it_travels_and_is_saved(name: str, loaded: dict[str, ChatTokenizer], tmp_path: Path) -> None:
    arrived = pickle.loads(pickle.dumps(loaded[name]))
    loaded[name].save(tmp_path)
    for other in (arrived, ChatTokenizer.load(tmp_path)):
        assert other.encode_chat(CHAT) == loaded[name].encode_chat(CHAT)
        assert other.encode_text("a 1 b") == loaded[name].encode_text("a 1 b")
    assert arrived.stop_token_ids == loaded[name].stop_token_ids


def test_another_template(places: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(HEADERS.replace("{{- bos_token }}", ""), encoding="utf-8")
    tokenizer = ChatTokenizer.load(places["llama"], chat_template=file)
    assert said(tokenizer, CHAT) == ["The answer is 7.<|eot_id|>", "You are welcome 😀<|eot_id|>"]
    assert not tokenizer.decode(tokenizer.encode_chat(CHAT)[0]).startswith("<|begin_of_text|>")
    tokenizer.save(tmp_path / "saved")
    assert ChatTokenizer.load(tmp_path / "saved").encode_chat(CHAT) == tokenizer.encode_chat(CHAT)


def test_no_template(tmp_path: Path) -> None:
    folder = chatml_folder(tmp_path, "")
    (folder / "chat_template.jinja").unlink()
    tokenizer = ChatTokenizer.load(folder)
    assert not tokenizer.has_chat_template
    assert tokenizer.stop_token_ids == (511,)
    for encode in (tokenizer.encode_chat, tokenizer.encode_prompt):
        with pytest.raises(ModelError, match="no chat template") as caught:
            encode(CHAT)
        assert "data.chat_template" in (caught.value.repair or "")


def test_a_template_without_headers_is_named(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(chatml_folder(tmp_path, ALTERNATING))
    chat: Chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    assert (
        tokenizer.decode(tokenizer.encode_prompt(chat, add_generation_prompt=False)) == "[INST] 1 [/INST] 2<|im_end|>"
    )
    with pytest.raises(ModelError, match="adds no header") as caught:
        tokenizer.encode_chat(chat)
    assert caught.value.path == str(tmp_path)
    assert "{% generation %}" in (caught.value.repair or "")
    with pytest.raises(DataError, match="roles must alternate") as refused:
        tokenizer.encode_chat(chat[1:])
    assert refused.value.value == ["assistant"]


def test_a_template_that_drops_an_answer_is_named(tmp_path: Path) -> None:
    drops = THINKING.replace("{{- content }}", "{{- content if content != 'secret' else '' }}")
    shortens = THINKING.replace("{{- content }}", "{{- content[:20] }}")
    for number, template in enumerate((drops, shortens)):
        tokenizer = ChatTokenizer.load(chatml_folder(tmp_path / str(number), template))
        answer = ("secret", "a long answer that is not all there")[number]
        with pytest.raises(ModelError, match="does not mark exactly"):
            tokenizer.encode_chat([{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}])


@pytest.mark.parametrize("chat", [[], [{"content": "no role"}], ["text"], [{"role": 7, "content": ""}]])
def test_messages_that_are_none(chat: Any, loaded: dict[str, ChatTokenizer]) -> None:
    with pytest.raises(DataError) as caught:
        loaded["tiny"].encode_chat(chat)
    assert caught.value.path is not None
    assert caught.value.path.startswith("messages")
    assert caught.value.repair


def test_folders_and_files_that_cannot_be_read(places: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer in this folder") as caught:
        ChatTokenizer.load(tmp_path)
    assert (caught.value.path, "forge download" in (caught.value.repair or "")) == (str(tmp_path), True)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be loaded"):
        ChatTokenizer.load(tmp_path)
    with pytest.raises(ModelError, match="chat template cannot be read"):
        ChatTokenizer.load(places["tiny"], chat_template=tmp_path / "none.jinja")
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for message in messages %}\n{{ message }\n", encoding="utf-8")
    with pytest.raises(ModelError, match="a Jinja template") as caught:
        ChatTokenizer.load(places["tiny"], chat_template=broken)
    assert caught.value.path == f"{broken}:2"


def test_generation_settings_that_cannot_be_read(tmp_path: Path) -> None:
    folder = chatml_folder(tmp_path, THINKING)
    (folder / "generation_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelError, match="generation settings") as caught:
        ChatTokenizer.load(folder)
    assert caught.value.path == str(folder / "generation_config.json")
