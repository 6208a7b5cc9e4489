"""A process that has imported a test's module, and forks ranks on request. Ranks then start without importing torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

LIMIT_S = 600


class RankServer:
    """Starts `program` with the name of a test's module as its argument; requests go through its standard streams."""

    def __init__(self, module: str, *, program: str) -> None:
        path = Path(sys.modules[module].__file__ or "")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        folders = [str(Path(__file__).parent), str(path.parent), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)
        self._process = subprocess.Popen(
            [sys.executable, program, path.stem], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    @property
    def requests(self) -> BinaryIO:
        assert self._process.stdin is not None
        return self._process.stdin  # type: ignore[return-value]

    @property
    def answers(self) -> BinaryIO:
        assert self._process.stdout is not None
        return self._process.stdout  # type: ignore[return-value]

    def close(self) -> None:
        self.requests.close()
        self._process.wait(timeout=LIMIT_S)


S = TypeVar("S", bound=RankServer)


def until_closed(server: S) -> Iterator[S]:
    """Yield the server, and close it afterwards: the body of a module's fixture."""
    try:
        yield server
    finally:
        server.close()
