"""What a volume took from a publisher that did not commit it is let go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

import forge.store as ts
from forge.store.client import client
from forge.store.records import HEADER, Begin, Layout, SegmentRecord
from forge.store.snapshot import as_stored
from forge.store.tensors import shards_of


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_volume_lets_go_of_what_was_never_committed(drive: Callable[[Any], Any], is_elsewhere: bool) -> None:
    async def body() -> None:
        (volume,) = await ts.setup(volumes=1)
        here = client()
        layout = Layout.of(("w",), (as_stored(shards_of(torch.ones(1 << 16), name="w"), None),))
        for version in range(1, 4):
            wish = Begin("policy", "weights", version, 0, 1, layout.id, layout)
            assignment = await here.line.call_async("begin", wish)
            segment = here.segments.create("policy", HEADER + (1 << 18))
            if is_elsewhere:
                here.host = "elsewhere"
            record = SegmentRecord(segment.size, 1)
            held_by = await asyncio.to_thread(here.data_plane.hold, segment, record, assignment)
            assert [holder for holder in held_by if holder.volume]
            assert await volume.num_segments.call_one() == 1  # type: ignore[attr-defined]
            await here.line.call_async("give_up", (assignment.id, "it dies before it commits"))
            while await volume.num_segments.call_one():  # type: ignore[attr-defined]
                pass

    drive(body())
