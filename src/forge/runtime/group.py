"""A group of ranks: the processes of one actor, started, watched, failed and ended as a whole.

One group is one Monarch proc mesh. The first death of any rank fails the whole group: pending calls raise
`ActorFailure` at once, the other ranks are killed, and the mesh is thrown away (a second death inside one mesh may
never be noticed). Everything here runs on the control loop.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge.errors import ActorFailure, ForgeError, LaunchError
from forge.observe.monitor import note_lost
from forge.observe.phases import phase
from forge.observe.tracing import LABEL, TRACE, is_tracing
from forge.runtime import rank_stub, rendezvous
from forge.runtime.backend import (
    OWNED,
    Actor,
    SupervisionError,
    context,
    default_bootstrap_cmd,
    forget_faults,
    monarch_actor,
    watch_faults,
)
from forge.runtime.control import post
from forge.runtime.forking import ForkPoint
from forge.runtime.group_logs import GroupLogs
from forge.runtime.hosts import Host, joint_mesh
from forge.runtime.import_environment import import_environment
from forge.runtime.pending_calls import PendingCalls
from forge.runtime.placement import GpuLease, rank_environment
from forge.runtime.rank_main import GROUP, RANK
from forge.runtime.start_turns import turns_of

_log = logging.getLogger("forge.runtime")
_serial = itertools.count(1)
_RUN = uuid.uuid4().hex[:12]
"""Tells this process's groups from those of every other process on the machine."""

ACTOR_FAILED = "its actor failed"
"""Begins the reason where an actor failed in a process that lives on."""

STOP_S = 5.0
"""How long a group may take to stop by itself before it is killed."""

_live: dict[RankGroup, None] = {}


def live_groups() -> tuple[RankGroup, ...]:
    """Return the groups of this process that have started and not begun to end."""
    return tuple(_live)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What to start: a class with its arguments, how many ranks, and what each process gets."""

    cls: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: str
    num_procs: int = 1
    with_gpus: bool = False
    num_threads: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    setup_timeout_s: float = 600.0
    spawn_timeout_s: float = 120.0
    preload: tuple[str, ...] = ()
    """Modules that its processes import, and that a process they are forks of imports once."""


class RankProbe(Actor):  # type: ignore[misc]
    """The first actor of every rank: says which process it is, before any of the user's code runs there."""

    @monarch_actor.endpoint
    def introduce(self, secrets: dict[str, str]) -> tuple[int, int]:
        """Take the variables that only this process and what it starts may know, and answer with the pid, and that of
        the process that writes its log file (0 for none).

        Monarch writes the environment that it starts a process with into a log that others can read.
        """
        from forge.runtime.rank_logging import start_rank_logging

        os.environ.update(secrets)
        return os.getpid(), start_rank_logging()


class RankGroup:
    """A running group of ranks."""

    def __init__(self, spec: GroupSpec, hosts: Sequence[Host]) -> None:
        self.spec, self.hosts = spec, tuple(hosts)
        self.name = f"{OWNED}-{_plain(spec.label)}-{next(_serial)}-{_RUN}"
        self.calls = PendingCalls()
        self.logs = GroupLogs(spec.label, num_ranks=spec.num_procs * len(self.hosts))
        self.pids: tuple[tuple[Host, int], ...] = ()
        self.actor: Any = None
        self._procs: Any = None
        self._probe: Any = None
        self._leases: list[tuple[Host, GpuLease]] = []
        self._placed: list[Host] = []
        self._num_threads = 1
        self._on_death: list[Callable[[str], None]] = []
        self._pid_of_rank: dict[int, int] = {}
        self._exited: dict[int, asyncio.Event] = {}
        self._dying: asyncio.Task[None] | None = None
        self._is_starting = False
        self._start_ended = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self.released = asyncio.Event()
        """Set when every rank has ended and what the group held (GPUs, threads) has been given back."""

    @property
    def is_alive(self) -> bool:
        return self.calls.failure is None and self._ending is None

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` once when the group dies without having been told to."""
        self._on_death.append(callback)

    async def start(self) -> None:
        """Spawn, construct, watch, and run `setup`; on failure nothing is left behind."""
        self._is_starting = True
        try:
            self._place()
            async with turns_of(self.hosts, lambda turn: self._ask(turn, None, "start")):
                with phase("starting", process=self.logs.name(0)):
                    await self._spawn()
                    await self._identify()
            with phase("setting up", process=self.logs.name(0)):
                await self._set_up()
            if self.is_alive:
                _live[self] = None
        except BaseException:
            self._start_ended.set()  # `_end` waits for this
            await self.stop(kill=True)
            raise
        finally:
            self._start_ended.set()

    def _place(self) -> None:
        for host in self.hosts:
            if self.spec.with_gpus:
                self._leases.append((host, host.gpus.take(self.spec.num_procs, holder=self.spec.label)))
            self._num_threads = host.threads.claim(self.spec.num_procs, self.spec.num_threads)
            host.num_groups += 1
            self._placed.append(host)

    async def _spawn(self) -> None:
        await rendezvous.open_server()
        port = await self.hosts[0].watch.free_port()
        devices = {host: ",".join(lease.devices) for host, lease in self._leases}
        with phase("importing", process=self.logs.name(0)):  # in the processes that ranks are forks of
            forks = {host: await self._fork_point(host) for host in self.hosts}

        def command(place: Any) -> Any:
            rank = int(place.rank)
            host = self.hosts[rank // self.spec.num_procs]
            env = self._environment(rank, port) | {GROUP: self.name, RANK: str(rank)}
            env |= rendezvous.open_environment(is_remote=not host.is_local)
            env |= {LABEL: self.spec.label.replace("\0", ""), TRACE: str(int(is_tracing()))}
            env["CUDA_VISIBLE_DEVICES"] = devices.get(host, "")
            env[rank_stub.OWNER] = str(host.facts.pid)
            env |= self.logs.environment(rank)
            point = forks[host]
            if point is not None:
                env |= {rank_stub.FORK_SERVER: point.address, rank_stub.PRELOAD: ",".join(self.spec.preload)}
            bootstrap = default_bootstrap_cmd().with_env({**env, **self.spec.env})
            program = "rank_stub" if self.logs.is_open else "rank_main"
            bootstrap.args = ["-m", f"forge.runtime.{program}"] if point is None else ["-I", "-S", point.program]
            return bootstrap

        mesh = joint_mesh(self.hosts)
        self._procs = mesh.spawn_procs({"procs": self.spec.num_procs}, name=self.name, bootstrap_command=command)

    async def _fork_point(self, host: Host) -> ForkPoint | None:
        """Return where the ranks on a host are forked from; None if it does not pay."""
        if not self.spec.preload:
            return None
        variables = {**self._environment(0, 0), **self.spec.env}
        try:
            async with asyncio.timeout(self.spec.spawn_timeout_s):
                return await host.watch.fork_point(variables, self.spec.preload)
        except TimeoutError:
            return None

    def _environment(self, rank: int, master_port: int) -> dict[str, str]:
        num_procs = self.spec.num_procs
        env = rank_environment(
            rank=rank,
            local_rank=rank % num_procs,
            world_size=num_procs * len(self.hosts),
            local_world_size=num_procs,
        )
        env["MASTER_ADDR"] = self.hosts[0].address
        env["MASTER_PORT"] = str(master_port)
        return env | import_environment(self._num_threads)

    async def _identify(self) -> None:
        """Learn the pids and watch them before any of the user's code runs: whatever it does, it can be ended."""
        boot = asyncio.create_task(self._watch_boot())
        try:
            self._probe = self._procs.spawn(f"{self.name}-probe", RankProbe)
            told = self._probe.introduce.call(rendezvous.secret_environment()).as_asyncio()
            replies = await self._ask(told, self.spec.spawn_timeout_s, "start")
        finally:
            boot.cancel()
            await asyncio.gather(boot, return_exceptions=True)
        for point, (pid, writer) in replies.items():
            rank = int(point.rank)
            await self._watch_rank(rank, int(pid))
            await self.logs.watch_writer(rank, writer, self.hosts[rank // self.spec.num_procs].watch)
        self.pids = tuple(
            (self.hosts[rank // self.spec.num_procs], pid) for rank, pid in sorted(self._pid_of_rank.items())
        )

    async def _watch_boot(self) -> None:
        """Find the ranks by their environment while they boot, so that a death before they can speak is seen too."""
        pause = 0.02
        while len(self._pid_of_rank) < self.spec.num_procs * len(self.hosts):
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.5)
            for host in self.hosts:
                for rank, pid in (await host.watch.find(self.name)).items():
                    await self._watch_rank(rank, pid)

    async def _watch_rank(self, rank: int, pid: int) -> None:
        if self._pid_of_rank.get(rank) == pid:
            return
        self._pid_of_rank[rank] = pid
        self._exited[rank] = asyncio.Event()
        host = self.hosts[rank // self.spec.num_procs]
        await host.watch.watch(pid, functools.partial(self._rank_ended, rank, pid))

    def _rank_ended(self, rank: int, pid: int) -> None:
        if self._pid_of_rank[rank] != pid:
            return  # not the rank after all
        self._exited[rank].set()
        reason = f"rank {rank} (process {pid}) ended"
        if not self.logs.is_open or not self.is_alive:
            self.fail(reason)
        elif self._dying is None:
            self._dying = asyncio.create_task(self._fail_with_log(rank, reason))

    async def _fail_with_log(self, rank: int, reason: str) -> None:
        """Fail with the last words of a rank, which are written when its process has ended."""
        log = await self.logs.last_words(rank, self.hosts[rank // self.spec.num_procs].watch)
        self.fail(f"{reason}; log: {log[0]}", log=log)

    async def _set_up(self) -> None:
        self._watch_for_faults()
        self.actor = self._procs.spawn(self.name, self.spec.cls, *self.spec.args, **self.spec.kwargs)
        await self._ask(self.actor._forge_setup.call().as_asyncio(), self.spec.setup_timeout_s, "setup")

    def _watch_for_faults(self) -> None:
        loop = asyncio.get_running_loop()

        def failed(report: str) -> None:
            if self._dying is None:  # else its last words are on their way
                self.fail(f"{ACTOR_FAILED}:\n{report}")

        def on_fault(report: str) -> None:
            post(loop, failed, report)

        watch_faults(self.name, on_fault)

    async def _ask(self, future: asyncio.Future[Any], timeout_s: float | None, phase: str) -> Any:
        """Await a call of the start-up; a death, a time-out or a failing constructor becomes a `LaunchError`."""
        self.calls.add(future, asyncio.get_running_loop())
        label = self.spec.label
        try:
            return await asyncio.wait_for(future, timeout_s)
        except ValueError as error:
            if phase != "start":
                raise
            raise LaunchError(f"{label} could not be started: {error}", path=label) from None
        except SupervisionError as error:
            failure = LaunchError(f"{label} failed in its {phase}:\n{error}", path=label)
            raise failure.with_log(self.logs.first) from None
        except ActorFailure as error:
            how = "failed" if ACTOR_FAILED in error.message else "died"  # a fault can come before the call's own answer
            failure = LaunchError(f"{label} {how} in its {phase}: {error.message}", path=label)
            raise failure.with_log(error.log) from None
        except TimeoutError as error:
            if getattr(error, "remote_traceback", None) is not None:
                raise
            raise LaunchError(
                f"{label} did not finish its {phase}",
                path=label,
                value=f"{timeout_s} s",
                rule=f"{phase} ends within {phase if phase == 'setup' else 'spawn'}_timeout_s",
                repair=f"raise the limit: options({'setup' if phase == 'setup' else 'spawn'}_timeout_s=...)",
            ).with_log(self.logs.first) from None
        finally:
            self.calls.discard(future)

    def fail(self, reason: str, *, log: tuple[str, tuple[str, ...]] | None = None) -> None:
        """Declare the group dead: every pending call raises now, the other ranks are killed, and the callbacks of
        `on_death` are called once. `log` is the log file of the rank that died, and its last lines."""
        if not self.is_alive:
            return
        failure = ActorFailure(
            f"{self.spec.label} was lost: {reason}",
            path=self.spec.label,
            repair="catch ActorFailure and spawn it again; a service does so automatically, and repeats calls of "
            "endpoints that are declared @endpoint(retry=True)",
        )
        self.calls.fail(failure.with_log(log or self.logs.first))
        note_lost(self.logs.name(0))
        self._begin_to_end(kill=True)
        for callback in self._on_death:
            callback(reason)

    async def stop(self, *, kill: bool = False) -> None:
        """End every rank and return what the group held. Graceful first (its `__cleanup__` runs), then by force."""
        await asyncio.shield(self._begin_to_end(kill=kill))

    def _begin_to_end(self, *, kill: bool) -> asyncio.Task[None]:
        _live.pop(self, None)
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(kill=kill))
        return self._ending

    async def _end(self, *, kill: bool) -> None:
        self.calls.fail(ActorFailure(f"{self.spec.label} was stopped", path=self.spec.label))
        if self._is_starting and not self._start_ended.is_set():
            kill = True
            await self._start_ended.wait()  # soon: what it waits for has just failed
        if not kill:
            await self._stop_mesh()
        try:
            await self._kill_all()
        finally:
            self._return_everything()
            self.released.set()
        if kill:
            await self._stop_mesh()
        self._forget_mesh()

    async def _stop_mesh(self) -> None:
        """Let Monarch end the mesh. One whose processes hang or are dead answers late or never: it is bounded."""
        if self._procs is None or any(host.is_lost for host in self.hosts):
            return
        try:
            await asyncio.wait_for(self._procs.stop(), STOP_S)
        except TimeoutError:
            _log.info("%s did not stop within %s s; killing its processes", self.spec.label, STOP_S)
        except Exception as error:  # noqa: BLE001 - its processes are killed all the same
            _log.debug("%s: stop failed: %s", self.spec.label, error)

    async def _kill_all(self) -> None:
        for host in self.hosts:
            try:
                if not host.is_lost and self._procs is not None:
                    for rank, pid in (await host.watch.find(self.name)).items():  # also those still booting
                        await self._watch_rank(rank, pid)
                    ranks = [rank for rank in self._pid_of_rank if self.hosts[rank // self.spec.num_procs] is host]
                    await host.watch.kill([self._pid_of_rank[rank] for rank in ranks])
            except LaunchError as error:
                _log.warning("host %s did not confirm the end of %s: %s", host.name, self.spec.label, error.message)
        exits = [asyncio.create_task(event.wait()) for event in self._exited.values()]
        if exits:
            _, waiting = await asyncio.wait(exits, timeout=STOP_S)
            for task in waiting:
                task.cancel()
        await self._kill_children()
        await self.logs.wait_written()

    async def _kill_children(self) -> None:
        """End what the ranks themselves had started: engines, sandboxes, tools. They carry the group's mark."""
        for host in self.hosts:
            try:
                if not host.is_lost and self._procs is not None:
                    await host.watch.end(self.name)
            except LaunchError as error:
                _log.warning("host %s did not confirm the end of %s: %s", host.name, self.spec.label, error.message)

    def _return_everything(self) -> None:
        for host, lease in self._leases:
            host.gpus.release(lease)
        self._leases.clear()
        for host in self._placed:
            host.threads.release(self.spec.num_procs, self._num_threads)
            host.num_groups -= 1
        self._placed.clear()
        self.logs.close()

    def _forget_mesh(self) -> None:
        """Drop Monarch's entries for this mesh, which it never frees and which would grow with every restart."""
        if self._procs is None:
            return
        forget_faults(self.name)
        gone = {id(mesh) for mesh in (self._procs, self._probe, self.actor)}
        host_mesh = self._procs._host_mesh
        kept_by = context().actor_instance._children or []
        for entries in (host_mesh._proc_meshes, kept_by):
            entries[:] = [entry for entry in entries if id(entry) not in gone]
        spawns = host_mesh._pending_spawns
        spawns[:] = [spawn for spawn in spawns if _is_under_way(spawn)]
        self._procs = self._probe = None


def _plain(label: str) -> str:
    """Return a label as Monarch would write it in a name: it keeps small letters and digits only."""
    return "".join(letter for letter in label.lower() if letter.isascii() and letter.isalnum())


def _is_under_way(spawn: Any) -> bool:
    try:
        return spawn.poll() is None
    except Exception:  # noqa: BLE001 - it failed, and its own group has raised that
        return False


def translate(error: BaseException, label: str) -> BaseException:
    """Return what a Monarch error means to a caller: the loss of a process, or the error itself."""
    if isinstance(error, ForgeError):
        return error
    if isinstance(error, SupervisionError):
        return ActorFailure(f"{label} was lost: {error}", path=label)
    return error
