"""Prompts from records: files and datasets, in the plain layout or in that of GSM8K."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from forge.config import PromptSourceConfig, SourceConfig
from forge.data.files import Record, suffix_of
from forge.data.formats import Layout, convert
from forge.data.sources import find_files, is_saved_dataset, open_indexed
from forge.errors import DataError, did_you_mean
from forge.types import Task

logger = logging.getLogger("forge.data")

MARK = "####"
ID = "prompt_id"
_KEYS = ("messages", "prompt", "question", "answer", "system")
_PLAIN = "one of `messages`, `prompt` and `question`"
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SKIP = "correct or remove it, or set prompts.on_bad_record to skip"
_LOOKED_AT = 100


class RecordReader:
    """Turns records into tasks.

    A record's `prompt_id` is the task's id where there is one; otherwise it is the record's place. Keys that have no
    meaning here go into the task's metadata, and so does what a record has under `metadata`.

    Args:
        names: column names that differ from the format's.
        chat: whether conversations are allowed.
        format: the layout of the records.
    """

    def __init__(
        self, names: Mapping[str, str] | None = None, *, chat: bool = True, format: Literal["plain", "gsm8k"] = "plain"
    ) -> None:
        self._names, self._chat = dict(names or {}), chat
        self.format: Literal["plain", "gsm8k"] = format

    def task(self, record: Record) -> Task:
        """Return the task of one record, as the record words it; a DataError that names its place if it has none."""
        value = record.value()
        used = {self._name(key) for key in _KEYS} | {ID, "metadata"}
        metadata = {key: item for key, item in value.items() if key not in used and item is not None}
        own = value.get("metadata")
        if isinstance(own, Mapping):
            metadata.update(own)
        elif own is not None:
            metadata["metadata"] = own
        answer = self._answer(value, place=record.place)
        if self.format == "gsm8k" and answer is not None:
            metadata["solution"] = answer
            answer = final_answer(answer, place=record.place)
        messages, text = self._words(record, value)
        name = value.get(ID)
        return Task(
            id=name if isinstance(name, str) and name else record.place,
            messages=messages,
            text=text,
            answer=answer,
            metadata=_plain(metadata),
        )

    def _words(self, record: Record, value: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], ...], str | None]:
        """The conversation of a record, or its text."""
        key = next((key for key in ("messages", "prompt", "question") if value.get(self._name(key)) is not None), None)
        if key is None:
            raise self._missing(record, value)
        words = value[self._name(key)]
        if isinstance(words, list):
            return self._conversation(record, value, key), None
        if not isinstance(words, str) or not words.strip():
            what = "the prompt is empty" if isinstance(words, str) else "the prompt is neither text nor messages"
            rule = f"`{self._name(key)}` is text that is not empty, or a list of messages"
            raise _bad(record.place, what, words, rule)
        system = value.get(self._name("system"))
        if isinstance(system, str) and system.strip():
            turns = ({"role": "system", "content": system}, {"role": "user", "content": words})
            return self._allowed(record.place, turns), None
        return (), words

    def _conversation(self, record: Record, value: Mapping[str, Any], key: str) -> tuple[Mapping[str, Any], ...]:
        layout = Layout("messages", {**self._names, "messages": self._name(key)})
        turns = convert(Record(record.place, value), layout=layout).messages
        if turns[-1]["role"] not in ("user", "tool"):
            rule = "the last message is one to be answered: a user's, or a tool's"
            raise _bad(record.place, "this conversation has no message to answer", turns[-1]["role"], rule)
        if turns[-1]["role"] == "user" and not turns[-1]["content"].strip():
            raise _bad(record.place, "the prompt is empty", turns[-1]["content"], "the last message is not empty")
        return self._allowed(record.place, _plain(turns))

    def _allowed(self, place: str, turns: Any) -> tuple[Mapping[str, Any], ...]:
        if not self._chat:
            rule = "with prompts.chat false every prompt is one text"
            raise _bad(place, "this record is a conversation", [turn["role"] for turn in turns], rule)
        return tuple(turns)

    def _answer(self, value: Mapping[str, Any], *, place: str) -> str | None:
        name = self._name("answer")
        answer = value.get(name)
        if answer is None:
            if self.format == "gsm8k" or ("answer" in self._names and name not in value):
                rule = f"every record has `{name}`" + (f", with {MARK}" if self.format == "gsm8k" else "")
                raise _lacking(place, f"this record has no `{name}`", value, rule)
            return None
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise _bad(place, "the answer is neither text nor a number", answer, f"`{name}` is text or a number")
        return str(answer)

    def _missing(self, record: Record, value: Mapping[str, Any]) -> DataError:
        renamed = [self._name(key) for key in ("messages", "prompt", "question") if key in self._names]
        rule = f"a record has {' or '.join(f'`{name}`' for name in renamed)}" if renamed else f"a record has {_PLAIN}"
        return _lacking(record.place, "there is no prompt in this record", value, rule)

    def _name(self, key: str) -> str:
        return self._names.get(key, key)


class RecordPrompts(RecordReader):
    """The prompts of one source of records, by the record's number. Nothing is kept but where each record begins."""

    def __init__(self, config: PromptSourceConfig, *, chat: bool, lenient: bool) -> None:
        place = SourceConfig(
            path=config.path, hf_dataset=config.hf_dataset, hf_config=config.hf_config, split=config.split
        )
        super().__init__(config.columns, chat=chat)
        self._records = open_indexed(place, wanted=_columns(config))
        self.name = self._records.name
        self.format = self._detect(lenient=lenient) if config.format == "auto" else config.format

    def __len__(self) -> int:
        return len(self._records)

    def read(self, index: int) -> Task:
        """The prompt of one record, as the record words it; a DataError that names its place if it has none."""
        record = self._records.read(index)
        try:
            return self.task(record)
        except DataError as error:
            if error.repair is None or "data.on_bad_record" not in error.repair:
                raise
            raise DataError(
                error.message, path=error.path, value=error.value, rule=error.rule, repair=_SKIP
            ) from error.__cause__

    def _detect(self, *, lenient: bool) -> Literal["plain", "gsm8k"]:
        for index in range(min(len(self), _LOOKED_AT if lenient else 1)):
            try:
                value = self._records.read(index).value()
            except DataError:
                continue  # it is refused, or counted, when the records are gone through
            answer = value.get(self._name("answer"))
            if isinstance(answer, str) and MARK in answer and isinstance(value.get(self._name("question")), str):
                logger.info("%s: the format is gsm8k, by its first record", self.name)
                return "gsm8k"
            break
        return "plain"


def final_answer(solution: str, *, place: str) -> str:
    """What stands behind the last `####`, without separators of thousands: "… #### 1,234" is "1234"."""
    _, mark, answer = solution.rpartition(MARK)
    if not mark or not answer.strip():
        rule = f"format gsm8k: an answer ends with {MARK} and what it comes to"
        raise _bad(place, f"there is no answer after {MARK}", solution, rule)
    return _THOUSANDS.sub("", answer.strip())


def _columns(config: PromptSourceConfig) -> frozenset[str]:
    """Every column of the source's Parquet files: a reward may read any column."""
    names = {config.columns.get(key, key) for key in _KEYS}
    if config.path is None or is_saved_dataset(Path(config.path)):
        return frozenset(names)
    for path in find_files(config.path):
        if suffix_of(path) == ".parquet":
            import pyarrow.parquet

            try:
                names.update(pyarrow.parquet.read_schema(path).names)
            except (OSError, pyarrow.ArrowException):
                logger.debug("%s: the columns cannot be read; opening it says why", path)
    return frozenset(names)


def _plain(value: Any) -> Any:
    """The same as JSON gives it back; in place of what JSON cannot hold stands its type."""
    return json.loads(json.dumps(value, default=lambda odd: {"unreadable": type(odd).__name__}))


def _bad(place: str, what: str, value: object, rule: str) -> DataError:
    return DataError(f"{place}: {what}", path=place, value=value, rule=rule, repair=_SKIP)


def _lacking(place: str, what: str, value: Mapping[str, Any], rule: str) -> DataError:
    near = next((hint for key in value if (hint := did_you_mean(str(key), _KEYS))), None)
    repair = "name its keys with `columns`, such as {prompt: problem, answer: solution}"
    return DataError(
        f"{place}: {what}; it has {', '.join(map(str, value)) or 'no keys at all'}",
        path=place,
        value=sorted(map(str, value)),
        rule=rule,
        repair=f"{repair}; {near}" if near else repair,
    )
