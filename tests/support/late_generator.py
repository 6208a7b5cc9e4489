"""A generator whose start a test can hold up. Every rank process imports this module."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from forge import endpoint
from forge.generator.actor import Generator


class LateGenerator(Generator):
    """Its `setup` ends when the pipe `gate`, if there is one in the folder FORGE_TEST_GATE, was opened and closed."""

    @endpoint
    async def setup(self) -> None:
        await super().setup()
        gate = Path(os.environ["FORGE_TEST_GATE"], "gate")
        if gate.exists():
            await asyncio.to_thread(gate.read_text)
