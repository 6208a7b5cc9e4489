"""Comparisons with TRL: sides that train in turns, each in a process of its own, and the programs' command line."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from harness.report import machine

ROOT = Path(__file__).resolve().parents[2]
TRL_PACKAGES = (
    "torch==2.13.0",
    "trl==1.16.0",
    "transformers==5.22.2",
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "peft==0.18.1",
)

# ---- the sides


@dataclass
class Side:
    """A process that trains for one window whenever it is told to."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    windows: list[dict[str, Any]] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, command: Sequence[str], log: Path, *, threads: int) -> Self:
        """Start the process; what it prints for people goes into `log`."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        pipe = subprocess.PIPE
        with log.open("w") as errors:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment)
        return cls(name, process, log)

    def take_turn(self) -> dict[str, Any]:
        """Let it train for one window, and return what it reports."""
        self._tell()
        return self.read_until("window")

    def finish(self, *, with_turn: bool = False) -> dict[str, Any]:
        """Let it end in order, after a last turn if it has one, and return what it reports last."""
        if with_turn:
            self._tell()
        else:
            self._pipe(self.process.stdin).close()
        self.last = self.read_until("done")
        self._pipe(self.process.stdin).close()
        self.process.wait(timeout=120)
        return self.last

    def stop(self) -> None:
        """See that the process is gone: it ends in order when its input ends."""
        with contextlib.suppress(OSError):
            self._pipe(self.process.stdin).close()
        for end in (self.process.terminate, self.process.kill):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=60)
            end()
        self.process.wait()

    def read_until(self, event: str) -> dict[str, Any]:
        """Return the next report of this event; reports of validations before it become the curve, logs are kept."""
        for line in self._pipe(self.process.stdout):
            if not line.startswith('{"event"'):
                continue  # a line for people
            found: dict[str, Any] = json.loads(line)
            if found["event"] == "validation":
                self.curve.append((found["tokens"], found["loss"]))
            if found["event"] == "log":
                self.logs.append(found)
            if found["event"] == event:
                return found
        self.process.wait()
        raise RuntimeError(f"{self.name}: ended before its {event}\n{self.log.read_text()[-4000:]}")

    def _tell(self) -> None:
        stream = self._pipe(self.process.stdin)
        stream.write("\n")
        stream.flush()

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


@contextlib.contextmanager
def started(wanted: Mapping[str, Sequence[str]], folder: Path, *, threads: int | None = None) -> Iterator[list[Side]]:
    """Yield all sides after their first report of a window, started one after the other; stop them in any case.

    Without `threads`, sides have one thread, or two where the name says so.
    """
    sides: list[Side] = []
    try:
        for number, (name, command) in enumerate(wanted.items()):
            count = threads or (2 if "2 threads" in name else 1)
            sides.append(Side.start(name, command, folder / f"side{number}.log", threads=count))
            sides[-1].windows.append(sides[-1].read_until("window"))
        yield sides
    finally:
        for side in sides:
            side.stop()


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


# ---- TRL


def trl_program(environment: Path, name: str, options: Mapping[str, Any]) -> list[str]:
    """Return the command of a program of this folder, run by the interpreter that has TRL."""
    program = Path(__file__).resolve().parent / name
    return [str(environment / "bin" / "python"), str(program), *words_of(options)]


def make_environment(folder: Path) -> None:
    """Make an environment with TRL, once; releases are pinned, and torch is the one that we use."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    wanted = [package.partition("==")[::2] for package in TRL_PACKAGES]
    probe = (
        "from importlib.metadata import version as v; import sys; print(*(v(n).split('+')[0] for n in sys.argv[1:]))"
    )
    names, versions = zip(*wanted, strict=True)
    found = subprocess.run([str(python), "-c", probe, *names], capture_output=True, text=True)
    if found.stdout.split() != list(versions):
        print(f"installing {' '.join(TRL_PACKAGES)} into {folder.name}", file=sys.stderr, flush=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *TRL_PACKAGES], check=True)


# ---- the command line


def comparison_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows the options of every comparison; `description` is the program's docstring."""
    parser = argparse.ArgumentParser(description=" ".join((description or "").split("\n\n")[0].split()))
    parser.add_argument("--quick", action="store_true", help="a smoke run of a tiny model; figures mean little")
    parser.add_argument("--with-trl", action="store_true", help="compare with TRL, installed into .venv-trl if need be")
    parser.add_argument("--trl-venv", type=Path, help="compare with TRL in this environment")
    parser.add_argument("--rounds", type=int, help="windows of each side")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal was missed")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return parser


def add_start_options(parser: argparse.ArgumentParser, *, sides: Sequence[str], which: str) -> None:
    """Add the options of comparisons whose sides start from a model that is trained here first."""
    parser.add_argument("--sides", nargs="+", choices=list(sides), help=which)
    parser.add_argument("--window", type=int, help="steps of a window")
    parser.add_argument("--start", type=Path, help="a model that --keep-start kept, instead of training one")
    parser.add_argument("--keep-start", type=Path, help="keep the model that all sides start from in this new folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of our sides")
    parser.add_argument("--side", help=argparse.SUPPRESS)


def parse_comparison(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return what the command line asks for."""
    chosen = parser.parse_args()
    if chosen.trl_venv is not None and not (chosen.trl_venv / "bin" / "python").exists():
        parser.error(f"--trl-venv {chosen.trl_venv}: no environment there; --with-trl makes one")
    return chosen


def run_comparison(
    chosen: argparse.Namespace,
    *,
    serve: Callable[[Path, dict[str, Any]], None],
    measure: Callable[[Path | None], dict[str, Any]],
    report: Callable[[dict[str, Any]], str],
    draw: Callable[[dict[str, Any]], None] | None = None,
) -> int:
    """Be one of our sides where the command line says so; otherwise measure, print and write what was found.

    Args:
        serve: gets the folder of a comparison and its plan.
        measure: gets the environment that has TRL, or None where TRL is not compared with.

    Returns:
        The exit status.
    """
    logging.getLogger("forge").setLevel(logging.ERROR)
    if chosen.serve is not None:
        serve(chosen.serve, json.loads((chosen.serve / "plan.json").read_text()))
        return 0
    environment: Path | None = chosen.trl_venv
    if environment is None and chosen.with_trl:
        environment = ROOT / ".venv-trl"
        make_environment(environment)
    found = {"machine": machine(), **measure(environment)}
    found["machine"]["load_after"] = os.getloadavg()[0]
    print(", ".join(f"{name} {value}" for name, value in found["machine"].items()) + f"\n\n{report(found)}")
    if environment is None:
        print("\nTRL: not measured: pass --with-trl")
    if draw is not None:
        draw(found)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    missed = [row["what"] for row in found["rows"] if row["met"] is False]
    print("\n" + ("goals missed: " + "; ".join(missed) if missed else "every goal measured was met"))
    return 1 if chosen.check and missed else 0
