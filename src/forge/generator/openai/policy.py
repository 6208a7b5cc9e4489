"""The policy service as the endpoint uses it: prompts in, completions out, each of them recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from forge.config.generator import BASE_ADAPTER
from forge.envs.chat_api.errors import parameter_error
from forge.envs.chat_api.requests import CONVERSATION_HEADER, RequestOptions, check_tools, read_options
from forge.envs.tool_calls import ToolFormat, detect_format
from forge.generator.openai.prompts import ChatPrompt, ExactPrompts
from forge.generator.openai.records import Recorder
from forge.generator.prompts import LongTexts, is_long, length_checked, too_long
from forge.types import Completion

if TYPE_CHECKING:
    from forge.models.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """One prompt to complete.

    Attributes:
        prompt: the argument of `generate` that is the prompt, and those that belong to it.
        options: what the client asked for.
        request: the request as the record keeps it.
        chat: the conversation as tokens, where it was tokenised here.
    """

    prompt: Mapping[str, Any]
    options: RequestOptions
    request: Mapping[str, Any]
    chat: ChatPrompt | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.prompt, "sampling": dict(self.options.sampling), "n": self.options.n}


class Policy:
    """A service of `Generator`, its card, and the endpoint's own state: exact prompts and the record."""

    def __init__(
        self,
        service: Any,
        *,
        name: str,
        card: Mapping[str, Any],
        tokenizer: ChatTokenizer | None,
        recorder: Recorder | None,
    ) -> None:
        self.service, self.name, self.card = service, name, card
        self._tokenizer, self._recorder = tokenizer, recorder
        self._prompts = None if tokenizer is None else ExactPrompts(tokenizer)
        self._long_texts = LongTexts()
        self.tool_format: ToolFormat = "hermes" if tokenizer is None else detect_format(tokenizer.chat_template)

    def close(self) -> None:
        """End the thread for long texts."""
        self._long_texts.close()

    def read_options(
        self, request: web.Request, body: Mapping[str, Any], *, own: frozenset[str], logprobs: bool
    ) -> RequestOptions:
        """Read everything but the prompt. `own` are the parameters that only this endpoint has."""
        can_structure = bool(self.card["capabilities"]["structured_output"])
        header = request.headers.get(CONVERSATION_HEADER)
        return read_options(body, own=own, has_structured_output=can_structure, logprobs=logprobs, header=header)

    def adapter(self, options: RequestOptions) -> str | None:
        """Return the adapter that a request selects, or the configuration for it; None for none."""
        defaults = self.card.get("sampling") or {}
        name: str | None = {**defaults, **options.sampling}.get("adapter")
        return name

    def model_name(self, options: RequestOptions) -> str:
        """Return the model that a response names: the adapter, if there is one."""
        name = self.adapter(options)
        return self.name if name is None or name == BASE_ADAPTER else name

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt: the context less one token for the completion."""
        return int(self.card["max_seq_len"]) - 1

    async def check_number(self, num_prompts: int, n: int) -> None:
        """Refuse more completions than the generators can ever have open. Up to that number, completions wait."""
        most: int | None = self.card.get("max_open")
        if most is None or num_prompts * n <= most:
            return
        if n > most:
            raise parameter_error("n", f"must be at most {most}, generator.max_batch and generator.max_queue together")
        most *= len(await self.service.stats.fanout())
        if num_prompts * n > most:
            rule = f"asks for {num_prompts} x {n} completions; the generators take at most {most} at a time"
            raise parameter_error("prompt", rule)

    async def prepare_chat(
        self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any], *, options: RequestOptions
    ) -> CompletionJob:
        """Prepare a conversation, as tokens where there is a tokenizer."""
        prompt = {"messages": list(messages), "template": dict(template)}
        request = self._request(prompt, options)
        if self._prompts is None:
            return CompletionJob(prompt, options, request)
        with length_checked("messages", max_seq_len=self.max_prompt_tokens + 1):
            encode, most = self._prompts.encode, self.max_prompt_tokens
            run = self._long_texts.run if is_long(None, messages) else asyncio.to_thread
            chat: ChatPrompt = await run(encode, messages, template, max_tokens=most)
        self.check_length(len(chat.token_ids), "messages")
        check_tools(messages, template, chat.text)
        return CompletionJob({"token_ids": chat.token_ids}, options, request, chat)

    def check_length(self, num_tokens: int, param: str) -> None:
        """Refuse a prompt that does not fit, before it is sent anywhere."""
        if num_tokens > self.max_prompt_tokens:
            raise too_long(f"{num_tokens} tokens", path=param, max_seq_len=self.max_prompt_tokens + 1)

    def prepare_text(self, prompt: str | Sequence[int], *, options: RequestOptions) -> CompletionJob:
        """Prepare a prompt of plain text, or of tokens."""
        given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": tuple(prompt)}
        return CompletionJob(given, options, self._request(given, options))

    def _request(self, prompt: Mapping[str, Any], options: RequestOptions) -> Mapping[str, Any]:
        defaults = self.card.get("sampling") or {}
        return {**prompt, "sampling": {**defaults, **options.sampling, "n": options.n}}

    def record(
        self, job: CompletionJob, completion: Completion, *, exchange_id: str, message: Mapping[str, Any] | None = None
    ) -> None:
        """Record and remember a completion, before the client gets its end."""
        if self._recorder is not None:
            self._recorder.write(completion, id=exchange_id, request=job.request, conversation=job.options.conversation)
        if self._prompts is not None and job.chat is not None and message is not None:
            self._prompts.remember(job.chat, completion, message=message)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return tokens as text, or nothing where there is no tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """Return a token as text, or its number where there is no tokenizer."""
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.decode([token_id])
