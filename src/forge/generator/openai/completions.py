"""`/v1/completions`: continue text, or tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

from aiohttp import web

from forge.generator.openai.errors import parameter_error
from forge.generator.openai.policy import CompletionJob, Policy
from forge.generator.openai.requests import RequestOptions
from forge.generator.openai.responses import exact_tokens, merge, send_events, text_logprobs, usage_of
from forge.types import Completion, Delta

_OWN: Final = frozenset(("prompt",))


async def complete_text(policy: Policy, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
    """Complete one prompt or several, whole or piece by piece."""
    options = policy.read_options(request, body, own=_OWN, logprobs=_wants_logprobs(body))
    prompts = _read_prompts(body.get("prompt"), policy)
    await policy.check_number(len(prompts), options.n)
    reply = _Reply(policy, [policy.prepare_text(prompt, options=options) for prompt in prompts], options)
    if options.stream:
        return await send_events(request, reply.chunks())
    return web.json_response(await reply.whole())


def _wants_logprobs(body: Mapping[str, Any]) -> bool:
    wanted = body.get("logprobs")
    if wanted is not None and (wanted != 0 or isinstance(wanted, bool)):
        rule = "may be 0, for the logprobs of the sampled tokens; logprobs of other tokens are not supported"
        raise parameter_error("logprobs", rule, code="unsupported_value")
    return wanted is not None


def _read_prompts(prompt: Any, policy: Policy) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        for ids in prompt if isinstance(prompt[0], list) else [prompt]:
            if isinstance(ids, list) and ids and type(ids[0]) is int:
                policy.check_length(len(ids), "prompt")
        if all(type(token) is int for token in prompt):
            return [prompt]
        if all(isinstance(text, str) for text in prompt):
            return prompt
        if all(isinstance(ids, list) and ids and all(type(token) is int for token in ids) for ids in prompt):
            return prompt
    rule = "must be text, a list of texts, a list of token ids, or a list of such lists, and not empty"
    raise parameter_error("prompt", rule, code="missing_required_parameter" if prompt is None else "invalid_type")


class _Reply:
    """The answer to one request: n choices for each prompt, in the order of the prompts."""

    def __init__(self, policy: Policy, jobs: Sequence[CompletionJob], options: RequestOptions) -> None:
        self._policy, self._jobs, self._options = policy, jobs, options
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": policy.name,
        }
        self._num_characters: dict[int, int] = {}
        self._ended: list[Completion] = []

    async def whole(self) -> dict[str, Any]:
        """Return the response, all at once. One prompt that fails fails all."""
        try:
            async with asyncio.TaskGroup() as group:
                generate = self._policy.service.generate
                tasks = [group.create_task(generate.route(**job.arguments)) for job in self._jobs]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        choices = []
        for number, task in enumerate(tasks):
            for completion in task.result():
                choice = self._choice(number, completion, text=completion.text, reason=completion.finish_reason)
                self._record(number, completion, choice["index"])
                choices.append({**choice, **self._exact(completion)})
        return {**self._head, "choices": choices, "usage": usage_of(self._ended)}

    async def chunks(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the response piece by piece."""
        streams = [self._policy.service.generate_stream.stream(**job.arguments) for job in self._jobs]
        async with contextlib.aclosing(merge(streams)) as deltas:
            async for number, delta in deltas:
                yield self._grow(number, delta)
        if self._options.include_usage:
            yield {**self._head, "choices": [], "usage": usage_of(self._ended)}

    def _grow(self, number: int, delta: Delta) -> dict[str, Any]:
        completion = delta.completion
        choice = self._choice(number, delta, text=delta.text, reason=None)
        if completion is not None:
            self._record(number, completion, choice["index"])
            choice = {**choice, "finish_reason": completion.finish_reason, **self._exact(completion)}
        if self._options.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return {**self._head, "choices": [choice], **({"usage": None} if self._options.include_usage else {})}

    def _choice(self, number: int, tokens: Completion | Delta, *, text: str, reason: str | None) -> dict[str, Any]:
        index = number * self._options.n + tokens.index
        logprobs = None
        if self._options.logprobs:
            start = self._num_characters.get(index, 0)
            logprobs = text_logprobs(self._policy, tokens.token_ids, tokens.logprobs, start=start)
            self._num_characters[index] = start + sum(map(len, logprobs["tokens"]))
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _record(self, number: int, completion: Completion, index: int) -> None:
        self._policy.record(self._jobs[number], completion, exchange_id=f"{self._head['id']}-{index}")
        self._ended.append(completion)

    def _exact(self, completion: Completion) -> dict[str, Any]:
        if not self._options.return_token_ids:
            return {}
        return {"prompt_token_ids": list(completion.prompt_ids), **exact_tokens(completion)}
