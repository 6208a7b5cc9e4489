"""The thread of the native engine.

Each turn runs the commands that came in (requests, cancellations), then a weight update if one is due, then one step
of the model. Results are delivered on the event loop. The engine may already have launched the step after the current
one: that step is finished before anything else happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from forge.config import UpdateMode
from forge.errors import EngineDead
from forge.runtime.control import post
from forge.types import INITIAL_VERSION

if TYPE_CHECKING:
    from forge.generator.native.batching import Batching, Message

_log = logging.getLogger("forge.generator")
T = TypeVar("T")
Send: TypeAlias = "Callable[[Iterable[Message]], object]"


@dataclass(slots=True, eq=False)
class WeightUpdate:
    """An update of the weights that waits for its turn.

    Attributes:
        mode: what happens to completions in progress.
        version: the version of the weights after `apply`, which runs on the engine's thread.
        done: resolves to the seconds for which it held up generation, and the number of aborted completions.
    """

    mode: UpdateMode
    version: int
    apply: Callable[[], None]
    done: Future[tuple[float, int]] = field(default_factory=Future)


class EngineThread:
    """One thread, and the commands of other threads for it.

    Args:
        make: creates the state that the thread works on, given a function that delivers results; called on the thread.
        on_death: called on the thread when an error ends it.
    """

    def __init__(
        self, make: Callable[[Send], Batching], *, on_death: Callable[[BaseException], None] | None = None
    ) -> None:
        self.version = INITIAL_VERSION
        self.is_asleep = False
        self.batching: Batching | None = None
        self.updates: deque[WeightUpdate] = deque()
        self._make, self._on_death = make, on_death
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._dead: BaseException | None = None

    # ---- For other threads --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start, and wait until requests are served. Results are delivered on the running event loop."""
        import torch

        self.loop = asyncio.get_running_loop()
        ready: Future[None] = Future()
        arguments = (ready, torch.get_num_threads())
        self._thread = threading.Thread(target=self._main, args=arguments, name="forge-generator", daemon=True)
        self._thread.start()
        await asyncio.shield(asyncio.wrap_future(ready))

    async def close(self) -> None:
        """End the thread. Completions in progress finish as aborted."""
        if self._thread is None:
            return
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def ask(self, function: Callable[[Batching], T]) -> Future[T]:
        """Run a function on the thread, between two steps."""
        answer: Future[T] = Future()

        def command() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function(self.serving()))
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

    async def update_weights(self, update: WeightUpdate) -> tuple[float, int]:
        """Queue an update and wait for it.

        If the caller is cancelled before its turn has come, the update is withdrawn; afterwards, it finishes first.
        """
        with self._wake:
            if self._dead is not None:
                update.done.set_exception(self._death())
            else:
                self.updates.append(update)
            self._wake.notify()
        done = asyncio.wrap_future(update.done)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            with self._wake:
                is_withdrawn = update in self.updates
                if is_withdrawn:
                    self.updates.remove(update)
            if is_withdrawn:
                update.done.cancel()
            else:
                await asyncio.wait([done])
            raise

    def serving(self) -> Batching:
        """Return what the thread works on, or raise `EngineDead` if it has ended."""
        if self._dead is not None or self.batching is None:
            raise self._death()
        return self.batching

    def _death(self) -> EngineDead:
        return EngineDead(
            "the generator's engine has ended",
            value=repr(self._dead),
            rule="the engine's thread runs as long as the generator",
            repair="restart the generator; a service restarts it automatically",
        )

    # ---- On the thread ------------------------------------------------------------------------------------------

    def _main(self, ready: Future[None], num_threads: int) -> None:
        import torch

        torch.set_num_threads(num_threads)  # each thread has a number of its own
        try:
            self.batching = self._make(lambda messages: post(self.loop, _deliver_all, tuple(messages)))
        except BaseException as error:  # noqa: BLE001 - it is the start's outcome
            self._die(error)
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            self._run(self.batching)
        except BaseException as error:  # noqa: BLE001 - delivered to all callers
            _log.error("the generator's engine ended", exc_info=error)
            self._die(error)
            if self._on_death is not None:
                self._on_death(error)

    def _run(self, batching: Batching) -> None:
        while True:
            self._run_commands(batching)
            if self._is_closing:
                self._finish_launched(batching)
                batching.abort_all()
                self._die(RuntimeError("the engine was closed"))
                return
            self._apply_update(batching)
            if not self.is_asleep:
                self._step(batching)
            batching.flush()

    def _step(self, batching: Batching) -> None:
        with self._failing(batching):
            batching.step(self.version, admit=not self._is_draining(batching))

    def _finish_launched(self, batching: Batching) -> None:
        """Finish a launched step and deliver its results: what comes next may take long."""
        with self._failing(batching):
            batching.finish_launched()
        batching.flush()

    @contextlib.contextmanager
    def _failing(self, batching: Batching) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if _is_fatal(error):
                raise
            _log.error("a step failed; its error is raised for all completions in progress", exc_info=error)
            batching.fail_all(error)

    def _run_commands(self, batching: Batching) -> None:
        """Run the commands; wait while there is nothing to do."""
        with self._wake:
            while not (self._commands or self._is_closing or self.updates or self._has_work(batching)):
                self._wake.wait()
            if not self._commands:
                return
        self._finish_launched(batching)
        with self._wake:
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()

    def _has_work(self, batching: Batching) -> bool:
        return not self.is_asleep and not batching.scheduler.is_idle

    def _apply_update(self, batching: Batching) -> None:
        with self._wake:
            if not self.updates or self._is_draining(batching):
                return
        self._finish_launched(batching)
        with self._wake:
            if not self.updates or self._is_draining(batching):  # it was withdrawn
                return
            update = self.updates.popleft()
        started = time.perf_counter()
        try:
            update.apply()
            num_aborted = batching.weights_updated(update.mode)
        except BaseException as error:  # noqa: BLE001 - it is the update's outcome
            update.done.set_exception(error)
            return
        self.version = update.version
        update.done.set_result((time.perf_counter() - started, num_aborted))

    def _is_draining(self, batching: Batching) -> bool:
        """Return whether the next update waits for completions in progress. A sleeping engine cannot finish them."""
        is_asked = bool(self.updates) and self.updates[0].mode == "drain"
        return is_asked and not self.is_asleep and batching.scheduler.has_started

    def _die(self, error: BaseException) -> None:
        """Fail all commands, requests and updates, now and in the future."""
        with self._wake:
            self._dead = error
            commands, self._commands = self._commands, deque()
            updates, self.updates = self.updates, deque()
        if self.batching is not None:
            self.batching.fail_all(self._death())
            self.batching.flush()
        for command in commands:
            command()  # each finds the engine dead
        for update in updates:
            update.done.set_exception(self._death())


def _is_fatal(error: Exception) -> bool:
    """Return whether nothing can be computed after this error: a device that reported one keeps reporting it."""
    import torch

    return isinstance(error, torch.AcceleratorError)


def _deliver_all(messages: Iterable[tuple[Callable[[Any], None], Any]]) -> None:
    for deliver, value in messages:
        deliver(value)
