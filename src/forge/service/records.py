"""What a service tells about itself: plain, frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Health = Literal["starting", "healthy", "restarting", "given_up", "draining", "removed", "stopped"]
"""`draining`: it gets no new calls and ends when those in flight have ended. `removed`: it has left the service."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What a router may know about a replica that can take a call now.

    Attributes:
        index: the replica's number, stable over restarts.
        generation: how many times it was started before this one.
        in_flight: calls of this process that it has not answered yet.
        last_used: the number of the last call that this process sent to it; larger is later, 0 is never.
        host: the name of the host it runs on.
        num_sessions: sessions of this process that are pinned to it.
    """

    index: int
    generation: int
    in_flight: int
    last_used: int
    host: str
    num_sessions: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """What a router may know about the call that it places."""

    endpoint: str
    session: str | None
    attempt: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one replica made of a fanout: a value, or the error that it raised."""

    replica: int
    value: Any = None
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    """One replica, as its owner and this process see it."""

    index: int
    health: Health
    generation: int
    restarts: int
    pids: tuple[int, ...]
    host: str
    in_flight: int
    num_ok: int
    num_errors: int
    num_lost: int
    last_failure: str | None
    num_sessions: int = 0


@dataclass(frozen=True, slots=True)
class ServiceMetrics:
    """A service at one moment. Counts of calls are those of this process's handle."""

    name: str
    replicas: tuple[ReplicaMetrics, ...]
    num_waiting: int
    num_sessions: int
    num_retried: int
    num_timeouts: int
    num_cancelled: int
    num_rejected: int

    @property
    def num_healthy(self) -> int:
        return sum(replica.health == "healthy" for replica in self.replicas)

    @property
    def restarts(self) -> int:
        return sum(replica.restarts for replica in self.replicas)
