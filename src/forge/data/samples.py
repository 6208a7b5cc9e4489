"""From a record to a sample: its conversation, its tokens, and which of them count."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from forge.config import DataConfig
from forge.data.files import Record
from forge.data.formats import Conversation, Layout, convert
from forge.errors import DataError, ForgeError
from forge.types import Sample

logger = logging.getLogger("forge.data")

_SHOWN = 5


class Tokenizer(Protocol):
    """What the data needs of a tokenizer."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if there is one."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """The tokens of a conversation, and for each whether the assistant says it, its end-of-turn token included."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """The tokens of plain text, with the end-of-text token at the end."""
        ...


class SampleEncoder(Protocol):
    """Makes samples of records. Any thread may call it."""

    max_seq_len: int

    def encode_all(self, record: Record, *, layout: Layout, counters: Counters) -> tuple[Sample, ...]:
        """Return the samples of a record, which go into one batch together; none where it was left out and counted.

        Those that belong to one sequence have the same number as `Sample.sequence`.
        """
        ...


@dataclass(slots=True)
class Counters:
    """What became of the records so far. They continue counting after a resume.

    Attributes:
        samples: samples in the batches given.
        tokens: tokens in them; loss_tokens: those that count.
        rows: rows in them; a row is one sample, or one pack.
        oversize: samples dropped because they were longer than max_seq_len.
        truncated: samples cut to max_seq_len.
        without_loss: samples dropped because no token in them counts.
        bad: records that could not be read, and were left out by choice.
    """

    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    rows: int = 0
    oversize: int = 0
    truncated: int = 0
    without_loss: int = 0
    bad: int = 0

    @property
    def dropped(self) -> int:
        """Everything that was read and is in no batch."""
        return self.oversize + self.without_loss + self.bad

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Encoder:
    """Makes samples of records. Any thread may call it; the tokenizer works for one at a time."""

    def __init__(self, tokenizer: Tokenizer, *, data: DataConfig, max_seq_len: int) -> None:
        from jinja2 import TemplateError

        self._tokenizer = tokenizer
        self._data = data
        self.max_seq_len = max_seq_len
        self._lock = threading.Lock()
        self._faults = (TemplateError, ValueError, TypeError, KeyError)

    def encode(self, record: Record, *, layout: Layout, counters: Counters) -> Sample | None:
        """The sample of a record, or None where it was left out and counted.

        Raises DataError for a record that cannot be read (data.on_bad_record: error) or is too long
        (data.oversize: error).
        """
        try:
            conversation = convert(record, layout=layout, system_prompt=self._data.system_prompt)
            token_ids, weights = self._tokens(conversation, record.place)
        except DataError as error:
            if self._data.on_bad_record == "error":
                raise
            self._leave_out(error, counters)
            return None
        return self._fit(token_ids, weights, place=record.place, counters=counters)

    def encode_all(self, record: Record, *, layout: Layout, counters: Counters) -> tuple[Sample, ...]:
        """The samples of a record: one, or none where it was left out and counted."""
        sample = self.encode(record, layout=layout, counters=counters)
        return () if sample is None else (sample,)

    def _leave_out(self, error: DataError, counters: Counters) -> None:
        counters.bad += 1
        if counters.bad <= _SHOWN:
            logger.warning("left out: %s", error.message)

    def _tokens(self, conversation: Conversation, place: str) -> tuple[list[int], list[float]]:
        if conversation.text is not None:
            token_ids = self._call(place, self._tokenizer.encode_text, conversation.text)
            return token_ids, [1.0] * len(token_ids)
        answers = [turn["role"] == "assistant" for turn in conversation.messages]
        if self._data.loss_on == "answers" and not any(answers):
            raise _bad(place, "there is no assistant message", "with data.loss_on: answers each record needs one")
        token_ids, is_assistant = self._call(place, self._tokenizer.encode_chat, conversation.messages)
        if len(token_ids) != len(is_assistant):
            raise RuntimeError(f"the tokenizer gave {len(token_ids)} tokens and a mask of {len(is_assistant)}")
        everything = self._data.loss_on == "all"
        weights = [1.0 if everything or mark else 0.0 for mark in is_assistant]
        if not all(conversation.trained):
            _take_out(weights, is_assistant, conversation, place=place, everything=everything)
        return token_ids, weights

    def _call(self, place: str, encode: Any, argument: Any) -> Any:
        try:
            with self._lock:
                return encode(argument)
        except ForgeError:
            raise
        except self._faults as error:
            raise _bad(place, f"the tokenizer refuses it: {error}", "the chat template accepts the messages") from error

    def _fit(self, token_ids: list[int], weights: list[float], *, place: str, counters: Counters) -> Sample | None:
        if len(token_ids) > self.max_seq_len:
            if self._data.oversize == "error":
                raise self._too_long(len(token_ids), place)
            if self._data.oversize == "drop":
                counters.oversize += 1
                return None
        if not any(weights[1 : self.max_seq_len]):
            counters.without_loss += 1
            return None
        counters.truncated += len(token_ids) > self.max_seq_len
        return _sample(token_ids[: self.max_seq_len], weights[: self.max_seq_len], place)

    def _too_long(self, num_tokens: int, place: str) -> DataError:
        return DataError(
            f"{place}: this sample has {num_tokens} tokens",
            path=place,
            value=num_tokens,
            rule=f"with data.oversize: error, at most training.max_seq_len tokens, which is {self.max_seq_len}",
            repair="raise training.max_seq_len, or set data.oversize to drop or truncate",
        )


def _sample(token_ids: list[int], weights: list[float], place: str) -> Sample:
    import torch

    loss_weights = torch.tensor(weights, dtype=torch.float32)
    loss_weights[0] = 0.0
    return Sample(torch.tensor(token_ids, dtype=torch.int64), loss_weights, identity=place)


def _take_out(
    weights: list[float], is_assistant: list[bool], conversation: Conversation, *, place: str, everything: bool
) -> None:
    """Set the weights of messages with `train: false` to 0.

    Headers part one message of the assistant from the next, so the runs of marked tokens are its messages in order.
    """
    flags = list(zip(conversation.messages, conversation.trained, strict=True))
    if everything and any(not trained and turn["role"] != "assistant" for turn, trained in flags):
        raise _bad(
            place, "`train: false` on a message that is not the assistant's", "with data.loss_on: all only those"
        )
    wanted = [trained for turn, trained in flags if turn["role"] == "assistant"]
    runs = [(mark, len(list(group))) for mark, group in itertools.groupby(is_assistant)]
    if sum(mark for mark, _ in runs) != len(wanted):
        raise _bad(place, "the chat template does not separate its messages", "`train: false` needs each one marked")
    answers, start = iter(wanted), 0
    for mark, length in runs:
        if mark and not next(answers):
            weights[start : start + length] = [0.0] * length
        start += length


def _bad(place: str, what: str, rule: str) -> DataError:
    repair = "correct or remove it, or set data.on_bad_record to skip"
    return DataError(f"{place}: {what}", path=place, rule=rule, repair=repair)
