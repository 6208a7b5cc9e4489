"""Server-sent events, and several streams as one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from aiohttp import web

from forge.generator.openai.errors import request_error
from forge.generator.openai.policy import Policy
from forge.types import Completion, Delta


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
            return response  # the client is gone
        except Exception as error:  # noqa: BLE001 - sent to the client, and logged
            await _send(response, request_error(error).body)
        else:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    return response


async def _send(response: web.StreamResponse, chunk: Mapping[str, Any]) -> None:
    # In ASCII: some clients take U+2028 and its like for the end of a line.
    await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


async def merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield the deltas of several streams as they come, each with the number of its stream. One error ends all."""
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


# ---- Parts of responses ----------------------------------------------------------------------------------------------


def usage_of(completions: Iterable[Completion]) -> dict[str, Any]:
    """Return the token usage. The n completions of one prompt read it once."""
    listed = list(completions)
    prompts = [one for one in listed if one.index == 0]
    num_read = sum(len(one.prompt_ids) for one in prompts)
    num_sampled = sum(len(one.token_ids) for one in listed)
    return {
        "prompt_tokens": num_read,
        "completion_tokens": num_sampled,
        "total_tokens": num_read + num_sampled,
        "prompt_tokens_details": {"cached_tokens": sum(one.num_shared for one in prompts)},
    }


def chat_logprobs(policy: Policy, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """Return logprobs in the form of /v1/chat/completions, without alternatives."""
    content = []
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        text = policy.token_text(token_id)
        code = None if "\ufffd" in text else list(text.encode("utf-8", "backslashreplace"))
        content.append({"token": text, "logprob": logprob, "bytes": code, "top_logprobs": []})
    return {"content": content, "refusal": None}


def text_logprobs(
    policy: Policy, token_ids: Sequence[int], logprobs: Sequence[float], *, start: int = 0
) -> dict[str, Any]:
    """Return logprobs in the form of /v1/completions; `start` is the number of characters before them."""
    texts = [policy.token_text(token_id) for token_id in token_ids]
    offsets = list(accumulate(map(len, texts), initial=start))[:-1]
    return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}


def exact_tokens(completion: Completion) -> dict[str, Any]:
    """Return what `return_token_ids` adds to a choice: the tokens, and the weight version of each span."""
    return {"token_ids": list(completion.token_ids), "weight_versions": weight_versions(completion)}


def weight_versions(completion: Completion) -> list[dict[str, int]]:
    """Return the weight version of each span of tokens."""
    return [{"version": span.version, "start": span.start, "end": span.end} for span in completion.versions]
