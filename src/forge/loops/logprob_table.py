"""The reference model's logprobs of answers, kept beside a run.

    RUN/reference/
      table.json               which model they are of, what data they cover, and how many parts there are
      part-00000.safetensors   keys, lengths and logprobs of some answers

An answer is found by its tokens: the key is a digest of the sample's token ids and of which of them are the answer's.
So nothing that changes the tokens, be it data, tokenizer or chat template, can be answered with other tokens'
logprobs. What the digest cannot know, the model's weights and precision, is the table's identity.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from forge.errors import CheckpointError, DataError
from forge.losses.preference import COMPLETION
from forge.types import Sample

_log = logging.getLogger("forge.preference")
_FORMAT: Final = 1
_KEY_BYTES: Final = 16
TABLE_NAME: Final = "table.json"


class LogprobTable:
    """Logprobs of answers by their tokens, in memory and in a folder.

    Args:
        folder: where it is kept.
        identity: what the logprobs are of: name → digest or value.
        is_writer: whether this process writes; of several ranks one does.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str], *, is_writer: bool = True) -> None:
        self._folder, self._identity, self._is_writer = folder, dict(identity), is_writer
        self._found: dict[bytes, Tensor] = {}
        self._new: list[tuple[bytes, Tensor]] = []
        self._num_parts = 0
        self._covered: str | None = None

    def __len__(self) -> int:
        return len(self._found)

    def load(self, *, is_resumed: bool) -> None:
        """Read what the folder holds of the same model.

        Of another model, a run that starts anew forgets it and says so. A run that resumes is refused: it would be
        compared with another reference than before.
        """
        state = self._read_state()
        if state is None:
            return
        changed = [name for name, value in self._identity.items() if state["identity"].get(name) != value]
        if changed and is_resumed:
            raise CheckpointError(
                "the reference model is not the one that this run was compared with",
                path=str(self._folder),
                value=", ".join(changed),
                rule="a run that resumes has the reference model that it started with",
                repair="give the model and the precision that the run started with, or start a new run",
            )
        if changed:
            _log.warning(
                "the reference's logprobs in %s are of another reference (%s): they are computed again",
                self._folder,
                ", ".join(changed),
            )
            return
        for number in range(state["num_parts"]):
            self._read_part(self._part(number))
        self._num_parts, self._covered = state["num_parts"], state["covered"]

    def covers(self, coverage: str) -> bool:
        """Return whether a whole pass over the data with this digest was completed."""
        return self._covered == coverage

    def find(self, sample: Sample) -> Tensor | None:
        """Return the logprobs of an answer's tokens, float32, in order; None where they are not known."""
        return self._found.get(sample_key(sample))

    def forget(self) -> None:
        """Forget everything; the next `write` begins anew."""
        self._found, self._new, self._num_parts, self._covered = {}, [], 0, None

    def add(self, sample: Sample, logprobs: Tensor) -> None:
        """Keep the logprobs of an answer's tokens. They are on disk after `write`."""
        key = sample_key(sample)
        self._found[key] = logprobs
        self._new.append((key, logprobs))

    @property
    def num_unwritten(self) -> int:
        """Logprobs that `write` would write."""
        return sum(len(logprobs) for _, logprobs in self._new)

    def write(self, *, coverage: str | None = None) -> None:
        """Write what is new, atomically; `coverage` says what data a pass over it has covered."""
        if coverage is not None:
            self._covered = coverage
        if not self._is_writer:
            self._new = []
            return
        if self._num_parts == 0:
            (self._folder / TABLE_NAME).unlink(missing_ok=True)  # first: what it names goes next
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._new:
            keys = torch.frombuffer(bytearray(b"".join(key for key, _ in self._new)), dtype=torch.uint8)
            tensors = {
                "keys": keys.view(-1, _KEY_BYTES),
                "lengths": torch.tensor([len(logprobs) for _, logprobs in self._new]),
                "logprobs": torch.cat([logprobs for _, logprobs in self._new]),
            }
            path = self._part(self._num_parts)
            save_file(tensors, f"{path}.tmp")
            _replace(Path(f"{path}.tmp"), path)
            self._num_parts, self._new = self._num_parts + 1, []
        state = {
            "format": _FORMAT,
            "identity": self._identity,
            "covered": self._covered,
            "num_parts": self._num_parts,
        }
        path = self._folder / f"{TABLE_NAME}.tmp"
        path.write_text(json.dumps(state, indent=1), encoding="utf-8")
        _replace(path, self._folder / TABLE_NAME)

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:05}.safetensors"

    def _read_state(self) -> dict[str, Any] | None:
        path = self._folder / TABLE_NAME
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise _unreadable(path, str(error)) from error
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise _unreadable(path, f"its format is not {_FORMAT}")
        return state

    def _read_part(self, path: Path) -> None:
        try:
            tensors = load_file(path)
            lengths = tensors["lengths"].tolist()
            parts = tensors["logprobs"].split(lengths)
            keys = tensors["keys"].numpy()
        except (OSError, KeyError, RuntimeError, SafetensorError) as error:
            raise _unreadable(path, str(error)) from error
        self._found.update((key.tobytes(), logprobs) for key, logprobs in zip(keys, parts, strict=True))


def sample_key(sample: Sample) -> bytes:
    """Return what an answer is found by."""
    digest = hashlib.blake2b(sample.token_ids.numpy().tobytes(), digest_size=_KEY_BYTES)
    digest.update((sample.fields[COMPLETION] != 0).numpy().tobytes())
    return digest.digest()


def _replace(temporary: Path, path: Path) -> None:
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def _unreadable(path: Path, why: str) -> DataError:
    return DataError(
        "the reference's logprobs cannot be read",
        path=str(path),
        value=why,
        rule="files as this release writes them",
        repair=f"delete {path.parent}: they are computed again when the run starts",
    )
