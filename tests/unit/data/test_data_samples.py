"""Tokens, the weights on them, and what becomes of samples that do not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from jinja2 import TemplateError

from byte_tokenizer import END, EOS, ByteTokenizer
from forge.config import DataConfig
from forge.data import Counters, Encoder, Layout, Record, Tokenizer
from forge.errors import DataError, ModelError
from forge.types import Sample

TURNS = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "fg"},
]


def encode(
    value: Any, *, kind: str = "messages", max_seq_len: int = 99, tokenizer: Tokenizer | None = None, **data: Any
) -> tuple[Sample | None, Counters]:
    counters = Counters()
    encoder = Encoder(tokenizer or ByteTokenizer(), data=DataConfig(**data), max_seq_len=max_seq_len)
    record = Record("x.jsonl:3", json.dumps(value).encode())
    return encoder.encode(record, layout=Layout(kind, {}), counters=counters), counters


def learnt(sample: Sample | None) -> list[str]:
    """The tokens that count, one text for each run of them."""
    assert sample is not None
    runs, before = [], False
    for token, weight in zip(sample.token_ids.tolist(), sample.loss_weights.tolist(), strict=True):
        text = "$" if token == END else "." if token >= EOS else chr(token)
        if weight and before:
            runs[-1] += text
        elif weight:
            runs.append(text)
        before = bool(weight)
    return runs


def test_answers_count_with_their_end_and_nothing_else() -> None:
    sample, counters = encode({"messages": TURNS})
    assert learnt(sample) == ["cd$", "fg$"]
    assert sample is not None
    assert sample.token_ids.dtype is torch.int64
    assert sample.loss_weights.dtype is torch.float32
    assert sample.identity == "x.jsonl:3"
    assert counters == Counters()


def test_all_counts_but_the_first_token() -> None:
    sample, _ = encode({"messages": TURNS}, loss_on="all")
    assert sample is not None
    assert sample.loss_weights.tolist() == [0.0] + [1.0] * (len(sample) - 1)


def test_text_counts_whole_whatever_loss_on_says() -> None:
    for loss_on in ("answers", "all"):
        sample, _ = encode({"text": "abc"}, kind="text", loss_on=loss_on)
        assert sample is not None
        assert sample.token_ids.tolist() == [97, 98, 99, EOS]
        assert sample.loss_weights.tolist() == [0, 1, 1, 1]


def test_train_false_takes_one_answer_out() -> None:
    turns = [TURNS[0], {**TURNS[1], "train": False}, {**TURNS[2], "train": False}, TURNS[3]]
    assert learnt(encode({"messages": turns})[0]) == ["fg$"]
    turns[2] = TURNS[2]
    assert learnt(encode({"messages": turns}, loss_on="all")[0]) == ["user.ab$.assistant.", ".user.e$.assistant.fg$"]
    turns[3] = {**TURNS[3], "train": False}
    sample, counters = encode({"messages": turns})
    assert sample is None
    assert counters.without_loss == counters.dropped == 1


def test_train_false_on_a_question_is_refused_where_questions_count() -> None:
    turns = [{**TURNS[0], "train": False}, TURNS[1]]
    with pytest.raises(DataError, match="not the assistant's") as caught:
        encode({"messages": turns}, loss_on="all")
    assert caught.value.path == "x.jsonl:3"


class OneRun(ByteTokenizer):
    """A template that marks everything after the first message."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        token_ids, _ = super().encode_chat(messages)
        return token_ids, [False] * 5 + [True] * (len(token_ids) - 5)


def test_train_false_needs_a_template_that_tells_messages_apart() -> None:
    turns = [TURNS[0], {**TURNS[1], "train": False}, *TURNS[2:]]
    with pytest.raises(DataError, match="does not separate its messages"):
        encode({"messages": turns}, tokenizer=OneRun())


def test_a_record_without_an_answer_is_bad_unless_all_counts() -> None:
    with pytest.raises(DataError, match=r"x\.jsonl:3: there is no assistant message"):
        encode({"messages": TURNS[:1]})
    sample, _ = encode({"messages": TURNS[:1]}, loss_on="all")
    assert sample is not None


def test_oversize_samples_are_dropped_truncated_or_refused() -> None:
    length = len(encode({"messages": TURNS})[0] or [])
    assert encode({"messages": TURNS}, max_seq_len=length)[0] is not None

    sample, counters = encode({"messages": TURNS}, max_seq_len=length - 1)
    assert sample is None
    assert counters == Counters(oversize=1)

    sample, counters = encode({"messages": TURNS}, max_seq_len=length - 1, oversize="truncate")
    assert learnt(sample) == ["cd$", "fg"]
    assert len(sample or []) == length - 1
    assert counters == Counters(truncated=1)

    sample, counters = encode({"messages": TURNS}, max_seq_len=8, oversize="truncate")
    assert sample is None
    assert counters == Counters(without_loss=1)

    with pytest.raises(DataError, match=f"this sample has {length} tokens") as caught:
        encode({"messages": TURNS}, max_seq_len=length - 1, oversize="error", on_bad_record="skip")
    assert (caught.value.path, caught.value.value) == ("x.jsonl:3", length)
    assert str(length - 1) in str(caught.value.rule)


def test_a_bad_record_is_raised_or_counted() -> None:
    with pytest.raises(DataError, match=r"x\.jsonl:3"):
        encode({"messages": []})
    sample, counters = encode({"messages": []}, on_bad_record="skip")
    assert sample is None
    assert counters == Counters(bad=1)


class Strict(ByteTokenizer):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        raise self.error


def test_what_a_template_refuses_is_a_bad_record_and_a_broken_tokenizer_is_not() -> None:
    refused = Strict(TemplateError("roles must alternate"))
    with pytest.raises(DataError, match=r"x\.jsonl:3: the tokenizer refuses it: roles must alternate"):
        encode({"messages": TURNS}, tokenizer=refused)
    assert encode({"messages": TURNS}, tokenizer=refused, on_bad_record="skip")[1].bad == 1
    with pytest.raises(ModelError):
        encode({"messages": TURNS}, tokenizer=Strict(ModelError("no template")), on_bad_record="skip")
