"""Weights of a model that may be spread over ranks, out into a Hugging Face folder.

One parameter after the other is put together and written to its place in its file, so that no rank holds more than its
own shards and one whole parameter. Files are written beside the folder and appear in it all at once.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from forge.config.schema import ModelConfig
from forge.errors import CheckpointError, ForgeError, ModelError
from forge.models.adapter_names import AdapterSpec, adapter_slots, is_adapter
from forge.models.weight_folder import INDEX_FILE, SINGLE_FILE
from forge.models.weight_names import WeightSlot, slots_by_name, split, unknown_parameter, weight_map, wrong_parameter
from forge.models.weights import named_parameters

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from forge.models.quantized import QuantizedWeight

MAX_SHARD_BYTES = 5 * 10**9
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_CODES = {"torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of Hugging Face's: which rank writes it, and as what."""

    hf_name: str
    dtype: str
    shape: tuple[int, ...]
    writer: int

    @property
    def num_bytes(self) -> int:
        size = _ITEM_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file: which rank writes it, and its tensors in the order in which they arrive there."""

    name: str
    writer: int
    tensors: tuple[TensorPlan, ...]

    def offsets(self) -> dict[str, tuple[int, int]]:
        """Return the first byte and the end of each tensor. Wider dtypes come first, so every tensor is aligned."""
        ends: dict[str, tuple[int, int]] = {}
        at = 0
        for tensor in sorted(self.tensors, key=lambda tensor: -_ITEM_BYTES[tensor.dtype]):
            ends[tensor.hf_name] = (at, at + tensor.num_bytes)
            at += tensor.num_bytes
        return ends


def export_hf(
    parts: Sequence[nn.Module],
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    finish: Callable[[Path], None] | None = None,
    adapter: AdapterSpec | None = None,
) -> None:
    """Write the weights of a model as a Hugging Face folder. All ranks call it together, each with its own parts.

    An adapter is merged into the weights, in float32, before they are rounded to `dtype`. Weights in few bits are
    dequantised to float32 for it.

    Of the ranks that hold a parameter the lowest writes it, as `dtype` or, for None, as it is. No file is larger than
    `max_shard_bytes`, unless one tensor alone is. `finish` is called on rank 0 with the folder before it has its name,
    to add config.json and the tokenizer; the other ranks wait.

    The folder appears whole or not at all, whenever the run is killed. One that exists and is not empty is refused
    unless `overwrite`; then it is exchanged for the new one. It must be on a file system that all writing ranks see.
    An error on any rank is raised on all of them.
    """
    held = _Held(parts, config, dtype=dtype, max_shard_bytes=max_shard_bytes, adapter=adapter)
    target = Path(folder).resolve()
    rank = _rank()
    error = held.error
    if rank == 0 and error is None:
        error = attempt(target, _prepare, target, overwrite=overwrite)
    try:
        answers = _exchange((error, held.dtypes, str(_partial(target))))
        raise_any([answer[0] for answer in answers], mine=error)
        files = plan_files(_plan(config, [answer[1] for answer in answers]), max_shard_bytes=max_shard_bytes)
        partial = Path(answers[0][2])
        error = _write(held, config, files=files, folder=partial)
        raise_any(_exchange(error), mine=error)
        if rank == 0:
            error = attempt(target, _complete, partial, target, files=files, finish=finish)
        raise_any(_exchange(error), mine=error)
    except ForgeError:
        if rank == 0:
            shutil.rmtree(_partial(target), ignore_errors=True)
        raise


class _Held:
    """The parameters that this rank takes part in putting together, under our names; or why it cannot."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        config: ModelConfig,
        *,
        dtype: torch.dtype | None,
        max_shard_bytes: int,
        adapter: AdapterSpec | None = None,
    ) -> None:
        self.dtype = dtype
        self._scale = 1.0 if adapter is None else adapter.scale
        self._adapters = {} if adapter is None else adapter_slots(config, adapter)
        self._matrices: dict[str, Tensor] = {}
        self.error: ForgeError | None = None
        self.tensors: dict[str, Tensor | QuantizedWeight] = {}
        self.dtypes: dict[str, str] = {}
        try:
            if max_shard_bytes < 1:
                raise ModelError(
                    "A file needs room for its tensors.",
                    path="max_shard_bytes",
                    value=max_shard_bytes,
                    rule="at least 1",
                    repair="Leave it out for files of 5 GB.",
                )
            self._collect(parts, slots_by_name(config))
        except ForgeError as error:
            self.error = error

    def _collect(self, parts: Sequence[nn.Module], slots: Mapping[str, WeightSlot]) -> None:
        import torch

        from forge.models.quantized import quantized_weights

        for name, parameter in named_parameters(parts):
            if is_adapter(name):
                self._matrices[name] = parameter
                continue
            if name not in slots:
                raise unknown_parameter(name)
            if tuple(parameter.shape) != slots[name].shape:
                raise wrong_parameter(name, tuple(parameter.shape), slots[name])
            code = _CODES.get(str(self.dtype or parameter.dtype))
            if code is None:
                raise ModelError(
                    "Weights are not written with this dtype.",
                    path=name,
                    value=str(self.dtype or parameter.dtype),
                    rule=f"one of {', '.join(_CODES)}",
                    repair="Give one of these as dtype.",
                )
            if slots[name].name == name and name not in self.tensors and _takes_part(parameter):
                self.tensors[name], self.dtypes[name] = parameter, code
        for name, weight in quantized_weights(parts).items():
            self.tensors[name], self.dtypes[name] = weight, _CODES[str(self.dtype or torch.float32)]

    def whole(self, name: str) -> Tensor:
        """Gather a whole parameter. All ranks of its mesh call this for the same parameters in the same order."""
        weight = self._weight(name)
        if name in self._adapters:
            matrices = [self._matrices[each] for each in self._adapters[name].names]
            found = merged(_gathered(weight), *map(_gathered, matrices), scale=self._scale)
            return found.to(self.dtype or weight.dtype)
        return _gathered(weight if self.dtype is None else weight.to(self.dtype))

    def _weight(self, name: str) -> Tensor:
        import torch

        found = self.tensors[name]
        return found if isinstance(found, torch.Tensor) else found.dequantize(torch.float32)


def _gathered(parameter: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def merged(weight: Tensor, a: Tensor, b: Tensor, *, scale: float) -> Tensor:
    """Return a weight with its adapter in it, summed in float32 or wider and not rounded after."""
    import torch

    wide = torch.promote_types(torch.promote_types(torch.float32, weight.dtype), a.dtype)
    return weight.to(wide) + scale * (b.to(wide) @ a.to(wide))


def _takes_part(parameter: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return not isinstance(parameter, DTensor) or parameter.device_mesh.get_coordinate() is not None


def _plan(config: ModelConfig, dtypes: Sequence[Mapping[str, str]]) -> list[TensorPlan]:
    """Decide which rank writes what, from what each rank holds. Every rank gets the same answer."""
    tensors = []
    for slot in weight_map(config):
        writer = next((rank for rank, held in enumerate(dtypes) if slot.name in held), None)
        if writer is None:
            raise ModelError(
                "A parameter of the model is on no rank.",
                path=slot.name,
                rule="the parts of all ranks together are the whole model",
                repair="Give all parts of the model, and its own configuration.",
            )
        tensors += [TensorPlan(name, dtypes[writer][slot.name], slot.hf_shape, writer) for name in slot.hf_names]
    return tensors


def plan_files(tensors: Iterable[TensorPlan], *, max_shard_bytes: int) -> tuple[FilePlan, ...]:
    """Share tensors out to files, in order: each file has one writer and at most so many bytes, or one tensor."""
    groups: list[list[TensorPlan]] = []
    current: dict[int, list[TensorPlan]] = {}
    sizes: dict[int, int] = {}
    for tensor in tensors:
        size = sizes.get(tensor.writer, 0) + tensor.num_bytes
        if tensor.writer not in current or size > max_shard_bytes:
            current[tensor.writer] = []
            groups.append(current[tensor.writer])
            size = tensor.num_bytes
        current[tensor.writer].append(tensor)
        sizes[tensor.writer] = size
    total = len(groups)
    names = [SINGLE_FILE] if total == 1 else [f"model-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1)]
    return tuple(FilePlan(name, group[0].writer, tuple(group)) for name, group in zip(names, groups, strict=True))


def _write(held: _Held, config: ModelConfig, *, files: Sequence[FilePlan], folder: Path) -> ForgeError | None:
    """Put every parameter together and write this rank's tensors.

    After an error it keeps gathering without writing: other ranks wait for this one in every parameter.
    """
    rank = _rank()
    mine = [file for file in files if file.writer == rank]
    names = {tensor.hf_name for file in mine for tensor in file.tensors}
    output = _Output(folder, mine)
    error: ForgeError | None = None
    for slot in weight_map(config):
        if slot.name not in held.tensors:
            continue
        whole = held.whole(slot.name)
        if slot.hf_names[0] in names and error is None:
            error = attempt(folder, output.take, split(slot, whole))
    return attempt(folder, output.close) or error


class _Output:
    """This rank's files, one of them open at a time."""

    def __init__(self, folder: Path, files: Sequence[FilePlan]) -> None:
        self._folder = folder
        self._files = {tensor.hf_name: file for file in files for tensor in file.tensors}
        self._plan: FilePlan | None = None
        self._file: BinaryIO | None = None
        self._offsets: dict[str, tuple[int, int]] = {}
        self._first_byte = 0

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        import torch

        for name, tensor in tensors:
            if self._plan is not self._files[name]:
                self.close()
                self._open(self._files[name])
            assert self._file is not None
            self._file.seek(self._first_byte + self._offsets[name][0])
            flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            self._file.write(memoryview(flat.numpy()))

    def _open(self, plan: FilePlan) -> None:
        self._plan, self._offsets = plan, plan.offsets()
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for tensor in plan.tensors:
            entry = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": self._offsets[tensor.hf_name]}
            entries[tensor.hf_name] = entry
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._file = (self._folder / plan.name).open("xb")
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._first_byte = 8 + len(header)

    def close(self) -> None:
        file, self._file, self._plan = self._file, None, None
        if file is not None:
            with file:
                file.flush()
                os.fsync(file.fileno())


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _prepare(target: Path, *, overwrite: bool) -> None:
    """Make the folder that is written to, without what a killed export left there."""
    old = _replaced(target)
    if old.exists() and not target.exists():
        old.rename(target)
    if target.exists() and not (target.is_dir() and (overwrite or not any(target.iterdir()))):
        raise CheckpointError(
            "There is something where the model is to be written.",
            path=str(target),
            rule="it does not exist or is an empty folder",
            repair="Choose another folder, or pass overwrite=True to replace a folder."
            if target.is_dir()
            else "Move it.",
        )
    for leftover in (_partial(target), old):
        if leftover.exists():
            shutil.rmtree(leftover)
    _partial(target).mkdir(parents=True)


def _complete(partial: Path, target: Path, *, files: Sequence[FilePlan], finish: Callable[[Path], None] | None) -> None:
    """Add what belongs to no single rank, and give the folder its name."""
    if len(files) > 1:
        (partial / INDEX_FILE).write_text(json.dumps(_index(files), indent=2, sort_keys=True) + "\n")
    if finish is not None:
        finish(partial)
    if target.exists() and any(target.iterdir()):
        replace_folder(partial, target)
    else:
        partial.rename(target)


def replace_folder(partial: Path, target: Path, *, exchange: Callable[[Path, Path], bool] | None = None) -> None:
    """Put one folder in the place of another, which is removed.

    `exchange` swaps two folders in one step or returns False; the default asks the kernel. Where it cannot be done, a
    kill may leave the old folder under its other name; the next export puts it back.
    """
    if not (exchange or swap)(partial, target):
        target.rename(_replaced(target))
        partial.rename(target)
    for old in (partial, _replaced(target)):
        if old.exists():
            shutil.rmtree(old)


def _index(files: Sequence[FilePlan]) -> dict[str, Any]:
    tensors = [(tensor, file.name) for file in files for tensor in file.tensors]
    total = sum(tensor.num_bytes for tensor, _ in tensors)
    parameters = sum(tensor.num_bytes // _ITEM_BYTES[tensor.dtype] for tensor, _ in tensors)
    return {
        "metadata": {"total_parameters": parameters, "total_size": total},
        "weight_map": {tensor.hf_name: file for tensor, file in tensors},
    }


def swap(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, or say that this file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def attempt(path: Path, action: Callable[..., None], *args: Any, **kwargs: Any) -> ForgeError | None:
    """Do something and return what went wrong, in a form that can travel to the other ranks."""
    try:
        action(*args, **kwargs)
    except ForgeError as error:
        return error
    except Exception as error:  # noqa: BLE001  (it is raised on every rank)
        failure = CheckpointError(
            "The model could not be written.",
            path=str(path),
            value=f"{type(error).__name__}: {error}",
            rule="every writing rank can create files there, and the caller's `finish` succeeds",
            repair="Check space and rights, and that all hosts see the folder.",
        )
        failure.__cause__ = error
        return failure
    return None


def _rank() -> int:
    import torch.distributed as dist

    return int(dist.get_rank()) if dist.is_available() and dist.is_initialized() else 0


def _exchange(value: Any) -> list[Any]:
    """Gather a value from every rank, in the order of ranks."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def raise_any(errors: Iterable[ForgeError | None], *, mine: ForgeError | None) -> None:
    """Raise this rank's error, which knows its cause, or else the first one of another rank."""
    for error in (mine, *errors):
        if error is not None:
            raise error
