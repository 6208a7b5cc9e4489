"""Token-exact histories: messages in, tokens to append out.

Sampled text that is tokenised again need not give the sampled tokens. So sampled tokens are kept as they are. When the
template's text of the longer conversation starts with the text that the engine already has, only the rest is tokenised
and appended. Otherwise the history cannot be extended, and the next turn starts a new root with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from forge.envs.rendered import PromptCodec, RenderedPrompt, render
from forge.envs.trace import Message
from forge.types import PrefixBreakKind

_JOINT: Final = 16
"""Tokens before a joint that are decoded again to see whether the tokens on both sides can be joined."""


class ChatCodec(PromptCodec, Protocol):
    """What a history needs from a tokenizer with a chat template (`forge.models.tokenizer.ChatTokenizer`)."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Extension:
    """What to send to the engine for the next turn.

    Attributes:
        appended_ids: tokens to append to the history; the whole prompt where `starts_over`.
        starts_over: whether the history is replaced instead of extended.
        prefix_break: why it starts over; None for the first turn of a branch.
        text: the text of the whole prompt.
    """

    appended_ids: tuple[int, ...]
    starts_over: bool
    prefix_break: PrefixBreakKind | None
    text: str


@dataclass(frozen=True, slots=True)
class History:
    """One branch of a conversation: its messages, and the text and last tokens that the engine has. Immutable.

    Example:
        >>> extension = history.extend([{"role": "user", "content": "Hi"}], codec)
        >>> history = history.after(extension, messages, sampled_ids, codec)

    Attributes:
        messages: the conversation, with each sampled answer as the text that was sampled.
        text: the text of all tokens that the engine has for this branch; None before its first turn.
        tail: the last of those tokens.
        edit: why the next turn cannot extend `text`, if it is known already.
    """

    messages: tuple[Message, ...] = ()
    text: str | None = None
    tail: tuple[int, ...] = ()
    edit: PrefixBreakKind | None = None

    def extend(
        self, messages: Sequence[Message], codec: ChatCodec, *, template: Mapping[str, Any] | None = None
    ) -> Extension:
        """Return what to append so that the engine continues after `messages`."""
        prompt = render([*self.messages, *messages], codec, template or {})
        if self.text is None or self.edit is not None:
            return self._start_over(prompt, codec, self.edit)
        if not prompt.text.startswith(self.text):
            return self._start_over(prompt, codec, "template")
        rest = prompt.text[len(self.text) :]
        appended = tuple(prompt.encode(codec, start=len(self.text)))
        if codec.decode(self.tail + appended) != codec.decode(self.tail) + rest:
            return self._start_over(prompt, codec, "retokenization")
        return Extension(appended, starts_over=False, prefix_break=None, text=prompt.text)

    def after(
        self, extension: Extension, messages: Sequence[Message], sampled_ids: Sequence[int], codec: ChatCodec
    ) -> History:
        """Return the history with `messages` and the answer that was sampled after them."""
        sampled = tuple(sampled_ids)
        held = () if extension.starts_over else self.tail
        return History(
            (*self.messages, *messages, answer_message(sampled, codec)),
            extension.text + codec.decode(sampled),
            (held + extension.appended_ids + sampled)[-_JOINT:],
        )

    def replaced(self, messages: Sequence[Message], why: PrefixBreakKind = "compaction") -> History:
        """Return a history of other messages. It breaks the prefix unless nothing was sampled yet."""
        edit = why if self.text is not None else None
        return replace(self, messages=tuple(messages), edit=edit)

    def _start_over(self, prompt: RenderedPrompt, codec: ChatCodec, why: PrefixBreakKind | None) -> Extension:
        return Extension(tuple(prompt.encode(codec)), starts_over=True, prefix_break=why, text=prompt.text)


def answer_message(sampled_ids: Sequence[int], codec: ChatCodec) -> Message:
    """Return a sampled answer as a message that the template renders as it was sampled, where that is possible.

    The content keeps special tokens and tool calls as text. Only the token that ended the turn is taken away, because
    the template adds it.
    """
    ids = tuple(sampled_ids)
    if ids and ids[-1] in codec.stop_token_ids:
        ids = ids[:-1]
    return {"role": "assistant", "content": codec.decode(ids)}
