"""Sides as child processes, one after the other, within a budget of time.

A side owns the GPU alone. It writes what it has measured into a file of events as it goes, so that a side that is
ended because its time is over still has told what it found.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from harness.gpu_memory import GpuMemory, Reader, family, resident_bytes, settled, watched
from harness.gpu_plan import EVENTS, ROOT

Event = Mapping[str, Any]
LOOK_S = 0.2
GRACE_S = 10.0
SLACK = 2**30
"""How much more than before may be in use on the GPU after a side has ended: what a driver keeps for a while."""


class Budget:
    """How much time is left of a number of minutes; without one, as much as is asked for."""

    def __init__(self, minutes: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if minutes is None else clock() + 60 * minutes

    @property
    def left_s(self) -> float:
        return float("inf") if self._end is None else max(0.0, self._end - self._clock())

    def has(self, seconds: float) -> bool:
        """Whether something that takes so long can still be done."""
        return self.left_s >= seconds

    def cut(self, seconds: float) -> float:
        """So many seconds, or what is left of them."""
        return min(seconds, self.left_s)

    @property
    def left_minutes(self) -> float | None:
        return None if self._end is None else self.left_s / 60


@dataclass
class Outcome:
    """How a side ended.

    Attributes:
        status: `ok`, `failed`, `time` (it was ended because its time was over) or `skipped`.
        events: what it told, in order.
        seconds: how long it ran.
        peak_bytes: the most that was in use, of the device or of its processes; start_bytes: before it began.
        why: the last lines of its log, or the reason for which it was skipped.
    """

    status: str
    events: list[Event] = field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int = 0
    start_bytes: int = 0
    why: str = ""

    def all(self, event: str) -> list[Event]:
        return [each for each in self.events if each["event"] == event]

    def last(self, event: str) -> Event | None:
        return next(iter(self.all(event)[::-1]), None)

    def summary(self) -> dict[str, Any]:
        """For the JSON file."""
        return {
            "status": self.status,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "start_bytes": self.start_bytes,
            "why": self.why,
            "events": [dict(event) for event in self.events],
        }


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def environment(device: str) -> dict[str, str]:
    """What every side gets: no network, our benchmarks importable, and on a CPU one thread for each process."""
    more = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1" if device == "cpu" else os.environ.get("OMP_NUM_THREADS", ""),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])),
    }
    if device == "cpu":
        more |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
        more["VLLM_USE_AOT_COMPILE"] = "0"
    return {**os.environ, **{name: value for name, value in more.items() if value}}


def run_side(
    name: str,
    command: Sequence[str],
    *,
    folder: Path,
    device: str,
    limit_s: float,
    more: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a side to its end, or until its time is over. Nothing of it is left when this returns."""
    events, log = folder / f"{name}.events.jsonl", folder / f"{name}.log"
    events.write_text("")
    gpu = GpuMemory() if device == "cuda" else None
    variables = {**environment(device), EVENTS: str(events), **(more or {})}
    began = time.monotonic()
    with log.open("w") as file:
        process = start(command, output=file, variables=variables)
        read: Reader = (lambda: resident_bytes(family(process.pid))) if gpu is None else gpu.used
        try:
            with watched(read) as peak:
                is_late = _follow(name, process, events, until=began + limit_s)
        finally:
            end_session(process)
    if gpu is not None and (left := settled(read, below=peak.start + SLACK)) > peak.start + SLACK:
        tell(f"{name}: {(left - peak.start) / 1e9:.1f} GB of the GPU are still in use after its end")
    status = "time" if is_late else "ok" if process.returncode == 0 else "failed"
    why = f"ended after {limit_s:.0f} s" if is_late else "" if status == "ok" else last_lines(log)
    return Outcome(status, read_events(events), time.monotonic() - began, peak.highest, peak.start, why)


def start(command: Sequence[str], *, output: IO[Any], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process with a session of its own, which does not outlive this one."""
    return subprocess.Popen(
        list(command),
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(variables),
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


def _follow(name: str, process: subprocess.Popen[bytes], events: Path, *, until: float) -> bool:
    """Print what a side tells until it ends; True if its time was over before."""
    num_shown = 0
    while True:
        is_over = process.poll() is not None
        for event in read_events(events)[num_shown:]:
            num_shown += 1
            if event["event"] != "phase":  # there are many
                tell(f"{name}: {shown(event)}")
        if is_over:
            return False
        if time.monotonic() > until:
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_S)


def read_events(path: Path) -> list[Event]:
    """The whole lines of a file of events; a line that is being written is left for the next time."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines if line]


def shown(event: Event) -> str:
    """An event on one line, its long parts left out."""
    parts = []
    for key, value in event.items():
        if key != "event" and not isinstance(value, dict | list):
            parts.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    return f"{event['event']}: {', '.join(parts)}" if parts else str(event["event"])


def last_lines(log: Path, most: int = 1500) -> str:
    """What a side said last, and before it the lines that name errors."""
    text = log.read_text(encoding="utf-8", errors="replace")
    errors = [line for line in text.splitlines() if "Error" in line][-3:]
    return "\n".join([*errors, "…", text[-most:]])


def end_session(process: subprocess.Popen[bytes], *, grace_s: float = GRACE_S) -> None:
    """End a side and all that it has started: first asked to, then not."""
    left = family(process.pid)
    for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, max(grace_s, GRACE_S))):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + limit_s
        while (left := [pid for pid in left if lives(pid)]) and time.monotonic() < until:
            time.sleep(LOOK_S / 4)
    process.wait()


def lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def measured(measure: Callable[[argparse.Namespace, Path], dict[str, Any]], chosen: argparse.Namespace) -> Any:
    """What `measure(chosen, folder)` found, in the folder that was asked for or one that is deleted afterwards.

    None, with a word about it, where a GPU is to be measured and there is none.
    """
    end_in_order()
    if chosen.device == "cuda" and not has_gpu():
        print("no NVIDIA GPU is visible here: nothing was measured. `--quick --device cpu` tries the program out.")
        return None
    if chosen.folder is not None:
        return measure(chosen, chosen.folder)
    with tempfile.TemporaryDirectory(prefix="forge-gpu-") as name:
        chosen.folder = Path(name)
        return measure(chosen, chosen.folder)


def has_gpu() -> bool:
    """Whether NVML knows a GPU here. torch is not asked: it would take memory of it."""
    try:
        return GpuMemory().total > 0
    except OSError:
        return False


def end_in_order() -> None:
    """Let a request to end this program run its `finally` blocks, which end the sides."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _die_with_parent() -> None:
    """Called in a new process: when the program that measures is killed, its side is asked to end."""
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGTERM)
