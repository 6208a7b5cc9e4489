"""A generator that says which process answered."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from forge import ForgeActor, endpoint
from forge.types import Completion


class Echo(ForgeActor):
    """Answers with one token, and with its process id as the text. A prompt that starts with 0 waits for ever."""

    @endpoint(retry=True, concurrent=True)
    async def generate(self, *, token_ids: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
        """Return one completion."""
        if token_ids[0] == 0:
            await asyncio.Event().wait()
        return [Completion(tuple(token_ids), (1,), (0.0,), (0.0,), str(os.getpid()), "stop")]
