"""Reading files of records: JSON lines, JSON arrays, both under gzip, and Parquet.

One function, `read_file`, goes through any of them in order and can start in the middle, at an offset that it gave
before. Indexing and streaming are both built on it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

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


SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
RULE = "a file ends in .jsonl, .json, .jsonl.gz, .json.gz or .parquet"

_CHUNK = 1 << 20
_ENDS = 1 << 16
_BOM = b"\xef\xbb\xbf"
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("?)|[\[\]{},]', re.DOTALL)


class Located(NamedTuple):
    """A record with the place from which `read_file` can start again: a byte offset, or a row of Parquet."""

    offset: int
    line: int
    raw: bytes | Mapping[str, Any]


def suffix_of(path: Path) -> str | None:
    """Which of the known suffixes a file has; None for another kind of file."""
    return next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if path.name.endswith(suffix)), None)


def read_file(
    path: Path, *, wanted: frozenset[str], offset: int = 0, line: int = 0, chunk_size: int = _CHUNK
) -> Iterator[Located]:
    """The records of a file in order, from the one at `offset` and `line` on, or from the first.

    `wanted` names the columns of Parquet that are read; `chunk_size` is how much of an array is looked at once. A file
    that cannot be read as what its name says is a DataError; a broken record inside a file of lines is not, because
    it has not been parsed yet.
    """
    suffix = suffix_of(path)
    if suffix is None:
        raise DataError(
            f"{path} is not a kind of file that can be read", path=str(path), rule=RULE, repair="rename or convert it"
        )
    try:
        if suffix == ".parquet":
            yield from _parquet_rows(path, wanted=wanted, start=offset)
            return
        with _open(path, compressed=suffix.endswith(".gz")) as file:
            if suffix.startswith(".jsonl") or not _is_array(file):
                yield from _lines(file, offset=offset, line=line or 1)
            else:
                yield from _elements(file, name=str(path), offset=offset, line=line or 1, chunk_size=chunk_size)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read: {error}",
            path=str(path),
            rule=RULE,
            repair="check that the file is whole and that you may read it",
        ) from error


def digest_of(path: Path, *, whole: bool) -> str:
    """What a file holds, as a short text: of all its bytes, or of its size and its two ends."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(f"{size}:".encode())
        if whole:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        else:
            digest.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()


def _open(path: Path, *, compressed: bool) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if compressed else path.open("rb")


def _is_array(file: IO[bytes]) -> bool:
    """Whether the first byte that counts is `[`; otherwise a .json file is taken as one of lines."""
    head = file.read(len(_BOM)).removeprefix(_BOM).lstrip()
    while not head and (more := file.read(4096)):
        head = more.lstrip()
    return head.startswith(b"[")


def _lines(file: IO[bytes], *, offset: int, line: int) -> Iterator[Located]:
    file.seek(offset)
    for number, text in enumerate(file, start=line):
        if not text.isspace():
            yield Located(offset, number, text)
        offset += len(text)


def _elements(file: IO[bytes], *, name: str, offset: int, line: int, chunk_size: int) -> Iterator[Located]:
    """The elements of an array, found by their brackets and commas, without parsing and a chunk at a time."""
    file.seek(offset)
    depth = 1 if offset else 0
    window, begin, scan = b"", 0, 0
    while True:
        token = _TOKEN.search(window, scan)
        if token is None or token[1] == b"":
            scan = (len(window) if token is None else token.start()) - begin
            chunk = file.read(chunk_size)
            if not chunk:
                raise _not_an_array(name, line, "the array that continues here is not closed")
            window, offset, begin = window[begin:] + chunk, offset + begin, 0
            continue
        scan = token.end()
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(token[0], 0)
        if depth > 1 or (depth == 1 and token[0] not in (b",", b"[")):
            continue
        if token[0] != b"[":
            text = window[begin : token.start()]
            body = text.lstrip()
            lead = len(text) - len(body)
            if body:
                yield Located(offset + begin + lead, line + text.count(b"\n", 0, lead), body.rstrip())
            elif token[0] == b",":
                raise _not_an_array(name, line + text.count(b"\n"), "there is a comma without an element before it")
        line += window.count(b"\n", begin, scan)
        begin = scan
        if depth == 0:
            break
    if window[begin:].strip() or file.read().strip():
        raise _not_an_array(name, line, "something follows the array")


def _not_an_array(name: str, line: int, what: str) -> DataError:
    return DataError(
        f"{name}:{line}: {what}",
        path=f"{name}:{line}",
        rule="a .json file is one array of objects, or has one object on each line",
        repair="correct the file",
    )


def _parquet_rows(path: Path, *, wanted: frozenset[str], start: int) -> Iterator[Located]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in wanted]
            if not columns:
                raise DataError(
                    f"{path} has no column that a format knows",
                    path=str(path),
                    value=list(file.schema_arrow.names),
                    rule=f"at least one column is among {', '.join(sorted(wanted))}",
                    repair="name its columns with `columns`, such as {prompt: question, response: answer}",
                )
            row = 0
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                if row + num_rows <= start:
                    row += num_rows
                    continue
                for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=columns):
                    for value in batch.to_pylist():
                        if row >= start:
                            yield Located(row, row, value)
                        row += 1
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path} cannot be read as Parquet: {error}",
            path=str(path),
            rule="a .parquet file is a whole Parquet file",
            repair="check that the file is whole",
        ) from error
