"""A version of weights in a file: safetensors, with the digest that its publisher got. Written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge.errors import CheckpointError, SaveError

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIX = ".safetensors"
_CODES = {
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "int8": "I8",
    "uint8": "U8",
}


@dataclass(frozen=True, slots=True)
class VersionFile:
    """What a file holds. The tensors are read from it when they are used."""

    version: int
    digest: str
    tensors: dict[str, Tensor]


def version_path(folder: Path, version: int) -> Path:
    """Return the file of a version."""
    return folder / f"version-{version:08d}{_SUFFIX}"


def versions_in(folder: Path) -> dict[int, Path]:
    """Return the files of versions in a folder, by number."""
    found = {}
    for path in folder.glob(f"version-*{_SUFFIX}"):
        number = path.name.removeprefix("version-").removesuffix(_SUFFIX)
        if number.isdecimal():
            found[int(number)] = path
    return dict(sorted(found.items()))


def write_version(path: Path, tensors: Mapping[str, Tensor], *, version: int, digest: str) -> None:
    """Write a version, one tensor after the other. The file appears under its name when it is complete and on disk."""
    import torch

    header: dict[str, object] = {"__metadata__": {"version": str(version), "digest": digest}}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        code = _CODES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in tensors.values():
                plain = tensor.detach().cpu().contiguous().reshape(-1)
                file.write(memoryview(plain.view(torch.uint8).numpy()))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise SaveError(
            f"a pinned version could not be written: {error.strerror or error}",
            path=str(path),
            value=f"{at} bytes of version {version}",
            rule="a folder that can be written, with room for the weights",
            repair="free some space, or choose another run.output_dir; then resume the run",
        ) from error
    finally:
        with contextlib.suppress(OSError):  # it has its name, or was never there
            part.unlink()


def read_version(path: Path) -> VersionFile:
    """Open the file of a version. Raise `CheckpointError` for one that is missing or cannot be read.

    Damage inside tensors shows only in their digest: compare it with `digest`.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise missing_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
            return VersionFile(int(facts["version"]), facts["digest"], tensors)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error


def missing_file(path: Path) -> CheckpointError:
    """Return the error for a file that is not there."""
    return CheckpointError(
        "the file of a pinned version is missing",
        path=str(path),
        value="no such file",
        rule="the weights of every pinned version of a run, in its folder",
        repair="restore the file from a backup, or remove what names this version from the configuration",
    )


def damaged(path: Path, found: str) -> CheckpointError:
    """Return the error for a file that does not hold what was written."""
    return CheckpointError(
        "the file of a pinned version is damaged",
        path=str(path),
        value=found,
        rule="the weights as they were published, with their digest",
        repair="restore the file from a backup, or remove what names this version from the configuration",
    )
