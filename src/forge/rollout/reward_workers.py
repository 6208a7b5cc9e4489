"""The processes of one replica that run reward functions, seen from its event loop.

A call waits for a free worker, not a thread; an answer, a death and the end of a process are events of the loop. A call
that takes too long gets its worker killed, with its process group, and another worker is started at once. A worker is
two processes (`reward_worker_main`): a guard, which is our child, and its child, which runs the functions.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from forge.config.rewards import RewardConfig
from forge.errors import ForgeError
from forge.rollout.reward_worker_main import CALL, SETUP
from forge.runtime import framing
from forge.types import Completion, Task

START_TIMEOUT_S = 120.0
"""How long a worker may take to import its functions: generous, for large packages and busy machines."""

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class RewardFailed(ForgeError, RuntimeError):
    """A reward has no number for a completion: it raised, took too long, or its process died."""

    def __init__(self, message: str, *, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback
        """That of the reward's process, where it raised."""


class RewardWorkers:
    """A fixed number of worker processes that run the same functions.

    Args:
        functions: the rewards, by whose place calls name them.
        num_workers: how many processes.

    Use it on one event loop. A worker that cannot be started fails the call that needs it, and is tried again for the
    next one; no wait is unbounded.
    """

    def __init__(self, functions: Sequence[RewardConfig], *, num_workers: int) -> None:
        self._asked = pickle.dumps([(function.kind, dict(function.args)) for function in functions])
        self._alive: set[_Worker] = set()
        self._slots = [_Slot(self._asked, self._alive) for _ in range(num_workers)]
        self._free: asyncio.Queue[_Slot] = asyncio.Queue()
        self._is_closed = False
        self.num_killed = 0
        self.num_lost = 0

    async def start(self) -> None:
        """Start all workers. Raises `RewardFailed` when one cannot import its functions; none is left then."""
        for slot in self._slots:
            slot.begin()
        try:
            await asyncio.gather(*(slot.worker() for slot in self._slots))
        except BaseException:
            await self.close()
            raise
        for slot in self._slots:
            self._free.put_nowait(slot)

    @property
    def pids(self) -> list[int]:
        """The processes that are up."""
        return [worker.pid for worker in self._alive]

    async def call(self, index: int, *, payload: bytes, timeout_s: float) -> float:
        """The reward of function `index` for a payload of `pack`. Raises `RewardFailed`, with what happened.

        The time counts from when a worker takes the call. A call whose worker dies is run once more in another one: a
        process killed from outside costs nothing, and a reward that ends its own process fails twice.
        """
        for attempt in (1, 2):
            slot = await self._free.get()
            try:
                if self._is_closed:
                    raise RewardFailed("the workers of this reward are closed")
                worker = await slot.worker()
                return await worker.ask(framing.pack(CALL, index, payload), timeout_s=timeout_s)
            except _Late:
                self.num_killed += 1
                raise RewardFailed(f"it took longer than {timeout_s:g} s, and was killed") from None
            except _Died as death:
                self.num_lost += 1
                if attempt == 2 or self._is_closed:
                    raise RewardFailed(f"its process ended: {death}") from None
            finally:
                if not self._is_closed:
                    slot.begin_if_gone()
                self._free.put_nowait(slot)
        raise AssertionError("the second attempt returns or raises")

    async def close(self) -> None:
        """End all workers and wait until they are gone. Calls that are under way fail."""
        self._is_closed = True
        await asyncio.gather(*(slot.stop_starting() for slot in self._slots))
        await asyncio.gather(*(worker.end() for worker in self._alive))


def pack(prompt: Task, completion: Completion) -> bytes:
    """What a worker needs of one completion, once for all its rewards."""
    return pickle.dumps((prompt, completion), protocol=pickle.HIGHEST_PROTOCOL)


class _Late(Exception):
    """A worker did not answer in time, and was killed."""


class _Died(Exception):
    """A worker ended before it answered; the text says how."""


class _Slot:
    """The place of one worker: there is one, or one is being started, or the next call starts one."""

    def __init__(self, asked: bytes, alive: set[_Worker]) -> None:
        self._asked, self._alive = asked, alive
        self._starting: asyncio.Task[_Worker] | None = None
        self.current: _Worker | None = None

    def begin(self) -> None:
        self._starting = asyncio.create_task(_Worker.start(self._asked, self._alive))

    def begin_if_gone(self) -> None:
        """Replace a worker that has gone, before it is needed. A start that failed is left to the next call."""
        if self.current is not None and self.current.is_gone:
            self.current = None
            self.begin()

    async def worker(self) -> _Worker:
        if self.current is None:
            if self._starting is None:
                self.begin()
            assert self._starting is not None
            starting = self._starting
            try:
                self.current = await asyncio.shield(starting)
            finally:
                if starting.done():
                    self._starting = None
        return self.current

    async def stop_starting(self) -> None:
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            await asyncio.wait({starting})


class _Worker:
    """One process that runs functions, its guard, and the line to it.

    Attributes:
        pid: the process that runs the functions; until it is ready, its guard.
    """

    def __init__(self, guard: subprocess.Popen[bytes], alive: set[_Worker]) -> None:
        self._guard, self._alive = guard, alive
        self.pid = guard.pid
        alive.add(self)
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._ending: asyncio.Task[str] | None = None

    @property
    def is_gone(self) -> bool:
        return self._ending is not None

    @classmethod
    async def start(cls, asked: bytes, alive: set[_Worker]) -> _Worker:
        """Start a process and wait until it has imported its functions. Until it is gone, it is one of `alive`."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "forge.rollout.reward_worker_main", str(theirs.fileno())]
            # It imports from the same places as this process, including later changes to sys.path.
            path = os.pathsep.join(place for place in sys.path if place)
            worker = cls(
                subprocess.Popen(  # noqa: ASYNC220 - it returns as soon as the process exists
                    command,
                    stdin=subprocess.PIPE,  # it ends with us: the pipe closes
                    env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1"), "PYTHONPATH": path},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                ),
                alive,
            )
        try:
            worker._reader, worker._writer = await asyncio.open_unix_connection(sock=ours, limit=2**20)
            worker.pid = int(await worker.ask(framing.pack(SETUP, 0, asked), timeout_s=START_TIMEOUT_S))
        except _Late:
            raise RewardFailed(f"its process was not ready within {START_TIMEOUT_S:g} s") from None
        except _Died as death:
            raise RewardFailed(f"its process ended while it started: {death}") from None
        except BaseException:
            await asyncio.shield(worker.end())
            raise
        return worker

    async def ask(self, frame: Sequence[bytes | memoryview], *, timeout_s: float) -> float:
        """Send a frame and wait for the reply. Whatever prevents the reply ends the worker."""
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.writelines(frame)
                await self._writer.drain()
                _, _, data = await framing.read(self._reader)
        except TimeoutError:
            await self.end()
            raise _Late from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise _Died(await self.end()) from None
        except BaseException:  # no caller waits any more: an answer would be taken for that of the next call
            await asyncio.shield(self.end())
            raise
        is_number, value, traceback = pickle.loads(data)
        if not is_number:
            raise RewardFailed(value, traceback=traceback)
        return float(value)

    def end(self) -> asyncio.Task[str]:
        """Kill the process with its group, and wait until it is gone. How it ended."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return self._ending

    async def _end(self) -> str:
        loop, guard = asyncio.get_running_loop(), self._guard.pid
        watch = os.pidfd_open(guard)
        over = asyncio.Event()
        loop.add_reader(watch, over.set)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        # A guard that is still starting is not waited for, and one that a function stopped continues.
        os.kill(guard, signal.SIGKILL if self.pid == guard else signal.SIGCONT)
        try:
            await over.wait()
        finally:
            loop.remove_reader(watch)
            os.close(watch)
        # What the function started, and the function itself where it killed the guard. The guard is not reaped yet, so
        # its number is still its own, and the group is that of this worker and no other.
        os.killpg(guard, signal.SIGKILL)
        if hasattr(self, "_writer"):
            self._writer.close()
        code = self._guard.wait()
        self._alive.discard(self)
        return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
