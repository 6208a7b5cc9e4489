"""Stand-ins for the library's seams, for your tests and ours. Each passes the contract suite of its seam."""

from forge.testing.generators import FakeGenerator, FakeRequest
from forge.testing.sinks import ListSink

__all__ = ["FakeGenerator", "FakeRequest", "ListSink"]
