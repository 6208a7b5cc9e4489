"""`ForgeActor`: the class that users extend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from forge.runtime.actor import MeshActor, PendingHandle, Spawner
from forge.service.options import ServiceOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractAsyncContextManager

    from forge.service.records import ServiceMetrics
    from forge.service.resizing import SessionRule

T = TypeVar("T")


class ServiceSpawner(Spawner[T]):
    """A class with its options: spawn it as one actor, or as a service of replicas."""

    chosen: ServiceOptions

    def as_service(self, *args: Any, **kwargs: Any) -> PendingHandle[T]:
        """Start the replicas, run their `setup`, and return the handle that routes to them. To be awaited."""
        from forge.service.handle import Service

        starting = Service.start(self.cls, self.chosen, args, kwargs)
        return PendingHandle(cast("Coroutine[Any, Any, T]", starting), call=f"{self.cls.__name__}.as_service")


class ForgeActor(MeshActor):
    """An actor that can be one mesh (`as_actor`) or a replicated, self-healing service (`as_service`).

    Example:
        >>> class Reward(ForgeActor):
        ...     @endpoint(retry=True)
        ...     async def score(self, text: str) -> float:
        ...         return float("yes" in text)
        >>> reward = await Reward.options(num_replicas=4).as_service()
        >>> await reward.score.route("yes and no")
        1.0
    """

    if TYPE_CHECKING:  # of a service's handle, which type checkers see as its actor's class; see `Service`
        name: str

        def session(self) -> AbstractAsyncContextManager[str]: ...
        async def start_session(self) -> str: ...
        async def terminate_session(self, session: str) -> None: ...
        async def get_metrics(self) -> ServiceMetrics: ...
        async def wait_until(
            self, condition: Callable[[ServiceMetrics], bool], *, timeout_s: float | None = None
        ) -> ServiceMetrics: ...
        async def resize(
            self, num_replicas: int, *, sessions: SessionRule = "move", drain_timeout_s: float | None = None
        ) -> ServiceMetrics: ...
        async def shutdown(self) -> None: ...

    @classmethod
    def options(cls, **keywords: Any) -> ServiceSpawner[Self]:
        """Return this class with options (see `ServiceOptions`). The class never changes; unknown options raise."""
        return ServiceSpawner(cls, ServiceOptions.from_keywords(**keywords))

    @classmethod
    def as_service(cls, *args: Any, **kwargs: Any) -> PendingHandle[Self]:
        """`options().as_service(...)`: a service of one replica. To be awaited."""
        return cls.options().as_service(*args, **kwargs)
