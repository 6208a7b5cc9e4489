"""The embedded engine: continuous batching over a paged cache, on one thread of this process.

The thread takes turns: commands that came in (requests, cancellations), then a change of weights if one is due, then
one step of the model. Whoever waits is told on their own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from forge.config import GeneratorConfig, UpdateMode
from forge.errors import EngineDead, ModelError, OptionError, Overloaded
from forge.generator.engine import EngineStats, Request, UpdateReport
from forge.generator.limits import context_limit
from forge.generator.native.batching import Batching, is_fatal
from forge.generator.native.sequences import ScoreJob, Ticket
from forge.runtime.control import post
from forge.types import INITIAL_VERSION, Completion, Delta

if TYPE_CHECKING:
    from torch import Tensor

    from forge.models.locate import ResolvedModel
    from forge.models.tokenizer import ChatTokenizer

_log = logging.getLogger("forge.generator")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Change:
    """A change of weights that waits for its turn."""

    mode: UpdateMode
    version: int
    apply: Callable[[], None]
    done: Future[tuple[float, int]] = field(default_factory=Future)
    """How long it held up generation, in seconds, and how many completions it cut short."""


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
        self._on_death = on_death
        self.max_seq_len = context_limit(config, model.facts)
        self.version = INITIAL_VERSION
        self._shared = shared
        self._batching: Batching | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._changes: deque[Change] = deque()
        self._is_closing = self._is_asleep = False
        self._dead: BaseException | None = None
        self._num_open = 0
        self._ids = itertools.count()
        self._weights: Any = None
        self._updating = asyncio.Lock()

    # ---- Life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model on the engine's own thread, and begin to serve."""
        import torch

        self._loop = asyncio.get_running_loop()
        ready: Future[None] = Future()
        num_threads = torch.get_num_threads()
        self._thread = threading.Thread(
            target=self._main, args=(ready, num_threads), name="forge-generator", daemon=True
        )
        self._thread.start()
        await asyncio.shield(asyncio.wrap_future(ready))

    async def close(self) -> None:
        """End the thread. Completions under way end as aborted."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _main(self, ready: Future[None], num_threads: int) -> None:
        import torch

        torch.set_num_threads(num_threads)  # each thread has a number of its own
        try:
            self._batching = Batching(
                self.config,
                self.model,
                tokenizer=self.tokenizer,
                max_seq_len=self.max_seq_len,
                shared=self._shared,
                send=self._send,
            )
        except BaseException as error:  # noqa: BLE001 - it is the start's outcome
            self._die(error)
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            self._run(self._batching)
        except BaseException as error:  # noqa: BLE001 - whoever waits must hear of it
            _log.error("the generator's engine ended", exc_info=error)
            self._die(error)
            if self._on_death is not None:
                self._on_death(error)

    def _run(self, batching: Batching) -> None:
        while True:
            self._take_commands(batching)
            if self._is_closing:
                batching.abort_all()
                self._die(RuntimeError("the engine was closed"))
                return
            self._change_weights(batching)
            if self._is_asleep:
                continue
            try:
                batching.step(self.version, admit=not self._is_draining(batching))
            except Exception as error:
                if is_fatal(error):
                    raise
                _log.error("a step failed; the completions that were under way get its error", exc_info=error)
                batching.fail_all(error)
            batching.flush()

    def _take_commands(self, batching: Batching) -> None:
        """Do what was asked for; wait while there is nothing at all to do."""
        with self._wake:
            while not (self._commands or self._is_closing or self._changes or self._has_work(batching)):
                self._wake.wait()
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()

    def _has_work(self, batching: Batching) -> bool:
        return not self._is_asleep and not batching.scheduler.is_idle

    def _change_weights(self, batching: Batching) -> None:
        with self._wake:
            if not self._changes or self._is_draining(batching):
                return
            change = self._changes.popleft()
        began = time.perf_counter()
        try:
            change.apply()
            num_aborted = batching.weights_changed(change.mode)
        except BaseException as error:  # noqa: BLE001 - it is the change's outcome
            change.done.set_exception(error)
            return
        self.version = change.version
        change.done.set_result((time.perf_counter() - began, num_aborted))

    def _is_draining(self, batching: Batching) -> bool:
        """Whether the next change waits until what has begun has ended. While the engine sleeps nothing would end."""
        is_asked = bool(self._changes) and self._changes[0].mode == "drain"
        return is_asked and not self._is_asleep and batching.scheduler.has_begun

    def _die(self, error: BaseException) -> None:
        """Nothing is done from now on: answer everybody."""
        with self._wake:
            self._dead = error
            commands, self._commands = self._commands, deque()
            changes, self._changes = self._changes, deque()
        if self._batching is not None:
            self._batching.fail_all(self._death())
            self._batching.flush()
        for command in commands:
            command()  # each finds the engine dead
        for change in changes:
            change.done.set_exception(self._death())

    def _death(self) -> EngineDead:
        return EngineDead(
            "the generator's engine has ended",
            value=repr(self._dead),
            rule="the thread that makes tokens runs as long as the generator",
            repair="start the generator again; a service does so by itself",
        )

    def _send(self, messages: Iterable[tuple[Callable[[Any], None], Any]]) -> None:
        """Tell those who wait, on their event loop."""
        post(self._loop, _tell_all, tuple(messages))

    def _ask(self, function: Callable[[Batching], T]) -> Future[T]:
        """Run a function on the engine's thread, between two steps."""
        answer: Future[T] = Future()

        def command() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                if self._dead is not None:
                    raise self._death()
                assert self._batching is not None
                answer.set_result(function(self._batching))
            except BaseException as error:  # noqa: BLE001 - it is the answer
                answer.set_exception(error)

        with self._wake:
            is_dead = self._dead is not None
            if not is_dead:
                self._commands.append(command)
                self._wake.notify()
        if is_dead:
            command()
        return answer

    # ---- Requests -----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> list[Completion]:
        """See `GenerationEngine.generate`."""
        outcome: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        ticket = Ticket(request, tell=lambda found: _settle(outcome, found))
        with self._opened(request.sampling.n):
            self._ask(lambda batching: batching.enter(ticket)).add_done_callback(
                lambda asked: post(self._loop, _fail_if, outcome, asked)
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
        with self._opened(request.sampling.n):
            self._ask(lambda batching: batching.enter(ticket)).add_done_callback(
                lambda asked: asked.exception() and post(self._loop, arrivals.put_nowait, asked.exception())
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

    @contextlib.contextmanager
    def _opened(self, num: int) -> Any:
        """Count a request's completions among those that are open, unless there are too many."""
        limit = self.config.max_batch + self.config.max_queue
        if self._num_open + num > limit:
            raise Overloaded(
                "the generator has as many completions waiting as it may",
                path="generator.max_queue",
                value=f"{self._num_open} open, {num} more asked for",
                rule=f"at most {limit} open: max_batch {self.config.max_batch} and max_queue {self.config.max_queue}",
                repair="ask for fewer at once, raise generator.max_queue, or add replicas",
            )
        self._num_open += num
        try:
            yield
        finally:
            self._num_open -= num

    def _cancel(self, ticket: Ticket) -> None:
        if not ticket.is_over:
            self._ask(lambda batching: batching.cancel(ticket))

    async def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """See `GenerationEngine.score`. Computed with the operations that the trainer uses."""
        if not (math.isfinite(temperature) and temperature > 0):
            raise OptionError(
                "logprobs cannot be computed at this temperature",
                path="score(temperature=)",
                value=temperature,
                rule="a finite number above 0",
                repair="leave it out for 1, which is also what greedy completions have",
            )
        return list(await asyncio.gather(*(self._score(token_ids, temperature) for token_ids in sequences)))

    async def _score(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        outcome: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        job = ScoreJob(tuple(token_ids), temperature, tell=lambda found: _settle(outcome, found))
        self._ask(lambda batching: batching.enter_score(job)).add_done_callback(
            lambda asked: post(self._loop, _fail_if, outcome, asked)
        )
        return await outcome

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
            runner = self._serving().runner
            fetched = await self._weights.fetch(version=version)
            change = Change(mode, fetched.version, lambda: runner.load(fetched.tensors))
            try:
                runner.check(fetched.tensors)
            except BaseException:
                fetched.release()
                raise
            change.done.add_done_callback(lambda _: post(self._loop, fetched.release))
            stall_s, num_aborted = await self._change(change)
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

            return await asyncio.wrap_future(self._ask(compare))
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
            changed = asyncio.ensure_future(self._change(change))
            either: set[asyncio.Future[Any]] = {changed, asyncio.wrap_future(reached)}
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                yield
            except BaseException:
                change.version = self.version
                raise
            finally:
                go_on.set()
                await changed

    async def _change(self, change: Change) -> tuple[float, int]:
        """Have a change made. If the caller is cancelled before its turn has come, it is not made at all."""
        with self._wake:
            if self._dead is not None:
                change.done.set_exception(self._death())
            else:
                self._changes.append(change)
            self._wake.notify()
        try:
            return await asyncio.shield(asyncio.wrap_future(change.done))
        except asyncio.CancelledError:
            with self._wake:
                is_withdrawn = change in self._changes
                if is_withdrawn:
                    self._changes.remove(change)
            if is_withdrawn:
                change.done.set_exception(asyncio.CancelledError())
            raise

    def _refuse_shared(self) -> None:
        if self._shared is not None:
            raise ModelError(
                "this engine computes with the trainer's own weights; there is nothing to fetch",
                path="update",
                rule="weights that are shared are changed in place",
                repair="change them inside `async with engine.changing(version):`",
            )

    def _serving(self) -> Batching:
        if self._dead is not None or self._batching is None:
            raise self._death()
        return self._batching

    # ---- Memory and figures ---------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """See `GenerationEngine.sleep`. Completions under way wait too, and are read again when it wakes."""

        def doze(batching: Batching) -> None:
            if not self._is_asleep:
                batching.give_back()
                self._is_asleep = True

        await asyncio.wrap_future(self._ask(doze))

    async def wake(self) -> None:
        """See `GenerationEngine.wake`."""

        def rise(batching: Batching) -> None:
            if self._is_asleep:
                batching.runner.take_back()
                self._is_asleep = False

        await asyncio.wrap_future(self._ask(rise))

    def stats(self) -> EngineStats:
        """See `GenerationEngine.stats`."""
        batching = self._serving()
        return batching.stats(self.version, is_asleep=self._is_asleep, num_open=self._num_open)


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


def _tell_all(messages: Iterable[tuple[Callable[[Any], None], Any]]) -> None:
    for tell, value in messages:
        tell(value)
