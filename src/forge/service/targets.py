"""The replicas of a service, as one calling process knows them: what the owner publishes, and what calls use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forge.runtime.pending_calls import PendingCalls
from forge.runtime.replies import ReplyChannel
from forge.service.records import Health, ReplicaState


@dataclass(frozen=True, slots=True)
class Entry:
    """One replica, as its owner publishes it. While it drains, `keeps_sessions` lets calls of its sessions through."""

    index: int
    generation: int
    health: Health
    actor: Any
    host: str
    num_ranks: int
    restarts: int = 0
    pids: tuple[int, ...] = ()
    failure: str | None = None
    keeps_sessions: bool = False


class Target:
    """One generation of a replica, as a caller uses it. Has the fields that the built-in routers read."""

    __slots__ = (
        "calls",
        "cancel",
        "entry",
        "in_flight",
        "index",
        "invoke",
        "is_connected",
        "last_used",
        "num_errors",
        "num_held",
        "num_lost",
        "num_ok",
    )

    def __init__(self, entry: Entry, calls: PendingCalls) -> None:
        self.entry, self.index, self.calls = entry, entry.index, calls
        self.invoke = entry.actor._forge_invoke.broadcast
        self.is_connected = False
        self.cancel = entry.actor._forge_cancel.broadcast
        self.in_flight = self.num_held = self.last_used = 0
        self.num_ok = self.num_errors = self.num_lost = 0

    def connect(self, channel: ReplyChannel) -> None:
        """Introduce this process before its first call, so that the replica knows where answers go."""
        self.is_connected = True
        self.entry.actor._forge_connect.broadcast(channel.caller, channel.port)

    def state(self, num_sessions: int) -> ReplicaState:
        entry = self.entry
        return ReplicaState(entry.index, entry.generation, self.in_flight, self.last_used, entry.host, num_sessions)
