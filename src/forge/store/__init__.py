"""Moves tensors between processes: `import forge.store as ts`.

`put` and `get` store values by key; `Weights` publishes versions of weights that readers get whole or not at all, under
any sharding. Names are imported when first used: the registry, in the controller, needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.errors import StoreError, StoreKeyError, WeightMismatch
    from forge.store.objects import delete, exists, get, get_state_dict, keys, put, put_state_dict
    from forge.store.pins import PinnedVersion, PinnedVersions
    from forge.store.reader import Fetched
    from forge.store.records import VersionInfo
    from forge.store.sharding import Region
    from forge.store.targets import At, Chunk, Placed
    from forge.store.volumes import setup
    from forge.store.weights import Pin, Publication, Weights
    from forge.store.writer import Published

_HOMES = {
    "At": "targets",
    "Chunk": "targets",
    "Fetched": "reader",
    "Pin": "weights",
    "PinnedVersion": "pins",
    "PinnedVersions": "pins",
    "Placed": "targets",
    "Publication": "weights",
    "Published": "writer",
    "Region": "sharding",
    "VersionInfo": "records",
    "Weights": "weights",
    "delete": "objects",
    "exists": "objects",
    "get": "objects",
    "get_state_dict": "objects",
    "keys": "objects",
    "put": "objects",
    "put_state_dict": "objects",
    "setup": "volumes",
}
_ERRORS = ("StoreError", "StoreKeyError", "WeightMismatch")

__all__ = [
    "At",
    "Chunk",
    "Fetched",
    "Pin",
    "PinnedVersion",
    "PinnedVersions",
    "Placed",
    "Publication",
    "Published",
    "Region",
    "StoreError",
    "StoreKeyError",
    "VersionInfo",
    "WeightMismatch",
    "Weights",
    "delete",
    "exists",
    "get",
    "get_state_dict",
    "keys",
    "put",
    "put_state_dict",
    "setup",
]


def __getattr__(name: str) -> Any:
    if name in _ERRORS:
        value = getattr(import_module("forge.errors"), name)
    elif name in _HOMES:
        value = getattr(import_module(f"forge.store.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'forge.store' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
