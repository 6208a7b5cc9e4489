"""What launchers of a cluster are tested with in place of connecting to workers."""

from __future__ import annotations

from collections.abc import Sequence

from forge.runtime.hosts import HostTimings
from forge.runtime.launchers import Allocation


class Attached:
    """Stands where `attach_all` would connect, and notes what it was asked to do."""

    def __init__(self, error: Exception | None = None, release_error: Exception | None = None) -> None:
        self.error, self.release_error = error, release_error
        self.addresses: list[str] = []
        self.bind = ""
        self.timings: HostTimings | None = None
        self.num_releases = 0

    async def __call__(self, addresses: Sequence[str], *, bind: str, timings: HostTimings) -> Allocation:
        self.addresses, self.bind, self.timings = list(addresses), bind, timings
        if self.error is not None:
            raise self.error

        async def release() -> None:
            self.num_releases += 1
            if self.release_error is not None:
                raise self.release_error

        return Allocation((), release)
