"""A server in a thread, in front of a service in memory, and OpenAI's own clients for it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai

from forge.config import ServeConfig
from forge.generator.engine import EngineStats
from forge.generator.openai import OpenAIServer, serve_openai
from forge.models.tokenizer import ChatTokenizer
from forge.types import Completion, Delta, VersionSpan

LIMIT_S = 600


@contextmanager
def serving(service: Any, tokenizer: ChatTokenizer | None = None, **config: Any) -> Iterator[OpenAIServer]:
    """Serve until the block ends, on an event loop of another thread."""
    started: queue.Queue[OpenAIServer | BaseException] = queue.Queue()
    ended = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        try:
            options = ServeConfig(port=0, **config)
            async with serve_openai(service, options, tokenizer=tokenizer, drain_s=0.1) as server:
                started.put(server)
                await ended.wait()
        except BaseException as error:
            started.put(error)
            raise

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        server = started.get(timeout=LIMIT_S)
        if isinstance(server, BaseException):
            raise server
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        loop.close()


@contextmanager
def client_of(server: OpenAIServer, *, api_key: str = "none") -> Iterator[openai.OpenAI]:
    """The official client. It takes no proxy from the environment and tries nothing twice."""
    with openai.OpenAI(
        base_url=server.base_url,
        api_key=api_key,
        max_retries=0,
        timeout=LIMIT_S,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        yield client


class _Endpoint:
    def __init__(self, call: Any) -> None:
        self.route = self.stream = call

    async def fanout(self) -> list[Any]:
        return [await self.route()]


class TokenService:
    """A policy that draws the tokens it is told to, one list after another, and keeps the prompts it was given."""

    def __init__(self, tokenizer: ChatTokenizer, answers: Sequence[Sequence[int]]) -> None:
        self._tokenizer, self._answers = tokenizer, list(answers)
        self.prompts: list[tuple[int, ...]] = []
        self.generate, self.generate_stream = _Endpoint(self._generate), _Endpoint(self._stream)
        self.card, self.stats = _Endpoint(self._card), _Endpoint(self._stats)

    async def _generate(self, *, token_ids: Sequence[int], sampling: Any, n: int) -> list[Completion]:
        self.prompts.append(tuple(token_ids))
        drawn = tuple(self._answers.pop(0))
        logprobs = tuple(-0.5 - index for index in range(len(drawn)))
        text = self._tokenizer.decode(drawn, skip_special=True)
        spans = (VersionSpan(3, 0, len(drawn)),)
        return [Completion(tuple(token_ids), drawn, logprobs, None, text, "stop", versions=spans)]

    async def _stream(self, **arguments: Any) -> AsyncIterator[Delta]:
        (whole,) = await self._generate(**arguments)
        for index, token in enumerate(whole.token_ids):
            is_last = index + 1 == len(whole)
            text = whole.text if is_last else ""
            yield Delta(0, (token,), (whole.logprobs[index],), text, 3, whole if is_last else None)

    async def _card(self) -> dict[str, Any]:
        return {
            "name": "tokens",
            "engine": "fake",
            "capabilities": {"structured_output": True},
            "max_seq_len": 4096,
            "version": 3,
        }

    async def _stats(self) -> EngineStats:
        return EngineStats(version=3)
