"""`/v1/chat/completions`."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, Final

from aiohttp import web

from forge.generator.openai.policy import CompletionJob, Policy
from forge.generator.openai.requests import read_flag, read_messages, read_template
from forge.generator.openai.responses import chat_logprobs, exact_tokens, send_events, usage_of, weight_versions
from forge.generator.openai.tool_calls import CallReader, ToolCall
from forge.types import Completion, Delta

_OWN: Final = frozenset(("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort"))


async def complete_chat(policy: Policy, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
    """Answer a conversation, whole or piece by piece."""
    options = policy.read_options(request, body, own=_OWN, logprobs=read_flag(body, "logprobs"))
    messages, template = read_messages(body), read_template(body)
    await policy.check_number(1, options.n)
    job = await policy.prepare_chat(messages, template, options=options)
    reply = _Reply(policy, job, reads_calls="tools" in template)
    if options.stream:
        return await send_events(request, reply.chunks())
    completions = await policy.service.generate.route(**job.arguments)
    return web.json_response(reply.whole(completions))


class _Message:
    """The assistant's message of one choice, as it grows."""

    def __init__(self, *, reads_calls: bool) -> None:
        self._reader = CallReader() if reads_calls else None
        self._text = ""
        self._calls: list[ToolCall] = []
        self.has_begun = False

    def add(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """Return what is new, each as the `delta` of a choice."""
        parts: list[str | ToolCall] = [text] if text else []
        if self._reader is not None:
            parts = [*self._reader.add(text), *(self._reader.finish() if is_last else ())]
        return [self._take(part) for part in parts]

    def _take(self, part: str | ToolCall) -> dict[str, Any]:
        if isinstance(part, str):
            self._text += part
            return {"content": part}
        self._calls.append(part)
        return {"tool_calls": [{"index": len(self._calls) - 1, **part.as_message_part()}]}

    def whole(self) -> dict[str, Any]:
        """Return the message."""
        message: dict[str, Any] = {"role": "assistant", "content": self._text, "refusal": None}
        if self._calls:
            message["content"] = self._text or None
            message["tool_calls"] = [call.as_message_part() for call in self._calls]
        return message

    def reason(self, completion: Completion) -> str:
        """Return OpenAI's `finish_reason`, or "abort" for a completion that was cut short."""
        is_call = bool(self._calls) and completion.finish_reason == "stop"
        return "tool_calls" if is_call else completion.finish_reason


class _Reply:
    """The answer to one request."""

    def __init__(self, policy: Policy, job: CompletionJob, *, reads_calls: bool) -> None:
        self._policy, self._job, self._options, self._reads_calls = policy, job, job.options, reads_calls
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": policy.name}
        self._messages: dict[int, _Message] = {}
        self._ended: list[Completion] = []

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        """Return the response, all at once."""
        choices = []
        for completion in completions:
            message = _Message(reads_calls=self._reads_calls)
            message.add(completion.text, is_last=True)
            self._record(completion, message)
            choice: dict[str, Any] = {
                "index": completion.index,
                "message": message.whole(),
                "logprobs": self._logprobs(completion),
                "finish_reason": message.reason(completion),
            }
            choices.append({**choice, **(exact_tokens(completion) if self._options.return_token_ids else {})})
        response = {**self._head, "object": "chat.completion", "choices": choices, "usage": usage_of(completions)}
        if self._options.return_token_ids:
            response["prompt_token_ids"] = list(completions[0].prompt_ids)
        return response

    async def chunks(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the response piece by piece."""
        async with contextlib.aclosing(self._policy.service.generate_stream.stream(**self._job.arguments)) as deltas:
            async for delta in deltas:
                for chunk in self._grow(delta):
                    yield chunk
        if self._options.include_usage:
            yield {**self._chunk_head(), "choices": [], "usage": usage_of(self._ended)}

    def _grow(self, delta: Delta) -> Iterator[dict[str, Any]]:
        message = self._messages.setdefault(delta.index, _Message(reads_calls=self._reads_calls))
        parts = message.add(delta.text, is_last=delta.completion is not None)
        if not message.has_begun:
            message.has_begun = True
            parts.insert(0, {"role": "assistant", "content": ""})
        if delta.completion is not None:
            self._record(delta.completion, message)
        more = self._tokens_of(delta)
        if more and not parts:
            parts = [{"content": ""}]
        for part in parts:
            yield self._chunk({"index": delta.index, "delta": part, "logprobs": None, "finish_reason": None, **more})
            more = {}
        if delta.completion is not None:
            reason = message.reason(delta.completion)
            last: dict[str, Any] = {"index": delta.index, "delta": {}, "logprobs": None, "finish_reason": reason}
            if self._options.return_token_ids:
                last["weight_versions"] = weight_versions(delta.completion)
            chunk = self._chunk(last)
            if self._options.return_token_ids:
                chunk["prompt_token_ids"] = list(delta.completion.prompt_ids)
            yield chunk

    def _chunk(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._chunk_head(), "choices": [choice], **({"usage": None} if self._options.include_usage else {})}

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _record(self, completion: Completion, message: _Message) -> None:
        exchange_id = f"{self._head['id']}-{completion.index}"
        self._policy.record(self._job, completion, exchange_id=exchange_id, message=message.whole())
        self._ended.append(completion)

    def _logprobs(self, tokens: Completion | Delta) -> dict[str, Any] | None:
        if not self._options.logprobs:
            return None
        return chat_logprobs(self._policy, tokens.token_ids, tokens.logprobs)

    def _tokens_of(self, delta: Delta) -> dict[str, Any]:
        if not delta.token_ids:
            return {}
        more: dict[str, Any] = {"logprobs": self._logprobs(delta)} if self._options.logprobs else {}
        return {**more, "token_ids": list(delta.token_ids)} if self._options.return_token_ids else more
