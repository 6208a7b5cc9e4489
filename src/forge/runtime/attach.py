"""Join a host on which `forge worker` listens, and let it go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final
from urllib.parse import urlsplit

from forge.errors import LaunchError
from forge.runtime.backend import OWNED, default_bootstrap_cmd, monarch_actor, without_banner
from forge.runtime.hosts import AgentWatch, Host, HostAgent, HostFacts, HostTimings

_log = logging.getLogger("forge.runtime")
_RETRY_S: Final = 0.5
_LAST_ANSWER_S: Final = 1.0


async def attach_host(worker: str, timings: HostTimings) -> Host:
    """Join the host whose worker listens at `worker` (such as `tcp://10.0.0.7:22222`)."""
    notice = asyncio.get_running_loop().call_later(
        2.0, _log.warning, "waiting for the worker at %s, for up to %g s", worker, timings.attach_timeout_s
    )
    with without_banner():
        mesh = monarch_actor.attach_to_workers(ca="trust_all_connections", workers=[worker])
    asking = asyncio.create_task(_describe(mesh, timings))
    try:
        async with asyncio.timeout(timings.attach_timeout_s):
            await _answered_or_ended(asking, worker)
            procs, agent, facts = asking.result()
    except LaunchError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it was, the worker cannot be used
        raise LaunchError(
            f"no worker answers at {worker}" + (f": {error}" if str(error) else ""),
            path="launcher.hosts",
            value=worker,
            rule="every address is that of a running `forge worker`, which answers within "
            f"launcher.attach_timeout_s ({timings.attach_timeout_s:g} s)",
            repair=f"on that host run `forge worker --address {worker}`, and check that the port is open",
        ) from None
    finally:
        notice.cancel()
        asking.cancel()
    if facts is None:
        await asyncio.wait_for(procs.stop(), timings.answer_s)
        raise LaunchError(
            f"the worker at {worker} serves another controller",
            path="launcher.hosts",
            value=worker,
            rule="a worker serves one controller at a time",
            repair="wait for that run to end, or start another `forge worker` on another port",
        )
    host = Host(worker, mesh, address=urlsplit(worker).hostname or "127.0.0.1", facts=facts)
    host.watch = watch = AgentWatch(host, agent, procs, timings)
    await watch.connect()
    return host


async def _describe(mesh: Any, timings: HostTimings) -> tuple[Any, Any, HostFacts | None]:
    """Start the agent of a host; return its processes, the agent, and what the host has."""
    await mesh.initialized
    command = default_bootstrap_cmd()
    command.args = ["-m", "forge.runtime.rank_main"]
    procs = mesh.spawn_procs(name=f"{OWNED}-agent", bootstrap_command=command)
    agent = procs.spawn(f"{OWNED}-agent", HostAgent, timings.lease_s).slice(hosts=0)
    return procs, agent, await agent.describe.call_one()


async def _answered_or_ended(asking: asyncio.Task[Any], worker: str) -> None:
    """Wait for the agent's answer. Raise if the worker, its parent, ends before.

    It does when the lease of its last controller runs out, which was killed. Monarch would not notice.
    """
    ended = asyncio.create_task(_wait_until_ended(worker))
    try:
        await asyncio.wait({asking, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            await asyncio.wait({asking}, timeout=_LAST_ANSWER_S)
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)
    if not asking.done():
        raise LaunchError(
            f"the worker at {worker} ended while this controller waited for it",
            path="launcher.hosts",
            value=worker,
            rule="a worker whose controller was killed ends after launcher.lease_s; a fresh one takes over",
            repair="start the program again now (`forge run --supervise` does)",
        )


async def _wait_until_ended(worker: str) -> None:
    """Wait until the process that listens at a worker's address has closed a connection, as its end does."""
    parts = urlsplit(worker)
    while True:
        try:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        except OSError:  # it may be starting
            await asyncio.sleep(_RETRY_S)
            continue
        try:
            with contextlib.suppress(ConnectionError):
                while await reader.read(1024):
                    pass
            return
        finally:
            writer.close()


async def let_go(host: Host, timings: HostTimings) -> None:
    """Shut a host's worker down; `forge worker` starts a fresh one for the next run."""
    try:
        await host.watch.close()  # before the worker ends: a heartbeat to one that is gone would come back as a fault
        if not host.is_lost:
            await asyncio.wait_for(host.mesh.shutdown(), timings.answer_s)
    except Exception as error:  # noqa: BLE001 - it ends by itself when the controller falls silent
        _log.warning("host %s did not confirm its release: %s", host.name, type(error).__name__)
