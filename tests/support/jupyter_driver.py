"""Drives a real Jupyter kernel through a scenario, in the venv that has jupyter_client.

VENV/bin/python tests/support/jupyter_driver.py < scenario.json > outcome.json

The kernel is another Python, `python`: the one that has forge. It finds ipykernel in `site`, behind its own packages.
Each step is a cell:

    {"cell": CODE}                                        run it
    {"cell": CODE, "interrupts": [TEXT, …]}            interrupt the kernel when each text has appeared in its outputs
    {"cell": CODE, "when": TEXT, "then": "restart"}    restart the kernel, or `kill` it, when the text has appeared

The outcome has one object for each step: its outputs, and with `then` the processes that the kernel has left behind.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import time
import uuid
from typing import Any

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

MARK = "FORGE_TEST_KERNEL"
LIMIT_S = 600.0
START = """\
import sys
sys.path.append({site!r})
from ipykernel.kernelapp import launch_new_instance
launch_new_instance()
"""


class Kernel(KernelManager):
    """A kernel in another environment than this one."""

    def __init__(self, python: str, site: str) -> None:
        super().__init__()
        self._command = [python, "-c", START.format(site=site)]

    def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
        return [*self._command, "-f", self.connection_file]

    @property
    def pid(self) -> int:
        assert self.provisioner is not None
        return int(self.provisioner.pid)


class Driver:
    def __init__(self, scenario: dict[str, Any]) -> None:
        self._mark = uuid.uuid4().hex
        self._kernel = Kernel(scenario["python"], scenario["site"])
        self._kernel.start_kernel(cwd=scenario["cwd"], env={**os.environ, **scenario["env"], MARK: self._mark})
        self._client = self._connect()

    def _connect(self) -> BlockingKernelClient:
        client = self._kernel.client()
        client.start_channels()
        client.wait_for_ready(timeout=LIMIT_S)
        return client

    def close(self) -> None:
        self._client.stop_channels()
        self._kernel.shutdown_kernel(now=True)

    def run(self, step: dict[str, Any]) -> dict[str, Any]:
        markers = [*step.get("interrupts", ()), *([step["when"]] if "when" in step else [])]
        then, seen, outputs = step.get("then"), "", []
        request = self._client.execute(step["cell"])
        for kind, content in self._outputs(request):
            outputs.append({"kind": kind, **content})
            seen += json.dumps(content, ensure_ascii=False)
            while markers and markers[0] in seen:
                seen = seen.split(markers.pop(0), 1)[1]
                if markers or then is None:
                    self._kernel.interrupt_kernel()
                else:
                    return {"outputs": outputs, "left": self._end(then)}
        return {"outputs": outputs}

    def _outputs(self, request: str) -> Any:
        """Yield the outputs of a cell until it has ended."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            try:
                message = self._client.get_iopub_msg(timeout=1.0)
            except queue.Empty:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind in ("stream", "display_data", "update_display_data", "execute_result", "error"):
                yield kind, content
            elif kind == "status" and (content["execution_state"], message["parent_header"].get("msg_id")) == (
                "idle",
                request,
            ):
                return
        raise SystemExit(f"the cell has not ended within {LIMIT_S:g} s")

    def _end(self, how: str) -> list[str]:
        """Restart or kill the kernel, and return the command lines of its processes that do not end."""
        old = self._processes()
        assert len(old) > 1, "there is nothing that could be left behind"
        if how == "restart":
            self._kernel.restart_kernel()
        else:
            os.kill(self._kernel.pid, signal.SIGKILL)
        _, lasting = psutil.wait_procs(old, timeout=60)
        lasting = [each for each in lasting if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        if how == "restart":
            self._client.stop_channels()
            self._client = self._connect()
        return [" ".join(each.cmdline()) for each in lasting]

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
            except psutil.Error:  # it has ended meanwhile, or belongs to somebody else
                continue
        return found


def main() -> None:
    scenario = json.load(sys.stdin)
    driver = Driver(scenario)
    try:
        outcome = [driver.run(step) for step in scenario["steps"]]
    finally:
        driver.close()
    json.dump(outcome, sys.stdout)


if __name__ == "__main__":
    main()
