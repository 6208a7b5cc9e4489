"""A generator's event loop goes on while it tokenises a long prompt."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from forge.config import GeneratorConfig, Sampling
from forge.generator.actor import Generator
from forge.generator.adapters import NamedAdapters
from forge.generator.prompts import LongTexts, is_long
from forge.models.long_text import LONG_TEXT

LIMIT_S = 600


class HeldReader:
    """Reads a prompt only when it may."""

    def __init__(self) -> None:
        self.started, self.may_go_on = threading.Event(), threading.Event()

    def token_ids(self, prompt: str | None, **options: Any) -> tuple[int, ...]:
        self.started.set()
        assert self.may_go_on.wait(LIMIT_S)
        return (1, 2, 3)

    def sampling(self, given: Any, n: Any) -> Sampling:
        return Sampling()


@pytest.mark.parametrize(
    "prompt", [{"prompt": "x" * LONG_TEXT}, {"messages": [{"role": "user", "content": "x" * LONG_TEXT}]}]
)
def test_a_long_prompt_does_not_hold_the_event_loop(prompt: dict[str, Any]) -> None:
    async def body() -> None:
        generator, reader = Generator(GeneratorConfig()), HeldReader()
        generator._reader, generator._long_texts = reader, LongTexts()  # type: ignore[assignment]
        generator._sync = SimpleNamespace(check=lambda: None)  # type: ignore[assignment]
        generator._adapters = NamedAdapters(generator.config, None)
        given = {"prompt": None, "messages": None, **prompt}
        reading = asyncio.create_task(generator._request(**given, token_ids=None, sampling=None, n=None, template=None))
        assert await asyncio.to_thread(reader.started.wait, LIMIT_S)
        assert not reading.done(), "this loop runs, and the prompt is being read"
        reader.may_go_on.set()
        assert (await reading).prompt_ids == (1, 2, 3)
        generator._long_texts.close()

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))


def test_what_is_long() -> None:
    assert not is_long("x" * (LONG_TEXT - 1))
    assert is_long("x" * LONG_TEXT)
    assert is_long(None, [{"content": "x" * (LONG_TEXT // 2)}] * 2)
    assert not is_long(None, [{"content": None}, {"content": [1]}, "text"])  # type: ignore[list-item]
