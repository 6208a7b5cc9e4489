"""The native engine: continuous batching over a paged cache, on one thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from forge.config import GeneratorConfig, UpdateMode
from forge.config.generator import LEAST_TEMPERATURE
from forge.errors import EngineDead, ModelError, OptionError, PromptError
from forge.generator.engine import (
    EngineCapabilities,
    EngineStats,
    OpenCompletions,
    PromptScores,
    Request,
    TopScores,
    UpdateReport,
    context_limit,
)
from forge.generator.native.adapters import AttachedAdapters, LoadedAdapter, SelectableAdapters
from forge.generator.native.pinned import FetchedVersions, PinnedWeights
from forge.generator.native.sequences import Deliver, PendingRequest, ScoreJob
from forge.generator.native.thread import EngineThread, Send, WeightUpdate
from forge.runtime.control import post
from forge.types import Completion, Delta

if TYPE_CHECKING:
    from torch import Tensor

    from forge.config import GenerationConfig
    from forge.errors import ConfigError
    from forge.generator.native.batching import Batching
    from forge.models.locate import ResolvedModel
    from forge.models.tokenizer import ChatTokenizer


class NativeEngine:
    """`GenerationEngine` on the trainer's own model definition.

    Args:
        config: the generator's configuration.
        model: the resolved model.
        tokenizer: decodes tokens, and names those that end a completion. Without one, texts are empty.
        shared: parameters of a trainer in this process, which the engine computes with instead of a copy; update them
            inside `paused`.
        on_death: called on the engine's thread when an error ends the engine.
    """

    capabilities: ClassVar = EngineCapabilities(
        shared_weights=True,
        prompt_logprobs=True,
        top_logprobs=True,
        pinned_versions=True,
        scores_tempered=True,
        live_adapter=True,
        adapters=True,
        speculation=True,
    )

    @staticmethod
    def config_errors(config: GenerationConfig) -> Sequence[ConfigError]:
        """See `GenerationEngine.config_errors`. What else is wrong shows when the model is loaded."""
        from forge.errors import ConfigError
        from forge.generator.native.cache_size import resolved_draft

        try:
            resolved_draft(config)
        except ConfigError as error:
            return (error,)
        return ()

    def __init__(
        self,
        config: GeneratorConfig,
        *,
        model: ResolvedModel,
        tokenizer: ChatTokenizer | None = None,
        shared: Mapping[str, Tensor] | None = None,
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.max_seq_len = context_limit(config, model.architecture)
        self._shared = shared
        self.thread = EngineThread(self._make, on_death=on_death)
        self._completions = OpenCompletions(config)
        self._weights: Any = None
        self._fetched: FetchedVersions | None = None
        self._adapters = SelectableAdapters(
            config, model.architecture, self._ask_adapters, lambda: self.thread.serving().runner.adapters.item_bytes
        )
        self._updating = asyncio.Lock()
        self._is_cache_released = self._stays_paused = False

    # ---- Lifetime -------------------------------------------------------------------------------------------------

    def _make(self, send: Send) -> Batching:
        from forge.generator.native.batching import Batching

        return Batching(
            self.config,
            self.model,
            tokenizer=self.tokenizer,
            max_seq_len=self.max_seq_len,
            shared=self._shared,
            send=send,
        )

    @property
    def version(self) -> int:
        """The version of the weights in use."""
        return self.thread.version

    async def start(self) -> None:
        """Load the model on the engine's own thread, and start to serve."""
        await self.thread.start()

    async def close(self) -> None:
        """End the thread. Completions in progress finish as aborted."""
        await self.thread.close()

    # ---- Requests -----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> list[Completion]:
        """See `GenerationEngine.generate`."""
        outcome: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        async with self._opened(request) as (weights, adapter):
            pending = PendingRequest(request, deliver=partial(_resolve, outcome), weights=weights, adapter=adapter)
            self._submit(lambda batching: batching.enter(pending), pending.deliver)
            try:
                return await outcome
            except asyncio.CancelledError:
                self._cancel(pending)
                raise

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        """See `GenerationEngine.stream`."""
        arrivals: asyncio.Queue[Delta | list[Completion] | BaseException] = asyncio.Queue()
        deliver = arrivals.put_nowait
        async with self._opened(request) as (weights, adapter):
            pending = PendingRequest(request, deliver, deliver_delta=deliver, weights=weights, adapter=adapter)
            self._submit(lambda batching: batching.enter(pending), pending.deliver)
            try:
                while True:
                    arrival = await arrivals.get()
                    if isinstance(arrival, BaseException):
                        raise arrival
                    if isinstance(arrival, list):
                        return
                    yield arrival
            finally:
                self._cancel(pending)

    @contextlib.asynccontextmanager
    async def _opened(self, request: Request) -> AsyncIterator[tuple[PinnedWeights | None, LoadedAdapter | None]]:
        """Count the completions of a request while it is open, and keep the pinned version or the adapter that it asks
        for."""
        name = request.sampling.adapter
        with self._completions.opened(request.sampling.n):
            if request.version is None:
                async with self._adapters.opened(name) as adapter:
                    yield None, adapter
                return
            if name is not None:
                raise PromptError(
                    "A pinned version has no adapters: they belong to the live weights.",
                    path="sampling.adapter",
                    value=name,
                    rule="null in a request with a version",
                    repair="leave out the version, or the adapter",
                )
            async with self._pinned_versions().opened(request.version) as weights:
                yield weights, None

    def _pinned_versions(self) -> FetchedVersions:
        if self._fetched is None:
            runner = self.thread.serving().runner

            async def drop(weights: PinnedWeights) -> None:
                dropped = self.thread.ask(lambda batching: batching.runner.drop(weights))
                with contextlib.suppress(EngineDead):
                    await asyncio.shield(asyncio.wrap_future(dropped))  # also if the request is cancelled meanwhile

            self._fetched = FetchedVersions(
                self.config.weights,
                verify=self.config.update.verify,
                most=runner.pinned.most,
                check=runner.check_weights,
                drop=drop,
            )
        return self._fetched

    def _ask_adapters(self, change: Callable[[AttachedAdapters], None]) -> Future[None]:
        return self.thread.ask(lambda batching: change(batching.runner.adapters))

    async def load_adapter(self, name: str, path: str) -> str:
        """Load a LoRA adapter for requests with `sampling.adapter = name`; under a name that is known, replace it.

        Return the digest of what was loaded.
        """
        return await self._adapters.load(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Requests that use it finish."""
        await self._adapters.unload(name)

    async def unload_version(self, version: int) -> None:
        """Free the memory of a pinned version that is not asked for any more."""
        if self._fetched is not None:
            await self._fetched.unload(version)

    def _submit(self, enter: Callable[[Batching], None], deliver: Deliver) -> None:
        """Call `enter` on the engine's thread. If it raises, deliver the error on the event loop."""

        def check(entered: Future[None]) -> None:
            error = entered.exception()
            if error is not None:
                post(self.thread.loop, deliver, error)

        self.thread.ask(enter).add_done_callback(check)

    def _cancel(self, pending: PendingRequest) -> None:
        if not pending.is_over:
            self.thread.ask(lambda batching: batching.cancel(pending))

    async def score(
        self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0, urgent: bool = False
    ) -> list[list[float]]:
        """See `GenerationEngine.score`. Uses the trainer's own operations."""
        is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        if not (is_number and math.isfinite(temperature) and temperature >= LEAST_TEMPERATURE):
            raise OptionError(
                "logprobs cannot be computed at this temperature",
                path="score(temperature=)",
                value=temperature,
                rule=f"a finite number, at least {LEAST_TEMPERATURE:g}",
                repair="leave it out for 1, which is also what greedy completions have",
            )
        return list(await asyncio.gather(*(self._score(token_ids, temperature, urgent) for token_ids in sequences)))

    async def score_prompts(self, sequences: Sequence[Sequence[int]]) -> list[PromptScores]:
        """Return the logprobs of each sequence's tokens, and the likeliest token at each place."""
        return list(await asyncio.gather(*map(self._score_prompt, sequences)))

    async def _score_prompt(self, token_ids: Sequence[int]) -> PromptScores:
        outcome: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        job = ScoreJob(tuple(token_ids), 1.0, deliver=partial(_resolve, outcome), wants_best=True)
        logprobs = await self._scored(job, outcome)
        first = job.token_ids[:1]
        return PromptScores(tuple(logprobs), (*first, *job.best_ids), (*((0.0,) * len(first)), *job.best_logprobs))

    async def score_top(self, sequences: Sequence[Sequence[int]], k: int) -> list[TopScores]:
        """Return the k likeliest tokens at each place of each sequence."""
        return list(await asyncio.gather(*(self._score_top(token_ids, k) for token_ids in sequences)))

    async def _score_top(self, token_ids: Sequence[int], k: int) -> TopScores:
        outcome: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        job = ScoreJob(tuple(token_ids), 1.0, deliver=partial(_resolve, outcome), num_top=k)
        await self._scored(job, outcome)
        return TopScores.of(job.top_ids, job.top_logprobs, k=k)

    async def _score(self, token_ids: Sequence[int], temperature: float, urgent: bool) -> list[float]:
        outcome: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        job = ScoreJob(tuple(token_ids), temperature, deliver=partial(_resolve, outcome), is_urgent=urgent)
        return await self._scored(job, outcome)

    async def _scored(self, job: ScoreJob, outcome: asyncio.Future[list[float]]) -> list[float]:
        self._submit(lambda batching: batching.enter_score(job), job.deliver)
        try:
            return await outcome
        except asyncio.CancelledError:
            self.thread.ask(lambda batching: batching.cancel_score(job))
            raise

    # ---- Weights ------------------------------------------------------------------------------------------------

    async def update_weights(self, version: int | Literal["latest"], mode: UpdateMode) -> UpdateReport:
        """See `GenerationEngine.update_weights`.

        The version is fetched and checked while tokens are generated; only the copy into place holds them up.
        """
        if self._shared is not None:
            raise ModelError(
                "this engine computes with the trainer's own weights; there is nothing to fetch",
                path="update_weights",
                rule="shared weights are updated in place",
                repair="update them inside `async with engine.paused(version):`",
            )
        from forge.store import Weights

        started = time.perf_counter()
        async with self._updating:
            if self._weights is None:
                self._weights = Weights(self.config.weights, verify=self.config.update.verify)
            runner = self.thread.serving().runner
            fetched = await self._weights.fetch(version=version)
            update = WeightUpdate(mode, fetched.version, lambda: runner.update_weights(fetched.tensors))
            try:
                runner.check_weights(fetched.tensors)
            except BaseException:
                fetched.release()
                raise
            update.done.add_done_callback(lambda _: post(self.thread.loop, fetched.release))
            stall_s, num_aborted = await self.thread.update_weights(update)
        took_s, received = time.perf_counter() - started, fetched.num_received
        return UpdateReport(fetched.version, mode, took_s, stall_s, num_aborted=num_aborted, received_bytes=received)

    async def differing(self, version: int) -> dict[str, tuple[int, int]]:
        """See `GenerationEngine.differing`."""
        from forge.store import Weights
        from forge.store.digest import digest_tensor

        fetched = await Weights(self.config.weights).fetch(version=version)
        try:

            def compare(batching: Batching) -> dict[str, tuple[int, int]]:
                own = batching.runner.updated
                both = {
                    name: (digest_tensor(fetched.tensors[name].to(own[name])), digest_tensor(own[name].detach()))
                    for name in own
                }
                return {name: digests for name, digests in both.items() if digests[0] != digests[1]}

            return await asyncio.wrap_future(self.thread.ask(compare))
        finally:
            fetched.release()

    @contextlib.asynccontextmanager
    async def paused(self, version: int, mode: UpdateMode = "keep") -> AsyncIterator[None]:
        """Pause generation between two steps while the block updates shared weights, which are `version` afterwards.

        Completions in progress then continue as `mode` says. If the block raises, the version stays as it was.
        """
        async with self._updating:
            resume = threading.Event()
            reached: Future[None] = Future()

            def hold() -> None:
                reached.set_result(None)
                resume.wait()

            update = WeightUpdate(mode, version, hold)
            updated = asyncio.ensure_future(self.thread.update_weights(update))
            either: set[asyncio.Future[Any]] = {updated, asyncio.wrap_future(reached)}
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if updated.done():  # it was not held: the engine has ended
                    await updated
                yield
            except BaseException:
                update.version = self.version
                raise
            finally:
                resume.set()
                await updated

    def copy_weights(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy weights into the engine's own, while generation is held."""
        self.thread.serving().runner.update_weights(parameters)

    # ---- Memory and statistics --------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """See `GenerationEngine.sleep`. Completions in progress wait too, and are recomputed when it wakes."""

        def release(batching: Batching) -> None:
            if not self.thread.is_asleep:
                batching.release()
                self.thread.is_asleep = True

        await asyncio.wrap_future(self.thread.ask(release))

    async def wake(self) -> None:
        """See `GenerationEngine.wake`."""

        def restore(batching: Batching) -> None:
            if self.thread.is_asleep:
                batching.runners.restore()
                self.thread.is_asleep = self._is_cache_released = False

        await asyncio.wrap_future(self.thread.ask(restore))

    @property
    def is_on_gpu(self) -> bool:
        """Whether it computes on a GPU."""
        return self.thread.serving().runner.on_gpu

    def release_cache(self, *, preempt: bool = False) -> bool:
        """Free the cache's memory inside a `paused` block, for work that runs there. Return whether it was freed.

        It is not freed while completions are in progress, which need its contents, unless `preempt` says that they are
        recomputed later. Shared prefixes are forgotten. Until `restore_cache` the engine is asleep, but keeps its
        weights.
        """
        batching = self.thread.serving()
        if self._is_cache_released:
            return True
        is_asleep = self.thread.is_asleep and not self._stays_paused
        if is_asleep or not (preempt or batching.scheduler.is_idle):
            return False
        self.thread.is_asleep = self._is_cache_released = True
        batching.release_cache()
        return True

    def stay_paused(self) -> None:
        """Generate nothing when the `paused` block ends either, until `resume` in a later one. Requests wait."""
        self.thread.is_asleep = self._stays_paused = True

    def resume(self) -> None:
        """End what `stay_paused` began, in a `paused` block; the cache is restored where it was released."""
        self._stays_paused = False
        self.restore_cache()
        self.thread.is_asleep = False

    def restore_cache(self) -> None:
        """Allocate again what `release_cache` freed. On `OutOfDeviceMemory` the engine stays asleep.

        Call it again when others have freed their memory; `wake` tries, too. After `stay_paused` it stays asleep until
        `resume`.
        """
        if self._is_cache_released:
            self.thread.serving().runners.allocate_cache()
            self._is_cache_released = False
            self.thread.is_asleep = self._stays_paused

    def stats(self) -> EngineStats:
        """See `GenerationEngine.stats`."""
        batching = self.thread.serving()
        return batching.stats(self.version, is_asleep=self.thread.is_asleep, num_open=self._completions.num)


def _resolve(outcome: asyncio.Future[Any], found: Any) -> None:
    if outcome.done():
        return
    if isinstance(found, BaseException):
        outcome.set_exception(found)
    else:
        outcome.set_result(found)
