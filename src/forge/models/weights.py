"""Weights into a model that may be spread over ranks: those of a Hugging Face folder, or random ones.

Each rank opens the files itself and reads only the rows and columns that its shards hold, a bounded piece at a time,
straight into the parameters. Nothing is gathered, no rank waits for another, and no second copy of the model exists.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forge.config.schema import ModelConfig
from forge.errors import ModelError
from forge.models.adapter_names import is_adapter
from forge.models.weight_folder import Box, LoadReport, WeightFolder
from forge.models.weight_names import (
    EMBEDDING,
    HEAD,
    SCORE,
    WeightSlot,
    plain_name,
    slots_by_name,
    unknown_parameter,
    wrong_parameter,
)
from forge.observe.phases import phase

if TYPE_CHECKING:
    from torch import Tensor, nn

READ_BYTES = 64 * 2**20
"""About the largest piece that is in memory between the file and the parameter."""
_STD = 0.02
_OUTPUTS = (".wo.weight", ".w2.weight", ".w2_EDF")


def load_hf(
    parts: Sequence[nn.Module],
    folder: Path,
    config: ModelConfig,
    *,
    seed: int | None = None,
    max_read_bytes: int = READ_BYTES,
) -> LoadReport:
    """Fill the parameters of this rank's parts of a model from a Hugging Face folder, in place.

    `parts` is the whole model or this rank's pipeline stages; parameters are plain tensors or DTensors of any mesh,
    sharded or replicated, on any device but meta. They keep their dtype: numbers are converted on the way. Beside them
    there is never more than one piece of about `max_read_bytes` (one row, where that is larger). Weights that are kept
    in few bits are quantised one after the other, each of them whole in host memory for that time.

    The folder is checked whole before anything is written, so every rank of a run refuses the same folder: a tensor
    that is missing, one too many, one of another shape or of a quantized dtype, or a file that is damaged raises
    `ModelError`. (One thing is seen only on the way, by ranks that hold it: an output layer that is said to be tied and
    is not.) Ranks do not wait for each other here.

    With `model.head: scalar` the folder may also be that of a language model: its output layer is left out, and the
    scalar head is initialised from `seed`, equally for every layout. Without a seed such a folder is refused.
    """
    import torch

    from forge.models.quantized import quantized_weights

    slots = slots_by_name(config)
    targets = [(name, parameter, _slot_of(name, parameter, slots)) for name, parameter in _base_parameters(parts)]
    with (
        phase("loading weights", total=_local_bytes([each for _, each, _ in targets]), unit="B") as progress,
        WeightFolder(folder, config, max_read_bytes=max_read_bytes) as files,
        torch.no_grad(),
    ):
        files.check(may_lack_score=seed is not None)
        done: set[int] = set()
        for name, parameter, slot in targets:
            if id(parameter) not in done:
                done.add(id(parameter))
                if seed is not None and files.lacks_score and slot.hf_names == (SCORE,):
                    initialise(SCORE, parameter, seed=seed, std=_STD)
                else:
                    _fill(name, parameter, slot, files=files)
                progress.advance(_local_bytes([parameter]))
        for name, weight in quantized_weights(parts).items():
            whole = torch.empty(weight.shape, dtype=torch.float32)
            _fill(name, whole, slots[name], files=files)
            weight.store(whole)
        return files.report


def _local_bytes(parameters: Sequence[nn.Parameter]) -> int:
    """Return the bytes of what this rank holds of some parameters, each counted once."""
    from torch.distributed.tensor import DTensor

    once = {id(each): each for each in parameters}.values()
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in once)


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
    """Fill the parameters of this rank's parts as a new model's: norms 1, biases 0, the rest normally distributed.

    Each parameter has a generator of its own, made from the seed and its name, and is sampled whole before this
    rank's shard is taken. So every layout on one kind of device starts with the same model.
    """
    import torch
    from torch.distributed.tensor import DTensor

    from forge.models.quantized import quantized_weights

    with phase("initialising weights"), torch.no_grad():
        for name, parameter in _base_parameters(parts):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if parameter.ndim == 1:
                local.fill_(0.0 if name.endswith(".bias") else 1.0)
                continue
            if name == HEAD:
                name = SCORE if parameter.shape[0] == 1 else EMBEDDING  # one parameter where they are tied
            initialise(name, parameter, seed=seed, std=_std(name, num_layers))
        for name, weight in quantized_weights(parts).items():
            whole = torch.empty(weight.shape, dtype=torch.float32)
            initialise(name, whole, seed=seed, std=_std(name, num_layers))
            weight.store(whole)


def _std(name: str, num_layers: int) -> float:
    return _STD / (2 * num_layers) ** 0.5 if name.endswith(_OUTPUTS) else _STD


def initialise(name: str, parameter: Tensor, *, seed: int, std: float | None = None, bound: float = 0.0) -> None:
    """Fill a parameter from a normal distribution, or uniformly up to `bound`.

    The generator is made from the seed and the name; the whole is sampled, and this rank's shard is taken.
    """
    import torch
    from torch.distributed.tensor import DTensor

    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    generator = torch.Generator(parameter.device).manual_seed((seed << 32) ^ zlib.crc32(name.encode()))
    whole = torch.empty(tuple(parameter.shape), device=parameter.device)
    whole.uniform_(-bound, bound, generator=generator) if std is None else whole.normal_(0.0, std, generator=generator)
    local.copy_(whole[local_box(parameter)])


def _base_parameters(parts: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in named_parameters(parts) if not is_adapter(name)]


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


def _fill(name: str, parameter: Tensor, slot: WeightSlot, *, files: WeightFolder) -> None:
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
