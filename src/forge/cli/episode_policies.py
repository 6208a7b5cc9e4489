"""What answers in `forge episode try`: a model on the native engine in this process, or another server's endpoint."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from forge.envs.character_codec import CharacterCodec, character_limits
from forge.errors import ConfigError, ModelError
from forge.rollout.endpoint_policy import EndpointPolicy, Usage, first_model, make_client
from forge.types import Completion

if TYPE_CHECKING:
    from forge.config import EpisodeLimits, GRPOConfig
    from forge.envs.history import ChatCodec
    from forge.envs.state import Policy
    from forge.envs.tool_calls import ToolFormat
    from forge.generator.native.engine import NativeEngine
    from forge.generator.prompts import PromptReader


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


@asynccontextmanager
async def open_endpoint(
    config: GRPOConfig, url: str, *, model: str | None, api_key: str | None
) -> AsyncIterator[OpenedPolicy]:
    """Open an OpenAI-compatible endpoint. Without `model`, the first one that it lists answers."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "this is not the address of an endpoint",
            path="--endpoint",
            value=url,
            rule="a URL that starts with http:// or https://",
            repair="write it like http://127.0.0.1:8000/v1",
        )
    limits = config.episode.limits
    async with make_client(url, api_key=api_key, timeout_s=limits.turn_timeout_s) as client:
        name = model or await first_model(client, url)
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
