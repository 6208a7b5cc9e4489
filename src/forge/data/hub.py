"""Hugging Face datasets: from the hub, through its cache, or from a folder that `datasets` saved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge.config import SourceConfig
from forge.data.records import Mark, Record
from forge.errors import DataError

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
