"""The hosts of a run, which may change while it runs: they join, leave, or are lost.

Everything here runs on the control loop. Moving replicas off a host that leaves is the services' part
(`forge.service.hosts`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from forge.errors import LaunchError, PlacementError, did_you_mean
from forge.runtime.attach import attach_host, let_go
from forge.runtime.hosts import Host, HostTimings

if TYPE_CHECKING:
    from forge.runtime.group import GroupSpec

_log = logging.getLogger("forge.runtime")
_LISTENING_S: Final = 20.0
"""How long a host that joins may take to listen: `forge worker` may just be starting, or changing runs."""


class Membership:
    """The hosts that processes can be started on.

    Args:
        hosts: those of the launcher, or the controller's own machine.
        release: lets the launcher's hosts go.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        *,
        release: Callable[[], Awaitable[None]] | None = None,
        timings: HostTimings | None = None,
    ) -> None:
        self._hosts, self._release = list(hosts), release
        self._timings = timings or HostTimings()
        self._joined: list[Host] = []
        self._listeners: dict[Callable[[Host], None], None] = {}
        self._used = {host.name for host in self._hosts}
        self._is_closed = False

    @property
    def hosts(self) -> tuple[Host, ...]:
        return tuple(self._hosts)

    def pick(self, count: int, *, spec: GroupSpec) -> tuple[Host, ...]:
        """Return the `count` hosts that have the GPUs and carry the fewest groups, first ones first."""
        usable = [host for host in self._hosts if host.is_usable]
        if count > len(usable):
            lost = [host.name for host in self._hosts if host.is_lost]
            raise PlacementError(
                f"{spec.label} asked for {count} host(s), and {len(usable)} of {len(self._hosts)} can be used",
                path="options(hosts=)",
                value=count,
                rule=f"at most {len(usable)}: {[host.name for host in usable]}" + (f"; lost: {lost}" if lost else ""),
                repair="ask for fewer hosts, or give the launcher more",
            )
        need = spec.num_procs if spec.with_gpus else 0

        def rank(index: int) -> tuple[bool, int, int]:
            return (len(usable[index].gpus.free) < need, usable[index].num_groups, index)

        order = sorted(range(len(usable)), key=rank)
        return tuple(usable[index] for index in sorted(order[:count]))

    def on_join(self, listener: Callable[[Host], None]) -> None:
        """Call `listener(host)` whenever a host joins."""
        self._listeners[listener] = None

    def forget_listener(self, listener: Callable[[Host], None]) -> None:
        self._listeners.pop(listener, None)

    # ---- A host joins

    async def add(self, address: str) -> Host:
        """Attach to the worker at `address`."""
        self._check_joins(address)
        await _wait_until_listening(address)
        self._check_joins(address)  # again: another call may have been faster
        self._used.add(address)
        host = await attach_host(address, self._timings)
        if self._is_closed:
            await let_go(host, self._timings)
            raise LaunchError("the run ended while the host joined", path="ADDRESS", value=address)
        self._take_in(host)
        return host

    def _check_joins(self, address: str) -> None:
        schemes = {urlsplit(host.name).scheme for host in self._hosts if not host.is_local}
        if not schemes:
            raise LaunchError(
                "a run on the controller's own machine cannot get more hosts",
                path="launcher.kind",
                value="local",
                rule="`hosts`, `slurm` or `kubernetes`: the channel to other hosts is opened at the start",
                repair="start the run with launcher.kind=hosts; `forge worker` on this machine may be the first host",
            )
        if urlsplit(address).scheme not in schemes:
            raise LaunchError(
                "the worker has another kind of address than the run's other hosts",
                path="ADDRESS",
                value=address,
                rule=f"an address that begins with {schemes.pop()}://, as theirs do",
                repair="start `forge worker` with such an address",
            )
        if address in self._used:
            raise LaunchError(
                "this run has used this address before",
                path="ADDRESS",
                value=address,
                rule="an address serves a run once: Monarch cannot attach to it again, not even to a fresh worker",
                repair="start `forge worker` on another port of that host, and add that address",
            )

    def _take_in(self, host: Host) -> None:
        """Let processes be started on a host from now on."""
        self._hosts.append(host)
        self._joined.append(host)
        for listener in list(self._listeners):
            listener(host)

    # ---- A host leaves

    def find(self, address: str) -> Host:
        """Return the host with this address, or raise with those that there are."""
        for host in self._hosts:
            if host.name == address:
                return host
        names = [host.name for host in self._hosts]
        raise LaunchError(
            "the run has no such host",
            path="ADDRESS",
            value=address,
            rule=f"one of {', '.join(names)}",
            repair=did_you_mean(address, names) or "name one of these",
        )

    async def drop(self, host: Host) -> None:
        """Let a host go on which nothing runs any more."""
        host.is_leaving = True
        self._hosts.remove(host)
        await let_go(host, self._timings)
        _log.info("host %s has left", host.name)

    async def close(self) -> None:
        """Let all hosts go."""
        self._is_closed = True
        for host in self._hosts:
            try:
                await host.watch.close()
            except Exception as error:  # noqa: BLE001 - a lost host cannot be closed
                _log.warning("host %s did not close: %s", host.name, type(error).__name__)
        joined, self._joined = [host for host in self._joined if not host.is_leaving], []
        try:
            if self._release is not None:
                await self._release()
        finally:
            await asyncio.gather(*(let_go(host, self._timings) for host in joined))


async def _wait_until_listening(address: str) -> None:
    """Wait until something accepts connections at a worker's address; raise if nothing does for long."""
    parts = urlsplit(address)
    try:
        async with asyncio.timeout(_LISTENING_S):
            while not await _accepts(parts.hostname, parts.port):  # noqa: ASYNC110 - another program is waited for
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise LaunchError(
            f"no worker listens at {address}",
            path="ADDRESS",
            value=address,
            rule=f"the address of a running `forge worker`, which accepts connections within {_LISTENING_S:g} s",
            repair=f"on that host run `forge worker --address {address}`, and check that the port is open",
        ) from None


async def _accepts(host: str | None, port: int | None) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True
