"""Tokenise conversations such that a later turn starts with exactly the tokens of the earlier ones.

Sampled text, tokenised again, need not give the tokens that were sampled. So these are kept: when the text of a new
conversation starts with that of an earlier exchange, the exchange's tokens are used, and only the rest is tokenised.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, AnyStr, Generic, TypeVar

from forge.envs.chat_api.requests import message_key
from forge.envs.rendered import RenderedPrompt, render

if TYPE_CHECKING:
    from forge.models.tokenizer import ChatTokenizer
    from forge.types import Completion

V = TypeVar("V")


class PrefixIndex(Generic[AnyStr, V]):
    """Values by text (or bytes), with a search for the longest entry that is a prefix of another text.

    The least recently used are dropped when there are more than `max_entries`, or more than `max_size` characters.
    """

    def __init__(self, *, max_entries: int = 2048, max_size: int = 64_000_000) -> None:
        self._max_entries, self._max_size = max_entries, max_size
        self._entries: OrderedDict[AnyStr, V] = OrderedDict()
        self._size = 0
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: AnyStr, value: V) -> None:
        with self._guard:
            self._size += 0 if key in self._entries else len(key)
            self._entries[key] = value
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries or self._size > self._max_size:
                self._size -= len(self._entries.popitem(last=False)[0])

    def get(self, key: AnyStr) -> V | None:
        """Return the value of exactly this text."""
        with self._guard:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key]

    def find(self, text: AnyStr) -> tuple[AnyStr, V] | None:
        """Return the longest entry that is a prefix of `text`."""
        with self._guard:
            best = max((key for key in self._entries if text.startswith(key)), key=len, default=None)
            if best is None:
                return None
            self._entries.move_to_end(best)
            return best, self._entries[best]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as text and as tokens, the first `num_kept` of which are those of an earlier exchange.

    `key` is the text in a form that is the same only for the same tokens (`RenderedPrompt.key`).
    """

    text: str
    token_ids: tuple[int, ...]
    num_kept: int = 0
    key: str = ""


class ExactPrompts:
    """Renders conversations, and remembers what was sampled after them. Thread-safe."""

    def __init__(self, tokenizer: ChatTokenizer, *, max_entries: int = 2048) -> None:
        self.tokenizer = tokenizer
        self._sampled: PrefixIndex[str, tuple[int, ...]] = PrefixIndex(max_entries=max_entries)
        self._texts: PrefixIndex[str, str] = PrefixIndex(max_entries=max_entries)

    def encode(
        self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any], *, max_tokens: int | None = None
    ) -> ChatPrompt:
        """Tokenise the prompt of an answer. `template` are keyword arguments of the chat template.

        A long text of more than `max_tokens` raises `TextTooLong`.
        """
        prompt = render(messages, self.tokenizer, template, tags=False)
        restored = [self._as_sampled(message) for message in messages]
        if restored != list(messages):
            exact = render(restored, self.tokenizer, template, tags=False)
            found = self._sampled.find(exact.key)
            # Only the turns with calls may differ: what comes after them must be as the template has it.
            if found is not None and prompt.key.endswith(exact.key[len(found[0]) :]):
                prompt = exact
        return self._encode_prompt(prompt, max_tokens)

    def remember(self, prompt: ChatPrompt, completion: Completion, *, message: Mapping[str, Any]) -> None:
        """Keep what was sampled after a prompt; `message` is what the client was given for it."""
        sampled = self.tokenizer.decode(completion.token_ids)
        self._sampled.put((prompt.key or prompt.text) + sampled, prompt.token_ids + completion.token_ids)
        key = message_key(message)
        if key is not None:
            self._texts.put(key, completion.text)

    def _as_sampled(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with tool calls that this server sent as the text that the model sampled."""
        key = message_key(message)
        text = None if key is None else self._texts.get(key)
        return message if text is None else {"role": "assistant", "content": text}

    def _encode_prompt(self, prompt: RenderedPrompt, max_tokens: int | None) -> ChatPrompt:
        text, key = prompt.text, prompt.key
        found = self._sampled.find(key)
        most = max_tokens if found is None else None  # it may have more tokens than what was sampled
        plain = tuple(self.tokenizer.encode_rendered(text, max_tokens=most))
        if prompt.literals:
            plain = tuple(prompt.encode(self.tokenizer))
        if found is None:
            return ChatPrompt(text, plain, key=key)
        known, kept = found
        exact = (*kept, *prompt.encode(self.tokenizer, start=len(known)))
        # Tokens cannot be joined like this if the tokenizer treats the start of a text in its own way.
        if self.tokenizer.decode(exact) != self.tokenizer.decode(plain):
            return ChatPrompt(text, plain, key=key)
        return ChatPrompt(text, exact, len(kept), key)
