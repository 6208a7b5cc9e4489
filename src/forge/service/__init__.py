"""Services: a replicated actor that feels like one object.

`ForgeActor` is the class that users extend; `Service` is the handle they call. Routing happens in the caller's own
process, from a table that the owner keeps up to date.
"""

from typing import TYPE_CHECKING, Annotated, TypeVar

from forge.runtime.endpoints import Batch
from forge.service.actor import ForgeActor
from forge.service.options import ServiceOptions
from forge.service.records import Outcome, ReplicaMetrics, ReplicaState, Request, ServiceMetrics
from forge.service.routing import least_loaded, round_robin

if TYPE_CHECKING:
    T = TypeVar("T", bound=ForgeActor)
    Service = Annotated[T, "the handle of a replicated actor"]
else:
    from forge.service.handle import Service

__all__ = [
    "Batch",
    "ForgeActor",
    "Outcome",
    "ReplicaMetrics",
    "ReplicaState",
    "Request",
    "Service",
    "ServiceMetrics",
    "ServiceOptions",
    "least_loaded",
    "round_robin",
]
