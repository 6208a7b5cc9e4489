"""`run` and `shutdown`: the lifetime of everything that was spawned, and the hosts it runs on."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import functools
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from forge.errors import LaunchError
from forge.observe.logs.folder import FOLDER, logging_to
from forge.runtime import rendezvous
from forge.runtime.backend import install_fault_hook, stop_client, this_host, without_banner
from forge.runtime.control import control
from forge.runtime.group import GroupSpec, RankGroup
from forge.runtime.handle import ActorHandle
from forge.runtime.hosts import Host, HostTimings, local_host
from forge.runtime.membership import Membership
from forge.runtime.rank_main import GROUP
from forge.runtime.relay import close_relay
from forge.runtime.replies import stop_replies
from forge.runtime.worker import wait_for_name

if TYPE_CHECKING:
    from forge.config import ForgeConfig, LauncherConfig

_log = logging.getLogger("forge.runtime")
_POD_NAME_S: Final = 60.0
"""How long the name of a controller's own pod may take to become known."""


class Block:
    """What was spawned inside one `async with forge.run():`."""

    def __init__(self) -> None:
        self.owned: dict[Any, None] = {}


_current_block: contextvars.ContextVar[Block | None] = contextvars.ContextVar("forge block", default=None)


class Runtime:
    """What one process has spawned. There is one for each process; `runtime()` gives it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._membership: Membership | None = None
        self._outside = Block()
        self._blocks: list[Block] = [self._outside]
        self._guard = asyncio.Lock()

    async def open(self, launcher: LauncherConfig | None = None) -> None:
        """Get the hosts; later calls without a launcher keep them. Called on the control loop."""
        async with self._guard:
            if self._membership is not None:
                if launcher is not None:
                    raise LaunchError(
                        "the runtime is already open on " + ", ".join(host.name for host in self.hosts),
                        path="forge.run(launcher=)",
                        value=launcher.kind,
                        rule="hosts are chosen before the first spawn",
                        repair="call forge.run(launcher=...) first, or forge.shutdown() before changing hosts",
                    )
                return
            was_open = rendezvous.is_server_open()
            try:
                await self._find_hosts(launcher)
            except BaseException:
                if not was_open:
                    await rendezvous.close_server()
                raise

    async def _find_hosts(self, launcher: LauncherConfig | None) -> None:
        if launcher is None or launcher.kind == "local":
            await rendezvous.open_server()
            install_fault_hook()
            with without_banner():
                this_host()  # starts Monarch in this process
            _close_at_exit()
            self._membership = Membership((local_host(),))
            return
        from forge.runtime.launchers import check_launcher, launch

        check_launcher(launcher)
        if launcher.kind == "kubernetes":
            await asyncio.to_thread(wait_for_name, f"//{launcher.bind}", _POD_NAME_S)
        await rendezvous.open_server(launcher.bind, insecure=launcher.insecure)
        install_fault_hook()
        allocation = await launch(launcher)
        _close_at_exit()
        timings = HostTimings.of(launcher)
        self._membership = Membership(allocation.hosts, release=allocation.release, timings=timings)

    @property
    def is_open(self) -> bool:
        return self._membership is not None

    @property
    def membership(self) -> Membership:
        """The hosts, which may change."""
        if self._membership is None:
            raise LaunchError("the runtime is not open", repair="spawn something, or enter `async with forge.run():`")
        return self._membership

    @property
    def hosts(self) -> tuple[Host, ...]:
        return self.membership.hosts

    async def start_group(self, spec: GroupSpec, hosts: Sequence[Host]) -> RankGroup:
        """Start a group of ranks that ends with the current block. Called on the control loop."""
        group = RankGroup(spec, hosts)
        self.own(group)
        try:
            await group.start()
        except BaseException:
            self.forget(group)
            raise
        return group

    async def spawn_actor(self, spec: GroupSpec, *, num_hosts: int | None) -> ActorHandle:
        started: list[RankGroup] = []

        async def start() -> RankGroup:
            await self.open()
            started.append(await self.start_group(spec, self.membership.pick(num_hosts or 1, spec=spec)))
            return started[0]

        try:
            group = await control().submit(start())
        except BaseException:
            for group in started:  # it came up, but its caller no longer waits
                await asyncio.shield(control().submit(group.stop(kill=True)))
                self.forget(group)
            raise
        group.on_death(lambda reason: _log.error("%s was lost: %s", spec.label, reason))
        return ActorHandle(group.actor, spec.label, group=group)

    def own(self, thing: Any) -> None:
        """Remember something with an async `stop()`, to be stopped with the block it was made in, last first."""
        (_current_block.get() or self._outside).owned[thing] = None

    def forget(self, thing: Any) -> None:
        for block in self._blocks:
            block.owned.pop(thing, None)

    def enter(self) -> Block:
        """Begin a block; what is spawned in the current context from here on belongs to it."""
        block = Block()
        self._blocks.append(block)
        return block

    async def leave(self, block: Block) -> None:
        """Stop what a block owns; with the last block, stop the rest and let the hosts go. On the control loop."""
        await self._stop_all(block)
        if block in self._blocks:
            self._blocks.remove(block)
        if self._blocks == [self._outside]:
            await self.close()

    async def _stop_all(self, block: Block) -> None:
        while block.owned:
            thing = next(reversed(block.owned))
            block.owned.pop(thing, None)
            try:
                await thing.stop()
            except Exception:  # noqa: BLE001 - the rest must be stopped too
                _log.exception("%r did not stop cleanly", thing)

    async def close(self) -> None:
        """Stop what is owned, release the hosts, and close the rendezvous server. Called on the control loop."""
        async with self._guard:
            for block in reversed(self._blocks):
                await self._stop_all(block)
            membership, self._membership = self._membership, None
            try:
                if membership is not None:
                    await membership.close()
            finally:
                await rendezvous.close_server()
                await close_relay()


_runtime: Runtime | None = None
_runtime_guard = threading.Lock()


def runtime() -> Runtime:
    """Return this process's runtime."""
    global _runtime
    with _runtime_guard:
        if _runtime is None or _runtime.pid != os.getpid():
            _runtime = Runtime()
        return _runtime


@functools.cache
def _close_at_exit() -> None:
    """Stop a program's processes in order when it ends without `shutdown`. Registered once Monarch runs, so that it
    runs before Monarch's own handler."""

    def close() -> None:
        is_rank = GROUP in os.environ  # what it has left ends with it, and Monarch serves it no longer
        if _runtime is not None and _runtime.pid == os.getpid() and not is_rank:
            with contextlib.suppress(concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
                control().start(_runtime.close()).result(timeout=10)
        stop_replies()
        stop_client()

    atexit.register(close)


def _launcher_of(config: ForgeConfig | LauncherConfig | None) -> LauncherConfig | None:
    if config is None:
        return None
    from forge.config import ForgeConfig, save

    if not isinstance(config, ForgeConfig):
        return config
    save(config, config.run.output_dir / config.run.name)
    return config.launcher


@contextlib.contextmanager
def _log_files(config: ForgeConfig | LauncherConfig | None) -> Iterator[None]:
    """Let all processes log to files in the folder of a whole configuration's run."""
    from forge.config import ForgeConfig

    if not isinstance(config, ForgeConfig):
        yield
        return
    run = config.run
    with logging_to(run.output_dir / run.name / FOLDER, max_bytes=int(run.max_log_mb * 2**20)):
        yield


async def shutdown() -> None:
    """Stop every actor and service of this process and wait until their processes are gone.

    Safe to call twice, and when nothing was spawned. Afterwards spawning works again, in a new run.
    """
    # Shielded: a second Ctrl-C or a cancelled caller must not leave processes behind.
    await asyncio.shield(control().submit(runtime().close()))


@contextlib.asynccontextmanager
async def run(config: ForgeConfig | LauncherConfig | None = None) -> AsyncIterator[Runtime]:
    """Everything spawned inside `async with forge.run():` is gone when the block ends, however it ends.

    Given a whole configuration, its `launcher` says where processes go; the resolved configuration is saved as
    `<run.output_dir>/<run.name>/config.yaml`, and all processes log to files in `logs` there. Given a launcher alone,
    nothing is written.
    """
    current = runtime()
    with _log_files(config):
        await control().submit(current.open(_launcher_of(config)))
        async with _entered(current):
            yield current


@contextlib.asynccontextmanager
async def _entered(current: Runtime) -> AsyncIterator[None]:
    """Let a block own what is spawned inside it."""
    block = current.enter()
    token = _current_block.set(block)
    with _ending_in_order() as received:
        try:
            yield
        finally:
            _current_block.reset(token)
            await asyncio.shield(control().submit(current.leave(block)))
            if received:
                raise SystemExit(128 + received[0])


@contextlib.contextmanager
def _ending_in_order() -> Iterator[list[signal.Signals]]:
    """Treat SIGTERM and SIGHUP as Ctrl-C is treated: the block is left, and everything is cleaned up. Yields what was
    received. Only where the program has not decided otherwise (`nohup` ignores SIGHUP), and in the main thread, which
    alone gets signals."""
    received: list[signal.Signals] = []
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def end(number: signal.Signals) -> None:
        received.append(number)
        if task is not None:
            task.cancel()

    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) == signal.SIG_DFL]
    for number in numbers:
        loop.add_signal_handler(number, end, number)
    try:
        yield received
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
