"""The sides of `generation.py` as their parent sees them: processes that generate when they are told to."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from harness.generation_child import SPAWNED

SOURCES = Path(__file__).resolve().parent.parent.parent / "src"


@dataclass(frozen=True)
class Program:
    """How a side is started: an interpreter, a file, and which of the file's sides it is."""

    python: str
    file: Path
    name: str

    def command(self, folder: Path, threads: int) -> list[str]:
        return [self.python, str(self.file), self.name, str(folder), str(threads)]


@dataclass
class Side:
    """One process. `ready` is what it said when it had made its first token."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    ready: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, program: Program, folder: Path, *, threads: int) -> Self:
        """Start it. Threads that wait sleep on all sides, unless the environment says otherwise.

        Where they spin, on cores that others use too, two threads are several times slower than one.
        """
        log = folder / f"{program.name}-{threads}.log"
        known = os.environ.get("PYTHONPATH")
        environment = {
            "OMP_WAIT_POLICY": "PASSIVE",
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": str(SOURCES) if not known else f"{SOURCES}{os.pathsep}{known}",
            SPAWNED: repr(time.perf_counter()),
        }
        pipe = subprocess.PIPE
        with log.open("w") as errors:
            process = subprocess.Popen(
                program.command(folder, threads), stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment
            )
        return cls(name, process, log)

    def ask(self, **command: Any) -> dict[str, Any]:
        """Let it generate once; how many tokens, in what time."""
        stream = self._pipe(self.process.stdin)
        stream.write(json.dumps(command) + "\n")
        stream.flush()
        return self.read_until("window")

    def read_until(self, event: str) -> dict[str, Any]:
        for line in self._pipe(self.process.stdout):
            if line.startswith('{"event"') and (found := json.loads(line))["event"] == event:
                return {key: value for key, value in found.items() if key != "event"}
        self.process.wait()
        raise RuntimeError(f"{self.name}: ended before it said {event!r}\n{self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        """See that the process is gone: it ends in order when nobody is left to tell it to go on."""
        with contextlib.suppress(OSError):
            self._pipe(self.process.stdin).close()
        for end in (self.process.terminate, self.process.kill):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=60)
                break
            end()
        self.process.wait()
        self._pipe(self.process.stdout).close()

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


@contextlib.contextmanager
def started(programs: Mapping[str, Program], folder: Path, *, threads: int) -> Iterator[dict[str, Side]]:
    """All sides after their first token, started one after the other; they are gone afterwards, whatever happens."""
    sides: dict[str, Side] = {}
    try:
        for name, program in programs.items():
            sides[name] = Side.start(name, program, folder, threads=threads)
            sides[name].ready = sides[name].read_until("ready")
        yield sides
    finally:
        for side in sides.values():
            side.stop()
