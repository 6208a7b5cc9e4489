"""Stand-ins for the library's seams, for your tests and ours. Each passes the contract suite of its seam.

Names are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.testing.generators import FakeGenerator, FakeRequest
    from forge.testing.sinks import ListSink

_HOMES = {
    "FakeGenerator": "forge.testing.generators",
    "FakeRequest": "forge.testing.generators",
    "ListSink": "forge.testing.sinks",
}

__all__ = ["FakeGenerator", "FakeRequest", "ListSink"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'forge.testing' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
