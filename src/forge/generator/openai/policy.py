"""The policy service as the endpoint sees it: prompts in, completions out, each of them recorded and remembered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.generator.openai.errors import refuse
from forge.generator.openai.prompts import ChatPrompt, ExactPrompts
from forge.generator.openai.records import Recorder
from forge.generator.openai.requests import Wish
from forge.generator.prompts import LongTexts, is_long, length_checked, too_long
from forge.types import Completion, Delta

if TYPE_CHECKING:
    from forge.models.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt to complete.

    Attributes:
        prompt: the argument of `generate` that is the prompt, and those that belong to it.
        wish: how to complete it.
        request: what the record says was asked.
        chat: the conversation as tokens, where it was tokenised here.
    """

    prompt: Mapping[str, Any]
    wish: Wish
    request: Mapping[str, Any]
    chat: ChatPrompt | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.prompt, "sampling": dict(self.wish.sampling), "n": self.wish.n}


class Policy:
    """A service of `Generator`, its card, and what the endpoint keeps beside it."""

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

    def close(self) -> None:
        """End the thread for long texts."""
        self._long_texts.close()

    @property
    def has_structured_output(self) -> bool:
        return bool(self.card["capabilities"]["structured_output"])

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt: the context less one token for the completion."""
        return int(self.card["max_seq_len"]) - 1

    async def check_number(self, num_prompts: int, n: int) -> None:
        """Refuse more completions than the generators can ever have open; what they have no room for now waits."""
        most: int | None = self.card.get("max_open")
        if most is None or num_prompts * n <= most:
            return
        if n > most:
            raise refuse("n", f"must be at most {most}, generator.max_batch and generator.max_queue together")
        most *= len(await self.service.stats.fanout())
        if num_prompts * n > most:
            rule = f"asks for {num_prompts} x {n} completions; the generators take at most {most} at a time"
            raise refuse("prompt", rule)

    async def ask_chat(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any], *, wish: Wish) -> Ask:
        """A conversation, as tokens where there is a tokenizer."""
        told = {"messages": list(messages), "template": dict(template)}
        request = self._request(told, wish)
        if self._prompts is None:
            return Ask(told, wish, request)
        with length_checked("messages", max_seq_len=self.max_prompt_tokens + 1):
            encode, most = self._prompts.encode, self.max_prompt_tokens
            run = self._long_texts.run if is_long(None, messages) else asyncio.to_thread
            chat: ChatPrompt = await run(encode, messages, template, max_tokens=most)
        self.check_length(len(chat.token_ids), "messages")
        _check_tools(messages, template, chat.text)
        return Ask({"token_ids": chat.token_ids}, wish, request, chat)

    def check_length(self, num_tokens: int, param: str) -> None:
        """Refuse a prompt that does not fit, before it is sent anywhere."""
        if num_tokens > self.max_prompt_tokens:
            raise too_long(f"{num_tokens} tokens", path=param, max_seq_len=self.max_prompt_tokens + 1)

    def ask_text(self, prompt: str | Sequence[int], *, wish: Wish) -> Ask:
        """A prompt that is plain text, or tokens."""
        told: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": tuple(prompt)}
        return Ask(told, wish, self._request(told, wish))

    def _request(self, told: Mapping[str, Any], wish: Wish) -> Mapping[str, Any]:
        defaults = self.card.get("sampling") or {}
        return {**told, "sampling": {**defaults, **wish.sampling, "n": wish.n}}

    async def complete(self, ask: Ask) -> list[Completion]:
        """All completions of a prompt."""
        completions: list[Completion] = await self.service.generate.route(**ask.arguments)
        return completions

    def stream(self, ask: Ask) -> AsyncGenerator[Delta, None]:
        """They again, as they grow. Closing it ends the work on them."""
        deltas: AsyncGenerator[Delta, None] = self.service.generate_stream.stream(**ask.arguments)
        return deltas

    def settle(
        self, ask: Ask, completion: Completion, *, exchange_id: str, message: Mapping[str, Any] | None = None
    ) -> None:
        """Record and remember a completion, before the client is told that it is whole."""
        if self._recorder is not None:
            self._recorder.write(completion, id=exchange_id, request=ask.request, conversation=ask.wish.conversation)
        if self._prompts is not None and ask.chat is not None and message is not None:
            self._prompts.remember(ask.chat, completion, message=message)

    def token_text(self, token_id: int) -> str:
        """A token as text, or its number where there is no tokenizer here."""
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.decode([token_id])


def _check_tools(messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any], text: str) -> None:
    """A chat template that knows no tools leaves them out without a word."""
    names = [("tools", tool["function"]["name"]) for tool in template.get("tools") or ()]
    for message in messages:
        names += [("messages", call["function"]["name"]) for call in message.get("tool_calls") or ()]
    for param, name in names:
        if name not in text:
            rule = f"the model's chat template leaves {name!r} out: set generator.chat_template to one with tools"
            raise refuse(param, rule, code="unsupported_value")
