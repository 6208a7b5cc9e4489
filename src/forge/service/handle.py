"""`Service`: the handle of a replicated actor. What callers hold, in the owner's process and in any other."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import random
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import GenericAlias
from typing import Any, ClassVar

from forge.errors import CallTimeout, OptionError, ServiceStopped
from forge.runtime.backend import Channel
from forge.runtime.control import control
from forge.runtime.endpoints import EndpointSpec, check_endpoint_names, specs_of
from forge.runtime.lifetime import runtime
from forge.service.batching import Batcher
from forge.service.calls import CallOptions, CallPath, ServiceEndpoint
from forge.service.options import ServiceOptions
from forge.service.records import ReplicaMetrics, ServiceMetrics
from forge.service.resizing import Drained, SessionRule, check_resize
from forge.service.routing_table import RoutingTable
from forge.service.streams import StreamEndpoint
from forge.service.supervisor import RENEW_AFTER, Message, Notice, Supervisor, subscriptions
from forge.service.targets import Entry

_known: dict[str, Service] = {}
_known_guard = threading.Lock()


class Service:
    """A replicated actor. Endpoints are attributes: `await service.generate.route(prompt)`, and for one that yields
    `async for item in service.generate_stream.stream(prompt)`.

    A handle may be sent to other actors. There it routes by itself, from a table that the owner keeps up to date; the
    same service is the same object however often it is sent.

    In annotations write `Service[Policy]`: a type checker then knows the signature of every endpoint.
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)

    def __init__(self, cls: type, options: ServiceOptions, *, name: str, uid: str) -> None:
        self._cls, self._options, self._uid = cls, options, uid
        self._table = RoutingTable(
            name, router=options.router(), limit=options.max_concurrency, max_queue=options.max_queue
        )
        self._path = CallPath(self._table, max_retries=options.max_retries, timeout_s=options.call_timeout_s)
        self._batchers: weakref.WeakValueDictionary[tuple[str, CallOptions], Batcher] = weakref.WeakValueDictionary()
        self._supervisor: Supervisor | None = None
        self._owner_port: Any = None
        self._subscriber = random.getrandbits(60)
        self._subscription: concurrent.futures.Future[None] | None = None
        self._reports: set[asyncio.Task[None]] = set()
        check_endpoint_names(cls, _RESERVED)
        for endpoint_name, spec in specs_of(cls).items():
            setattr(self, endpoint_name, (StreamEndpoint if spec.is_stream else ServiceEndpoint)(self, spec))

    def _batcher(self, spec: EndpointSpec, options: CallOptions) -> Batcher:
        """Return the one batcher for calls with these options, however often `endpoint.options(...)` is written."""
        key = (spec.name, options)
        batcher = self._batchers.get(key)
        if batcher is None:
            batcher = self._batchers[key] = Batcher(spec, self._path, options)
        return batcher

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"service {self.__dict__['_table'].name if '_table' in self.__dict__ else ''} has no endpoint {name!r}; "
            f"{self.__dict__['_cls'].__name__ if '_cls' in self.__dict__ else 'its class'} declares: "
            + (", ".join(specs_of(self.__dict__["_cls"])) if "_cls" in self.__dict__ else "none")
        )

    @classmethod
    async def start(
        cls, actor: type, options: ServiceOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Service:
        """Start the replicas of `actor` and return their handle. Users write `Actor.options(...).as_service(...)`."""
        name = options.mesh_name or actor.__name__
        service = cls(actor, options, name=name, uid=uuid.uuid4().hex)
        spec = options.group_spec(actor, args, kwargs, label=name)
        spec = replace(spec, env={"FORGE_SERVICE": service._uid, **spec.env})
        supervisor = service._supervisor = Supervisor(spec, options, service._table)
        runtime().own(service)
        try:
            service._owner_port = await control().submit(service._open(supervisor))
        except BaseException:
            await asyncio.shield(control().submit(service.stop()))
            raise
        return service

    async def _open(self, supervisor: Supervisor) -> Any:
        await supervisor.start()
        subscriptions().services[self._uid] = supervisor
        with _known_guard:
            _known[self._uid] = self
        return subscriptions().port

    # ---- sessions

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[str]:
        """Inside `async with service.session():` this task's calls (and those of tasks it starts) go to one replica.

        The first call chooses the one with the fewest sessions of this process, and among those as usual. If the
        replica is lost, the next call chooses another. Calls of other services are not affected.
        """
        session = await self.start_session()
        token = self._path.session.set(session)
        try:
            yield session
        finally:
            try:
                self._path.session.reset(token)
            finally:
                await self.terminate_session(session)

    async def start_session(self) -> str:
        """Begin a session that is used by name: `service.f.options(session=name).route(...)`."""
        session = uuid.uuid4().hex
        self._table.pin(session)
        return session

    async def terminate_session(self, session: str) -> None:
        """End a session. Unknown names raise; a `session()` block ends its own."""
        if not self._table.unpin(session):
            raise OptionError(
                f"service {self._table.name} has no session {session!r}",
                path="terminate_session",
                value=session,
                rule="a session that was started and not yet terminated",
                repair="end each session once",
            )

    # ---- what it is and does

    @property
    def name(self) -> str:
        return self._table.name

    async def get_metrics(self) -> ServiceMetrics:
        """Return the replicas' health, restarts and processes, and this process's calls."""
        await self._ready()
        replicas = []
        for index, entry in sorted(self._table.entries.items()):
            target = self._table.targets.get(index)
            replicas.append(
                ReplicaMetrics(
                    index=index,
                    health=entry.health,
                    generation=entry.generation,
                    restarts=entry.restarts,
                    pids=entry.pids,
                    host=entry.host,
                    in_flight=target.in_flight if target is not None else 0,
                    num_ok=target.num_ok if target is not None else 0,
                    num_errors=target.num_errors if target is not None else 0,
                    num_lost=target.num_lost if target is not None else 0,
                    last_failure=entry.failure,
                    num_sessions=self._table.num_sessions_at(index),
                )
            )
        return ServiceMetrics(
            name=self.name,
            replicas=tuple(replicas),
            num_waiting=self._table.num_waiting,
            num_sessions=self._table.num_sessions,
            num_retried=self._path.num_retried,
            num_timeouts=self._path.num_timeouts,
            num_cancelled=self._path.num_cancelled,
            num_rejected=self._table.num_rejected,
        )

    async def wait_until(
        self, condition: Callable[[ServiceMetrics], bool], *, timeout_s: float | None = None
    ) -> ServiceMetrics:
        """Wait until the replicas are as `condition` says, and return the metrics that met it.

        It is looked at again whenever a replica changes its health, as in
        `await service.wait_until(lambda metrics: metrics.num_healthy == 4, timeout_s=60)`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    change = self._table.next_change()
                    metrics = await self.get_metrics()
                    if condition(metrics):
                        return metrics
                    await change
        except TimeoutError:
            raise CallTimeout(
                f"service {self.name} did not reach the expected state in time",
                value=f"{timeout_s} s",
                path="wait_until",
                rule=f"now: {[(replica.index, replica.health) for replica in (await self.get_metrics()).replicas]}",
                repair="raise timeout_s, or see why the replicas are not healthy (get_metrics: last_failure)",
            ) from None

    async def resize(
        self, num_replicas: int, *, sessions: SessionRule = "move", drain_timeout_s: float | None = None
    ) -> ServiceMetrics:
        """Change the number of replicas while the service runs, and return the metrics when that is done.

        New replicas are started while the others serve; each gets calls when its `setup` has ended. Replicas that leave
        (dropped ones first, then those that are not healthy, then those with the highest index) get no new calls and
        end when the calls in flight, of every process, have ended. Their sessions choose another replica with their
        next call; with `sessions="wait"` they stay, and the replica ends when they do. After `drain_timeout_s` seconds
        a replica ends anyway: calls that are left are sent to another one where the endpoint has `retry=True`, and
        raise `ActorFailure` elsewhere.

        Calls of this method are carried out one after another. A caller that is cancelled does not undo it. Raises
        `ResizeError` if a replica could not be started; those that could stay.
        """
        if self._supervisor is None:
            raise OptionError(
                f"only the process that started service {self.name} can resize it",
                path="resize",
                repair="call resize() where as_service() was awaited",
            )
        check_resize(num_replicas, sessions, drain_timeout_s)
        resizing = self._supervisor.resizer.resize(num_replicas, sessions=sessions, drain_timeout_s=drain_timeout_s)
        await asyncio.shield(control().submit(resizing))
        return await self.get_metrics()

    async def shutdown(self) -> None:
        """Stop every replica and give back what they held. Calls that wait raise `ServiceStopped`."""
        if self._supervisor is None:
            raise OptionError(
                f"only the process that started service {self.name} can shut it down",
                path="shutdown",
                repair="call shutdown() where as_service() was awaited",
            )
        await asyncio.shield(control().submit(self.stop()))

    async def stop(self) -> None:
        """As `shutdown`, on the control loop; the runtime calls it."""
        assert self._supervisor is not None
        subscriptions().services.pop(self._uid, None)
        with _known_guard:
            _known.pop(self._uid, None)
        await self._supervisor.stop()
        runtime().forget(self)

    def __repr__(self) -> str:
        healthy = len(self._table.live())
        return f"Service({self.name}, {healthy} of {len(self._table.entries)} replicas healthy)"

    # ---- in other processes

    def __reduce__(self) -> tuple[Any, ...]:
        return (_arrive, (self._cls, self._options, self.name, self._uid, self._owner_port))

    async def _ready(self, timeout_s: float | None = None) -> None:
        """In another process than the owner's: wait for the first copy of the table."""
        if self._supervisor is not None:
            return
        with _known_guard:
            if self._subscription is None:
                self._subscription = control().start(self._subscribe())
            subscription = self._subscription
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(asyncio.wrap_future(subscription))
        except TimeoutError:
            raise CallTimeout(f"the owner of service {self.name} does not answer", value=f"{timeout_s} s") from None

    async def _subscribe(self) -> None:
        port, messages = Channel.open()
        self._ask_owner(port)
        message = await self._receive(messages)
        if message is Notice.SILENCE:
            self._subscription = None  # the next call asks again
            raise ServiceStopped(f"the owner of service {self.name} does not answer", path=self.name)
        if not self._apply(message):
            return
        self._following = asyncio.create_task(self._follow(port, messages))

    def _ask_owner(self, port: Any) -> None:
        self._owner_port.send((self._uid, self._subscriber, port))

    async def _follow(self, port: Any, messages: Any) -> None:
        """Keep the table up to date until the service is gone."""
        num_ticks = 0
        while True:
            message = await self._receive(messages)
            if message is Notice.SILENCE:
                message = await self._wait_out()
            if not self._apply(message):
                return
            num_ticks += message is Notice.TICK
            if num_ticks >= RENEW_AFTER:
                num_ticks = 0
                self._ask_owner(port)

    async def _receive(self, messages: Any) -> Message:
        """Return the owner's next message. It ticks even when nothing changes, so silence is a notice too."""
        limit = self._options.heartbeat_s + self._options.heartbeat_timeout_s
        self._next = asyncio.ensure_future(messages.recv().as_asyncio())
        for _ in range(2):  # in halves: after a stall of this very process a message that lies ready still counts
            await asyncio.wait({self._next}, timeout=limit / 2)
        return self._next.result() if self._next.done() else Notice.SILENCE

    async def _wait_out(self) -> Message:
        """Let no replica be called until the owner sends something again, if it does."""
        known = dict(self._table.entries)
        self._apply(Notice.SILENCE)
        message: Message = await self._next
        if message is not Notice.GONE:
            for entry in known.values():
                self._table.update(entry)
        return message

    async def _report_drained(self, entry: Entry) -> None:
        """Report to the owner when no call of this process is at a replica that leaves."""
        await self._table.wait_drained(entry.index)
        self._owner_port.send((self._uid, self._subscriber, Drained(entry.index, entry.generation)))

    def _apply(self, message: Message) -> bool:
        """Bring the table up to date; False when there will be no more."""
        if isinstance(message, tuple):
            for entry in message:
                self._table.update(entry)
        elif isinstance(message, Entry):
            self._table.update(message)
            if message.health == "draining":
                report = asyncio.create_task(self._report_drained(message))
                self._reports.add(report)
                report.add_done_callback(self._reports.discard)
        elif message is not Notice.TICK:
            for index in list(self._table.entries) or range(self._options.num_replicas):
                self._table.update(Entry(index, -1, "stopped", None, "", 0, failure="the service's owner is gone"))
        if message is Notice.GONE:
            with _known_guard:
                if _known.get(self._uid) is self:
                    del _known[self._uid]
        return message not in (Notice.GONE, Notice.SILENCE)


def _arrive(cls: type, options: ServiceOptions, name: str, uid: str, owner_port: Any) -> Service:
    with _known_guard:
        service = _known.get(uid)
        if service is None:
            service = _known[uid] = Service(cls, options, name=name, uid=uid)
            service._owner_port = owner_port
        return service


_RESERVED = frozenset(name for name in vars(Service) if not name.startswith("_"))
