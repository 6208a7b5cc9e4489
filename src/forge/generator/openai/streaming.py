"""Server-sent events, and several streams as one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from aiohttp import web

from forge.generator.openai.errors import request_error
from forge.types import Delta


async def send_events(request: web.Request, chunks: AsyncGenerator[Mapping[str, Any], None]) -> web.StreamResponse:
    """Send each chunk as it comes. What fails before the first is an ordinary error; later it is an event.

    However it ends, also when the client goes away, the chunks are closed before this returns.
    """
    async with contextlib.aclosing(chunks):
        first = await anext(chunks)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            await _send(response, first)
            async for chunk in chunks:
                await _send(response, chunk)
        except ConnectionError:
            return response  # nobody listens any more
        except Exception as error:  # noqa: BLE001 - the client is told, and the log has it
            await _send(response, request_error(error).body)
        else:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    return response


async def _send(response: web.StreamResponse, chunk: Mapping[str, Any]) -> None:
    # In ASCII: some clients take U+2028 and its like for the end of a line.
    await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


async def merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of several streams as they come, each with the number of its stream. One that fails ends all."""
    arrived: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue(maxsize=16)

    async def pump(number: int, stream: AsyncGenerator[Delta, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for delta in stream:
                    await arrived.put((number, delta))
        except Exception as error:  # noqa: BLE001 - raised to the reader
            await arrived.put((number, error))
        else:
            await arrived.put((number, None))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            number, delta = await arrived.get()
            if isinstance(delta, BaseException):
                raise delta
            if delta is None:
                num_open -= 1
            else:
                yield number, delta
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
