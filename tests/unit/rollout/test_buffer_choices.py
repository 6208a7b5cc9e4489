"""The buffer looks at its groups only when that can change what it gives out.

Its batches are those of a buffer that looks at all groups after every event.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from episodes import make_group
from forge.config import RolloutConfig
from forge.rollout.buffer import ReplayBuffer
from forge.rollout.taken_batch import TakenBatch


class EagerBuffer(ReplayBuffer):
    """Looks at every group for each event."""

    def _return_stale(self) -> None:
        self._tested_at = -1
        super()._return_stale()

    def _choose(self) -> Any:
        oldest_next = self.num_taken + 1 - self._config.staleness
        if any(started_at < oldest_next for started_at in self._in_flight.values()):
            return None
        ready = sorted(self._ready.values(), key=lambda each: (each.started_at, each.group.number))
        if len(ready) < self._config.batch_groups and (self._in_flight or self._has_more()):
            return None
        return ready[: self._config.batch_groups] or None


class Run:
    """A buffer, with groups in flight and one task that takes batches."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer
        self.taking: asyncio.Task[TakenBatch | None] = asyncio.create_task(buffer.take())
        self.log: list[Any] = []

    async def do(self, name: str, number: int) -> None:
        in_flight = sorted(self.buffer.in_flight.items())
        if name == "admit":
            asking = asyncio.create_task(self.buffer.admit())
            await asyncio.sleep(0)
            asking.cancel()
        elif in_flight:
            group, version = in_flight[number % len(in_flight)]
            if name == "requeue":
                self.buffer.requeue(group)
            else:
                self.buffer.put(make_group(group, version=max(0, version - number % 3)))
        for _ in range(4):
            await asyncio.sleep(0)
        await self._train()
        self.log.append((self.buffer.state(), self.buffer.counts.num_stale, self.buffer.version))

    async def _train(self) -> None:
        if self.taking.done() and (taken := self.taking.result()) is not None:
            self.log.append((taken.index, [group.number for group in taken.groups], taken.num_stale))
            self.buffer.commit()
            self.buffer.serve(taken.index + 1)
            self.taking = asyncio.create_task(self.buffer.take())
            await asyncio.sleep(0)


@given(
    batch_groups=st.integers(1, 3),
    staleness=st.integers(0, 2),
    num_groups=st.sampled_from([None, 7]),
    script=st.lists(
        st.tuples(st.sampled_from(["admit", "admit", "admit", "admit", "put", "put", "requeue"]), st.integers(0, 30)),
        max_size=90,
    ),
)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_batches_are_those_of_a_buffer_that_always_looks_at_every_group(
    batch_groups: int, staleness: int, num_groups: int | None, script: list[tuple[str, int]]
) -> None:
    async def body() -> None:
        config = RolloutConfig(batch_groups=batch_groups, staleness=staleness)
        ours = Run(ReplayBuffer(config, num_groups=num_groups))
        reference = Run(EagerBuffer(config, num_groups=num_groups))
        for name, number in script:
            await ours.do(name, number)
            await reference.do(name, number)
            assert ours.log == reference.log
        ours.taking.cancel()
        reference.taking.cancel()

    asyncio.run(asyncio.wait_for(body(), 600))
