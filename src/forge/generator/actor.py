"""`Generator`: an engine behind endpoints. The same for every engine: prompts, weights, proof, and death."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from forge.config import GeneratorConfig, Sampling, UpdateMode
from forge.errors import ConfigError, OptionError, StoreError, SyncError, WeightMismatch
from forge.generator.engine import EngineStats, GenerationEngine, Request, UpdateReport
from forge.runtime.endpoints import endpoint
from forge.service.actor import ForgeActor
from forge.types import INITIAL_VERSION, Completion, Delta

if TYPE_CHECKING:
    from forge.generator.prompts import PromptReader
    from forge.models.locate import ResolvedModel
    from forge.models.tokenizer import ChatTokenizer

_log = logging.getLogger("forge.generator")
T = TypeVar("T")
Version = int | Literal["latest"]
Messages = Sequence[Mapping[str, Any]]

ENGINE_DIED = 70
"""The exit code of a generator whose engine is gone."""
_BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}


class Generator(ForgeActor):
    """Turns prompts into completions. As a service, several replicas feel like one policy.

    Example:
        >>> policy = await Generator.options(num_replicas=2).as_service(GeneratorConfig(model=model))
        >>> completions = await policy.generate.route("Once upon a time", n=4)
        >>> await policy.update_weights.fanout(version=3)

    `procs` is the number of processes over which vLLM splits the model; the embedded engine has one. When the engine
    dies the process ends with it, so that a service restarts the replica, which then loads the newest version.
    """

    def __init__(self, config: GeneratorConfig) -> None:
        self.config = config

    # ---- Life ---------------------------------------------------------------------------------------------------

    @endpoint
    async def setup(self) -> None:
        """Load the model, and the newest weights if any were published."""
        self._proven = asyncio.Event()
        self._proven.set()
        self._stop: SyncError | None = None
        self._unproven: int | None = None
        self._trusted = {INITIAL_VERSION}
        self._under_way: set[asyncio.Task[Any]] = set()
        self._updating = asyncio.Lock()
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if world_size > 1 and self.config.engine == "native":
            raise OptionError(
                "the embedded engine runs in one process",
                path="Generator.options(procs=)",
                value=world_size,
                rule="1 with `engine: native`",
                repair="procs=1 and more replicas, or engine: vllm",
            )
        devices = await asyncio.to_thread(_all_devices, rank, world_size)
        self._is_front = rank == 0
        if not self._is_front:
            return  # it lends its device to the engine of rank 0
        self.model, self._tokenizer = await asyncio.to_thread(self._read_model)
        self._engine = self._make_engine(world_size, devices)
        self._reader = self._make_reader()
        await self._engine.start()
        from forge.store import Weights

        if await Weights(self.config.weights).versions():
            try:
                await self._update("latest", "keep")
            except SyncError:
                _log.error("this generator takes no requests until an update passes")

    def _read_model(self) -> tuple[ResolvedModel, ChatTokenizer | None]:
        from forge.models.locate import resolve
        from forge.models.tokenizer import ChatTokenizer

        model = resolve(self.config.model)
        if model.folder is None:
            return model, None
        return model, ChatTokenizer.load(model.folder, chat_template=self.config.chat_template)

    def _make_engine(self, world_size: int, devices: Sequence[str]) -> GenerationEngine:
        if self.config.engine == "native":
            from forge.generator.native.engine import NativeEngine

            return NativeEngine(self.config, model=self.model, tokenizer=self._tokenizer, on_death=_end_process)
        from forge.generator.vllm.engine import VllmEngine

        return VllmEngine(self.config, tensor_parallel=world_size, devices=devices, on_death=_end_process)

    def _make_reader(self) -> PromptReader:
        from forge.generator.limits import context_limit
        from forge.generator.prompts import PromptReader

        return PromptReader(
            self.config,
            tokenizer=self._tokenizer,
            max_seq_len=context_limit(self.config, self.model.facts),
            vocab_size=self.model.facts.vocab_size or 0,
        )

    @endpoint(concurrent=True)
    async def close(self) -> None:
        """End the engine in order. Completions under way end as aborted."""
        if self._is_front:
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
    ) -> list[Completion]:
        """The completions of one prompt.

        Args:
            prompt: text to go on from.
            messages: or a conversation to answer, which goes through the chat template.
            token_ids: or tokens, as they are.
            sampling: how tokens are drawn: a whole `Sampling`, or a dict of what differs from the configuration's.
            n: how many completions; overrides `sampling`.
            template: arguments of the chat template, such as `tools` or `enable_thinking`.
        """
        if not self._is_front:
            return []
        request = self._request(prompt, messages, token_ids, sampling, n, template)
        completions = await self._watched(self._engine.generate(request))
        await self._hold(span.version for completion in completions for span in completion.versions)
        return completions

    @endpoint
    async def generate_stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        n: int | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[Delta]:
        """As `generate`, as the completions grow: `async for delta in policy.generate_stream.stream(...)`."""
        if not self._is_front:
            return
        deltas = self._engine.stream(self._request(prompt, messages, token_ids, sampling, n, template))
        try:
            while True:
                try:
                    delta = await self._watched(anext(deltas))
                except StopAsyncIteration:
                    return
                await self._hold([delta.version])
                yield delta
        finally:
            await deltas.aclose()  # type: ignore[attr-defined]

    def _request(
        self,
        prompt: str | None,
        messages: Messages | None,
        token_ids: Sequence[int] | None,
        sampling: Sampling | Mapping[str, Any] | None,
        n: int | None,
        template: Mapping[str, Any] | None,
    ) -> Request:
        self._check_sync()
        ids = self._reader.token_ids(prompt, messages=messages, token_ids=token_ids, template=template)
        chosen = self._reader.sampling(sampling, n)
        if self.config.engine == "native":
            _refuse_for_native(chosen)
        return Request(uuid.uuid4().hex, ids, chosen)

    async def _hold(self, versions: Iterable[int]) -> None:
        """Wait with tokens of weights that are being proven; those of others pass."""
        if not self._trusted.issuperset(versions):
            await self._proven.wait()
        self._check_sync()

    async def _watched(self, work: Awaitable[T]) -> T:
        """Await work that a failed proof of sync ends."""
        task = asyncio.ensure_future(work)
        self._under_way.add(cast("asyncio.Task[Any]", task))
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            caller = asyncio.current_task()
            if self._stop is not None and not (caller is not None and caller.cancelling()):
                raise self._stop from None
            raise
        finally:
            self._under_way.discard(cast("asyncio.Task[Any]", task))

    @endpoint(retry=True, concurrent=True)
    async def score(
        self, token_ids: Sequence[int] | Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> list[list[float]]:
        """The logprob of every given token after those before it; the first one's is 0. One line of tokens, or many."""
        if not self._is_front:
            return []
        self._check_sync()
        first = token_ids[0] if len(token_ids) else None
        lines = [token_ids] if isinstance(first, int) or first is None else token_ids
        checked = [self._reader.line(cast(Sequence[int], line)) for line in lines]
        return await self._watched(self._engine.score(checked, temperature=temperature))

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
        if mode is not None and mode not in ("drain", "keep", "recompute", "abort"):
            raise OptionError(
                "there is no such way to update weights",
                path="update_weights(mode=)",
                value=mode,
                rule="one of drain, keep, recompute, abort",
                repair="leave it out for the configuration's",
            )
        return await self._update(version, mode or self.config.update.mode)

    async def _update(self, version: Version, mode: UpdateMode) -> UpdateReport:
        async with self._updating:
            began = time.perf_counter()
            self._proven.clear()
            try:
                report = await self._update_with_retries(version, mode)
                is_asleep = self._engine.stats().is_asleep
                self._unproven = report.version if is_asleep else None
                difference = None if is_asleep else await self._prove(report.version)
                self._stop = None
            except SyncError as error:
                self._halt(error)
                raise
            finally:
                self._proven.set()
            return replace(report, canary=difference, seconds=time.perf_counter() - began)

    async def _update_with_retries(self, version: Version, mode: UpdateMode) -> UpdateReport:
        most, wait_s = self.config.update.max_attempts, self.config.update.retry_wait_s
        for attempt in range(1, most + 1):
            try:
                report = await self._engine.update(version, mode)
            except WeightMismatch as error:  # another try would find the same
                _log.error("the update to version %s was refused: %s", version, error.message)
                raise
            except (StoreError, OSError) as error:
                _log.warning(
                    "the update to version %s failed (attempt %d of %d): %s; version %d goes on serving",
                    *(version, attempt, most, error, self._engine.version),
                )
                if attempt == most:
                    raise
                await asyncio.sleep(wait_s * 2 ** (attempt - 1))
            else:
                return replace(report, num_attempts=attempt)
        raise AssertionError("unreachable")

    async def _prove(self, version: int) -> float | None:
        """Compare the canary's logprobs with the trainer's; the largest difference, or None without a canary."""
        from forge.store.canary import get_canary, largest_difference

        canary = await get_canary(self.config.weights, version) if self.config.canary.enabled else None
        if canary is None:
            self._trusted.add(version)
            return None
        (found,) = await self._engine.score([canary.token_ids])
        difference = largest_difference(canary, found)
        bound = self.config.canary.bound or _BOUNDS[self._precision()]
        if difference <= bound:
            self._trusted.add(version)
            return difference
        self._trusted.discard(version)
        differing = await self._differing(version)
        raise SyncError(
            f"after the update to version {version} the generator's logprobs are not the trainer's",
            tensors=tuple(differing),
            path="generator.canary.bound",
            value=f"largest difference {difference:.4g}",
            rule=f"at most {bound:g}; " + _told(differing),
            repair="publish the version again and update; if no tensor differs, compare the models' configurations and "
            "precisions, or set generator.canary.enabled=false",
        )

    def _precision(self) -> str:
        if self.config.precision is not None:
            return self.config.precision
        import torch

        on_gpu = torch.cuda.is_available() if self.config.with_gpus is None else self.config.with_gpus
        return "bfloat16" if on_gpu else "float32"

    async def _differing(self, version: int) -> dict[str, tuple[int, int]]:
        differing = getattr(self._engine, "differing", None)
        return {} if differing is None else await differing(version)

    def _halt(self, error: SyncError) -> None:
        """Stop rollouts: everything under way, and everything that comes until an update passes."""
        _log.error("generation stops: %s", error)
        self._stop = error
        for task in tuple(self._under_way):
            task.cancel()

    def _check_sync(self) -> None:
        if self._stop is not None:
            raise self._stop

    # ---- Memory, adapters, figures --------------------------------------------------------------------------------

    @endpoint(concurrent=True)
    async def sleep(self) -> None:
        """Give the device's memory back, to a trainer for example. Requests wait until `wake`."""
        if self._is_front:
            async with self._updating:  # which cannot be proven by an engine that sleeps
                await self._engine.sleep()

    @endpoint(concurrent=True)
    async def wake(self) -> None:
        """Take memory again and go on. Weights that came meanwhile are proven now: see `update_weights`."""
        if not self._is_front:
            return
        async with self._updating:
            self._proven.clear()
            try:
                await self._engine.wake()
                version, self._unproven = self._unproven, None
                if version is not None:
                    await self._prove(version)
            except SyncError as error:
                self._halt(error)
                raise
            finally:
                self._proven.set()

    @endpoint(retry=True, concurrent=True)
    async def stats(self) -> EngineStats | None:
        """What the engine does now, and what it has done."""
        return self._engine.stats() if self._is_front else None

    @endpoint(retry=True, concurrent=True)
    async def card(self) -> dict[str, Any]:
        """What is served: name, engine, max_seq_len, version, vocab_size, has_chat_template, folder, sampling."""
        if not self._is_front:
            return {}
        from forge.generator.limits import context_limit

        return {
            "name": self.model.name,
            "engine": self.config.engine,
            "max_seq_len": context_limit(self.config, self.model.facts),
            "version": self._engine.version,
            "vocab_size": self.model.facts.vocab_size,
            "has_chat_template": self._tokenizer is not None and self._tokenizer.has_chat_template,
            "folder": None if self.model.folder is None else str(self.model.folder),
            "sampling": self.config.sampling.model_dump(mode="json"),
        }

    @endpoint(concurrent=True)
    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a folder, or load it again, for requests with `sampling.adapter=name`."""
        if self._is_front:
            await self._adapters().load_adapter(name, path)

    @endpoint(concurrent=True)
    async def unload_adapter(self, name: str) -> None:
        """Let an adapter go."""
        if self._is_front:
            await self._adapters().unload_adapter(name)

    def _adapters(self) -> Any:
        if self.config.engine == "native":
            raise _only_vllm("load_adapter", "adapters")
        return self._engine


def _refuse_for_native(sampling: Sampling) -> None:
    if sampling.structured is not None:
        raise _only_vllm("sampling.structured", "structured output")
    if sampling.adapter is not None:
        raise _only_vllm("sampling.adapter", "adapters")


def _only_vllm(path: str, what: str) -> ConfigError:
    return ConfigError(
        f"the embedded engine has no {what}",
        path=path,
        rule="only with `engine: vllm`",
        repair="set generator.engine=vllm, or leave it out",
    )


def _told(differing: Mapping[str, tuple[int, int]], most: int = 4) -> str:
    if not differing:
        return "every tensor has the digest that was published"
    shown = [f"{name} ({here:016x}, published {published:016x})" for name, (published, here) in differing.items()]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return f"these tensors have other digests than were published: {', '.join(shown[:most])}{more}"


def _all_devices(rank: int, world_size: int) -> tuple[str, ...]:
    """The GPUs of all ranks, in order: rank 0's engine uses them all."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if world_size == 1:
        return tuple(own.split(",")) if own else ()
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, world_size, is_master=rank == 0)
    store.set(f"devices/{rank}", own or "-")
    found = [store.get(f"devices/{each}").decode() for each in range(world_size)]
    store.set(f"read/{rank}", "yes")
    if rank == 0:  # the others' answers come from here
        store.wait([f"read/{each}" for each in range(world_size)])
    return tuple(device for devices in found if devices != "-" for device in devices.split(","))


def _end_process(error: BaseException) -> None:
    """The engine is gone: end this process, so that whoever watches it starts another."""
    _log.critical("the engine died, and this generator ends with it", exc_info=error)
    logging.shutdown()
    os._exit(ENGINE_DIED)
