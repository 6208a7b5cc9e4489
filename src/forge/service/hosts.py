"""Hosts join and leave a run while it runs.

`add_host` attaches to one more `forge worker`: new and restarted replicas can be placed there. `remove_host` moves the
replicas of a host elsewhere, each replacement first, and then lets the host go.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forge.errors import PlacementError
from forge.runtime.control import control
from forge.runtime.group import live_groups
from forge.runtime.hosts import Host
from forge.runtime.lifetime import runtime
from forge.runtime.option_checks import check_seconds
from forge.runtime.worker import check_address
from forge.service.supervisor import subscriptions

if TYPE_CHECKING:
    from forge.service.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class HostState:
    """A host of the run.

    Attributes:
        name: its address; `local` for the controller's own machine.
        state: `ready`, `leaving`, or `lost`.
        groups: what runs there, by the names in logs and metrics, such as `generator[1]`.
        num_free_gpus: GPUs that no process holds.
    """

    name: str
    state: Literal["ready", "leaving", "lost"]
    groups: tuple[str, ...]
    num_free_gpus: int


def list_hosts() -> tuple[HostState, ...]:
    """Return the hosts of the run, in the order in which they joined."""
    return tuple(
        HostState(host.name, host.state, tuple(sorted(_groups_on(host))), len(host.gpus.free))
        for host in runtime().hosts
    )


def _groups_on(host: Host) -> list[str]:
    return [group.spec.label for group in live_groups() if host in group.hosts]


async def add_host(address: str) -> HostState:
    """Let the run use one more host, on which `forge worker` listens at `address`.

    Replicas that are added or restarted from now on can be placed there, and those that were dropped because they had
    no place are started again. Replicas that run stay where they are. Raise `LaunchError` if no worker answers there.
    """
    check_address(address, path="ADDRESS")
    host = await asyncio.shield(control().submit(runtime().membership.add(address)))
    return HostState(host.name, host.state, (), len(host.gpus.free))


async def remove_host(address: str, *, drain_timeout_s: float | None = None) -> None:
    """Let a host go, when nothing of the run needs it any more.

    No process is placed there from now on. Each replica there gets a replacement elsewhere; when that serves, the old
    one gets no new calls, and ends when its calls in flight have ended, or after `drain_timeout_s` seconds. Raise
    `PlacementError`, and change nothing, if something runs there that cannot be moved: the ranks of a trainer, or an
    actor that is not a replica of a service. Raise `ResizeError` if a replacement could not be started: the host stays.
    A host that is lost is no longer listed.
    """
    check_seconds("drain_timeout_s", drain_timeout_s, optional=True, where="remove_host")
    await asyncio.shield(control().submit(_remove(address, drain_timeout_s)))


async def _remove(address: str, drain_timeout_s: float | None) -> None:
    membership = runtime().membership
    host = membership.find(address)
    if host.is_usable:
        moves = _moves(host)
        host.is_leaving = True
        try:
            for supervisor, indices in moves.items():
                await supervisor.resizer.move(indices, drain_timeout_s=drain_timeout_s)
        except BaseException:
            host.is_leaving = False
            raise
    elif not host.is_lost:
        raise PlacementError("this host is leaving already", path="ADDRESS", value=address)
    await membership.drop(host)


def _moves(host: Host) -> dict[Supervisor, tuple[int, ...]]:
    """Return the replicas on a host, by service. Raise if the host cannot be done without."""
    moves: dict[Supervisor, tuple[int, ...]] = {}
    movable: set[str] = set()
    for supervisor in subscriptions().services.values():
        here = [each for each in supervisor.replicas if each.group is not None and host in each.group.hosts]
        if here and supervisor.options.max_restarts > 0:
            moves[supervisor] = tuple(each.index for each in here)
            movable |= {each.group.spec.label for each in here if each.group is not None}
    fixed = sorted(set(_groups_on(host)) - movable)
    if fixed:
        raise PlacementError(
            f"host {host.name} is needed by {', '.join(fixed)}, which cannot be moved while the run runs",
            path="ADDRESS",
            value=host.name,
            rule="only replicas of services that are restarted can be moved; trainers and single actors stay",
            repair="remove another host, or stop the run and resume it on other hosts",
        )
    if not any(each.is_usable for each in runtime().hosts if each is not host):
        raise PlacementError(
            f"host {host.name} is the only one that the run can use",
            path="ADDRESS",
            value=host.name,
            rule="a run keeps at least one host",
            repair="add another host first",
        )
    return moves
