"""The hosts of a run, shown and changed by `forge hosts` while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from forge.errors import OptionError
from forge.loops.planning import GRPOPlan
from forge.loops.run_control import Handler
from forge.loops.run_paths import run_dir
from forge.loops.runtime_changes import RuntimeChange, record_change
from forge.service.hosts import add_host, list_hosts, remove_host

_log = logging.getLogger("forge.grpo")
_KEY: Final = "launcher.hosts"


class RunHosts:
    """Lets hosts join and leave one run. All calls are made on the controller's loop.

    Args:
        plan: what the run does.
        step: returns the steps taken so far.
    """

    def __init__(self, plan: GRPOPlan, *, step: Callable[[], int]) -> None:
        self._plan, self._step = plan, step
        self._turn = asyncio.Lock()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What answers the command `hosts`."""
        return {"hosts": self._answer}

    async def _answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Carry a request out and return the hosts: those to `add` join first, then those to `remove` leave."""
        added, removed = (_addresses(request, name) for name in ("add", "remove"))
        async with self._turn:
            for address in added:
                await self._change(add_host(address))
            for address in removed:
                await self._change(remove_host(address, drain_timeout_s=request.get("drain_timeout_s")))
        return {"hosts": [asdict(host) for host in list_hosts()], "step": self._step()}

    async def _change(self, work: Any) -> None:
        before = self._names()
        await work
        after = self._names()
        if self._plan.config.launcher.kind == "hosts":  # other launchers find their hosts anew at a resume
            configured = list((self._plan.asked or self._plan.config).launcher.hosts)
            change = RuntimeChange(self._step(), _KEY, configured, before, after, "forge hosts")
            record_change(run_dir(self._plan.config), change)
        _log.info("hosts: %s", ", ".join(after))

    def _names(self) -> list[str]:
        return [host.name for host in list_hosts()]


def _addresses(request: Mapping[str, Any], name: str) -> list[str]:
    found = request.get(name, [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise OptionError("a list of addresses is needed", path=name, value=found, rule="tcp://HOST:PORT, …")
    return found
