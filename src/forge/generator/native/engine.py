"""The embedded engine: continuous batching over a paged cache, on one thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from forge.config import GeneratorConfig, UpdateMode
from forge.config.generator import LEAST_TEMPERATURE
from forge.errors import ModelError, OptionError
from forge.generator.engine import EngineCapabilities, EngineStats, Request, UpdateReport
from forge.generator.limits import OpenCompletions, context_limit
from forge.generator.native.sequences import ScoreJob, Ticket
from forge.generator.native.thread import Change, EngineThread, Send
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
        config: what the generator was configured with.
        model: the model, resolved.
        tokenizer: makes text of tokens, and says which tokens end a completion. Without one, texts are empty.
        shared: parameters of a trainer in this process, which the engine computes with instead of a copy; change them
            inside `changing`.
        on_death: is called, on the engine's thread, when the engine ends by an error.
    """

    capabilities: ClassVar = EngineCapabilities(shared_weights=True)

    @staticmethod
    def config_errors(config: GenerationConfig) -> Sequence[ConfigError]:
        """See `GenerationEngine.config_errors`. What is wrong shows when the model is loaded."""
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
        self.max_seq_len = context_limit(config, model.facts)
        self._shared = shared
        self.thread = EngineThread(self._make, on_death=on_death)
        self._completions = OpenCompletions(config)
        self._weights: Any = None
        self._updating = asyncio.Lock()
        self._is_lent = False

    # ---- Life ---------------------------------------------------------------------------------------------------

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
        """The weights that make tokens now."""
        return self.thread.version

    async def start(self) -> None:
        """Load the model on the engine's own thread, and begin to serve."""
        await self.thread.start()

    async def close(self) -> None:
        """End the thread. Completions under way end as aborted."""
        await self.thread.close()

    # ---- Requests -----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> list[Completion]:
        """See `GenerationEngine.generate`."""
        outcome: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        ticket = Ticket(request, tell=lambda found: _settle(outcome, found))
        with self._completions.opened(request.sampling.n):
            self.thread.ask(lambda batching: batching.enter(ticket)).add_done_callback(
                lambda asked: post(self.thread.loop, _fail_if, outcome, asked)
            )
            try:
                return await outcome
            except asyncio.CancelledError:
                self._cancel(ticket)
                raise

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        """See `GenerationEngine.stream`."""
        arrivals: asyncio.Queue[Delta | list[Completion] | BaseException] = asyncio.Queue()
        ticket = Ticket(request, tell=arrivals.put_nowait, tell_delta=arrivals.put_nowait)
        with self._completions.opened(request.sampling.n):
            self.thread.ask(lambda batching: batching.enter(ticket)).add_done_callback(
                lambda asked: asked.exception() and post(self.thread.loop, arrivals.put_nowait, asked.exception())
            )
            try:
                while True:
                    arrival = await arrivals.get()
                    if isinstance(arrival, BaseException):
                        raise arrival
                    if isinstance(arrival, list):
                        return
                    yield arrival
            finally:
                self._cancel(ticket)

    def _cancel(self, ticket: Ticket) -> None:
        if not ticket.is_over:
            self.thread.ask(lambda batching: batching.cancel(ticket))

    async def score(
        self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0, urgent: bool = False
    ) -> list[list[float]]:
        """See `GenerationEngine.score`. Computed with the operations that the trainer uses."""
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

    async def _score(self, token_ids: Sequence[int], temperature: float, urgent: bool) -> list[float]:
        outcome: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        job = ScoreJob(tuple(token_ids), temperature, tell=lambda found: _settle(outcome, found), is_urgent=urgent)
        self.thread.ask(lambda batching: batching.enter_score(job)).add_done_callback(
            lambda asked: post(self.thread.loop, _fail_if, outcome, asked)
        )
        try:
            return await outcome
        except asyncio.CancelledError:
            self.thread.ask(lambda batching: batching.cancel_score(job))
            raise

    # ---- Weights ------------------------------------------------------------------------------------------------

    async def update(self, version: int | Literal["latest"], mode: UpdateMode) -> UpdateReport:
        """See `GenerationEngine.update`.

        The version is fetched and checked beside generation; only the copy into place holds it up.
        """
        self._refuse_shared()
        from forge.store import Weights

        began = time.perf_counter()
        async with self._updating:
            if self._weights is None:
                self._weights = Weights(self.config.weights)
            runner = self.thread.serving().runner
            fetched = await self._weights.fetch(version=version)
            change = Change(mode, fetched.version, lambda: runner.load(fetched.tensors))
            try:
                runner.check(fetched.tensors)
            except BaseException:
                fetched.release()
                raise
            change.done.add_done_callback(lambda _: post(self.thread.loop, fetched.release))
            stall_s, num_aborted = await self.thread.change(change)
        return UpdateReport(fetched.version, mode, time.perf_counter() - began, stall_s, num_aborted=num_aborted)

    async def differing(self, version: int) -> dict[str, tuple[int, int]]:
        """The tensors that are not as they were published: by name, the published digest and that of what is here."""
        from forge.store import Weights
        from forge.store.digest import digest_tensor

        fetched = await Weights(self.config.weights).fetch(version=version)
        try:

            def compare(batching: Batching) -> dict[str, tuple[int, int]]:
                own = batching.runner.parameters
                both = {
                    name: (digest_tensor(fetched.tensors[name].to(own[name])), digest_tensor(own[name].detach()))
                    for name in own
                }
                return {name: digests for name, digests in both.items() if digests[0] != digests[1]}

            return await asyncio.wrap_future(self.thread.ask(compare))
        finally:
            fetched.release()

    @contextlib.asynccontextmanager
    async def changing(self, version: int, mode: UpdateMode = "keep") -> AsyncIterator[None]:
        """Hold generation between two steps while the block changes weights that are shared; they are `version` then.

        Completions under way go on afterwards as `mode` says. If the block raises, the version stays as it was.
        """
        async with self._updating:
            go_on = threading.Event()
            reached: Future[None] = Future()

            def hold() -> None:
                reached.set_result(None)
                go_on.wait()

            change = Change(mode, version, hold)
            changed = asyncio.ensure_future(self.thread.change(change))
            either: set[asyncio.Future[Any]] = {changed, asyncio.wrap_future(reached)}
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if changed.done():  # it was not held: the engine has ended
                    await changed
                yield
            except BaseException:
                change.version = self.version
                raise
            finally:
                go_on.set()
                await changed

    def copy_weights(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy weights into the engine's own, inside a block of `changing`."""
        self.thread.serving().runner.load(parameters)

    def _refuse_shared(self) -> None:
        if self._shared is not None:
            raise ModelError(
                "this engine computes with the trainer's own weights; there is nothing to fetch",
                path="update",
                rule="weights that are shared are changed in place",
                repair="change them inside `async with engine.changing(version):`",
            )

    # ---- Memory and figures ---------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """See `GenerationEngine.sleep`. Completions under way wait too, and are read again when it wakes."""

        def doze(batching: Batching) -> None:
            if not self.thread.is_asleep:
                batching.give_back()
                self.thread.is_asleep = True

        await asyncio.wrap_future(self.thread.ask(doze))

    async def wake(self) -> None:
        """See `GenerationEngine.wake`."""

        def rise(batching: Batching) -> None:
            if self.thread.is_asleep:
                batching.runner.take_back()
                self.thread.is_asleep = self._is_lent = False

        await asyncio.wrap_future(self.thread.ask(rise))

    @property
    def is_on_gpu(self) -> bool:
        """Whether it computes on a GPU."""
        return self.thread.serving().runner.on_gpu

    def lend_cache(self) -> bool:
        """Free the cache's memory inside a block of `changing`, for whoever computes there, and tell whether it was.

        It is not where completions are under way: they need what the cache holds. What was remembered of prompts is
        forgotten. Until `reclaim_cache` the engine is asleep, but for its weights, which stay.
        """
        batching = self.thread.serving()
        if self._is_lent:
            return True
        if self.thread.is_asleep or not batching.scheduler.is_idle:
            return False
        self.thread.is_asleep = self._is_lent = True
        batching.give_back_cache()
        return True

    def reclaim_cache(self) -> None:
        """Take again what `lend_cache` freed. With `OutOfDeviceMemory`, if others have it, the engine stays asleep.

        It can then be tried again, as `wake` also does.
        """
        if self._is_lent:
            self.thread.serving().runner.allocate()
            self.thread.is_asleep = self._is_lent = False

    def stats(self) -> EngineStats:
        """See `GenerationEngine.stats`."""
        batching = self.thread.serving()
        return batching.stats(self.version, is_asleep=self.thread.is_asleep, num_open=self._completions.num)


def _settle(outcome: asyncio.Future[Any], found: Any) -> None:
    if outcome.done():
        return
    if isinstance(found, BaseException):
        outcome.set_exception(found)
    else:
        outcome.set_result(found)


def _fail_if(outcome: asyncio.Future[Any], asked: Future[None]) -> None:
    error = asked.exception()
    if error is not None and not outcome.done():
        outcome.set_exception(error)
