"""Weights into a model that may be spread over ranks: those of a Hugging Face folder, or random ones.

Each rank opens the files itself and reads only the rows and columns that its shards hold, a bounded piece at a time,
straight into the parameters. Nothing is gathered, no rank waits for another, and no second copy of the model exists.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from forge.config.schema import ModelConfig
from forge.errors import ModelError
from forge.models.weight_names import (
    EMBEDDING,
    HEAD,
    WeightSlot,
    plain_name,
    slots_by_name,
    unknown_parameter,
    weight_map,
    wrong_parameter,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

Box = tuple[slice, ...]
"""A range of indices for each dimension."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
READ_BYTES = 64 * 2**20
"""About the largest piece that is in memory between the file and the parameter."""
_WIDEST = 8
"""Bytes of the widest number that a file may hold."""
_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_HARMLESS = "rotary_emb.inv_freq"
_STD = 0.02
_OUTPUTS = (".wo.weight", ".w2.weight", ".w2_EDF")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one rank read: the number of pieces, their bytes in the files, and the bytes of the largest piece."""

    num_reads: int = 0
    num_bytes: int = 0
    largest_bytes: int = 0


def load_hf(
    parts: Sequence[nn.Module], folder: Path, config: ModelConfig, *, max_read_bytes: int = READ_BYTES
) -> LoadReport:
    """Fill the parameters of this rank's parts of a model from a Hugging Face folder, in place.

    `parts` is the whole model or this rank's pipeline stages; parameters are plain tensors or DTensors of any mesh,
    sharded or replicated, on any device but meta. They keep their dtype: numbers are converted on the way. Beside them
    there is never more than one piece of about `max_read_bytes` (one row, where that is larger).

    The folder is checked whole before anything is written, so every rank of a run refuses the same folder: a tensor
    that is missing, one too many, one of another shape or of a quantized dtype, or a file that is damaged raises
    `ModelError`. (One thing is seen only on the way, by ranks that hold it: an output layer that is said to be tied and
    is not.) Ranks do not wait for each other here.
    """
    import torch

    slots = slots_by_name(config)
    targets = [(name, parameter, _slot_of(name, parameter, slots)) for name, parameter in named_parameters(parts)]
    with _Folder(folder, config, max_read_bytes=max_read_bytes) as files, torch.no_grad():
        files.check()
        done: set[int] = set()
        for name, parameter, slot in targets:
            if id(parameter) not in done:
                done.add(id(parameter))
                _fill(name, parameter, slot, files=files)
        return files.report


def named_parameters(parts: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of some parts, each under every name that it has, without what wrappers insert.

    FSDP shows whole parameters between forward and backward, and what is written to them is lost; so parts are
    resharded first.
    """
    from torch.distributed.fsdp import FSDPModule

    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    return [
        (plain_name(name), parameter)
        for part in parts
        for name, parameter in part.named_parameters(remove_duplicate=False)
    ]


def shard_range(size: int, splits: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the first index and the end of a part of `size` indices after splits, each (number of chunks, which).

    Chunks are those of `torch.chunk`: all of one size, but the last ones may be smaller or empty.
    """
    start, end = 0, size
    for num_chunks, chunk in splits:
        step = -(-(end - start) // num_chunks)
        start, end = min(start + step * chunk, end), min(start + step * (chunk + 1), end)
    return start, end


def local_box(tensor: Tensor) -> Box:
    """Return which part of the whole tensor this rank holds; DTensors are split as `full_tensor()` joins them."""
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    splits: dict[int, list[tuple[int, int]]] = {}
    if isinstance(tensor, DTensor):
        spec, mesh = tensor._spec, tensor.device_mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return tuple(slice(0, 0) for _ in tensor.shape)
        order = spec.shard_order
        if order is None:  # strided shards, which FSDP makes of what is already split further right in the mesh
            order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(spec.placements, mesh)
        if order is None or any(isinstance(placement, Partial) for placement in spec.placements):
            raise ModelError(
                "A parameter is laid out over ranks in a way that weights cannot be read for.",
                value=str(spec.placements),
                rule="every placement is Replicate, Shard, or what FSDP makes of a Shard",
                repair="Lay it out with FSDP, tensor or expert parallelism.",
            )
        for entry in order:
            splits[entry.tensor_dim] = [(mesh.size(dim), coordinate[dim]) for dim in entry.mesh_dims]
    return tuple(slice(*shard_range(size, splits.get(dim, ()))) for dim, size in enumerate(tensor.shape))


def draw_weights(parts: Sequence[nn.Module], *, num_layers: int, seed: int) -> None:
    """Fill the parameters of this rank's parts as a new model's.

    Norms are 1, biases 0, and the rest comes from a normal distribution.

    Each parameter has a generator of its own, made from the seed and its name, and is sampled whole before this
    rank's shard is taken. So every layout on one kind of device starts with the same model.
    """
    import torch
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        for name, parameter in named_parameters(parts):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if parameter.ndim == 1:
                local.fill_(0.0 if name.endswith(".bias") else 1.0)
                continue
            std = _STD / (2 * num_layers) ** 0.5 if name.endswith(_OUTPUTS) else _STD
            local.copy_(_draw(name, parameter, std=std, seed=seed)[local_box(parameter)])


def _draw(name: str, parameter: Tensor, *, std: float, seed: int) -> Tensor:
    import torch

    name = EMBEDDING if name == HEAD else name  # one parameter where they are tied
    generator = torch.Generator(parameter.device).manual_seed((seed << 32) ^ zlib.crc32(name.encode()))
    shape = tuple(parameter.shape)
    return torch.empty(shape, device=parameter.device).normal_(0.0, std, generator=generator)


def _slot_of(name: str, parameter: Tensor, slots: Mapping[str, WeightSlot]) -> WeightSlot:
    if name not in slots:
        raise unknown_parameter(name)
    if tuple(parameter.shape) != slots[name].shape:
        raise wrong_parameter(name, tuple(parameter.shape), slots[name])
    if parameter.is_meta:
        raise ModelError(
            "A parameter has no memory to load weights into.",
            path=name,
            value="device meta",
            rule="parameters are on a real device",
            repair="Call to_empty(device=...) on the model first.",
        )
    return slots[name]


def _fill(name: str, parameter: Tensor, slot: WeightSlot, *, files: _Folder) -> None:
    from torch.distributed.tensor import DTensor

    box = local_box(parameter)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
    extent = tuple(part.stop - part.start for part in box)
    if 0 in extent and local.numel() == 0:
        return
    if tuple(local.shape) != extent:
        raise ModelError(
            "A rank does not hold the part of a parameter that its layout says.",
            path=name,
            value=tuple(local.shape),
            rule=f"it holds {extent} of {slot.shape}",
            repair="Load the weights before anything else is done to the parameters.",
        )
    for hf_name, where, into in _sources(slot, box, local, fused=files.has_fused(slot)):
        files.read(hf_name, where, into=into)
    if slot.name == EMBEDDING:
        files.compare_head(slot.hf_names[0], box)


def _sources(slot: WeightSlot, box: Box, local: Tensor, *, fused: bool) -> Iterator[tuple[str, Box, Tensor]]:
    """Yield the pieces of a shard: the tensor in the files, the box of it, and the part of the shard that it fills."""
    if slot.fused is None:
        yield slot.hf_names[0], box, local
        return
    experts, rows, columns = box
    first = slot.fused.first_row
    for at, expert in enumerate(range(experts.start, experts.stop)):
        if fused:
            where = (slice(expert, expert + 1), slice(first + rows.start, first + rows.stop), columns)
            yield slot.fused.hf_name, where, local[at : at + 1]
        else:
            yield slot.hf_names[expert], (rows, columns), local[at]


class _Folder:
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
        return bool(self.config.tie_embeddings) and HEAD in self._handles

    def check(self) -> None:
        """Refuse a folder that does not hold exactly the tensors of the model."""
        expected: dict[str, tuple[int, ...]] = {}
        for slot in weight_map(self.config):
            if slot.fused is not None and self.has_fused(slot):
                expected[slot.fused.hf_name] = slot.fused.shape
            else:
                expected.update(dict.fromkeys(slot.hf_names, slot.hf_shape))
        if self.has_needless_head:
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
                repair="Check that the configuration is of this checkpoint (for lm_head.weight: tie_embeddings), and "
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
