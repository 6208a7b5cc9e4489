"""A policy service in memory: scripted answers, called as a service of `Generator` is called."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Generic, TypeVar, cast

from forge.config import GeneratorConfig, Sampling
from forge.generator.engine import EngineCapabilities, EngineStats
from forge.generator.prompts import PromptReader
from forge.types import INITIAL_VERSION, Completion, Delta, FinishReason, VersionSpan

Answer = str | Exception
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
_VOCAB_SIZE: Final = 0x110000


class _Characters:
    """The fake's tokenizer, as far as `PromptReader` needs one."""

    def encode_beginning(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        return list(map(ord, text))

    encode_rendered = encode_beginning
    special_tokens: tuple[str, ...] = ()
    tag_tokens: tuple[str, ...] = ()

    def render_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + "assistant: "


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """What was asked: the arguments of `generate`, the sampling that they come to, and the prompt's tokens.

    A conversation becomes one line for each message, `role: content`, and `assistant: ` at the end.
    """

    prompt: str | None
    messages: tuple[Mapping[str, Any], ...] | None
    token_ids: tuple[int, ...] | None
    sampling: Sampling
    template: Mapping[str, Any]
    prompt_ids: tuple[int, ...]

    @property
    def text(self) -> str:
        """The prompt as text, however it was given."""
        return "".join(map(chr, self.prompt_ids))


class Routed(Generic[Endpoint]):
    """An endpoint of which there is one replica: `await service.name.route(...)`, or `fanout(...)` for a list."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.route = endpoint

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [await self.route(*args, **kwargs)]


class Streamed(Generic[Endpoint]):
    """An endpoint that answers piece by piece: `async for piece in service.name.stream(...)`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.stream = endpoint


class FakeGenerator:
    """Stands for a service of `Generator` where only its answers matter.

    Every character is a token, whose id is its code point, and its logprob is `-(t + 1) / 100` at index t. A delta is a
    word with the space before it. `max_tokens`, `stop` and `n` are honoured, and requests are checked as a service
    checks them.

    Example:
        >>> policy = FakeGenerator(["Four.", OSError("the host is gone")])
        >>> [completion] = await policy.generate.route("2 + 2?")
        >>> completion.text
        'Four.'
        >>> policy.requests[0].text
        '2 + 2?'

    Attributes:
        requests: what was asked, in order.
        num_cancelled: requests whose caller went away before the last token.
        version: the weights that completions say they were made with; set it as you like.
        paused: is set when a stream waits, see `pause_after`.
    """

    def __init__(
        self,
        answers: Sequence[Answer] | Callable[[FakeRequest], Answer] = ("Fine.",),
        *,
        name: str = "fake",
        max_seq_len: int = 2048,
        sampling: Sampling | None = None,
        pause_after: int | None = None,
    ) -> None:
        """`answers` are given in order, the last one again and again; or a function makes them. One that is an
        exception is raised. With `pause_after`, a stream waits after so many deltas until `resume` or its end."""
        self.requests: list[FakeRequest] = []
        self.num_cancelled = 0
        self.version = INITIAL_VERSION
        self.paused = asyncio.Event()
        self._answers, self._name, self._max_seq_len = answers, name, max_seq_len
        self._pause_after = pause_after
        self._reader = PromptReader(
            GeneratorConfig(sampling=sampling or Sampling()),
            tokenizer=cast(Any, _Characters()),
            max_seq_len=max_seq_len,
            vocab_size=_VOCAB_SIZE,
        )
        self._resumed = asyncio.Event()
        self._num_running = self._num_done = self._num_tokens = 0
        self.generate = Routed(self._generate)
        self.generate_stream = Streamed(self._stream)
        self.card = Routed(self._card)
        self.stats = Routed(self._stats)

    def resume(self) -> None:
        """Resume the waiting streams; later ones do not wait."""
        self._resumed.set()

    async def _generate(self, prompt: str | None = None, **options: Any) -> list[Completion]:
        found = [delta.completion async for delta in self._stream(prompt, **options) if delta.completion is not None]
        return sorted(found, key=lambda completion: completion.index)

    async def _stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        token_ids: Sequence[int] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        n: int | None = None,
        template: Mapping[str, Any] | None = None,
        version: int | None = None,
    ) -> AsyncIterator[Delta]:
        request = FakeRequest(
            prompt,
            None if messages is None else tuple(dict(message) for message in messages),
            None if token_ids is None else tuple(token_ids),
            self._reader.sampling(sampling, n),
            dict(template or {}),
            self._reader.token_ids(prompt, messages=messages, token_ids=token_ids, template=template),
        )
        self.requests.append(request)
        answer = self._answer(request)
        is_whole = False
        self._num_running += 1
        try:
            for index in range(request.sampling.n):
                async for delta in self._deltas(request, answer, index):
                    yield delta
            is_whole = True
        finally:
            self._num_running -= 1
            self._num_done += is_whole
            self.num_cancelled += not is_whole

    def _answer(self, request: FakeRequest) -> str:
        answers = self._answers
        answer = answers(request) if callable(answers) else answers[min(len(self.requests), len(answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _deltas(self, request: FakeRequest, answer: str, index: int) -> AsyncIterator[Delta]:
        text, reason, stop_reason = self._cut(request, answer)
        pieces = re.findall(r"\s*\S+|\s+", text) or [""]
        start = 0
        for number, piece in enumerate(pieces, start=1):
            await asyncio.sleep(0)
            ids, logprobs = _tokens(piece, start=start)
            start += len(ids)
            self._num_tokens += len(ids)
            completion = None
            if number == len(pieces):
                completion = self._completion(request, text, reason, stop_reason=stop_reason, index=index)
            yield Delta(index, ids, logprobs, piece, self.version, completion)
            if number == self._pause_after and not self._resumed.is_set():
                self.paused.set()
                await self._resumed.wait()

    def _cut(self, request: FakeRequest, answer: str) -> tuple[str, FinishReason, str | None]:
        """The answer as far as stop strings, `max_tokens` and the context let it go, and why it ends there."""
        found = [(at, stop) for stop in request.sampling.stop if (at := answer.find(stop)) >= 0]
        end, stop = min(found, default=(len(answer), None))
        most = self._max_seq_len - len(request.prompt_ids)
        if request.sampling.max_tokens is not None:
            most = min(most, request.sampling.max_tokens)
        return (answer[:most], "length", None) if most < end else (answer[:end], "stop", stop)

    def _completion(
        self, request: FakeRequest, text: str, reason: FinishReason, *, stop_reason: str | None, index: int
    ) -> Completion:
        ids, logprobs = _tokens(text, start=0)
        return Completion(
            prompt_ids=request.prompt_ids,
            token_ids=ids,
            logprobs=logprobs,
            full_logprobs=logprobs,
            text=text,
            finish_reason=reason,
            stop_reason=stop_reason,
            versions=(VersionSpan(self.version, 0, len(ids)),),
            index=index,
        )

    async def _card(self) -> dict[str, Any]:
        return {
            "name": self._name,
            "engine": "fake",
            "capabilities": asdict(EngineCapabilities(structured_output=True)),
            "max_seq_len": self._max_seq_len,
            "max_open": 64,
            "version": self.version,
            "vocab_size": _VOCAB_SIZE,
            "has_chat_template": True,
            "folder": None,
        }

    async def _stats(self) -> EngineStats:
        return EngineStats(
            version=self.version,
            num_running=self._num_running,
            num_done=self._num_done,
            num_aborted=self.num_cancelled,
            num_tokens=self._num_tokens,
        )


def _tokens(text: str, *, start: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return tuple(map(ord, text)), tuple(-(start + offset + 1) / 100 for offset in range(len(text)))
