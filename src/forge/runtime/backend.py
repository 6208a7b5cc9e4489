"""The one door to Monarch: its settings, set before it is imported, and what to do when it reports a fault.

By default Monarch notices a death after 10 to 40 seconds and then interrupts the controller's main thread. Here a
fault of a mesh that this library owns is noted and dropped: the owner of the mesh has already seen the death through
its pidfd or heartbeat, and a controller must outlive its workers. So Monarch need not poll often: every 250 ms, a core
would be busy with 150 processes. It is patient with ranks that do not answer: on a crowded machine one that computes
may be silent for seconds, and lives. Monarch reads these settings once, so no other module imports it before this one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

_SETTINGS = {
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "30s",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "60s",
    "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "120s",
    "HYPERACTOR_MESH_ACTOR_SPAWN_MAX_IDLE": "120s",
    "HYPERACTOR_HOST_SPAWN_READY_TIMEOUT": "120s",
}
for _name, _value in _SETTINGS.items():
    os.environ.setdefault(_name, _value)

import monarch.actor as monarch_actor  # noqa: E402
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError  # noqa: E402
from monarch._src.actor import config as _python_config  # noqa: E402
from monarch._src.actor.actor_mesh import ActorMesh  # noqa: E402
from monarch._src.actor.endpoint import EndpointProperty  # noqa: E402
from monarch.actor import (  # noqa: E402
    Actor,
    ActorError,
    Channel,
    MeshFailure,
    Port,
    context,
    current_rank,
    default_bootstrap_cmd,
    shutdown_context,
    this_host,
)

__all__ = [
    "OWNED",
    "Actor",
    "ActorError",
    "ActorMesh",
    "Channel",
    "EndpointProperty",
    "MeshFailure",
    "Port",
    "SupervisionError",
    "context",
    "current_rank",
    "default_bootstrap_cmd",
    "forget_faults",
    "install_fault_hook",
    "monarch_actor",
    "note_fault",
    "stop_client",
    "this_host",
    "watch_faults",
    "without_banner",
]

_python_config.prefix_python_logs_with_actor = False  # it changes the text of records, once for each handler

OWNED = "forge"
"""Every mesh of ours has a name that starts so."""

_TO_OURS = re.compile(rf"dest: (\S*[.@])?{OWNED}-")
_log = logging.getLogger("forge.runtime")
_installed = threading.Event()


_on_fault: dict[str, Callable[[str], None]] = {}


def watch_faults(mesh: str, on_fault: Callable[[str], None]) -> None:
    """Call `on_fault(report)`, on some thread, when Monarch reports a fault of this mesh.

    A backstop: an actor can fail in a process that lives on, where no pidfd sees it.
    """
    _on_fault[mesh] = on_fault


def forget_faults(mesh: str) -> None:
    _on_fault.pop(mesh, None)


def note_fault(failure: Any) -> bool:
    """Pass a fault on to what watches that mesh; False for a mesh that is not ours.

    Monarch's own log forwarders fault along with a process; that says nothing new. In a notebook there are two kinds.
    """
    mesh_name = str(failure.mesh_name)
    if mesh_name.startswith(("logger-", "log_forwarder-")):
        return True
    report = str(failure.report())
    if not mesh_name.startswith(OWNED):
        return _is_late_message(report)
    _log.debug("fault in %s: %s", mesh_name, report)
    on_fault = _on_fault.get(mesh_name.rpartition("-")[0])  # Monarch adds a random word to the name
    if on_fault is not None:
        on_fault(report)
    return True


def _is_late_message(report: str) -> bool:
    """Return whether a report is about a message to a rank that had just stopped: its sender learns that elsewhere."""
    return "undeliverable message" in report and _TO_OURS.search(report) is not None


_BANNER = "Monarch internal logs are being written to "
_banner_seen = threading.Event()


@contextlib.contextmanager
def without_banner() -> Iterator[None]:
    """Turn what Monarch prints when it starts in this process, past Python and into whatever is on the terminal, into a
    log record: it says where Monarch's own log is. For calls that are over soon."""
    if _banner_seen.is_set():
        yield
        return
    kept, captured = os.dup(2), os.memfd_create("forge-banner")
    os.dup2(captured, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        with open(captured, "rb") as file:
            file.seek(0)
            lines = file.read().decode("utf-8", "replace").splitlines()
        for line in lines:
            if line.startswith(_BANNER):
                _banner_seen.set()
                _log.debug("%s", line)
            else:
                print(line, file=sys.stderr)


def install_fault_hook() -> None:
    """Keep the controller alive when one of our meshes faults; other meshes keep the hook they had."""
    if _installed.is_set():
        return
    _installed.set()
    previous: Callable[[Any], None] = monarch_actor.unhandled_fault_hook

    def hook(failure: Any) -> None:
        if not note_fault(failure):
            previous(failure)

    monarch_actor.unhandled_fault_hook = hook


def stop_client(*, timeout_s: float = 10.0) -> None:
    """Shut down this process's Monarch client, at the end of the program.

    Monarch's own exit handler waits one second and prints a traceback when a busy machine takes longer. After this
    call it has nothing left to do.
    """
    try:
        shutdown_context(host_timeout=0.3).get(timeout=timeout_s)
    except TimeoutError:
        _log.debug("Monarch's client did not stop within %g s", timeout_s)
