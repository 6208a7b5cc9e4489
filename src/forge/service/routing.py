"""Which replica takes a call: pure functions over what is known of those that can.

A router gets the replicas that are healthy and have a free slot, and the request; it returns the index of one of them.
Any function of this shape can be given as `options(routing=...)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forge.errors import OptionError
from forge.service.records import Request


class Candidate(Protocol):
    """What the built-in routers look at; `ReplicaState` has these fields."""

    @property
    def index(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def last_used(self) -> int: ...


def round_robin(states: Sequence[Candidate], request: Request | None = None) -> int:
    """Return the replica that has waited longest for a call. Fair to the call, whichever replicas come and go."""
    best = states[0]
    for state in states:
        if state.last_used < best.last_used:
            best = state
    return best.index


def least_loaded(states: Sequence[Candidate], request: Request | None = None) -> int:
    """Return the replica with the fewest calls in flight; among equals, the one that has waited longest."""
    best = states[0]
    for state in states:
        if (state.in_flight, state.last_used) < (best.in_flight, best.last_used):
            best = state
    return best.index


BUILT_IN = {"round_robin": round_robin, "least_loaded": least_loaded}


def check_choice(choice: object, states: Sequence[Candidate], router: object) -> int:
    """Return what a router chose; raise unless it is one of the replicas that it was given."""
    allowed = [state.index for state in states]
    if isinstance(choice, bool) or not isinstance(choice, int) or choice not in allowed:
        raise OptionError(
            "the router did not choose one of the replicas that it was given",
            path=f"options(routing={getattr(router, '__name__', router)})",
            value=choice,
            rule=f"one of {allowed}",
            repair="return states[k].index for some k",
        )
    return choice
