"""A thread for long texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from forge.models.long_text import LONG_TEXT

T = TypeVar("T")


class LongTexts:
    """One thread that tokenises long texts, one after another: the event loop goes on, short texts do not wait behind
    long ones, and the memory that a long one takes is taken once."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="long-texts")

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function on the thread and return what it returns."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Let the thread end; texts that wait are dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def is_long(text: str | None, messages: Sequence[Mapping[str, Any]] | None = None) -> bool:
    """Return whether a prompt is long, as text or as a conversation."""
    contents = (message.get("content") for message in messages or () if isinstance(message, Mapping))
    texts = (content for content in (text, *contents) if isinstance(content, str))
    return sum(map(len, texts)) >= LONG_TEXT
