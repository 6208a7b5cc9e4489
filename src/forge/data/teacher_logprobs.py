"""A teacher's top-k logprobs on disk, by sample: what off-policy distillation learns from.

A store is a folder with `teacher.json` and shards in the format safetensors. For every token that counts in the loss of
a sample, a shard holds the teacher's k likeliest tokens at its place (`ids`, int32 [tokens, k]) and their logprobs
(`logprobs`, [tokens, k]), the likeliest first. A sample is known by a digest of its tokens and of which of them count
(`keys`), so the order, the epochs and the packing of the data do not matter, and a sample that has changed since is
found to be missing instead of being taught something else.

A shard is there once it is listed in `teacher.json`, which is replaced atomically. So storing can be stopped at any
time and continued: samples that are there already are not asked for again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from forge.errors import DataError
from forge.types import Sample

if TYPE_CHECKING:
    from torch import Tensor

StoredDtype = Literal["float32", "float16"]
FILE_NAME: Final = "teacher.json"
FORMAT: Final = "forge-teacher-logprobs-1"
SHARD_TOKENS: Final = 1 << 18
_KEY_BYTES: Final = 16


def sample_key(sample: Sample) -> bytes:
    """Return what a sample is known by: its tokens, and which of them count."""
    import torch

    counted = (sample.loss_weights != 0).to(torch.uint8)
    found = hashlib.blake2b(sample.token_ids.to(torch.int64).numpy().tobytes(), digest_size=_KEY_BYTES)
    found.update(counted.numpy().tobytes())
    return found.digest()


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a store: `digest` is that of its content."""

    file: str
    digest: str
    num_samples: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What `teacher.json` says of a store.

    Attributes:
        k: tokens for each place.
        dtype: what logprobs are kept in.
        teacher: the model that they come from, for messages.
        tokenizer_digest: of the vocabulary (`forge.models.vocabulary`), the teacher's and the student's.
        shards: the files.
        is_complete: whether all samples of the data were stored.
    """

    k: int
    dtype: StoredDtype
    teacher: str
    tokenizer_digest: str
    shards: tuple[Shard, ...] = ()
    is_complete: bool = False

    @property
    def num_samples(self) -> int:
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)


def read_facts(folder: Path) -> StoreFacts | None:
    """Return what a store holds; None where there is none."""
    file = folder / FILE_NAME
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.pop("format", None) != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        return StoreFacts(**{**content, "shards": tuple(Shard(**each) for each in content["shards"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            "the stored logprobs of a teacher cannot be read",
            path=str(file),
            value=str(error),
            rule=f"a file that `forge distill` wrote, of the format {FORMAT}",
            repair="remove the folder, and run `forge distill` again",
        ) from None


class LogprobWriter:
    """Writes a store, shard by shard. `facts` must be those of what is already in the folder, if anything is."""

    def __init__(self, folder: Path, facts: StoreFacts, *, shard_tokens: int = SHARD_TOKENS) -> None:
        self._folder, self._shard_tokens = folder, shard_tokens
        self._facts = _continued(folder, facts)
        self._known = set(LogprobStore(folder, self._facts).keys()) if self._facts.shards else set()
        self._waiting: list[tuple[bytes, Tensor, Tensor]] = []
        self._num_waiting = 0

    @property
    def facts(self) -> StoreFacts:
        return self._facts

    def has(self, key: bytes) -> bool:
        """Whether a sample is stored, or about to be."""
        return key in self._known

    def add(self, key: bytes, logprobs: Tensor, ids: Tensor) -> None:
        """Take in the teacher's tokens at the places of a sample that count: [C, k] both."""
        shape = (int(logprobs.shape[0]), self._facts.k)
        if tuple(logprobs.shape) != shape or tuple(ids.shape) != shape:
            raise DataError(
                "the teacher did not give k tokens for every place",
                path="teacher",
                value=(tuple(logprobs.shape), tuple(ids.shape)),
                rule=f"{shape} both",
                repair="ask for fewer tokens (distillation.top_k)",
            )
        if not bool(logprobs.isfinite().all()):
            raise DataError(
                "a logprob of the teacher is not finite",
                path="teacher",
                value=float(logprobs[~logprobs.isfinite()][0]),
                rule="k tokens for every place, each with a finite logprob",
                repair="check the teacher's weights; for -inf, ask for fewer tokens (distillation.top_k)",
            )
        self._known.add(key)
        self._waiting.append((key, logprobs, ids))
        self._num_waiting += shape[0]
        if self._num_waiting >= self._shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting as a shard."""
        if not self._waiting:
            return
        import numpy as np
        import torch
        from safetensors.torch import save

        keys = np.frombuffer(b"".join(key for key, _, _ in self._waiting), dtype=np.uint8).reshape(-1, _KEY_BYTES)
        lengths = [0, *(len(each) for _, each, _ in self._waiting)]
        content = save(
            {
                "keys": torch.from_numpy(keys.copy()),
                "offsets": torch.tensor(lengths).cumsum(0),
                "ids": torch.cat([each for _, _, each in self._waiting]).to(torch.int32),
                "logprobs": torch.cat([each for _, each, _ in self._waiting]).to(getattr(torch, self._facts.dtype)),
            }
        )
        name = f"logprobs-{len(self._facts.shards):05d}.safetensors"
        _write(self._folder / name, content)
        shard = Shard(name, _digest(content), len(self._waiting), self._num_waiting)
        self._note(replace(self._facts, shards=(*self._facts.shards, shard)))
        self._waiting, self._num_waiting = [], 0

    def finish(self) -> StoreFacts:
        """Write the last shard, and note that the store is complete."""
        self.flush()
        self._note(replace(self._facts, is_complete=True))
        return self._facts

    def _note(self, facts: StoreFacts) -> None:
        content = {"format": FORMAT, **asdict(facts)}
        _write(self._folder / FILE_NAME, json.dumps(content, indent=1).encode())
        self._facts = facts


def _continued(folder: Path, facts: StoreFacts) -> StoreFacts:
    """Return the facts of what is in the folder, which must fit; those given where there is nothing."""
    present = read_facts(folder)
    if present is None:
        return facts
    for key in ("k", "dtype", "teacher", "tokenizer_digest"):
        if getattr(present, key) != getattr(facts, key):
            raise DataError(
                f"the folder holds logprobs with another {key}",
                path=str(folder),
                value=getattr(present, key),
                rule=f"{key} is {getattr(facts, key)!r}, to add to them",
                repair="choose another folder (distillation.store), or remove this one",
            )
    return replace(present, is_complete=False)


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    with open(temporary, "wb") as target:
        target.write(content)
        target.flush()
        os.fsync(target.fileno())
    os.replace(temporary, file)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class LogprobStore:
    """Reads a store. Any thread may ask; tensors are read from memory-mapped files as they are needed."""

    def __init__(self, folder: Path, facts: StoreFacts) -> None:
        self._folder, self.facts = folder, facts
        self._places: dict[bytes, tuple[int, int, int]] = {}
        self._shards: list[Mapping[str, Tensor]] = []
        for number, shard in enumerate(facts.shards):
            tensors = self._open(shard)
            self._shards.append(tensors)
            offsets = tensors["offsets"].tolist()
            for row, key in enumerate(tensors["keys"].numpy()):
                self._places[key.tobytes()] = (number, offsets[row], offsets[row + 1])

    def _open(self, shard: Shard) -> Mapping[str, Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        file = self._folder / shard.file
        try:
            tensors: dict[str, Tensor] = load_file(file)
            return tensors
        except (OSError, SafetensorError) as error:
            raise self._damaged(file, str(error)) from None

    def verify(self) -> None:
        """Read every file, and refuse one whose content is not what was written."""
        for shard in self.facts.shards:
            file = self._folder / shard.file
            if _digest(file.read_bytes()) != shard.digest:
                raise self._damaged(file, "its digest is another")

    def _damaged(self, file: Path, why: str) -> DataError:
        return DataError(
            "a file of the stored logprobs cannot be used",
            path=str(file),
            value=why,
            rule=f"the file that {FILE_NAME} names",
            repair="remove the folder, and run `forge distill` again",
        )

    def keys(self) -> Iterator[bytes]:
        """Yield what the samples are known by."""
        yield from self._places

    def find(self, sample: Sample, *, top_k: int) -> tuple[Tensor, Tensor]:
        """Return the teacher's logprobs and ids at every token of a sample, [L, top_k] both; 0 where none counts."""
        import torch

        place = self._places.get(sample_key(sample))
        if place is None:
            raise DataError(
                f"{sample.identity or 'a sample'} has no stored logprobs",
                path=sample.identity or "a sample",
                value=f"{len(sample)} tokens",
                rule=f"in {self._folder}: the same tokens, with the same tokens counted, as when they were stored",
                repair="run `forge distill` again with this configuration; it adds what is missing",
            )
        number, start, end = place
        shard, counted = self._shards[number], sample.loss_weights != 0
        logprobs = torch.zeros(len(sample), top_k)
        ids = torch.zeros(len(sample), top_k, dtype=torch.int64)
        logprobs[counted] = shard["logprobs"][start:end, :top_k].float()
        ids[counted] = shard["ids"][start:end, :top_k].to(torch.int64)
        return logprobs, ids


def taught_sample(sample: Sample, store: LogprobStore, *, top_k: int, names: Sequence[str]) -> Sample:
    """Return a sample with the teacher's ids and logprobs as fields of the two names."""
    logprobs, ids = store.find(sample, top_k=top_k)
    fields: dict[str, Any] = {**sample.fields, names[0]: ids, names[1]: logprobs}
    return replace(sample, fields=fields)
