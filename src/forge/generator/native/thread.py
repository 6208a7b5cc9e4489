"""The thread on which the embedded engine works.

It takes turns: commands that came in (requests, cancellations), then a change of weights if one is due, then one step
of the model. Whoever waits is told on their own event loop. The engine may have launched the step after that one
already: it is settled before anything else than that step is done.
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
class Change:
    """A change of weights that waits for its turn.

    Attributes:
        mode: what happens to completions under way.
        version: what the weights are when `apply` has returned, which is called on the engine's thread.
        done: how long it held up generation, in seconds, and how many completions it cut short.
    """

    mode: UpdateMode
    version: int
    apply: Callable[[], None]
    done: Future[tuple[float, int]] = field(default_factory=Future)


class EngineThread:
    """One thread, and what others ask of it.

    Args:
        make: makes the state that the thread works on, given how to tell those who wait; called on the thread.
        on_death: is called, on the thread, when it ends by an error.
    """

    def __init__(
        self, make: Callable[[Send], Batching], *, on_death: Callable[[BaseException], None] | None = None
    ) -> None:
        self.version = INITIAL_VERSION
        self.is_asleep = False
        self.batching: Batching | None = None
        self.changes: deque[Change] = deque()
        self._make, self._on_death = make, on_death
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._dead: BaseException | None = None

    # ---- For other threads --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin, and wait until requests can be taken. Results are told on the loop that runs now."""
        import torch

        self.loop = asyncio.get_running_loop()
        ready: Future[None] = Future()
        arguments = (ready, torch.get_num_threads())
        self._thread = threading.Thread(target=self._main, args=arguments, name="forge-generator", daemon=True)
        self._thread.start()
        await asyncio.shield(asyncio.wrap_future(ready))

    async def close(self) -> None:
        """End. Completions under way end as aborted."""
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

    async def change(self, change: Change) -> tuple[float, int]:
        """Have a change made.

        If the caller is cancelled before its turn has come, it is not made at all; afterwards, it is made first.
        """
        with self._wake:
            if self._dead is not None:
                change.done.set_exception(self._death())
            else:
                self.changes.append(change)
            self._wake.notify()
        done = asyncio.wrap_future(change.done)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            with self._wake:
                is_withdrawn = change in self.changes
                if is_withdrawn:
                    self.changes.remove(change)
            if is_withdrawn:
                change.done.cancel()
            else:
                await asyncio.wait([done])
            raise

    def serving(self) -> Batching:
        """What the thread works on; `EngineDead` if it has ended."""
        if self._dead is not None or self.batching is None:
            raise self._death()
        return self.batching

    def _death(self) -> EngineDead:
        return EngineDead(
            "the generator's engine has ended",
            value=repr(self._dead),
            rule="the thread that makes tokens runs as long as the generator",
            repair="restart the generator; a service restarts it automatically",
        )

    # ---- On the thread ------------------------------------------------------------------------------------------

    def _main(self, ready: Future[None], num_threads: int) -> None:
        import torch

        torch.set_num_threads(num_threads)  # each thread has a number of its own
        try:
            self.batching = self._make(lambda messages: post(self.loop, _tell_all, tuple(messages)))
        except BaseException as error:  # noqa: BLE001 - it is the start's outcome
            self._die(error)
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            self._run(self.batching)
        except BaseException as error:  # noqa: BLE001 - whoever waits must hear of it
            _log.error("the generator's engine ended", exc_info=error)
            self._die(error)
            if self._on_death is not None:
                self._on_death(error)

    def _run(self, batching: Batching) -> None:
        while True:
            self._take_commands(batching)
            if self._is_closing:
                self._settle(batching)
                batching.abort_all()
                self._die(RuntimeError("the engine was closed"))
                return
            self._change_weights(batching)
            if not self.is_asleep:
                self._step(batching)
            batching.flush()

    def _step(self, batching: Batching) -> None:
        with self._failing(batching):
            batching.step(self.version, admit=not self._is_draining(batching))

    def _settle(self, batching: Batching) -> None:
        """Have no step under way, and tell what came of it: what is done next may take long."""
        with self._failing(batching):
            batching.settle()
        batching.flush()

    @contextlib.contextmanager
    def _failing(self, batching: Batching) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if _is_fatal(error):
                raise
            _log.error("a step failed; the completions that were under way get its error", exc_info=error)
            batching.fail_all(error)

    def _take_commands(self, batching: Batching) -> None:
        """Do what was asked for; wait while there is nothing at all to do."""
        with self._wake:
            while not (self._commands or self._is_closing or self.changes or self._has_work(batching)):
                self._wake.wait()
            if not self._commands:
                return
        self._settle(batching)
        with self._wake:
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()

    def _has_work(self, batching: Batching) -> bool:
        return not self.is_asleep and not batching.scheduler.is_idle

    def _change_weights(self, batching: Batching) -> None:
        with self._wake:
            if not self.changes or self._is_draining(batching):
                return
        self._settle(batching)
        with self._wake:
            if not self.changes or self._is_draining(batching):  # it was withdrawn
                return
            change = self.changes.popleft()
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
        is_asked = bool(self.changes) and self.changes[0].mode == "drain"
        return is_asked and not self.is_asleep and batching.scheduler.has_begun

    def _die(self, error: BaseException) -> None:
        """Nothing is done from now on: answer everybody."""
        with self._wake:
            self._dead = error
            commands, self._commands = self._commands, deque()
            changes, self.changes = self.changes, deque()
        if self.batching is not None:
            self.batching.fail_all(self._death())
            self.batching.flush()
        for command in commands:
            command()  # each finds the engine dead
        for change in changes:
            change.done.set_exception(self._death())


def _is_fatal(error: Exception) -> bool:
    """Return whether nothing can be computed after this error: a device that reported one reports it for ever."""
    import torch

    return isinstance(error, torch.AcceleratorError)


def _tell_all(messages: Iterable[tuple[Callable[[Any], None], Any]]) -> None:
    for tell, value in messages:
        tell(value)
