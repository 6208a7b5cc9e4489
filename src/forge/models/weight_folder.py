"""The safetensors files of a Hugging Face folder: checked against a model, and read in bounded pieces."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from forge.config.schema import ModelConfig
from forge.errors import ModelError
from forge.models.weight_names import HEAD, SCORE, WeightSlot, weight_map

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[slice, ...]
"""A range of indices for each dimension."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_WIDEST = 8
"""Bytes of the widest number that a file may hold."""
_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_HARMLESS = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one rank read: the number of pieces, their bytes in the files, and the bytes of the largest piece."""

    num_reads: int = 0
    num_bytes: int = 0
    largest_bytes: int = 0


class WeightFolder:
    """The safetensors files of a folder, open, with what each tensor is."""

    def __init__(self, folder: Path, config: ModelConfig, *, max_read_bytes: int) -> None:
        self.folder = Path(folder)
        self.config = config
        self.max_read_bytes = max_read_bytes
        self.report = LoadReport()
        self._stack = ExitStack()
        self._handles: dict[str, tuple[Path, Any]] = {}

    def __enter__(self) -> Self:
        try:
            for file in _files(self.folder):
                handle = self._stack.enter_context(_opened(file))
                self._handles.update((name, (file, handle)) for name in handle.keys())  # noqa: SIM118
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def has_fused(self, slot: WeightSlot) -> bool:
        return slot.fused is not None and slot.fused.hf_name in self._handles

    @property
    def has_needless_head(self) -> bool:
        """Whether there is an output layer that the model does not take, because it takes the embedding instead."""
        return bool(self.config.tie_embeddings) and self.config.head == "language" and HEAD in self._handles

    @property
    def lacks_score(self) -> bool:
        """Whether the model has a scalar head and the folder has none: it is that of a language model."""
        return self.config.head == "scalar" and SCORE not in self._handles

    def check(self, *, may_lack_score: bool = False) -> None:
        """Refuse a folder that does not hold exactly the tensors of the model."""
        expected: dict[str, tuple[int, ...]] = {}
        for slot in weight_map(self.config):
            if slot.fused is not None and self.has_fused(slot):
                expected[slot.fused.hf_name] = slot.fused.shape
            else:
                expected.update(dict.fromkeys(slot.hf_names, slot.hf_shape))
        if self.lacks_score and may_lack_score:
            del expected[SCORE]
        if self.has_needless_head or (self.lacks_score and HEAD in self._handles):
            expected[HEAD] = expected["model.embed_tokens.weight"]
        for name, shape in expected.items():
            self._check_tensor(name, shape)
        extra = [name for name in self._handles if name not in expected and not name.endswith(_HARMLESS)]
        if extra:
            raise ModelError(
                f"The folder holds {len(extra)} tensor(s) that the model has no place for; the first is {extra[0]}.",
                path=self._place(extra[0]),
                value=sorted(extra)[:8],
                rule="every tensor is taken, so that nothing that was trained is dropped in silence",
                repair="Check that the configuration is of this checkpoint. Quantized weights and adapters are not "
                "supported.",
            )

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._handles:
            raise ModelError(
                f"The folder has no tensor {name}.",
                path=f"{self.folder}:{name}",
                rule=f"it is there, with shape {shape}",
                repair="This is a language model; give the folder of a reward model or critic."
                if name == SCORE
                else "Check that the configuration is of this checkpoint (for lm_head.weight: tie_embeddings), and "
                "that all of its files were downloaded.",
            )
        part = self._handles[name][1].get_slice(name)
        if tuple(part.get_shape()) != shape:
            raise ModelError(
                f"The tensor {name} has another shape than the model's.",
                path=self._place(name),
                value=tuple(part.get_shape()),
                rule=f"its shape is {shape}",
                repair="Check that the configuration is of this checkpoint.",
            )
        if part.get_dtype() not in _DTYPES:
            raise ModelError(
                f"The tensor {name} has a dtype that weights are not read from.",
                path=self._place(name),
                value=part.get_dtype(),
                rule=f"one of {', '.join(sorted(_DTYPES))}",
                repair="Take the checkpoint that is not quantized.",
            )

    def _place(self, name: str) -> str:
        return f"{self._handles[name][0]}:{name}"

    def read(self, name: str, box: Box, *, into: Tensor) -> None:
        for where, piece in self._pieces(name, box):
            into[where].copy_(piece)

    def compare_head(self, name: str, box: Box) -> None:
        """Check that an output layer in a tied checkpoint is the embedding."""
        import torch

        if not self.has_needless_head:
            return
        heads = self._pieces(HEAD, box)
        for (_, piece), (_, head) in zip(self._pieces(name, box), heads, strict=True):
            if not torch.equal(piece, head):
                raise ModelError(
                    "The output layer is said to share the embedding's weights, but it has others in the folder.",
                    path=self._place(HEAD),
                    rule="with tie_embeddings, lm_head.weight is absent or equal to model.embed_tokens.weight",
                    repair="Set model.tie_embeddings to false, or remove lm_head.weight.",
                )

    def _pieces(self, name: str, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """Yield a box of a tensor in pieces along its first dimension that is not 1: its place in the box, and it."""
        from safetensors import SafetensorError

        file, handle = self._handles[name]
        source = handle.get_slice(name)
        extent = [part.stop - part.start for part in box]
        axis = next((dim for dim, size in enumerate(extent) if size != 1), 0)
        row_bytes = _WIDEST * math.prod(extent[:axis] + extent[axis + 1 :])
        step = max(1, self.max_read_bytes // max(1, row_bytes))
        for start in range(0, extent[axis], step):
            inside = [slice(0, size) for size in extent]
            inside[axis] = slice(start, min(start + step, extent[axis]))
            outside = tuple(
                slice(part.start + at.start, part.start + at.stop) for part, at in zip(box, inside, strict=True)
            )
            try:
                piece: Tensor = source[outside]
            except (OSError, SafetensorError) as error:
                raise _damaged(file, error) from error
            size = piece.numel() * piece.element_size()
            done = self.report
            self.report = LoadReport(done.num_reads + 1, done.num_bytes + size, max(done.largest_bytes, size))
            yield tuple(inside), piece


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> ModelError:
    return ModelError(
        "A file of weights cannot be read.",
        path=str(file),
        value=str(error),
        rule="it is a whole safetensors file",
        repair="Download it again.",
    )


def _files(folder: Path) -> list[Path]:
    """Return the files with the weights, found as transformers finds them: the single file, then the index."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return [single]
    if index.is_file():
        return [folder / name for name in indexed_files(index)]
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickled:
        repair = "Convert it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)."
    elif folder.is_dir():
        repair = "Download the model's weights, or leave model.path out for random ones."
    else:
        repair = "Give the folder of a downloaded model."
    raise ModelError(
        "There are no safetensors weights here.",
        path=str(folder),
        value=pickled or ("a folder without weights" if folder.is_dir() else "no folder"),
        rule=f"the folder holds {SINGLE_FILE} or {INDEX_FILE}",
        repair=repair,
    )


def indexed_files(index: Path) -> list[str]:
    """Return the names of the files that an index of weights names."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        whole = all(name == Path(name).name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _bad_index(index, repr(error)) from error
    if not whole or not names:
        raise _bad_index(index, names)
    return names


def _bad_index(index: Path, value: object) -> ModelError:
    return ModelError(
        "The index of the weights cannot be used.",
        path=str(index),
        value=value,
        rule="it is JSON with a weight_map from tensors to the names of files in the same folder",
        repair="Download it again.",
    )
