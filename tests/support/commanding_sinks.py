"""Metrics sinks that give commands to the run that they belong to: named in a configuration."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge.loops.run_control import SOCKET_NAME


def commanding(answers: Path, **at_steps: Mapping[str, Any]) -> str:
    """The override that names `Command`: requests by `step_N`."""
    return f"metrics.sinks=[{command_sink(answers, **at_steps)}]"


def command_sink(answers: Path, **at_steps: Mapping[str, Any]) -> str:
    """An element of `metrics.sinks`."""
    requests = json.dumps({name.removeprefix("step_"): dict(request) for name, request in at_steps.items()})
    return f"{{kind: 'commanding_sinks:Command', args: {{answers: '{answers}', requests: {requests}}}}}"


class Command:
    """When a step is written, sends a request. It is on its way when `write` returns; the answer is written to a file
    `step_N.json` when it comes."""

    def __init__(self, folder: Path, *, answers: str, requests: Mapping[str, Any]) -> None:
        self._folder, self._answers = folder, Path(answers)
        self._requests = {int(step): request for step, request in requests.items()}
        self._threads: list[threading.Thread] = []

    def write(self, step: int, values: Mapping[str, object]) -> None:
        request = self._requests.pop(step, None)
        if request is None:
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        connection.connect(f"/proc/self/fd/{handle}/{SOCKET_NAME}")
        os.close(handle)
        connection.sendall(json.dumps(dict(request)).encode() + b"\n")
        thread = threading.Thread(target=self._receive, args=(step, connection))
        thread.start()
        self._threads.append(thread)

    def _receive(self, step: int, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            answer = lines.readline()
        (self._answers / f"step_{step}.json").write_bytes(answer)

    def close(self) -> None:
        for thread in self._threads:
            thread.join()
