"""Where records come from: files on disk and Hugging Face datasets, indexed for random access or as a stream."""

from __future__ import annotations

import bisect
import glob
import hashlib
import itertools
import json
import os
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from forge.config import SourceConfig
from forge.data.files import RULE, SUFFIXES, Mark, Record, digest_of, read_file, suffix_of
from forge.errors import DataError


class IndexedSource(Protocol):
    """Records by number. `digest` tells whether they are still the same ones."""

    name: str
    digest: str

    def __len__(self) -> int: ...

    def read(self, index: int) -> Record: ...


class StreamSource(Protocol):
    """Records in order, from a mark on. The record of the mark is the first."""

    name: str
    digest: str

    def records(self, mark: Mark | None) -> Iterator[tuple[Mark, Record]]: ...


def open_indexed(config: SourceConfig, *, wanted: frozenset[str]) -> IndexedSource:
    """A source whose records can be read in any order. Files are read once now, to find where each record begins."""
    if config.path is None or is_saved_dataset(Path(config.path)):
        source: IndexedSource = DatasetRows(load_rows(config, streaming=False), name=_name_of(config))
    else:
        source = IndexedFiles(find_files(config.path), name=config.path, wanted=wanted)
    if not len(source):
        raise _no_records(source.name)
    return source


def open_stream(config: SourceConfig, *, wanted: frozenset[str]) -> StreamSource:
    """A source that is read from front to back. Nothing is read now but the two ends of each file."""
    if config.path is None or is_saved_dataset(Path(config.path)):
        return DatasetStream(load_rows(config, streaming=True), config=config, name=_name_of(config))
    return FileStream(find_files(config.path), name=config.path, wanted=wanted)


def find_files(path: str) -> list[Path]:
    """The files that a path names: itself, those in the folder (not below it), or those that match the pattern."""
    place = Path(path)
    if place.is_file():
        found = [place]
    elif place.is_dir():
        found = [file for file in place.iterdir() if suffix_of(file) and file.is_file() and file.name[0] not in "._"]
    else:
        found = [Path(name) for name in glob.glob(path, recursive=True) if os.path.isfile(name)]
    if not found:
        raise DataError(
            f"there is no data at {path}",
            path=path,
            rule=f"a path names a file, a folder with files, or a pattern that matches files; {RULE}",
            repair="correct the path; a relative one starts at the working directory",
        )
    for file in found:
        if suffix_of(file) is None:
            raise DataError(
                f"{file} is not a kind of file that can be read",
                path=str(file),
                rule=RULE,
                repair="rename or convert it, or write a pattern that leaves it out",
            )
    return sorted(found)


class IndexedFiles:
    """The records of some files, found by byte offset: 16 bytes of memory for each record, and 8 for odd lines.

    What cannot be read from the middle (gzip, Parquet) is unpacked once into a temporary file without a name, which
    takes disk and not memory, and is gone when the process ends, however it ends.
    """

    def __init__(self, paths: Sequence[Path], *, name: str, wanted: frozenset[str]) -> None:
        self.name = name
        self._paths = list(paths)
        self._starts, self._sizes, self._lines = array("q"), array("q"), array("q")
        self._ends: list[int] = []
        self._spooled = [suffix_of(path) in (".parquet", ".jsonl.gz", ".json.gz") for path in self._paths]
        self._spool: Any = None
        if any(self._spooled):
            self._spool = tempfile.TemporaryFile(prefix="forge-data-")  # noqa: SIM115 — it is read as long as this lives
        digest = hashlib.blake2b(digest_size=16)
        for path, spooled in zip(self._paths, self._spooled, strict=True):
            self._add(path, spooled=spooled, wanted=wanted)
            digest.update(digest_of(path, whole=True).encode())
        if self._spool is not None:
            self._spool.flush()
        if len(self._paths) == 1 and self._lines == array("q", range(1, len(self._lines) + 1)):
            self._lines = array("q")
        self.digest = digest.hexdigest()

    def _add(self, path: Path, *, spooled: bool, wanted: frozenset[str]) -> None:
        for offset, line, raw in read_file(path, wanted=wanted):
            text = raw if isinstance(raw, bytes) else json.dumps(raw, default=_odd_value).encode()
            if spooled:
                offset = self._spool.tell()
                self._spool.write(text)
            self._starts.append(offset)
            self._sizes.append(len(text))
            self._lines.append(line)
        self._ends.append(len(self._starts))

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, index: int) -> Record:
        """One record. Any thread may ask."""
        number = bisect.bisect_right(self._ends, index)
        start, size = self._starts[index], self._sizes[index]
        if self._spooled[number]:
            raw = os.pread(self._spool.fileno(), size, start)
        else:
            with self._paths[number].open("rb", buffering=0) as file:
                raw = os.pread(file.fileno(), size, start)
        line = self._lines[index] if self._lines else index + 1
        return Record(f"{self._paths[number]}:{line}", raw)


class FileStream:
    """The records of some files, one file after another."""

    def __init__(self, paths: Sequence[Path], *, name: str, wanted: frozenset[str]) -> None:
        self.name = name
        self._paths = list(paths)
        self._wanted = wanted
        ends = "".join(digest_of(path, whole=False) for path in self._paths)
        self.digest = hashlib.blake2b(ends.encode(), digest_size=16).hexdigest()

    def records(self, mark: Mark | None) -> Iterator[tuple[Mark, Record]]:
        """The records from the mark on, each with its own mark."""
        ordinal, first, offset, line = mark or (0, 0, 0, 0)
        count = itertools.count(ordinal)
        for number in range(first, len(self._paths)):
            path = self._paths[number]
            for found in read_file(path, wanted=self._wanted, offset=offset, line=line):
                raw = found.raw if isinstance(found.raw, bytes) else _plain(found.raw)
                yield (next(count), number, found.offset, found.line), Record(f"{path}:{found.line}", raw)
            offset = line = 0


def _plain(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row as indexing would give it again, so that streaming accepts and refuses the same records."""
    value: Mapping[str, Any] = json.loads(json.dumps(row, default=_odd_value))
    return value


def _odd_value(value: object) -> Mapping[str, str]:
    """Return what stands for a value that is not text, a number or a list; a format that needs it refuses it."""
    return {"unreadable": type(value).__name__}


def _name_of(config: SourceConfig) -> str:
    return config.path or str(config.hf_dataset)


def _no_records(name: str) -> DataError:
    return DataError(
        f"there are no records in {name}",
        path=name,
        rule=f"a source has at least one record; its files end in {', '.join(SUFFIXES)}",
        repair="correct the path, or remove the source",
    )


_PROBES = 16


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def load_rows(config: SourceConfig, *, streaming: bool) -> Any:
    """The rows of one split, as `datasets` gives them."""
    import datasets

    name = config.path or str(config.hf_dataset)
    try:
        if config.path is not None:
            rows = datasets.load_from_disk(config.path)
        else:
            rows = datasets.load_dataset(name, config.hf_config, split=config.split, streaming=streaming)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"the dataset {name} cannot be loaded: {error}",
            path=name,
            value={"hf_config": config.hf_config, "split": config.split},
            rule="a dataset, its configuration and its split exist and can be reached",
            repair="correct the three names; without a network, download it first or give a path",
        ) from error
    if isinstance(rows, dict):
        if config.split not in rows:
            raise DataError(
                f"the dataset {name} has no split {config.split!r}",
                path=name,
                value=config.split,
                rule=f"the split is one of {', '.join(sorted(rows))}",
                repair="correct `split`",
            )
        rows = rows[config.split]
    return rows


class DatasetRows:
    """A dataset by row number. The digest is of its length, its columns and rows spread over it."""

    def __init__(self, rows: Any, *, name: str) -> None:
        self.name = name
        self._rows = rows
        picks = sorted({index * (len(rows) - 1) // (_PROBES - 1) for index in range(_PROBES)}) if len(rows) else []
        text = json.dumps([len(rows), rows.column_names, [rows[pick] for pick in picks]], default=str)
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Record:
        """One row."""
        return Record(f"{self.name}:{index}", self._rows[index])


class DatasetStream:
    """A dataset from front to back. Its digest is of its names and columns: a stream shows no more."""

    def __init__(self, rows: Any, *, config: SourceConfig, name: str) -> None:
        self.name = name
        self._rows = rows
        text = json.dumps([name, config.hf_config, config.split, rows.column_names], default=str)
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def records(self, mark: Mark | None) -> Iterator[tuple[Mark, Record]]:
        """The rows from the mark on."""
        start = mark[0] if mark else 0
        for index, row in enumerate(self._rows.skip(start) if start else self._rows, start=start):
            yield (index, 0, index, index), Record(f"{self.name}:{index}", row)
