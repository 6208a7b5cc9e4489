"""The endpoints `/v1/chat/completions` and `/v1/completions`, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any, Final

from aiohttp import web

from forge.envs.chat_api.errors import parameter_error
from forge.envs.chat_api.requests import RequestOptions, read_flag, read_messages, read_template
from forge.envs.chat_api.responses import AssistantMessage, chat_logprobs, send_events, usage_of
from forge.envs.tool_calls import CallReader, opens_reasoning
from forge.generator.openai.echo import MOST_TOP, TOKENS_BY_NUMBER, EchoOptions, echoed_logprobs, read_echo, with_top
from forge.generator.openai.policy import CompletionJob, Policy
from forge.types import Completion, Delta

_CHAT_PARAMETERS: Final = frozenset(
    ("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort")
)


async def complete_chat(policy: Policy, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
    """Answer a conversation, whole or piece by piece."""
    options = policy.read_options(request, body, own=_CHAT_PARAMETERS, logprobs=read_flag(body, "logprobs"))
    messages, template = read_messages(body), read_template(body)
    await policy.check_number(1, options.n)
    job = await policy.prepare_chat(messages, template, options=options)
    one_call = not read_flag(body, "parallel_tool_calls", default=True)
    reply = _ChatReply(policy, job, reads_calls="tools" in template, one_call=one_call)
    if options.stream:
        return await send_events(request, reply.chunks())
    completions = await policy.service.generate.route(**job.arguments)
    return web.json_response(reply.whole(completions))


class _ChatReply:
    """The answer to one request."""

    def __init__(self, policy: Policy, job: CompletionJob, *, reads_calls: bool, one_call: bool) -> None:
        self._policy, self._job, self._options = policy, job, job.options
        self._reads_calls, self._one_call = reads_calls, one_call
        name = policy.model_name(job.options)
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        self._messages: dict[int, AssistantMessage] = {}
        self._ended: list[Completion] = []

    def _new_message(self) -> AssistantMessage:
        if not self._reads_calls:
            return AssistantMessage()
        is_reasoning = self._job.chat is not None and opens_reasoning(self._job.chat.text)
        id_prefix = f"call_{uuid.uuid4().hex}"
        reader = CallReader(self._policy.tool_format, id_prefix=id_prefix, is_reasoning=is_reasoning)
        return AssistantMessage(reader, one_call=self._one_call)

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        """Return the response, all at once."""
        choices = []
        for completion in completions:
            message = self._new_message()
            message.add(completion.text, is_last=True)
            self._record(completion, message)
            choice: dict[str, Any] = {
                "index": completion.index,
                "message": message.whole(),
                "logprobs": self._logprobs(completion),
                "finish_reason": message.reason(completion.finish_reason),
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
        message = self._messages.setdefault(delta.index, self._new_message())
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
            reason = message.reason(delta.completion.finish_reason)
            last: dict[str, Any] = {"index": delta.index, "delta": {}, "logprobs": None, "finish_reason": reason}
            if self._options.return_token_ids:
                last |= weights_of(delta.completion)
            chunk = self._chunk(last)
            if self._options.return_token_ids:
                chunk["prompt_token_ids"] = list(delta.completion.prompt_ids)
            yield chunk

    def _chunk(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._chunk_head(), "choices": [choice], **({"usage": None} if self._options.include_usage else {})}

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _record(self, completion: Completion, message: AssistantMessage) -> None:
        exchange_id = f"{self._head['id']}-{completion.index}"
        self._policy.record(self._job, completion, exchange_id=exchange_id, message=message.whole())
        self._ended.append(completion)

    def _logprobs(self, tokens: Completion | Delta) -> dict[str, Any] | None:
        if not self._options.logprobs:
            return None
        return chat_logprobs(tokens.token_ids, tokens.logprobs, self._policy.token_text)

    def _tokens_of(self, delta: Delta) -> dict[str, Any]:
        if not delta.token_ids:
            return {}
        more: dict[str, Any] = {"logprobs": self._logprobs(delta)} if self._options.logprobs else {}
        return {**more, "token_ids": list(delta.token_ids)} if self._options.return_token_ids else more


# ---- /v1/completions -------------------------------------------------------------------------------------------------


_TEXT_PARAMETERS: Final = frozenset(("prompt", "echo", TOKENS_BY_NUMBER))


async def complete_text(policy: Policy, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
    """Complete one prompt or several, whole or piece by piece."""
    echo = read_echo(body, can_score=bool(policy.card.get("capabilities", {}).get("prompt_logprobs")))
    if echo is not None and echo.is_prompt_only:
        body = {**body, "max_tokens": 1}  # its token is left out
    options = policy.read_options(request, body, own=_TEXT_PARAMETERS, logprobs=_wants_logprobs(body, echo))
    if echo is not None and options.logprobs and policy.adapter(options) is not None:
        rule = "with logprobs must be left out for an adapter: the logprobs of prompts are those of the model itself"
        raise parameter_error("echo", rule, code="unsupported_value")
    prompts = _read_prompts(body.get("prompt"), policy)
    await policy.check_number(len(prompts), options.n)
    jobs = [policy.prepare_text(prompt, options=options) for prompt in prompts]
    if echo is not None:
        return web.json_response(await _EchoReply(policy, jobs, options, echo=echo).whole())
    reply = _TextReply(policy, jobs, options)
    if options.stream:
        return await send_events(request, reply.chunks())
    return web.json_response(await reply.whole())


def _wants_logprobs(body: Mapping[str, Any], echo: EchoOptions | None) -> bool:
    wanted = body.get("logprobs")
    allowed: Sequence[int] = (0, 1) if echo is not None and echo.knows_best else (0,)
    if echo is not None and echo.num_top:
        allowed = range(MOST_TOP + 1)
    if wanted is not None and (wanted not in allowed or isinstance(wanted, bool)):
        rule = "may be 0, for the logprobs of the tokens themselves; 1, for the likeliest token of each place, only "
        rule += "with echo, and temperature 0 or max_tokens 0; up to "
        rule += f"{MOST_TOP} with echo, max_tokens 0 and {TOKENS_BY_NUMBER}"
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


class _TextReply:
    """The answer to one request: n choices for each prompt, in the order of the prompts."""

    def __init__(self, policy: Policy, jobs: Sequence[CompletionJob], options: RequestOptions) -> None:
        self._policy, self._jobs, self._options = policy, jobs, options
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": policy.model_name(options),
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


class _EchoReply(_TextReply):
    """The answer to a request with `echo`: the prompt stands before each completion, with its logprobs."""

    def __init__(
        self, policy: Policy, jobs: Sequence[CompletionJob], options: RequestOptions, *, echo: EchoOptions
    ) -> None:
        super().__init__(policy, jobs, options)
        self._echo = echo

    async def whole(self) -> dict[str, Any]:
        """Return the response, all at once. One prompt that fails fails all."""
        response = await super().whole()
        if self._echo.is_prompt_only:
            response["usage"] |= {"completion_tokens": 0, "total_tokens": response["usage"]["prompt_tokens"]}
        if not self._options.logprobs:
            return response
        firsts = self._ended[:: self._options.n]
        try:
            async with asyncio.TaskGroup() as group:
                score = self._policy.service.score_prompt
                tasks = [group.create_task(score.route(list(completion.prompt_ids))) for completion in firsts]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        for choice, completion in zip(response["choices"], self._ended, strict=True):
            scores = tasks[choice["index"] // self._options.n].result()
            choice["logprobs"] = echoed_logprobs(self._policy, completion, scores, echo=self._echo)
        if self._echo.num_top:
            prompts = [list(completion.prompt_ids) for completion in firsts]
            tops = await self._policy.service.score_top.route(prompts, self._echo.num_top)
            for choice in response["choices"]:
                top = tops[choice["index"] // self._options.n]
                choice["logprobs"] = with_top(choice["logprobs"], top)
        return response

    def _choice(self, number: int, tokens: Completion | Delta, *, text: str, reason: str | None) -> dict[str, Any]:
        choice = super()._choice(number, tokens, text=text, reason=reason)
        prompt = self._jobs[number].prompt.get("prompt")
        before = prompt if isinstance(prompt, str) else self._policy.decode(self._jobs[number].prompt["token_ids"])
        return {**choice, "text": before if self._echo.is_prompt_only else before + text}


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


def text_logprobs(
    policy: Policy, token_ids: Sequence[int], logprobs: Sequence[float], *, start: int = 0
) -> dict[str, Any]:
    """Return logprobs in the form of /v1/completions; `start` is the number of characters before them."""
    texts = [policy.token_text(token_id) for token_id in token_ids]
    offsets = list(accumulate(map(len, texts), initial=start))[:-1]
    return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}


def exact_tokens(completion: Completion) -> dict[str, Any]:
    """Return what `return_token_ids` adds to a choice: the tokens, and the weight version of each span."""
    return {"token_ids": list(completion.token_ids), **weights_of(completion)}


def weights_of(completion: Completion) -> dict[str, Any]:
    """Return the weight version of each span of tokens, and the adapter if one sampled them."""
    spans = [{"version": span.version, "start": span.start, "end": span.end} for span in completion.versions]
    adapter = {} if completion.adapter is None else {"adapter": asdict(completion.adapter)}
    return {"weight_versions": spans, **adapter}
