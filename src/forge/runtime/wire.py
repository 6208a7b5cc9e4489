"""How values travel: as bytes, made and read where an error reaches the right person.

Monarch would pickle arguments itself, but a value that cannot be read on the other side then kills the actor or is lost
to its caller. Here each end encodes and decodes its own, and a failure is raised to whoever made the call.
"""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle


def encode(value: object) -> bytes:
    """`value` as bytes. Classes and functions of `__main__` travel by value, others by name."""
    data: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return data


def decode(data: bytes) -> Any:
    return pickle.loads(data)
