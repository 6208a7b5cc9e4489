"""Processes, actors and hosts, on Monarch.

`MeshActor` is a class whose instances live in other processes; `run` and `shutdown` bound their lifetime; hosts,
launchers and placement say where those processes are and which GPUs and threads they may use. Names are imported when
first used: a rank process imports this package before anything heavy may load.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

if TYPE_CHECKING:
    from forge.runtime.actor import ActorOptions, MeshActor
    from forge.runtime.endpoints import endpoint
    from forge.runtime.lifetime import run, shutdown

    T = TypeVar("T", bound=MeshActor)
    ActorHandle = Annotated[T, "the handle of a spawned actor"]

_HOMES = {
    "ActorHandle": "forge.runtime.handle",
    "ActorOptions": "forge.runtime.actor",
    "MeshActor": "forge.runtime.actor",
    "endpoint": "forge.runtime.endpoints",
    "run": "forge.runtime.lifetime",
    "shutdown": "forge.runtime.lifetime",
}

__all__ = ["ActorHandle", "ActorOptions", "MeshActor", "endpoint", "run", "shutdown"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'forge.runtime' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
