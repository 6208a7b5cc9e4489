"""Answers of an episode's endpoint, whole or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forge.envs.chat_api.responses import LAST_EVENT, AssistantMessage, chat_logprobs, event
from forge.envs.endpoint_requests import ChatRequest
from forge.envs.history import ChatCodec
from forge.envs.responses_api import response_events, whole_response
from forge.envs.tool_calls import CallReader, ToolFormat
from forge.envs.trace import Message
from forge.types import Turn


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn as its client gets it.

    Attributes:
        turn: the turn, with its calls.
        id: names the response.
        message: the assistant's message.
        deltas: the message piece by piece: what is said, then each call.
        finish_reason: why it ended, in OpenAI's words.
        num_prompt_tokens: the tokens that the policy read.
        num_left_out: calls that were sampled and not delivered, because the client takes one at a time.
    """

    turn: Turn
    id: str
    message: Message
    deltas: tuple[Mapping[str, Any], ...]
    finish_reason: str
    num_prompt_tokens: int
    num_left_out: int = 0

    @classmethod
    def of(
        cls,
        turn: Turn,
        asked: ChatRequest,
        *,
        name: str,
        tool_format: ToolFormat,
        num_prompt_tokens: int,
        is_reasoning: bool = False,
    ) -> Answer:
        """Return a turn as the answer to a request. Calls are read where the client gave tools, after the reasoning
        that the prompt may have opened."""
        reader = None
        if asked.template.get("tools"):
            reader = CallReader(tool_format, id_prefix=f"call_{name}", is_reasoning=is_reasoning)
        message = AssistantMessage(reader, one_call=asked.one_call)
        deltas = tuple(message.add(turn.text, is_last=True))
        return cls(
            turn=replace(turn, calls=message.calls),
            id=f"resp_{name}" if asked.is_responses else f"chatcmpl-{name}",
            message=message.whole(),
            deltas=deltas,
            finish_reason=message.reason(turn.finish_reason),
            num_prompt_tokens=num_prompt_tokens,
            num_left_out=message.num_left_out,
        )

    def whole(self, asked: ChatRequest, codec: ChatCodec) -> dict[str, Any]:
        """Return the response, all at once."""
        if asked.is_responses:
            return whole_response(self, asked)
        choice = {
            "index": 0,
            "message": self.message,
            "logprobs": self._logprobs(asked, codec),
            "finish_reason": self.finish_reason,
        }
        return {**self._head(asked), "object": "chat.completion", "choices": [choice], "usage": self.usage()}

    def events(self, asked: ChatRequest, codec: ChatCodec) -> bytes:
        """Return the response as server-sent events."""
        if asked.is_responses:
            return response_events(self, asked)
        head = {**self._head(asked), "object": "chat.completion.chunk"}
        usage = {"usage": None} if asked.include_usage else {}
        logprobs = self._logprobs(asked, codec)
        chunks: list[Mapping[str, Any]] = []
        for delta in ({"role": "assistant", "content": ""}, *self.deltas):
            choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}
            chunks.append({**head, "choices": [choice], **usage})
            logprobs = None  # all of them come with the first
        last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": self.finish_reason}
        chunks.append({**head, "choices": [last], **usage})
        if asked.include_usage:
            chunks.append({**head, "choices": [], "usage": self.usage()})
        return b"".join(map(event, chunks)) + LAST_EVENT

    def _head(self, asked: ChatRequest) -> dict[str, Any]:
        return {"id": self.id, "created": int(time.time()), "model": asked.model}

    def _logprobs(self, asked: ChatRequest, codec: ChatCodec) -> dict[str, Any] | None:
        if not asked.logprobs:
            return None
        return chat_logprobs(self.turn.token_ids, self.turn.logprobs, lambda token: codec.decode([token]))

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens."""
        num_sampled = len(self.turn)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_sampled,
            "total_tokens": self.num_prompt_tokens + num_sampled,
            "prompt_tokens_details": {"cached_tokens": self.turn.num_cached},
        }
