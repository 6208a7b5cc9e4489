"""Chat templates on text: what a conversation looks like, and which characters of it the assistant generates.

A template may mark what the assistant says with `{% generation %}` blocks; then they decide. Most published templates
have none. For those the spans are found by rendering the conversation a second time, with a mark at the end of each
message: taking the marks out must give the first text again, character by character, or nothing is claimed. A span goes
from the end of the header that generation starts with to the end of the token that ends the turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from forge.errors import DataError, ModelError

Message: TypeAlias = Mapping[str, Any]
Span: TypeAlias = tuple[int, int]
"""Characters of a rendered text: from, and up to but not including."""

_BLOCK: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REPAIR: Final = "give a template with {% generation %} blocks in data.chat_template"


@dataclass(frozen=True)
class ChatTemplate:
    """One Jinja template and the words that it uses.

    Attributes:
        text: the template.
        name: where it came from, for messages.
        words: the special tokens that the template may name, such as bos_token.
        special_tokens: the texts of all special tokens; one of them must end an assistant's turn.
        stop_tokens: those at which generation stops, as far as the tokenizer says.
    """

    text: str
    name: str
    words: Mapping[str, Any] = field(default_factory=dict)
    special_tokens: tuple[str, ...] = ()
    stop_tokens: tuple[str, ...] = ()
    _turns: dict[str, _Turn] = field(default_factory=dict, repr=False, compare=False)

    @property
    def has_blocks(self) -> bool:
        """Whether the template says itself what the assistant generates."""
        return _BLOCK.search(self.text) is not None

    def check(self) -> None:
        """Raise `ModelError` with the line if this is not a Jinja template."""
        try:
            self.render([{"role": "user", "content": "?"}])
        except DataError:
            return  # it can be read, and wants other conversations than this

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the text of a conversation. `options` go to the template, such as add_generation_prompt or tools."""
        return self._render(messages, options, find_blocks=False)[0]

    def render_spans(self, messages: Sequence[Message], **options: Any) -> tuple[str, list[Span]]:
        """Return the text, and in order the spans that the assistant says, the end of each turn included."""
        if self.has_blocks:
            return self._render(messages, options, find_blocks=True)
        text = self.render(messages, **options)
        if not any(message["role"] == "assistant" for message in messages):
            return text, []
        for marks_all in (True, False):  # a mark may hide from the template what kind of text a user's message is
            ends = self._message_ends(messages, text, options, marks_all=marks_all)
            if ends is not None:
                return text, self._spans(messages, text, ends, self._turn(options))
        raise self._inexact("it changes with what is appended to a message, so message boundaries cannot be found")

    def end_of_turn(self) -> str | None:
        """Return the token that ends an assistant's turn; None where the template uses none."""
        try:
            return self._turn({}).end
        except (ModelError, DataError):
            return None

    def _render(
        self, messages: Sequence[Message], options: Mapping[str, Any], *, find_blocks: bool
    ) -> tuple[str, list[Span]]:
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        _check_messages(messages)
        try:
            texts, spans = render(
                conversations=[list(messages)],
                chat_template=self.text,
                return_assistant_tokens_mask=find_blocks,
                **{**self.words, **options},
            )
        except TemplateSyntaxError as error:
            raise ModelError(
                "The chat template cannot be read.",
                path=f"{self.name}:{error.lineno}",
                rule=f"a Jinja template: {error.message}",
                repair="correct it, or give another one in data.chat_template",
            ) from None
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(
                "The chat template does not accept this conversation.",
                path=self.name,
                value=[message["role"] for message in messages],
                rule=str(error),
                repair="correct the conversation, or give another template in data.chat_template",
            ) from None
        return texts[0], [(start, end) for start, end in spans[0]] if find_blocks else []

    def _inexact(self, reason: str) -> ModelError:
        return ModelError(
            "The chat template does not mark exactly which text is the assistant's.",
            path=self.name,
            rule=f"without {{% generation %}} blocks, the assistant's turns must be recognisable: {reason}",
            repair=_REPAIR,
        )

    def _message_ends(
        self, messages: Sequence[Message], text: str, options: Mapping[str, Any], *, marks_all: bool
    ) -> list[int | None] | None:
        """Return for each message the position in `text` where its content ends; None where it cannot be seen.

        None as a whole if the marks changed the rest of the text, or came out in another order.
        """
        opening = "\ue000"
        while opening in text:
            opening += "\ue000"
        marks: dict[int, str] = {}
        marked: list[Message] = []
        for index, message in enumerate(messages):
            mark = f"{opening}{index}\ue001"
            content = message.get("content")
            if isinstance(content, str) and content and (marks_all or message["role"] == "assistant"):
                marks[index] = mark
                kept = content.rstrip()
                message = {**message, "content": kept + mark + content[len(kept) :]}
            marked.append(message)
        try:
            rest = self.render(marked, **options)
        except DataError:
            return None
        ends: list[int | None] = [None] * len(messages)
        clean, position = "", 0
        for index, mark in marks.items():
            found = rest.find(mark, position)
            if found < 0 and mark not in rest:
                continue
            if found < 0:
                return None
            clean += rest[position:found]
            ends[index] = len(clean)
            position = found + len(mark)
        return ends if clean + rest[position:] == text else None

    def _spans(self, messages: Sequence[Message], text: str, ends: Sequence[int | None], turn: _Turn) -> list[Span]:
        is_unique = text.count(turn.header) == sum(message["role"] == "assistant" for message in messages)
        spans: list[Span] = []
        seen, is_sure = 0, True
        for index, message in enumerate(messages):
            end = ends[index]
            if message["role"] == "assistant":
                content = message.get("content")
                if end is None and isinstance(content, str) and content:
                    raise self._inexact(f"message {index} is not in the text")
                is_alone = is_unique or (end is not None and text.count(turn.header, seen, end) == 1)
                if not is_alone and (not is_sure or (end is None and content)):
                    raise self._inexact(f"the header {turn.header!r} is also in a text near message {index}")
                spans.append(self._span(text, turn, index, after=seen, end=end))
                seen, is_sure = spans[-1][1], True
            elif end is not None:
                seen, is_sure = end, True
            else:
                is_sure = is_sure and not message.get("content")
        return spans

    def _span(self, text: str, turn: _Turn, index: int, *, after: int, end: int | None) -> Span:
        start = text.find(turn.header, after)
        if start < 0 or (end is not None and start + len(turn.header) > end):
            raise self._inexact(f"the header {turn.header!r} does not stand before message {index}")
        start += len(turn.prompt if text.startswith(turn.prompt, start) else turn.header)
        stop = turn.find_end(text, max(start, end or 0))
        if stop is None:
            raise self._inexact(f"no {turn.end!r} ends message {index}")
        return start, stop

    def _turn(self, options: Mapping[str, Any]) -> _Turn:
        """Return how a turn of the assistant begins and ends, seen in a conversation made for it."""
        plain = {key: value for key, value in options.items() if key not in ("tools", "documents")}
        key = repr(sorted(plain.items()))
        if key not in self._turns:
            self._turns[key] = self._look_at_a_turn(plain)
        return self._turns[key]

    def _look_at_a_turn(self, options: Mapping[str, Any]) -> _Turn:
        user, answer = "\ue000u", "\ue000a"
        exchange = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        parts = re.split(f"{user}|{answer}", self.render(exchange * 2, **options))
        if len(parts) != 5:
            raise self._inexact("it drops or repeats messages")
        asked = self.render(exchange[:1], **{**options, "add_generation_prompt": False})
        prompted = self.render(exchange[:1], **{**options, "add_generation_prompt": True})
        if not prompted.startswith(asked) or len(prompted) == len(asked):
            raise self._inexact("add_generation_prompt adds no header for the assistant")
        prompt = prompted[len(asked) :]
        header = next((prompt[:size] for size in range(len(prompt), 0, -1) if parts[1].endswith(prompt[:size])), "")
        if not header.strip():
            raise self._inexact("the assistant's header differs from what add_generation_prompt adds")
        found = [(parts[2].find(token), -len(token), token) for token in self.special_tokens if token in parts[2]]
        if not found or min(found)[2] not in parts[4]:
            raise self._inexact("no special token ends the assistant's turn")
        end = min(found)[2]
        return _Turn(prompt, header, end, tuple(dict.fromkeys((end, *self.stop_tokens))))


@dataclass(frozen=True)
class _Turn:
    """How a turn looks: what generation starts with, what all turns start with, and what ends them."""

    prompt: str
    header: str
    end: str
    ends: tuple[str, ...]

    def find_end(self, text: str, start: int) -> int | None:
        found = [(at, at + len(token)) for token in self.ends if (at := text.find(token, start)) >= 0]
        return min(found)[1] if found else None


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise DataError(
            "A conversation has no messages.", path="messages", value=messages, rule="at least one", repair="remove it"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                "A message cannot be read.",
                path=f"messages[{index}]",
                value=message,
                rule="a mapping with the key role, whose value is text, and the key content",
                repair="correct the record, or name its keys in data.sources",
            )
