"""`MeshActor`: a class whose instances live in other processes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Coroutine, Generator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar, cast

from forge.runtime.backend import Actor, ActorMesh, monarch_actor, note_fault
from forge.runtime.dispatch import Dispatcher
from forge.runtime.endpoints import EndpointSpec, check_endpoint_names, specs_of
from forge.runtime.group import GroupSpec
from forge.runtime.option_checks import bad_option, check_count, check_known, check_seconds
from forge.runtime.placement import GPU_VARIABLE, RANK_VARIABLES
from forge.runtime.replies import ReplyPort
from forge.runtime.serialization import as_remote, decode
from forge.runtime.streams import StreamPort

T = TypeVar("T")
COMMON_PRELOAD: Final = ("torch", "forge.config", "forge.observe", "forge.store.execution")
"""What every rank of a run imports. Monarch is not among it: it starts threads."""

if TYPE_CHECKING:
    import builtins

    _Base = object  # and not Any: an endpoint that does not exist is an error
else:
    _Base = Actor


class PendingHandle(Coroutine[Any, Any, T]):
    """What `as_actor` and `as_service` return: a coroutine that raises a clear error when it is used unawaited."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], *, call: str) -> None:
        self._coroutine, self._call = coroutine, call

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, kind: Any, value: Any = None, traceback: TracebackType | None = None) -> Any:
        return self._coroutine.throw(kind if value is None else value)

    def close(self) -> None:
        self._coroutine.close()

    if not TYPE_CHECKING:  # a type checker is to report what is missing

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            call = self.__dict__.get("_call", "as_service")
            raise AttributeError(f"{call}(...) was not awaited, so there is no {name!r} yet: write `await {call}(...)`")

    def __repr__(self) -> str:
        return f"<{self._call}(...), not awaited>"


class MeshActor(_Base):
    """Base of every actor. Subclass it, mark methods with `endpoint`, and spawn it with `options(...)`.

    If the class has an endpoint named `setup`, it runs on every rank before anything else is served, and again whenever
    a service restarts a replica. Load models there, not in `__init__`.
    """

    # Monarch's base class has read-only properties of these names, which only make sense on a mesh. A user's actor may
    # have attributes so named.
    extent: Any = None
    initialized: Any = None
    sizes: Any = None

    if TYPE_CHECKING:  # of a handle, which type checkers see as its actor's class
        pids: tuple[int, ...]
        is_alive: bool

        def slice(self, **coordinates: int | builtins.slice) -> Self: ...
        def flatten(self, name: str) -> Self: ...
        async def stop(self) -> None: ...

    @classmethod
    def options(cls, **keywords: Any) -> Spawner[Self]:
        """Return this class with options for spawning (see `ActorOptions`). The class itself never changes."""
        return Spawner(cls, ActorOptions.from_keywords(**keywords))

    @classmethod
    def as_actor(cls, *args: Any, **kwargs: Any) -> PendingHandle[Self]:
        """Spawn one mesh with the default options: `options().as_actor(...)`."""
        return cls.options().as_actor(*args, **kwargs)

    @classmethod
    def _forge_preload(cls, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Return the modules that a process of this actor imports, given the arguments of its constructor.

        An actor of a program that has imported torch most likely needs it, too. For one that does not, starting by
        itself takes about as long as a fork.
        """
        return COMMON_PRELOAD if "torch" in sys.modules else ()

    def _forge_dispatcher(self) -> Dispatcher:
        dispatcher = self.__dict__.get("_forge_dispatch")
        if dispatcher is None:
            dispatcher = self.__dict__["_forge_dispatch"] = Dispatcher()
        return dispatcher

    def _forge_spec(self, name: str) -> EndpointSpec:
        specs = self.__dict__.get("_forge_specs")
        if specs is None:
            specs = self.__dict__["_forge_specs"] = specs_of(type(self))
        if name not in specs:
            raise AttributeError(f"{type(self).__name__} has no endpoint {name!r}")
        return specs[name]

    @monarch_actor.endpoint(explicit_response_port=True, instrument=False)
    async def _forge_setup(self, port: Any) -> None:
        if "setup" not in specs_of(type(self)):
            port.send(None)
            return
        self._forge_dispatcher().start(self, port, self._forge_spec("setup"), (), {})

    @monarch_actor.endpoint(explicit_response_port=True, instrument=False)
    async def _forge_connect(self, port: Any, caller: int, channel: Any) -> None:
        """Note where the replies to a calling process go."""
        self._forge_dispatcher().outbox(caller).connect(channel)

    @monarch_actor.endpoint(explicit_response_port=True, instrument=False)
    async def _forge_invoke(self, port: Any, caller: int, call_id: int, name: str, payload: bytes) -> None:
        """Start a call of a service. Whatever fails here is raised to the caller: it must not end the actor."""
        dispatcher = self._forge_dispatcher()
        reply = ReplyPort(dispatcher.outbox(caller), call_id)
        try:
            args, kwargs = decode(payload)
            spec = self._forge_spec(name)
        except Exception as error:  # noqa: BLE001 - arguments that cannot be read here, or no such endpoint
            reply.exception(as_remote(error))
            return
        dispatcher.start(self, reply, spec, args, kwargs, call_id)

    @monarch_actor.endpoint(explicit_response_port=True, instrument=False)
    async def _forge_stream(self, port: Any, caller: int, call_id: int, sender: int, name: str, payload: bytes) -> None:
        """Start a streaming endpoint; rank `sender` sends its items. `port` gets a value at the end."""
        dispatcher = self._forge_dispatcher()
        items = StreamPort(dispatcher.outbox(caller), call_id, sender=sender)
        try:
            args, kwargs = decode(payload)
            spec = self._forge_spec(name)
        except Exception as error:  # noqa: BLE001 - as above
            items.exception(as_remote(error))
            port.send(None)
            return
        task = dispatcher.start_stream(items, functools.partial(spec.method, self, *args, **kwargs), call_id)
        if task is None:
            port.send(None)
        else:
            task.add_done_callback(lambda _: port.send(None))

    @monarch_actor.endpoint(explicit_response_port=True, instrument=False)
    async def _forge_grant(self, port: Any, call_id: int, num_items: int) -> None:
        self._forge_dispatcher().grant(call_id, num_items)

    @monarch_actor.endpoint(explicit_response_port=True, instrument=False)
    async def _forge_cancel(self, port: Any, call_id: int) -> None:
        self._forge_dispatcher().cancel(call_id)

    @monarch_actor.endpoint(explicit_response_port=True, instrument=False)
    async def _forge_ping(self, port: Any, caller: int, call_id: int) -> None:
        dispatcher = self._forge_dispatcher()
        dispatcher.outbox(caller).send(call_id, True, dispatcher.num_served)

    @monarch_actor.endpoint(explicit_response_port=True, instrument=False)
    async def _forge_observations(
        self, port: Any, caller: int, call_id: int, tracing: bool, timeout_s: float, use: bool
    ) -> None:
        """Send what this process has recorded since the last call, and how it is; see `forge.runtime.collect`."""
        from forge.runtime.collect import answer

        answer(self._forge_dispatcher().outbox(caller), call_id, tracing=tracing, timeout_s=timeout_s, use=use)

    @monarch_actor.endpoint(explicit_response_port=True, instrument=False)
    async def _forge_profile(self, port: Any, caller: int, call_id: int, options: Any) -> None:
        """Start to profile this process, or with None send the profile; see `forge.runtime.profiling`."""
        from forge.runtime.profiling import answer_profile

        answer_profile(self._forge_dispatcher().outbox(caller), call_id, options)

    async def __supervise__(self, failure: Any) -> bool:
        return note_fault(failure)

    async def _handle_undeliverable_message(self, message: Any) -> bool:
        # A caller or a replica that has gone: what waited for it is notified by other means.
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorOptions:
    """How an actor is spawned.

    Attributes:
        procs: ranks on each host.
        hosts: on how many hosts; None means one, wherever there is room.
        with_gpus: one GPU for each rank, held until the actor stops.
        mesh_name: a name for logs, metrics and error messages; the class's name by default.
        env: extra environment variables of its processes.
        num_threads: CPU threads of each process; 1 unless given.
        setup_timeout_s: how long `setup` may take.
        spawn_timeout_s: how long starting the processes may take.
        preload: modules that its processes import. They are imported once on each host, by a process that the others
            are forks of; nothing that starts threads or uses a GPU while it is imported. The class chooses by default.
    """

    procs: int = 1
    hosts: int | None = None
    with_gpus: bool = False
    mesh_name: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    num_threads: int | None = None
    setup_timeout_s: float = 600.0
    spawn_timeout_s: float = 120.0
    preload: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("procs", "hosts", "num_threads"):
            check_count(name, getattr(self, name), optional=name != "procs")
        for name in ("setup_timeout_s", "spawn_timeout_s"):
            check_seconds(name, getattr(self, name))
        if not isinstance(self.with_gpus, bool):
            raise bad_option("with_gpus", self.with_gpus, "true or false", "with_gpus=True")
        if self.mesh_name is not None and (not isinstance(self.mesh_name, str) or not self.mesh_name.strip()):
            raise bad_option("mesh_name", self.mesh_name, "a non-empty string", "mesh_name='policy'")
        if not isinstance(self.env, dict) or not all(
            isinstance(key, str) and isinstance(value, str) for key, value in self.env.items()
        ):
            raise bad_option("env", self.env, "a dict of strings to strings", "env={'NAME': 'value'}")
        if self.preload is not None and not (
            isinstance(self.preload, tuple) and all(isinstance(name, str) and name for name in self.preload)
        ):
            raise bad_option("preload", self.preload, "a tuple of module names", "preload=('torch',)")
        odd = [name for name, value in self.env.items() if not name or "=" in name or "\0" in name + value]
        if odd:
            raise bad_option("env", odd, "names without `=`, and no NUL anywhere", "env={'NAME': 'value'}")
        taken = [name for name in self.env if name in RANK_VARIABLES or (self.with_gpus and name == GPU_VARIABLE)]
        if taken:
            raise bad_option("env", taken, "not a variable that placement sets for each rank", "remove it from env")

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Self:
        """Build from the keywords of `options(...)`; an unknown one raises with the nearest name."""
        check_known(keywords, cls)
        return cls(**keywords)

    def replaced(self, **keywords: Any) -> Self:
        """Return the same with some options changed."""
        check_known(keywords, type(self))
        return replace(self, **keywords)

    def group_spec(self, cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, label: str) -> GroupSpec:
        return GroupSpec(
            cls=cls,
            args=args,
            kwargs=kwargs,
            label=label,
            num_procs=self.procs,
            with_gpus=self.with_gpus,
            num_threads=self.num_threads,
            env=dict(self.env),
            setup_timeout_s=self.setup_timeout_s,
            spawn_timeout_s=self.spawn_timeout_s,
            preload=cls._forge_preload(*args, **kwargs) if self.preload is None else self.preload,
        )


_MESH_NAMES = frozenset(name for name in dir(ActorMesh) if not name.startswith("_")) | {"pids", "is_alive"}


class Spawner(Generic[T]):
    """A class with its options, ready to be spawned any number of times: what `options(...)` returns."""

    def __init__(self, cls: type[T], options: ActorOptions) -> None:
        self.cls, self.chosen = cls, options
        check_endpoint_names(cls, _MESH_NAMES)

    def options(self, **keywords: Any) -> Self:
        """Return the same with some options changed; this one stays as it is."""
        return type(self)(self.cls, self.chosen.replaced(**keywords))

    def as_actor(self, *args: Any, **kwargs: Any) -> PendingHandle[T]:
        """Spawn one mesh, run its `setup`, and return a handle with Monarch's verbs. To be awaited."""
        return PendingHandle(self._spawn(args, kwargs), call=f"{self.cls.__name__}.as_actor")

    async def _spawn(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        from forge.runtime.lifetime import runtime

        label = self.chosen.mesh_name or self.cls.__name__
        spec = self.chosen.group_spec(self.cls, args, kwargs, label=label)
        return cast(T, await runtime().spawn_actor(spec, num_hosts=self.chosen.hosts))
