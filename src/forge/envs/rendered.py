"""Prompts whose messages cannot write control tokens.

A tool's output or a user's text may contain `<|im_end|>` or another special token as text. Tokenised with the rest of
the prompt it would become the control token, and whoever wrote the text could end the turn or start another role. So
such text is found before the template renders it, and encoded as the plain text that it is. Answers of the assistant
are exempt: control tokens in them were sampled.

The same holds for tags: tokens that the tokenizer does not call special, but that a model reads as control tokens, such
as `<think>` and `<tool_call>`. A system prompt may use them: whoever writes it speaks of what the model knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, Protocol

from forge.envs.trace import Message

_MARKS: Final = range(0xF0000, 0xFFFFE)
"""Code points for private use, which stand for special tokens while the template renders."""


_AUTHORS: Final = ("system", "developer")
"""Roles whose messages may use tags."""


class PromptCodec(Protocol):
    """What rendering and encoding a prompt need from a tokenizer with a chat template."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The texts that `encode_rendered` turns into control tokens."""
        ...

    @property
    def tag_tokens(self) -> tuple[str, ...]:
        """The other texts that are single tokens and look like tags."""
        ...

    def render_prompt(self, messages: Sequence[Message], **options: Any) -> str: ...

    def encode_rendered(self, text: str) -> list[int]: ...

    def encode_literal(self, text: str, *, tags: bool = True) -> list[int]:
        """Return the tokens of text without any control token, and with `tags` without any tag, whatever it looks
        like."""
        ...


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The text of a prompt.

    Attributes:
        text: the whole text.
        literals: where messages contain the text of special tokens, in order: (start, end).
        tags: whether tags are control tokens, too.
    """

    text: str
    literals: tuple[tuple[int, int], ...] = ()
    tags: bool = True

    @property
    def key(self) -> str:
        """The text, with other characters in place of the literals: the same only for the same tokens."""
        pieces, done = list[str](), 0
        for start, end in self.literals:
            shifted = "".join(chr(_MARKS.start + ord(each) % len(_MARKS)) for each in self.text[start:end])
            pieces += [self.text[done:start], shifted]
            done = end
        return "".join([*pieces, self.text[done:]])

    def encode(self, codec: PromptCodec, *, start: int = 0) -> list[int]:
        """Return the tokens of the text from a position on."""
        literals = [span for span in self.literals if span[0] >= start]
        if not literals:
            return codec.encode_rendered(self.text[start:]) if start < len(self.text) else []
        ids: list[int] = []
        done, at = start, start
        for control_start, control_end in self._controls(codec, literals, start):
            if any(at <= first < control_start for first, _ in literals):
                ids += codec.encode_rendered(self.text[done:at]) if done < at else []
                ids += codec.encode_literal(self.text[at:control_start], tags=self.tags)
                done = control_start
            at = control_end
        return ids + (codec.encode_rendered(self.text[done:]) if done < len(self.text) else [])

    def _controls(
        self, codec: PromptCodec, literals: Sequence[tuple[int, int]], start: int
    ) -> Iterator[tuple[int, int]]:
        """Return where the template wrote control tokens, and the end of the text."""
        size = len(self.text)
        for (_, gap_start), (gap_end, _) in pairwise([(start, start), *literals, (size, size)]):
            for found in _pattern(_controls_of(codec, self.tags)).finditer(self.text, gap_start, gap_end):
                yield found.span()
        yield size, size


def render(
    messages: Sequence[Message], codec: PromptCodec, template: Mapping[str, Any], *, tags: bool = True
) -> RenderedPrompt:
    """Return a conversation as text, with the places where its messages contain the text of special tokens, and with
    `tags` of tags."""
    text = codec.render_prompt(messages, **template)
    controls, specials = _controls_of(codec, tags), codec.special_tokens

    def pattern_of(message: Message) -> re.Pattern[str] | None:
        role = message.get("role")
        chosen = () if role == "assistant" else specials if role in _AUTHORS else controls
        return _pattern(chosen) if chosen else None

    patterns = [pattern_of(message) for message in messages]
    written = {
        found
        for message, pattern in zip(messages, patterns, strict=True)
        if pattern is not None
        for part in _texts(message)
        for found in pattern.findall(part)
    }
    if not written:
        return RenderedPrompt(text, tags=tags)
    free = (chr(code) for code in _MARKS if chr(code) not in text)
    marks = {special: next(free) for special in sorted(written)}
    pairs = zip(messages, patterns, strict=True)
    marked = codec.render_prompt([_mark(message, pattern, marks) for message, pattern in pairs], **template)
    return _restore(marked, {mark: special for special, mark in marks.items()}, tags=tags)


def _controls_of(codec: PromptCodec, tags: bool) -> tuple[str, ...]:
    return codec.special_tokens + codec.tag_tokens if tags else codec.special_tokens


def _restore(marked: str, specials: Mapping[str, str], *, tags: bool) -> RenderedPrompt:
    pieces, literals, size = list[str](), list[tuple[int, int]](), 0
    for piece in re.split(f"([{''.join(specials)}])", marked):
        text = specials.get(piece, piece)
        if piece in specials:
            literals.append((size, size + len(text)))
        pieces.append(text)
        size += len(text)
    return RenderedPrompt("".join(pieces), tuple(literals), tags)


def _mark(message: Message, pattern: re.Pattern[str] | None, marks: Mapping[str, str]) -> Message:
    if pattern is None:
        return message

    def marked(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda found: marks[found.group()], value)
        if isinstance(value, Mapping):
            return {key: each if key == "role" else marked(each) for key, each in value.items()}
        return [marked(each) for each in value] if isinstance(value, list | tuple) else value

    found: Message = marked(message)
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if key != "role":
                yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


@lru_cache(maxsize=16)
def _pattern(specials: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(each) for each in sorted(specials, key=len, reverse=True)))
