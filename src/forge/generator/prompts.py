"""Read requests: prompts to tokens, and a complete `Sampling`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from forge.config import GeneratorConfig, InvalidConfig, Sampling
from forge.config.diagnosis import diagnose
from forge.envs.rendered import render
from forge.errors import PromptError
from forge.models.long_text import LONG_TEXT, TextTooLong

if TYPE_CHECKING:
    from forge.models.tokenizer import ChatTokenizer


class PromptReader:
    """Reads requests for one model.

    Args:
        config: the generator's configuration.
        tokenizer: None for a model without one, which takes token ids only.
        max_seq_len: longest prompt and completion together.
        vocab_size: how many tokens the model knows.
    """

    def __init__(
        self, config: GeneratorConfig, *, tokenizer: ChatTokenizer | None, max_seq_len: int, vocab_size: int
    ) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._max_seq_len, self._vocab_size = max_seq_len, vocab_size

    def token_ids(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        token_ids: Sequence[int] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Return the tokens of a prompt, whichever way it is given, or raise `PromptError`."""
        given = {"prompt": prompt, "messages": messages, "token_ids": token_ids}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise PromptError(
                "a request has one prompt",
                path="generate",
                value=names or None,
                rule="exactly one of prompt (text), messages (a conversation) and token_ids",
                repair='generate("Once upon a time"), or generate(messages=[{"role": "user", "content": "Hi"}])',
            )
        if template is not None and messages is None:
            raise PromptError(
                "only conversations go through the chat template",
                path="template",
                value=dict(template),
                rule="given together with messages",
                repair="leave it out, or give messages",
            )
        _check_type("prompt", prompt, str, "text")
        _check_type("token_ids", token_ids, Iterable, "a list of whole numbers")
        _check_type("messages", messages, Sequence, "a list of messages")
        _check_type("template", template, Mapping, "a dict of arguments of the chat template, without messages")
        if token_ids is not None:
            found = tuple(token_ids)
        else:
            tokenizer, most = self._needs_tokenizer(names[0]), self._max_seq_len - 1
            with length_checked(names[0], max_seq_len=self._max_seq_len):
                if prompt is not None:
                    found = tuple(tokenizer.encode_beginning(prompt, max_tokens=most))
                else:
                    assert messages is not None
                    rendered = render(messages, tokenizer, dict(template or {}), tags=False)
                    found = tuple(tokenizer.encode_rendered(rendered.text, max_tokens=most))
                    if rendered.literals:  # text of special tokens in messages, which is only text
                        found = tuple(rendered.encode(tokenizer))
        self._check(found, names[0])
        return found

    def lines(self, token_ids: Sequence[int] | Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Return sequences to be scored, checked: one, or many."""
        if isinstance(token_ids, Sequence) and len(token_ids) > 0 and isinstance(token_ids[0], list | tuple | range):
            return [self._line(line, f"token_ids[{place}]") for place, line in enumerate(token_ids)]
        return [self._line(token_ids, "token_ids")]

    def _line(self, token_ids: object, path: str) -> tuple[int, ...]:
        if not isinstance(token_ids, Sequence):
            raise PromptError(
                "tokens to be scored cannot be read",
                path=path,
                value=token_ids,
                rule="a list of whole numbers, or a list of such lists",
                repair="score([1, 2, 3]), or score([[1, 2, 3], [4, 5]])",
            )
        found = tuple(token_ids)
        self._check(found, path, room=0)
        return found

    def sampling(self, given: Sampling | Mapping[str, Any] | None, n: int | None) -> Sampling:
        """Return the configuration's sampling with the request's overrides; `ConfigError` names what is wrong."""
        chosen = self._overridden(given, n)
        if chosen.stop and self._tokenizer is None:
            raise PromptError(
                "this model has no tokenizer, so there is no text to find a stop string in",
                path="sampling.stop",
                value=chosen.stop,
                rule="only with a model that has a tokenizer",
                repair="give stop_token_ids, or set model.path to a folder with a tokenizer",
            )
        for place, token in enumerate(chosen.stop_token_ids):
            if not 0 <= token < self._vocab_size:
                raise PromptError(
                    "a stop token is not in the vocabulary, so nothing would ever end with it",
                    path=f"sampling.stop_token_ids[{place}]",
                    value=token,
                    rule=f"a whole number from 0 to {self._vocab_size - 1}",
                    repair="use the tokenizer of this model",
                )
        return chosen

    def _overridden(self, given: Sampling | Mapping[str, Any] | None, n: int | None) -> Sampling:
        base = self._config.sampling
        _check_type(
            "sampling", given, (Sampling, Mapping), "a Sampling, or a dict of what differs from the configuration's"
        )
        if isinstance(given, Sampling) and n is None:
            return given
        if given is None and n is None:
            return base
        changes = given.model_dump(exclude_unset=False) if isinstance(given, Sampling) else dict(given or {})
        if n is not None:
            changes["n"] = n
        data = {**base.model_dump(), **changes}
        try:
            return Sampling.model_validate(data)
        except ValidationError as error:
            found = diagnose(error, schema=Sampling, data=data, origins={})
            raise InvalidConfig([replace(problem, path=f"sampling.{problem.path}") for problem in found]) from None

    def _needs_tokenizer(self, path: str) -> ChatTokenizer:
        if self._tokenizer is None:
            raise PromptError(
                "this model has no tokenizer",
                path=path,
                rule="a model without a folder takes tokens only",
                repair="give token_ids, or set model.path to a folder with a tokenizer",
            )
        return self._tokenizer

    def _check(self, ids: tuple[int, ...], path: str, *, room: int = 1) -> None:
        if not ids:
            raise PromptError(
                "the prompt is empty", path=path, value=[], rule="at least one token", repair="give some text"
            )
        if len(ids) + room > self._max_seq_len:
            raise too_long(f"{len(ids)} tokens", path=path, max_seq_len=self._max_seq_len, room=room)
        for place, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._vocab_size:
                raise PromptError(
                    "a token of the prompt is not in the vocabulary",
                    path=f"{path}[{place}]",
                    value=token,
                    rule=f"a whole number from 0 to {self._vocab_size - 1}",
                    repair="use the tokenizer of this model",
                )


@contextmanager
def length_checked(path: str, *, max_seq_len: int) -> Iterator[None]:
    """Raise `PromptError` for a text that turns out to be too long inside the block."""
    try:
        yield
    except TextTooLong as error:
        raise too_long(str(error), path=path, max_seq_len=max_seq_len) from None


def too_long(value: str, *, path: str, max_seq_len: int, room: int = 1) -> PromptError:
    """Return the error for a prompt that leaves no room for `room` more tokens."""
    rule = f"at most {max_seq_len - room} tokens"
    return PromptError(
        "the prompt is longer than the context",
        path=path,
        value=value,
        rule=rule + (": the context less one for the completion" if room else ", the context"),
        repair="shorten it, or raise generator.max_seq_len as far as the model allows",
    )


def _check_type(path: str, value: object, wanted: type | tuple[type, ...], rule: str) -> None:
    is_wrong = value is not None and not isinstance(value, wanted)
    if path == "template" and isinstance(value, Mapping):
        is_wrong = "messages" in value or not all(isinstance(name, str) for name in value)
    if is_wrong:
        raise PromptError("a request cannot be read", path=path, value=value, rule=rule, repair="give it, or nothing")


# ---- Long texts ------------------------------------------------------------------------------------------------------


T = TypeVar("T")


class LongTexts:
    """A thread that tokenises long texts, one after another: they do not block the event loop, short texts do not wait
    behind them, and the memory that a long text takes is taken once."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="long-texts")

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function on the thread and return what it returns."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """End the thread; texts that wait are dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def is_long(text: str | None, messages: Sequence[Mapping[str, Any]] | None = None) -> bool:
    """Return whether a prompt is long, as text or as a conversation."""
    contents = (message.get("content") for message in messages or () if isinstance(message, Mapping))
    texts = (content for content in (text, *contents) if isinstance(content, str))
    return sum(map(len, texts)) >= LONG_TEXT
