"""`ForgeActor`: the class that users extend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge.runtime.actor import MeshActor, Spawner
from forge.runtime.starting import Starting
from forge.service.options import ServiceOptions

if TYPE_CHECKING:
    from forge.service.handle import Service


class ServiceSpawner(Spawner):
    """A class with its options: spawn it as one actor, or as a service of replicas."""

    chosen: ServiceOptions

    def as_service(self, *args: Any, **kwargs: Any) -> Starting[Service]:
        """Start the replicas, run their `setup`, and return the handle that routes to them. To be awaited."""
        from forge.service.handle import Service

        starting = Service.start(self.cls, self.chosen, args, kwargs)
        return Starting(starting, call=f"{self.cls.__name__}.as_service")


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

    @classmethod
    def options(cls, **keywords: Any) -> ServiceSpawner:
        """This class with options (see `ServiceOptions`). The class itself never changes; unknown options raise."""
        return ServiceSpawner(cls, ServiceOptions.from_keywords(**keywords))

    @classmethod
    def as_service(cls, *args: Any, **kwargs: Any) -> Starting[Service]:
        """`options().as_service(...)`: a service of one replica. To be awaited."""
        return cls.options().as_service(*args, **kwargs)
