"""Services: a replicated actor that feels like one object.

`ForgeActor` is the class that users extend; `Service` is the handle they call. Routing happens in the caller's own
process, from a table that the owner keeps up to date.
"""

from forge.runtime.endpoints import Batch
from forge.service.actor import ForgeActor
from forge.service.handle import Service
from forge.service.options import ServiceOptions
from forge.service.records import Outcome, ReplicaMetrics, ReplicaState, Request, ServiceMetrics
from forge.service.routing import least_loaded, round_robin

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
