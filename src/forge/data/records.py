"""A record as it lies in its file: where it is, and its bytes, not yet parsed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forge.errors import DataError

Mark = tuple[int, int, int, int]
"""Where a stream can start again: ordinal of the record, file, offset in it, line. They order as the records do."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a source.

    Attributes:
        place: where it lies, for messages: "train.jsonl:17" (lines count from 1), "train.parquet:17" (rows from 0).
        raw: the bytes of one JSON object, or the row itself where the source already holds objects.
    """

    place: str
    raw: bytes | Mapping[str, Any]

    def value(self) -> Mapping[str, Any]:
        """The record as an object; a DataError that names the place if it is none."""
        if not isinstance(self.raw, bytes):
            return self.raw
        try:
            value = json.loads(self.raw)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self.place}: this is not JSON: {error}",
                path=self.place,
                value=self.raw[:200],
                rule="each record is one whole JSON object in UTF-8",
                repair="correct or remove it, or set data.on_bad_record to skip",
            ) from error
        if not isinstance(value, dict):
            raise DataError(
                f"{self.place}: this is a JSON {_kind(value)}, not an object",
                path=self.place,
                value=value,
                rule="each record is one JSON object, {…}",
                repair="correct or remove it, or set data.on_bad_record to skip",
            )
        return value


def _kind(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
