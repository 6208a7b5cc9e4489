"""The one door to Monarch: its settings, set before it is imported, and what to do when it reports a fault.

By default Monarch notices a death after 10 to 40 seconds and then interrupts the controller's main thread. Here it
polls often, and a fault of a mesh that this library owns is noted and dropped: whoever owns the mesh has already seen
the death through its pidfd or heartbeat, and a controller must outlive its workers.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

_SETTINGS = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "250ms",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "1s",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "5s",
}
for _name, _value in _SETTINGS.items():
    os.environ.setdefault(_name, _value)

import monarch.actor as monarch_actor  # noqa: E402
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError  # noqa: E402
from monarch.actor import (  # noqa: E402
    Actor,
    ActorError,
    Channel,
    MeshFailure,
    Port,
    context,
    current_rank,
    default_bootstrap_cmd,
    this_host,
)

__all__ = [
    "OWNED",
    "Actor",
    "ActorError",
    "Channel",
    "MeshFailure",
    "Port",
    "SupervisionError",
    "context",
    "current_rank",
    "default_bootstrap_cmd",
    "install_fault_hook",
    "monarch_actor",
    "this_host",
]

OWNED = "forge"
"""Every mesh of ours has a name that starts so."""

_log = logging.getLogger("forge.runtime")
_installed = threading.Event()


def is_ours(mesh_name: str) -> bool:
    """Whether a fault in this mesh is ours to deal with (Monarch's own log forwarders fault along with a process)."""
    return mesh_name.startswith((OWNED, "logger-"))


def install_fault_hook() -> None:
    """Keep the controller alive when one of our meshes faults; other meshes keep the hook they had."""
    if _installed.is_set():
        return
    _installed.set()
    previous: Callable[[Any], None] = monarch_actor.unhandled_fault_hook

    def hook(failure: Any) -> None:
        if is_ours(str(failure.mesh_name)):
            _log.debug("fault in %s: %s", failure.mesh_name, failure.report())
            return
        previous(failure)

    monarch_actor.unhandled_fault_hook = hook
