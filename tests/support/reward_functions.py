"""Rewards that behave badly, for the processes that tests start."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from forge.types import Completion, Task


def number_of(prompt: Task, completion: Completion) -> float:
    return float(completion.text)


def own_pid(prompt: Task, completion: Completion) -> int:
    return os.getpid()


def fact(prompt: Task, completion: Completion, *, name: str) -> float:
    """Something about the process that runs rewards."""
    return {
        "torch": float("torch" in sys.modules),
        "threads": float(os.environ["OMP_NUM_THREADS"]),
        "descriptors": float(len(os.listdir("/proc/self/fd"))),
    }[name]


def raises(prompt: Task, completion: Completion) -> float:
    raise KeyError("no such\nword")


def exits(prompt: Task, completion: Completion) -> float:
    sys.exit(3)


def answers(prompt: Task, completion: Completion, *, value: Any) -> Any:
    return {"text": "1.0", "none": None, "nan": float("nan"), "infinity": float("-inf"), "true": True}[value]


def prints(prompt: Task, completion: Completion) -> float:
    print("noise")
    os.write(1, b"\x00\x00\x00\x04junk\n")
    subprocess.run([sys.executable, "-S", "-c", "print('noise')"], check=True)
    return 1.0


def segfaults(prompt: Task, completion: Completion) -> float:
    ctypes.string_at(0)
    return 1.0


def ends_process(prompt: Task, completion: Completion) -> float:
    os._exit(3)


def forks(prompt: Task, completion: Completion) -> float:
    """The child comes back as well."""
    return float(os.fork() != 0)


def hangs(prompt: Task, completion: Completion, *, fifo: str) -> float:
    """Never ends, and neither does its child; neither listens to a polite signal. Their numbers go to the fifo."""
    for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(kind, signal.SIG_IGN)
    child = os.fork()
    if child != 0:
        with open(fifo, "w") as file:
            file.write(f"{os.getpid()} {child}\n")
    while True:
        time.sleep(60)


def waits_once(prompt: Task, completion: Completion, *, folder: str) -> float:
    """The first time, says its number and waits for ever; later, answers."""
    if Path(folder, "again").exists():
        return 1.0
    with open(Path(folder, "fifo"), "w") as file:
        file.write(f"{os.getpid()}\n")
    while True:
        time.sleep(60)


def signals_parent(prompt: Task, completion: Completion, *, name: str) -> float:
    """Sends its parent a signal, and answers with the parent's number if it lives to do so."""
    parent = os.getppid()
    os.kill(parent, signal.Signals[name])
    if name == "SIGSTOP":
        return float(parent)
    while True:
        time.sleep(60)


def meets(prompt: Task, completion: Completion, *, fifo: str) -> float:
    """Ends only when it runs twice at the same time, as a reader and as a writer."""
    with open(fifo, completion.text):
        return 1.0
