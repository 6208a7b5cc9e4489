"""The options of a service: those of its actors, and how it routes, limits, watches and restarts them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forge.runtime.actor import ActorOptions
from forge.runtime.option_checks import bad_option, check_count, check_seconds
from forge.service.routing import BUILT_IN


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions(ActorOptions):
    """How a service is spawned and kept.

    Attributes:
        num_replicas: how many replicas, each a mesh of `procs` ranks.
        routing: "round_robin", "least_loaded", or a function `(states, request) -> index`.
        max_concurrency: calls that one calling process may have in flight at one replica; None is no limit.
        max_queue: calls that may wait for a slot in this process before `Overloaded` is raised; None is no limit.
        call_timeout_s: how long a call may take, waiting included; None is no limit.
        max_retries: how often a call of an endpoint with `retry=True` is sent again after a loss.
        heartbeat_s: how often each replica is asked for a heartbeat; less often in a service of so many replicas that
            it would ask for more than 1,000 a second.
        heartbeat_timeout_s: without one for so long, a replica is taken for dead. Longer than any `async` endpoint
            blocks its event loop; plain `def` endpoints do not block it.
        max_restarts: tries in a row, without having served, before a replica is given up.
        restart_backoff_s: the wait before the second try; it doubles from there.
        max_backoff_s: the longest such wait.
        stable_s: a replica that was up for so long counts as having served.
    """

    num_replicas: int = 1
    routing: str | Callable[..., int] = "round_robin"
    max_concurrency: int | None = None
    max_queue: int | None = None
    call_timeout_s: float | None = None
    max_retries: int = 10
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 30.0
    max_restarts: int = 5
    restart_backoff_s: float = 0.1
    max_backoff_s: float = 30.0
    stable_s: float = 2.0

    def __post_init__(self) -> None:
        ActorOptions.__post_init__(self)
        check_count("num_replicas", self.num_replicas)
        check_count("max_concurrency", self.max_concurrency, optional=True)
        check_count("max_queue", self.max_queue, optional=True, least=0)
        check_count("max_retries", self.max_retries, least=0)
        check_count("max_restarts", self.max_restarts, least=0)
        check_seconds("call_timeout_s", self.call_timeout_s, optional=True)
        for name in ("heartbeat_s", "heartbeat_timeout_s", "max_backoff_s"):
            check_seconds(name, getattr(self, name))
        for name in ("restart_backoff_s", "stable_s"):
            check_seconds(name, getattr(self, name), zero=True)
        if inspect.iscoroutinefunction(self.routing):
            raise bad_option("routing", self.routing, "a plain function: it must answer at once", "write `def`")
        if not callable(self.routing) and self.routing not in list(BUILT_IN):
            raise bad_option(
                "routing", self.routing, f"one of {', '.join(BUILT_IN)}, or a function", "routing='least_loaded'"
            )

    def router(self) -> Callable[..., Any]:
        return self.routing if callable(self.routing) else BUILT_IN[self.routing]
