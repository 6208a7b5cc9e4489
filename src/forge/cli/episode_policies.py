"""What answers in `forge episode try`: a model on the native engine in this process, or another server's endpoint."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TextIO

from forge.envs.character_codec import CharacterCodec, ChatPrompt, character_limits
from forge.envs.limits import Fault
from forge.errors import ConfigError, ModelError
from forge.types import INITIAL_VERSION, Completion, Timings, VersionSpan

if TYPE_CHECKING:
    import httpx

    from forge.config import EpisodeLimits, GRPOConfig
    from forge.envs.history import ChatCodec
    from forge.envs.state import Policy
    from forge.envs.tool_calls import ToolFormat
    from forge.generator.native.engine import NativeEngine
    from forge.generator.prompts import PromptReader

_NO_LIMIT: Final = 2**30
_PASSED_ON: Final = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of one turn, as the endpoint reports them."""

    num_prompt: int
    num_sampled: int


@dataclass(frozen=True, slots=True)
class OpenedPolicy:
    """A policy and what belongs to it.

    Attributes:
        about: what it is, in a line.
        is_exact: whether tokens are those that were sampled. Those of an endpoint are characters.
        limits: the episode's limits as far as they can be kept.
        sampling: options of every completion.
        notes: what is different from a run.
        usage: tokens by the turn's seed, where the endpoint reports them.
    """

    policy: Policy
    codec: ChatCodec
    tool_format: ToolFormat
    about: str
    is_exact: bool
    limits: EpisodeLimits
    sampling: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    usage: Mapping[int, Usage] = field(default_factory=dict)


class ProgressPolicy:
    """A policy that reports each turn when it is done.

    Args:
        policy: who answers.
        stream: where the reports go.
    """

    def __init__(self, policy: Policy, stream: TextIO) -> None:
        self._policy, self._stream = policy, stream
        self._num_turns = 0
        self.max_seq_len = policy.max_seq_len

    async def sample(self, token_ids: Sequence[int], *, options: Mapping[str, Any], session: str) -> Completion:
        """See `forge.envs.state.Policy.sample`."""
        began = time.perf_counter()
        completion = await self._policy.sample(token_ids, options=options, session=session)
        self._num_turns += 1
        print(f"turn {self._num_turns} took {time.perf_counter() - began:.1f} s", file=self._stream, flush=True)
        return completion


# ---- A model's folder ------------------------------------------------------------------------------------------------


class EnginePolicy:
    """An engine in this process as the policy of episodes."""

    def __init__(self, engine: NativeEngine, reader: PromptReader) -> None:
        self._engine, self._reader = engine, reader
        self.max_seq_len = engine.max_seq_len

    async def sample(self, token_ids: Sequence[int], *, options: Mapping[str, Any], session: str) -> Completion:
        """See `forge.envs.state.Policy.sample`."""
        from forge.generator.engine import Request

        prompt_ids = self._reader.token_ids(token_ids=token_ids)
        request = Request(uuid.uuid4().hex, prompt_ids, self._reader.sampling(options, 1))
        (completion,) = await self._engine.generate(request)
        return completion


@asynccontextmanager
async def open_model(config: GRPOConfig, *, as_in_run: bool) -> AsyncIterator[OpenedPolicy]:
    """Load the configuration's model on the native engine of this process.

    With `as_in_run`, context and longest answer are those of a run with this configuration.
    """
    from forge.config import GeneratorConfig
    from forge.envs.tool_calls import detect_format
    from forge.generator.native.engine import NativeEngine
    from forge.generator.prompts import PromptReader
    from forge.memory.resolved import context_lengths
    from forge.models.locate import resolve
    from forge.models.tokenizer import ChatTokenizer

    section = config.generator.model_copy(update={"engine": "native", "engine_args": {}})
    model = await asyncio.to_thread(resolve, config.model)
    if model.folder is None:
        raise ModelError(
            "this model has no tokenizer",
            path="model.path",
            value=None,
            rule="a folder with the model's files",
            repair="name it with --model, or set model.preset=tiny for a model of random weights",
        )
    if as_in_run:
        max_seq_len, max_tokens = context_lengths(config, model.architecture)
        sampling = section.sampling.model_copy(update={"max_tokens": max_tokens})
        section = section.model_copy(update={"max_seq_len": max_seq_len, "sampling": sampling})
    tokenizer = await asyncio.to_thread(ChatTokenizer.load, model.folder, chat_template=section.chat_template)
    if not tokenizer.has_chat_template:
        raise ModelError(
            "the tokenizer has no chat template",
            path="generator.chat_template",
            value=None,
            rule="a file with a Jinja template, if the tokenizer has none",
            repair="set generator.chat_template=FILE, or use the chat version of the model",
        )
    generator = GeneratorConfig.of(config.model, section)
    engine = NativeEngine(generator, model=model, tokenizer=tokenizer)
    reader = PromptReader(
        generator,
        tokenizer=tokenizer,
        max_seq_len=engine.max_seq_len,
        vocab_size=model.architecture.vocab_size or 0,
    )
    named = config.episode.tool_format
    notes = [] if config.generator.engine == "native" else [f"engine {config.generator.engine}: native is used here"]
    await engine.start()
    try:
        yield OpenedPolicy(
            EnginePolicy(engine, reader),
            tokenizer,
            detect_format(tokenizer.chat_template) if named == "auto" else named,
            about=f"{model.name} on the native engine, up to {engine.max_seq_len} tokens",
            is_exact=True,
            limits=config.episode.limits,
            sampling=section.sampling.model_dump(exclude={"n", "seed"}),
            notes=tuple(notes),
        )
    finally:
        await engine.close()


# ---- An endpoint -----------------------------------------------------------------------------------------------------


class EndpointPolicy:
    """Another server's chat completions as the policy of episodes. Tokens are characters: see `CharacterCodec`.

    Args:
        client: sends requests to the endpoint.
        model: the model's name there.
        codec: reads the conversation from a prompt.
    """

    max_seq_len = 2 * _NO_LIMIT

    def __init__(self, client: httpx.AsyncClient, model: str, codec: CharacterCodec) -> None:
        self._client, self._model, self._codec = client, model, codec
        self._answers: dict[str, Mapping[str, Any]] = {}
        self.usage: dict[int, Usage] = {}

    async def sample(self, token_ids: Sequence[int], *, options: Mapping[str, Any], session: str) -> Completion:
        """See `forge.envs.state.Policy.sample`."""
        began = time.perf_counter()
        answer = await self._ask(self._request(self._codec.read_prompt(token_ids), options))
        try:
            choice = answer["choices"][0]
            message = choice["message"]
            text = answer_text(message)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise Fault(
                f"the endpoint's answer is not a chat completion: {error!r}: {json.dumps(answer)[:300]}",
                kind="endpoint",
                path="--endpoint",
            ) from None
        self._answers[text] = message
        usage = answer.get("usage") or {}
        if "completion_tokens" in usage:
            self.usage[options["seed"]] = Usage(int(usage.get("prompt_tokens", 0)), int(usage["completion_tokens"]))
        ids = self._codec.encode_answer(text, max_tokens=None)
        return Completion(
            prompt_ids=tuple(token_ids),
            token_ids=ids,
            logprobs=(0.0,) * len(ids),
            full_logprobs=None,
            text=text,
            finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
            versions=(VersionSpan(INITIAL_VERSION, 0, len(ids)),),
            timings=Timings(total_s=time.perf_counter() - began),
            num_shared=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        )

    def _request(self, prompt: ChatPrompt, options: Mapping[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._model, "messages": self._messages(prompt.messages)}
        body |= {name: options[name] for name in _PASSED_ON if name in options}
        body["seed"] = options["seed"] % 2**31
        if options["max_tokens"] < _NO_LIMIT:
            body["max_tokens"] = options["max_tokens"]
        if options.get("stop"):
            body["stop"] = list(options["stop"])
        if prompt.tools:
            body["tools"] = list(prompt.tools)
        return body

    def _messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the conversation as the server knows it: its own answers as it gave them, results by its own ids."""
        found: list[dict[str, Any]] = []
        ids: list[str] = []
        for message in messages:
            plain = dict(message)
            if message["role"] == "assistant":
                known = self._answers.get(str(message.get("content")))
                if known is not None:
                    plain = {name: known.get(name) for name in ("role", "content", "tool_calls") if known.get(name)}
                    plain.setdefault("role", "assistant")
                    plain.setdefault("content", "")
                ids = [call["id"] for call in plain.get("tool_calls") or () if "id" in call]
            elif message["role"] == "tool" and ids:
                plain["tool_call_id"] = ids.pop(0)
            found.append(plain)
        return found

    async def _ask(self, body: Mapping[str, Any]) -> Any:
        import httpx

        try:
            response = await self._client.post("chat/completions", json=body)
            response.raise_for_status()
            return response.json()
        except httpx.HTTPStatusError as error:
            refusal = error.response
            text = f"the endpoint answered {refusal.status_code}: {refusal.text[:500]}"
            raise Fault(text, kind="endpoint", path=str(refusal.url)) from None
        except (httpx.HTTPError, ValueError) as error:
            text = f"the endpoint did not answer: {type(error).__name__}: {error}"
            raise Fault(text, kind="endpoint", path=str(self._client.base_url)) from None


def answer_text(message: Mapping[str, Any]) -> str:
    """Return an answer as text, with its tool calls in the format `hermes`."""
    parts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        body = f'{{"name": {json.dumps(function["name"])}, "arguments": {function.get("arguments") or "{}"}}}'
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(parts)


@asynccontextmanager
async def open_endpoint(
    config: GRPOConfig, url: str, *, model: str | None, api_key: str | None
) -> AsyncIterator[OpenedPolicy]:
    """Open an OpenAI-compatible endpoint. Without `model`, the first one that it lists answers."""
    import httpx

    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "this is not the address of an endpoint",
            path="--endpoint",
            value=url,
            rule="a URL that starts with http:// or https://",
            repair="write it like http://127.0.0.1:8000/v1",
        )
    limits = config.episode.limits
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    timeout = httpx.Timeout(limits.turn_timeout_s, connect=30.0)
    async with httpx.AsyncClient(base_url=url.rstrip("/") + "/", headers=headers, timeout=timeout) as client:
        name = model or await _first_model(client, url)
        codec = CharacterCodec()
        policy = EndpointPolicy(client, name, codec)
        notes = ["tokens are not exact at an endpoint: nothing here could be trained on"]
        if limits.max_tokens is not None:
            notes.append("episode.limits.max_tokens is not applied at an endpoint")
        yield OpenedPolicy(
            policy,
            codec,
            "hermes",
            about=f"{name} at {url}",
            is_exact=False,
            limits=character_limits(limits),
            sampling=config.generator.sampling.model_dump(exclude={"n", "seed"}),
            notes=tuple(notes),
            usage=policy.usage,
        )


async def _first_model(client: httpx.AsyncClient, url: str) -> str:
    import httpx

    try:
        response = await client.get("models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"the endpoint cannot be reached: {type(error).__name__}: {error}",
            path="--endpoint",
            value=url,
            rule="the address of a server that runs",
            repair="check the address; `forge serve MODEL_DIR` prints that of its own",
        ) from None
    if response.status_code in (401, 403):
        raise ConfigError(
            f"the endpoint refuses the request: {response.status_code}",
            path="--api-key",
            rule="the key that the server demands",
            repair="give --api-key, or set OPENAI_API_KEY",
        )
    try:
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"the endpoint lists no model: {type(error).__name__}: {error}",
            path="--model",
            value=None,
            rule="the name of a model at the endpoint",
            repair="name it with --model; the address usually ends in /v1",
        ) from None
