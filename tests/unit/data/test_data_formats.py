"""Records of each layout become the conversation that they hold, or are refused by place and rule."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forge.data import Conversation, Layout, Record, convert, detect
from forge.errors import DataError

PAIR = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}


def record(value: Any) -> Record:
    return Record("x.jsonl:3", json.dumps(value).encode())


def read(value: Any, kind: str, columns: dict[str, str] | None = None, system: str | None = None) -> Conversation:
    return convert(record(value), layout=Layout(kind, columns or {}), system_prompt=system)


EXAMPLES = [
    ("messages", {"messages": PAIR}, {}, PAIR),
    ("messages", {"conversations": PAIR}, {}, PAIR),
    ("messages", {"messages": None, "conversations": PAIR}, {}, PAIR),
    ("messages", {"dialog": PAIR}, {"messages": "dialog"}, PAIR),
    (
        "messages",
        {"messages": [{"who": "user", "said": "Q", "tool_calls": None}, {"who": "assistant", "said": "A"}]},
        {"role": "who", "content": "said"},
        PAIR,
    ),
    (
        "messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Q"}]},
                {"role": "assistant", "content": "A"},
            ]
        },
        {},
        PAIR,
    ),
    ("messages", {"messages": [PAIR[0], {**CALL, "content": None}]}, {}, [PAIR[0], CALL]),
    ("sharegpt", {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}, {}, PAIR),
    (
        "sharegpt",
        {
            "conversations": [
                {"from": "system", "value": "S"},
                {"from": "user", "value": "Q"},
                {"from": "bot", "value": "A"},
            ]
        },
        {},
        [{"role": "system", "content": "S"}, *PAIR],
    ),
    ("alpaca", {"instruction": "Q", "input": "", "output": "A"}, {}, PAIR),
    ("alpaca", {"instruction": "Q", "output": "A"}, {}, PAIR),
    (
        "alpaca",
        {"instruction": "Q", "input": "I", "output": "A"},
        {},
        [{"role": "user", "content": "Q\n\nI"}, PAIR[1]],
    ),
    ("prompt_response", {"prompt": "Q", "response": "A"}, {}, PAIR),
    ("prompt_response", {"prompt": "Q", "completion": "A"}, {}, PAIR),
    ("prompt_response", {"prompt": "Q", "answer": "A"}, {}, PAIR),
    ("prompt_response", {"question": "Q", "reply": "A"}, {"prompt": "question", "response": "reply"}, PAIR),
]


@pytest.mark.parametrize(("kind", "value", "columns", "messages"), EXAMPLES)
def test_a_layout_is_detected_and_converted(
    kind: str, value: dict[str, Any], columns: dict[str, str], messages: list[dict[str, Any]]
) -> None:
    assert detect([record(value)], columns=columns, lenient=False) == kind
    assert list(read(value, kind, columns).messages) == messages


def test_text_stays_text() -> None:
    assert detect([record({"text": "T"})], columns={}, lenient=False) == "text"
    assert read({"body": "T"}, "text", {"text": "body"}) == Conversation(text="T")


def test_a_system_prompt_goes_before_conversations_that_have_none() -> None:
    roles = [message["role"] for message in read({"messages": PAIR * 2}, "messages", system="S").messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    own = {"messages": [{"role": "system", "content": "own"}, *PAIR]}
    assert read(own, "messages", system="S").messages[0]["content"] == "own"


def test_train_false_is_kept_apart_from_the_message() -> None:
    turns = [{**PAIR[0], "train": False}, {**PAIR[1], "train": False}, PAIR[0], {**PAIR[1], "train": True}]
    found = read({"messages": turns}, "messages")
    assert found.trained == (False, False, True, True)
    assert list(found.messages) == PAIR * 2


REFUSED = [
    ("messages", {"text": "a"}, "no messages under `messages`"),
    ("messages", {"messages": []}, "no messages under `messages`"),
    ("messages", {"messages": "hello"}, "no messages under `messages`"),
    ("messages", {"messages": ["hello"]}, r"messages\[0\] is not a message"),
    ("messages", {"messages": [{"role": "king", "content": "a"}]}, r"messages\[0\] has no valid role"),
    ("messages", {"messages": [{"role": ["user"], "content": "a"}]}, r"messages\[0\] has no valid role"),
    ("messages", {"messages": [PAIR[0], {"role": "assistant"}]}, r"messages\[1\] has no text"),
    ("messages", {"messages": [PAIR[0], {"role": "assistant", "content": ""}]}, r"messages\[1\] is empty"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "has no text"),
    ("messages", {"messages": [{**PAIR[1], "train": "no"}]}, "`train` that cannot be followed"),
    ("messages", {"messages": [{**PAIR[0], "train": True}]}, "`train` that cannot be followed"),
    ("sharegpt", {"conversations": [{"from": "alien", "value": "a"}]}, "has no valid role"),
    ("sharegpt", {"conversations": [{"from": "human", "value": 3}]}, "has no text"),
    ("alpaca", {"instruction": " ", "output": "A"}, "not text"),
    ("alpaca", {"instruction": "Q"}, "no text under `output`"),
    ("alpaca", {"instruction": "Q", "input": 3, "output": "A"}, "`input` that is not text"),
    ("prompt_response", {"prompt": "Q"}, "no text under `response`"),
    ("prompt_response", {"prompt": PAIR, "response": "A"}, "`prompt` that is not text"),
    ("text", {"text": 7}, "`text` that is not text"),
    ("alpaca", {"instruction": "Q", "output": "A", "system": 7}, "`system` that is not text"),
    ("messages", {"messages": PAIR, "tools": [{"name": "add"}]}, "the record has tools"),
]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("messages", {"messages": PAIR, "tools": None}),
        ("alpaca", {"instruction": "Q", "output": "A", "tools": []}),
        ("prompt_response", {"prompt": "Q", "response": "A"}),
    ],
)
def test_a_system_message_beside_the_turns_comes_before_them(kind: str, value: dict[str, Any]) -> None:
    plain = read(value, kind)
    named = read({**value, "system": "Be brief."}, kind)
    assert named.messages == ({"role": "system", "content": "Be brief."}, *plain.messages)
    assert read({**value, "system": ""}, kind) == plain
    own = convert(record({**value, "system": "Be brief."}), layout=Layout(kind, {}), system_prompt="Other.")
    assert own == named


@pytest.mark.parametrize(("kind", "value", "what"), REFUSED)
def test_a_record_that_breaks_its_layout_is_named(kind: str, value: dict[str, Any], what: str) -> None:
    with pytest.raises(DataError, match=rf"^x\.jsonl:3: .*{what}") as caught:
        read(value, kind)
    assert caught.value.path == "x.jsonl:3"
    assert caught.value.rule
    assert caught.value.repair


def test_a_record_of_no_layout_is_named_with_its_keys() -> None:
    with pytest.raises(DataError, match="format of this record is not known") as caught:
        detect([record({"b": 1, "a": 2})], columns={}, lenient=False)
    assert caught.value.value == ["a", "b"]
    assert "columns" in str(caught.value.repair)


def test_a_lenient_detection_goes_on_to_the_first_good_record() -> None:
    records = [Record("x.jsonl:1", b"{"), record({"a": 1}), record({"text": "T"})]
    assert detect(records, columns={}, lenient=True) == "text"
    with pytest.raises(DataError, match=r"x\.jsonl:1"):
        detect(records, columns={}, lenient=False)
    with pytest.raises(DataError, match=r"x\.jsonl:1"):
        detect(records[:2], columns={}, lenient=True)
