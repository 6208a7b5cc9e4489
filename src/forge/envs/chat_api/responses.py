"""Parts of responses: server-sent events, the assistant's message, usage and logprobs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from aiohttp import web

from forge.envs.chat_api.errors import request_error
from forge.envs.tool_calls import CallReader
from forge.types import Completion, MalformedCall, ToolCall

EVENT_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
LAST_EVENT: Final = b"data: [DONE]\n\n"


class AssistantMessage:
    """The assistant's message of one choice, as it grows.

    With a `reader`, calls in the text become `tool_calls`. A malformed call stays text: the client sees what the model
    sampled, and nothing is guessed. With `one_call`, calls after the first are left out.
    """

    def __init__(self, reader: CallReader | None = None, *, one_call: bool = False) -> None:
        self._reader, self._one_call = reader, one_call
        self.num_left_out = 0
        self._text = ""
        self._calls: list[ToolCall] = []
        self._all_calls: list[ToolCall | MalformedCall] = []
        self.has_begun = False

    def add(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """Return what is new, each as the `delta` of a choice."""
        parts: Sequence[str | ToolCall | MalformedCall] = [text] if text else []
        if self._reader is not None:
            parts = [*self._reader.add(text), *(self._reader.finish() if is_last else ())]
        return [delta for part in parts if (delta := self._take(part)) is not None]

    def _take(self, part: str | ToolCall | MalformedCall) -> dict[str, Any] | None:
        if not isinstance(part, str):
            self._all_calls.append(part)
            if self._one_call and self._calls and isinstance(part, ToolCall):
                self.num_left_out += 1
                return None
        part = part.text if isinstance(part, MalformedCall) else part
        if isinstance(part, str):
            self._text += part
            return {"content": part}
        self._calls.append(part)
        return {"tool_calls": [{"index": len(self._calls) - 1, **part.as_message_part()}]}

    @property
    def calls(self) -> tuple[ToolCall | MalformedCall, ...]:
        """All calls so far, those that cannot be read included."""
        return tuple(self._all_calls)

    def whole(self) -> dict[str, Any]:
        """Return the message."""
        message: dict[str, Any] = {"role": "assistant", "content": self._text, "refusal": None}
        if self._calls:
            message["content"] = self._text or None
            message["tool_calls"] = [call.as_message_part() for call in self._calls]
        return message

    def reason(self, finish_reason: str) -> str:
        """Return OpenAI's `finish_reason`, or "abort" for a completion that was cut short."""
        return "tool_calls" if self._calls and finish_reason == "stop" else finish_reason


async def send_events(request: web.Request, chunks: AsyncGenerator[Mapping[str, Any], None]) -> web.StreamResponse:
    """Send each chunk as it comes. What fails before the first is an ordinary error; later it is an event.

    However it ends, also when the client goes away, the chunks are closed before this returns.
    """
    async with contextlib.aclosing(chunks):
        first = await anext(chunks)
        response = web.StreamResponse(headers=EVENT_HEADERS)
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
            await response.write(LAST_EVENT)
        await response.write_eof()
    return response


async def _send(response: web.StreamResponse, chunk: Mapping[str, Any]) -> None:
    await response.write(event(chunk))


def event(chunk: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    # In ASCII: some clients take U+2028 and its like for the end of a line.
    return f"data: {json.dumps(chunk)}\n\n".encode()


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


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[float], token_text: Callable[[int], str]
) -> dict[str, Any]:
    """Return logprobs in the form of /v1/chat/completions, without alternatives."""
    content = []
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        text = token_text(token_id)
        code = None if "\ufffd" in text else list(text.encode("utf-8", "backslashreplace"))
        content.append({"token": text, "logprob": logprob, "bytes": code, "top_logprobs": []})
    return {"content": content, "refusal": None}
