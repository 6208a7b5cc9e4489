"""Actors that stand in for models behind services, for the processes that tests start."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from forge.runtime.endpoints import endpoint
from forge.service.actor import ForgeActor
from forge.types import Completion


class PlainJudge(ForgeActor):
    """A judge that gives the mark that the response names, has none where it names none, and never ends at `hang`."""

    @endpoint(retry=True, concurrent=True)
    async def generate(
        self, prompt: str | None = None, *, messages: Sequence[Mapping[str, Any]], n: int
    ) -> list[Completion]:
        assert (len(messages), n) == (1, 1)
        response = messages[0]["content"].split("<response>\n")[1].split("\n</response>")[0]
        if response == "hang":
            await asyncio.Event().wait()
        if response == "break":
            raise RuntimeError("the judge broke")
        mark = f"Score: {response}" if response.isdigit() else response
        return [Completion((1,), (2,), (0.0,), None, f"Thinking. {mark}", "stop")]
