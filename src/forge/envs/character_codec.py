"""A codec without a tokenizer: each character is a token, and the messages can be read back from the tokens.

It stands in for a model's tokenizer where a policy answers messages instead of tokens: agents that check an
environment, and endpoints of other servers. Every continuation of a conversation is exact in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from forge.envs.limits import EpisodeLimits
from forge.envs.trace import Message

_START, _BODY, _END = "\U000f0001", "\U000f0002", "\U000f0003"
"""Characters of a private use area, which take the place of special tokens."""
_CLEAN: Final = str.maketrans(dict.fromkeys((_START, _BODY, _END), "\ufffd"))

END_TOKEN: Final = ord(_END)
_CHARACTERS_PER_TOKEN: Final = 4


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a policy is asked: the conversation, and further arguments of the chat template, such as `tools`."""

    messages: tuple[Message, ...]
    template: Mapping[str, Any]

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the policy may call."""
        found: Sequence[Mapping[str, Any]] = self.template.get("tools") or ()
        return found


class CharacterCodec:
    """A `forge.envs.history.ChatCodec` whose prompts can be read back with `read_prompt`."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (END_TOKEN,)

    def render_prompt(self, messages: Sequence[Message], **options: Any) -> str:
        """Return a conversation as text that ends where the answer starts."""
        words = {name: value for name, value in options.items() if value is not None}
        head = json.dumps(words, default=str, sort_keys=True).translate(_CLEAN)
        return head + "".join(map(_render, messages)) + _render({"role": "assistant", "content": ""}).removesuffix(_END)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return ()

    @property
    def tag_tokens(self) -> tuple[str, ...]:
        return ()

    def encode_rendered(self, text: str) -> list[int]:
        return list(map(ord, text))

    def encode_literal(self, text: str, *, tags: bool = True) -> list[int]:
        return self.encode_rendered(text)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def encode_answer(self, text: str, *, max_tokens: int | None) -> tuple[int, ...]:
        """Return the tokens of an answer with its end, which is left out where `max_tokens` leaves no room for it."""
        return tuple(self.encode_rendered(text.translate(_CLEAN) + _END))[:max_tokens]

    def read_prompt(self, token_ids: Sequence[int]) -> ChatPrompt:
        """Return what `render_prompt` was given."""
        head, *parts = self.decode(token_ids).split(_START)
        return ChatPrompt(tuple(_read(part) for part in parts[:-1]), json.loads(head))


def character_limits(limits: EpisodeLimits) -> EpisodeLimits:
    """Return limits for characters in place of tokens: sampled ones are not limited, and tools get about as much."""
    tool = limits.max_tool_tokens
    changes = {"max_tokens": None, "max_tool_tokens": None if tool is None else _CHARACTERS_PER_TOKEN * tool}
    return limits.model_copy(update=changes)


def _render(message: Message) -> str:
    content = message.get("content")
    is_text = isinstance(content, str)
    head = {name: value for name, value in message.items() if not (name == "content" and is_text)}
    body = content.translate(_CLEAN) if isinstance(content, str) else ""
    return f"{_START}{json.dumps(head, default=str).translate(_CLEAN)}{_BODY}{body}{_END}"


def _read(part: str) -> Message:
    head, _, body = part.partition(_BODY)
    message: dict[str, Any] = json.loads(head)
    return message if "content" in message else {**message, "content": body.removesuffix(_END)}
