"""`add_gauges`: numbers that say how something is now, such as what a queue holds, read when they are asked for.

A process reads its gauges after a step, when the run collects what it has recorded (`forge.runtime.collect`), and they
go into `system.jsonl`. Gauges of one name from several processes add up.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from forge.observe.tracing import this_process

T = TypeVar("T")
_log = logging.getLogger("forge.observe")
_guard = threading.Lock()
_gauges: weakref.WeakKeyDictionary[Any, Callable[[Any], Mapping[str, float]]] = weakref.WeakKeyDictionary()


def add_gauges(owner: T, read: Callable[[T], Mapping[str, float]]) -> None:
    """Let `read(owner)` be asked once a step, for as long as the owner exists. It is called on any thread and must not
    block; a name is like that of a metric.

    Example:
        >>> add_gauges(buffer, lambda buffer: {"buffer/ready": buffer.num_ready})
    """
    with _guard:
        _gauges[owner] = read


def of_process(values: Mapping[str, float]) -> dict[str, float]:
    """Return values under names that say of which process they are: `version/generator[0]`."""
    name = this_process().name
    return {f"{key}/{name}": value for key, value in values.items()}


def read_gauges() -> dict[str, float]:
    """Return the gauges of this process. One that cannot be read is left out, and logged once."""
    found: dict[str, float] = {}
    with _guard:
        known = [(weakref.ref(owner), read) for owner, read in _gauges.items()]
    for owner, read in known:
        add_up(found, _read(owner, read))
    return found


def _read(reference: weakref.ref[Any], read: Callable[[Any], Mapping[str, float]]) -> Mapping[str, float]:
    """Return the gauges of one owner; nothing where it is gone, or where they cannot be read.

    A traceback that is logged may be kept with its frames: these have no other owner among their variables.
    """
    owner = reference()
    if owner is None:
        return {}
    try:
        return {str(name): float(value) for name, value in read(owner).items()}
    except Exception:  # noqa: BLE001 - no gauge is worth a run
        with _guard:
            _gauges.pop(owner, None)
        _log.warning("the gauges of %s cannot be read, and are left out", type(owner).__name__, exc_info=True)
        return {}


def add_up(total: dict[str, float], values: Mapping[str, float]) -> None:
    """Add values to those of the same names."""
    for name, value in values.items():
        total[name] = total.get(name, 0.0) + value


def _begin_anew() -> None:
    """Start without gauges in a forked child: what they are of stays in its parent."""
    global _guard, _gauges
    _guard, _gauges = threading.Lock(), weakref.WeakKeyDictionary()


os.register_at_fork(after_in_child=_begin_anew)
