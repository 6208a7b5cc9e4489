"""Processes, actors and hosts, on Monarch.

`MeshActor` is a class whose instances live in other processes; `run` and `shutdown` bound their lifetime; hosts,
launchers and placement say where those processes are and which GPUs and threads they may use. Names are imported when
first used: a rank process imports this package before anything heavy may load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

from forge._lazy import lazy_names

if TYPE_CHECKING:
    from forge.runtime.actor import ActorOptions, MeshActor
    from forge.runtime.endpoints import endpoint
    from forge.runtime.lifetime import run, shutdown

    T = TypeVar("T", bound=MeshActor)
    ActorHandle = Annotated[T, "the handle of a spawned actor"]

__all__ = ["ActorHandle", "ActorOptions", "MeshActor", "endpoint", "run", "shutdown"]

__getattr__ = lazy_names(
    __name__,
    {
        "forge.runtime.handle": "ActorHandle",
        "forge.runtime.actor": "ActorOptions MeshActor",
        "forge.runtime.endpoints": "endpoint",
        "forge.runtime.lifetime": "run shutdown",
    },
)
