"""Launchers: where hosts come from. `local` needs none; the others end with workers to attach to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from forge.errors import LaunchError
from forge.runtime.attach import attach_host, let_go
from forge.runtime.backend import monarch_actor, without_banner
from forge.runtime.exposure import exposed, is_loopback_only
from forge.runtime.hosts import Host, HostTimings
from forge.runtime.sockets import check_tls

if TYPE_CHECKING:
    from forge.config import LauncherConfig

_log = logging.getLogger("forge.runtime")


@dataclass(frozen=True, slots=True)
class Allocation:
    """Hosts that are ready, and how to let them go."""

    hosts: tuple[Host, ...]
    release: Callable[[], Awaitable[None]]


class Launcher(Protocol):
    """Gets hosts. Everything runs on the control loop."""

    async def launch(self) -> Allocation: ...


class HostsLauncher:
    """Attaches to the workers at `launcher.hosts`."""

    def __init__(self, config: LauncherConfig) -> None:
        self._config = config

    async def launch(self) -> Allocation:
        if not self._config.hosts:
            raise LaunchError(
                "the launcher `hosts` has no address",
                path="launcher.hosts",
                value=[],
                rule="at least one worker address",
                repair="launcher.hosts=[tcp://10.0.0.7:22222], with `forge worker` running there",
            )
        return await attach_all(self._config.hosts, bind=self._config.bind, timings=HostTimings.of(self._config))


def check_launcher(config: LauncherConfig) -> None:
    """Raise `InsecureBindError` if the controller or a worker would be reachable from other machines without TLS."""
    if config.insecure or config.kind == "local":
        return
    plain = [address for address in config.hosts if urlsplit(address).scheme != "tls"]
    bind, secured = ("launcher.bind", config.bind), "start the workers at tls:// addresses"
    places = [("launcher.hosts", urlsplit(address).hostname or "") for address in plain]
    if config.kind == "slurm":
        plain, places, secured = [] if config.slurm.tls else ["tcp"], [], "set launcher.slurm.tls=true"
    elif config.kind == "kubernetes":
        plain, places = [] if config.kubernetes.tls_secret else ["tcp"], []
        secured = "set launcher.kubernetes.tls_secret"
    for path, host in (bind, *places) if plain else ():
        if not is_loopback_only(host):
            raise exposed(
                what="the channel, which executes what it is sent,",
                path=path,
                value=host,
                repair=f"{secured} (docs/guides/security.md), or set launcher.insecure=true on a network where you "
                "trust every machine and user",
            )


def open_transport(addresses: Sequence[str], *, bind: str) -> None:
    """Choose the channel to the workers, by the scheme of their addresses. Before the first use of Monarch only."""
    schemes = {urlsplit(address).scheme for address in addresses}
    if len(schemes) != 1:
        raise LaunchError(
            "the workers' addresses mix channels",
            path="launcher.hosts",
            value=sorted(addresses),
            rule="all tcp:// or all tls://",
            repair="start every worker with the same kind of address",
        )
    if "tls" in schemes:
        check_tls()
    host = f"[{bind}]" if ":" in bind else bind
    try:
        with without_banner():
            monarch_actor.enable_transport(f"{schemes.pop()}://{host}:0")
    except RuntimeError as error:
        raise LaunchError(
            f"this process already uses Monarch over another channel: {error}",
            path="forge.run(launcher=)",
            rule="hosts are chosen before anything is spawned",
            repair="call forge.run(launcher=...) first in the program",
        ) from error


async def attach_all(addresses: Sequence[str], *, bind: str, timings: HostTimings) -> Allocation:
    """Attach to every worker, all or none. Releasing shuts the workers' host processes down; `forge worker` starts a
    fresh one for the next run."""
    open_transport(addresses, bind=bind)
    attached = await asyncio.gather(*(attach_host(address, timings) for address in addresses), return_exceptions=True)
    hosts = tuple(host for host in attached if isinstance(host, Host))

    async def release() -> None:
        await asyncio.gather(*(let_go(host, timings) for host in hosts if not host.is_leaving))

    for failure in attached:
        if isinstance(failure, BaseException):
            await release()
            raise failure
    return Allocation(hosts, release)


def launch_checks(config: LauncherConfig) -> tuple[Callable[[], object], ...]:
    """Return what must hold on this machine before a launcher starts anything: each raises what is wrong."""
    if config.kind == "slurm":
        from forge.runtime.launchers import slurm

        return slurm.launch_checks(config)
    if config.kind == "kubernetes":
        from forge.runtime.launchers import kubernetes

        return kubernetes.launch_checks(config)
    has_tls = any(urlsplit(address).scheme == "tls" for address in config.hosts)
    return (partial(check_launcher, config), *([check_tls] if config.kind == "hosts" and has_tls else []))


def make_launcher(config: LauncherConfig) -> Launcher:
    """Return the launcher that a configuration names."""
    if config.kind == "slurm":
        from forge.runtime.launchers.slurm import SlurmLauncher

        return SlurmLauncher(config)
    if config.kind == "kubernetes":
        from forge.runtime.launchers.kubernetes import KubernetesLauncher

        return KubernetesLauncher(config)
    return HostsLauncher(config)


async def launch(config: LauncherConfig) -> Allocation:
    """Get the hosts that a configuration asks for."""
    return await make_launcher(config).launch()
