"""`Generator`: the actor that serves an engine, the same for every engine."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from forge.config import GenerationConfig, GeneratorConfig, PolicyConfig, Sampling, UpdateMode
from forge.errors import ConfigError, OptionError, SyncError
from forge.generator.adapters import NamedAdapters
from forge.generator.devices import all_devices
from forge.generator.engine import (
    EngineCapabilities,
    EngineStats,
    GenerationEngine,
    PromptScores,
    Request,
    TopScores,
    UpdateReport,
    check_split,
    engine_class,
    engine_gauges,
    most_open,
)
from forge.generator.prompts import LongTexts, is_long
from forge.generator.sync import Sync, Version
from forge.observe import span
from forge.observe.gauges import add_gauges
from forge.observe.phases import phase
from forge.runtime.actor import COMMON_PRELOAD
from forge.runtime.endpoints import endpoint
from forge.runtime.placement import num_usable_gpus, wants_gpus
from forge.service.actor import ForgeActor
from forge.types import Completion, Delta

if TYPE_CHECKING:
    from forge.generator.prompts import PromptReader
    from forge.models.locate import ResolvedModel
    from forge.models.tokenizer import ChatTokenizer
    from forge.service import Service

_log = logging.getLogger("forge.generator")
Messages = Sequence[Mapping[str, Any]]

ENGINE_DIED = 70
"""The exit code of a generator whose engine is gone."""
_PRELOAD: Final = (
    *COMMON_PRELOAD,
    *("forge.generator.native.engine", "forge.generator.prompts", "forge.models.peft_files", "forge.models.weights"),
    *("forge.models.tokenizer", "transformers.tokenization_utils_tokenizers", "forge.rewards.catalog"),
)
"""What a replica with the native engine imports until it serves."""
_PRELOAD_CPU: Final = ("forge.generator.native.batching", "forge.generator.native.loading")
"""What starts CUDA while it is imported, where there is a GPU: a fork could not use it then."""


class Generator(ForgeActor):
    """Generates completions of prompts. As a service, several replicas act as one policy.

    Example:
        >>> policy = await Generator.options(num_replicas=2).as_service(GeneratorConfig(model=model))
        >>> completions = await policy.generate.route("Once upon a time", n=4)
        >>> await policy.update_weights.fanout(version=3)

    `procs` is the number of processes over which the engine splits the model; the native engine has one. When the
    engine dies the process ends with it, so that a service restarts the replica, which then loads the newest version.
    """

    def __init__(self, config: GeneratorConfig) -> None:
        self.config = config

    @classmethod
    def _forge_preload(cls, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        config = args[0] if args else kwargs.get("config")
        if not isinstance(config, GenerationConfig) or config.engine != "native":
            return ()  # vLLM starts threads while it is imported
        return _PRELOAD if num_usable_gpus() else (*_PRELOAD, *_PRELOAD_CPU)

    # ---- Lifetime -----------------------------------------------------------------------------------------------

    @endpoint
    async def setup(self) -> None:
        """Load the model, and the newest weights if any were published."""
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        check_split(self.config, world_size, path="Generator.options(procs=)", error=OptionError)
        devices = await asyncio.to_thread(all_devices, rank, world_size)
        self._is_front = rank == 0
        self._catching_up = asyncio.Lock()
        names = ("FORGE_REPLICA_GENERATION", "FORGE_REPLICA_JOINED")
        self._may_be_behind = any(int(os.environ.get(name, "0")) > 0 for name in names)
        if not self._is_front:
            return  # the engine of rank 0 uses its device
        with phase("reading the tokenizer"):
            self.model, self._tokenizer = await asyncio.to_thread(self._read_model)
        with phase("importing the engine"):
            self._engine = self._make_engine(world_size, devices)
        self._sync = Sync(self._engine, self.config)
        self._reader = self._make_reader()
        self._long_texts = LongTexts()
        with phase("starting the engine"):
            await self._engine.start()
        self._adapters = NamedAdapters(self.config, self._engine)
        add_gauges(self._engine, engine_gauges)
        if self._capabilities.adapters:
            await self._adapters.start()
        from forge.store import Weights

        if await Weights(self.config.weights).versions():
            try:
                await self._sync.update_weights("latest", "keep")
            except SyncError:
                _log.error("this generator accepts no requests until an update succeeds")

    def _read_model(self) -> tuple[ResolvedModel, ChatTokenizer | None]:
        from forge.models.locate import resolve
        from forge.models.tokenizer import ChatTokenizer

        model = resolve(self.config.model)
        if model.folder is None:
            return model, None
        return model, ChatTokenizer.load(model.folder, chat_template=self.config.chat_template)

    def _make_engine(self, world_size: int, devices: Sequence[str]) -> GenerationEngine:
        engine: GenerationEngine = engine_class(self.config.engine)(
            self.config,
            model=self.model,
            tokenizer=self._tokenizer,
            on_death=_end_process,
            **self._engine_options(world_size, devices),
        )
        return engine

    def _engine_options(self, world_size: int, devices: Sequence[str]) -> dict[str, Any]:
        """Return what the engine is made from besides configuration, model and tokenizer."""
        return {"tensor_parallel": world_size, "devices": devices} if self._capabilities.tensor_parallel else {}

    @property
    def _capabilities(self) -> EngineCapabilities:
        found: EngineCapabilities = engine_class(self.config.engine).capabilities
        return found

    def _make_reader(self) -> PromptReader:
        from forge.generator.engine import context_limit
        from forge.generator.prompts import PromptReader

        return PromptReader(
            self.config,
            tokenizer=self._tokenizer,
            max_seq_len=context_limit(self.config, self.model.architecture),
            vocab_size=self.model.architecture.vocab_size or 0,
        )

    @endpoint(concurrent=True)
    async def close(self) -> None:
        """End the engine in order. Completions in progress finish as aborted."""
        if self._is_front:
            self._long_texts.close()
            await self._engine.close()

    # ---- Requests -----------------------------------------------------------------------------------------------

    @endpoint(retry=True, concurrent=True)
    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        n: int | None = None,
        template: Mapping[str, Any] | None = None,
        version: int | None = None,
    ) -> list[Completion]:
        """Return the completions of one prompt.

        Args:
            prompt: text to continue.
            messages: or a conversation to answer, which goes through the chat template.
            token_ids: or tokens, as they are.
            sampling: a whole `Sampling`, or a dict of what differs from the configuration's.
            n: how many completions; overrides `sampling`.
            template: arguments of the chat template, such as `tools` or `enable_thinking`.
            version: a pinned version (see `forge.store.PinnedVersions`) that samples every token, whatever weights are
                live meanwhile; None for the live weights. `StoreKeyError` if it is not pinned.
        """
        if not self._is_front:
            return []
        await self._catch_up()
        request = await self._request(prompt, messages, token_ids, sampling, n, template)
        request = self._at_version(request, version)
        with span("generate", num_prompt_tokens=len(request.prompt_ids), n=request.sampling.n):
            completions = await self._sync.watched(self._engine.generate(request))
            if version is None:
                await self._sync.hold(part.version for completion in completions for part in completion.versions)
        return [self._adapters.marked(completion, request.sampling) for completion in completions]

    @endpoint(retry=True)
    async def generate_stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        n: int | None = None,
        template: Mapping[str, Any] | None = None,
        version: int | None = None,
    ) -> AsyncIterator[Delta]:
        """Stream what `generate` returns: `async for delta in policy.generate_stream.stream(...)`."""
        if not self._is_front:
            return
        await self._catch_up()
        request = await self._request(prompt, messages, token_ids, sampling, n, template)
        deltas = self._engine.stream(self._at_version(request, version))
        try:
            while True:
                try:
                    delta = await self._sync.watched(anext(deltas))
                except StopAsyncIteration:
                    return
                if version is None:
                    await self._sync.hold([delta.version])
                yield self._adapters.marked_delta(delta, request.sampling)
        finally:
            await deltas.aclose()  # type: ignore[attr-defined]

    async def _request(
        self,
        prompt: str | None,
        messages: Messages | None,
        token_ids: Sequence[int] | None,
        sampling: Sampling | Mapping[str, Any] | None,
        n: int | None,
        template: Mapping[str, Any] | None,
    ) -> Request:
        self._sync.check()
        read: dict[str, Any] = {"messages": messages, "token_ids": token_ids, "template": template}
        if is_long(prompt, messages):
            ids = await self._long_texts.run(self._reader.token_ids, prompt, **read)
            self._sync.check()
        else:
            ids = self._reader.token_ids(prompt, **read)
        chosen = self._adapters.chosen(self._reader.sampling(sampling, n))
        if chosen.structured is not None and not self._capabilities.structured_output:
            raise self._unsupported("sampling.structured", "structured output")
        if chosen.adapter is not None and not self._capabilities.adapters:
            raise self._unsupported("sampling.adapter", "adapters")
        return Request(uuid.uuid4().hex, ids, chosen)

    def _at_version(self, request: Request, version: int | None) -> Request:
        """Return a request for a pinned version. The digest of its weights was checked when it was fetched: there is
        no other proof to wait for."""
        if version is None:
            return request
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise OptionError(
                "there is no such version of weights",
                path="generate(version=)",
                value=version,
                rule="a whole number >= 0: a pinned version",
                repair="leave it out for the live weights",
            )
        if not self._capabilities.pinned_versions:
            raise self._unsupported("generate(version=)", "several versions of the weights at once", engine="native")
        return replace(request, version=version)

    @endpoint(concurrent=True)
    async def unload_version(self, version: int) -> None:
        """Free the memory of a pinned version that will not be asked for any more. Requests in progress finish."""
        if self._is_front and self._capabilities.pinned_versions:
            engine: Any = self._engine
            await engine.unload_version(version)

    @endpoint(retry=True, concurrent=True)
    async def score(
        self, token_ids: Sequence[int] | Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> list[list[float]]:
        """Return the logprob of every token given those before it; the first one's is 0. One sequence, or many."""
        if not self._is_front:
            return []
        await self._catch_up()
        self._sync.check()
        lines = self._reader.lines(token_ids)
        found = await self._sync.watched(self._engine.score(lines, temperature=temperature))
        await self._sync.hold([self._engine.version])
        return found

    @endpoint(retry=True, concurrent=True)
    async def score_prompt(self, token_ids: Sequence[int]) -> PromptScores | None:
        """Return the logprob of every token given those before it, and the likeliest token at each place."""
        if not self._is_front:
            return None
        if not self._capabilities.prompt_logprobs:
            raise self._unsupported("score_prompt", "logprobs of other tokens than the prompt's", engine="native")
        await self._catch_up()
        self._sync.check()
        (ids,) = self._reader.lines(token_ids)
        engine: Any = self._engine
        (found,) = await self._sync.watched(engine.score_prompts([ids]))
        await self._sync.hold([self._engine.version])
        scores: PromptScores = found
        return scores

    @endpoint(retry=True, concurrent=True)
    async def score_top(self, token_ids: Sequence[Sequence[int]], k: int) -> list[TopScores]:
        """Return the k likeliest tokens at each place of sequences, given the tokens before it."""
        if not self._is_front:
            return []
        if not self._capabilities.top_logprobs:
            raise self._unsupported("score_top", "the likeliest tokens of a prompt", engine="native")
        await self._catch_up()
        self._sync.check()
        engine: Any = self._engine
        found: list[TopScores] = await self._sync.watched(engine.score_top(self._reader.lines(token_ids), k))
        await self._sync.hold([self._engine.version])
        return found

    # ---- Weights ------------------------------------------------------------------------------------------------

    @endpoint(concurrent=True)
    async def update_weights(
        self, version: Version = "latest", *, mode: UpdateMode | None = None
    ) -> UpdateReport | None:
        """Take a version from the store, between two decode steps; completions under way go on as `mode` says.

        An update that fails is tried again as often as the configuration says; if all fail it raises, and the old
        weights go on serving. Where the trainer kept a canary, its logprobs are compared afterwards: if they differ
        `SyncError` is raised, here and to every request, until an update passes.
        """
        if not self._is_front:
            return None
        is_number = isinstance(version, int) and not isinstance(version, bool) and version >= 0
        if not is_number and version != "latest":
            raise OptionError(
                "there is no such version of weights",
                path="update_weights(version=)",
                value=version,
                rule='a whole number >= 0, or "latest"',
                repair="leave it out for the newest",
            )
        if mode is not None and mode not in ("drain", "keep", "recompute", "abort"):
            raise OptionError(
                "this is not an update mode",
                path="update_weights(mode=)",
                value=mode,
                rule="one of drain, keep, recompute, abort",
                repair="leave it out for the configuration's",
            )
        self._may_be_behind = False
        mode = mode or self.config.update.mode
        with span("update_weights", version=version, mode=mode):
            return await self._sync.update_weights(version, mode)

    async def _catch_up(self) -> None:
        """Update before the first request after a restart: this replica missed versions that were sent to all while it
        started, and they are not sent again. Requests only come when it is part of every fanout."""
        async with self._catching_up:
            if self._may_be_behind:
                await self._sync.catch_up()
                if self._capabilities.adapters:
                    await self._adapters.catch_up()
                self._may_be_behind = False

    # ---- Memory, adapters, statistics ------------------------------------------------------------------------------

    @endpoint(concurrent=True)
    async def sleep(self) -> None:
        """Release the device's memory, for a trainer for example. Requests wait until `wake`."""
        if self._is_front:
            await self._sync.sleep()

    @endpoint(concurrent=True)
    async def wake(self) -> None:
        """Restore the memory and continue. Weights that came meanwhile are proven now: see `update_weights`."""
        if self._is_front:
            await self._sync.wake()

    @endpoint(retry=True, concurrent=True)
    async def stats(self) -> EngineStats | None:
        """Return what the engine does and has done."""
        if not self._is_front:
            return None
        found = self._engine.stats()
        more = {**found.more, "adapters": self._adapters.digests}
        return replace(found, is_stopped=self._sync.is_stopped, more=more)

    @endpoint(retry=True, concurrent=True)
    async def card(self) -> dict[str, Any]:
        """Describe what is served: name, engine, its capabilities, max_seq_len, max_open (most completions in progress
        or waiting), version, vocab_size, has_chat_template, folder, sampling."""
        if not self._is_front:
            return {}
        from forge.generator.engine import context_limit

        return {
            "name": self.model.name,
            "engine": self.config.engine,
            "capabilities": asdict(self._capabilities),
            "max_seq_len": context_limit(self.config, self.model.architecture),
            "max_open": most_open(self.config),
            "version": self._engine.version,
            "vocab_size": self.model.architecture.vocab_size,
            "has_chat_template": self._tokenizer is not None and self._tokenizer.has_chat_template,
            "folder": None if self.model.folder is None else str(self.model.folder),
            "sampling": self.config.sampling.model_dump(mode="json"),
        }

    @endpoint(concurrent=True)
    async def load_adapter(self, name: str, path: str) -> str | None:
        """Load a LoRA adapter from a folder, or load it again, for requests with `sampling.adapter=name`.

        Return its digest. A replica that is restarted loads it, too.
        """
        return await self._named_adapters().load(name, path) if self._is_front else None

    @endpoint(concurrent=True)
    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter."""
        if self._is_front:
            await self._named_adapters().unload(name)

    def _named_adapters(self) -> NamedAdapters:
        if not self._capabilities.adapters:
            raise self._unsupported("load_adapter", "adapters")
        return self._adapters

    def _unsupported(self, path: str, what: str, *, engine: str = "vllm") -> ConfigError:
        return ConfigError(
            f"the engine `{self.config.engine}` does not support {what}",
            path=path,
            rule=f"only with an engine that does, such as `{engine}`",
            repair=f"set generator.engine={engine}, or leave it out",
        )


def _end_process(error: BaseException) -> None:
    """End this process, because its engine is gone: the service starts another."""
    _log.critical("the engine died, and this generator ends with it", exc_info=error)
    logging.shutdown()
    os._exit(ENGINE_DIED)


# ---- A service -------------------------------------------------------------------------------------------------------


async def start_policy(config: PolicyConfig) -> Service[Generator]:
    """Start the generators that a configuration describes. Call it inside `async with forge.run(...)`."""
    section = config.generator
    check_split(section, section.tensor_parallel, path="generator.tensor_parallel")
    with_gpus = wants_gpus(section.with_gpus)
    if with_gpus and config.launcher.kind == "local" and not num_usable_gpus():
        raise ConfigError(
            "the configuration requires a GPU, and this machine has none",
            path="generator.with_gpus",
            value=True,
            rule="true only where there is a GPU (nvidia-smi lists them, CUDA_VISIBLE_DEVICES hides them)",
            repair="run it on a machine with a GPU; or set generator.with_gpus=false, for a model that a CPU can run",
        )
    options = Generator.options(
        procs=section.tensor_parallel,
        num_replicas=section.num_replicas,
        routing="least_loaded",
        num_threads=section.num_threads,
        with_gpus=with_gpus,
        **config.workers.generator.options(),
    )
    return await options.as_service(GeneratorConfig.of(config.model, section))
