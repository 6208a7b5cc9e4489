"""Stand-ins for the library's seams, for your tests and ours. Each passes the contract suite of its seam.

Names are imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge._lazy import lazy_names

if TYPE_CHECKING:
    from forge.testing.episodes import ScriptedPolicy, play
    from forge.testing.generators import FakeGenerator, FakeRequest
    from forge.testing.sinks import ListSink

__all__ = ["FakeGenerator", "FakeRequest", "ListSink", "ScriptedPolicy", "play"]

__getattr__ = lazy_names(
    __name__,
    {
        "forge.testing.episodes": "ScriptedPolicy play",
        "forge.testing.generators": "FakeGenerator FakeRequest",
        "forge.testing.sinks": "ListSink",
    },
)
