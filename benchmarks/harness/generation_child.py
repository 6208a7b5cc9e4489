"""One side of `generation.py` as a process: it loads the model, makes a first token, and then does what it is told.

Only the standard library is used here: this file also runs in the environments of peers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.generation_plan import PROBE, Plan, Wanted, requests

SPAWNED = "FORGE_BENCHMARK_SPAWNED"
"""When the process was started, on the clock that all processes of a machine share."""
NUM_PROBED = 12


@dataclass(frozen=True)
class Made:
    """What was drawn for one request; `logprobs` is empty where they were not asked for."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


class Contender(Protocol):
    """Something that makes tokens. `about` is what a reader of the figures should know of it."""

    about: dict[str, Any]

    def make(self, wanted: Sequence[Wanted], *, greedy: bool = False) -> list[Made]: ...

    def close(self) -> None: ...


Open = Callable[[Path, Plan, int], Contender]


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def serve(open_contender: Open, folder: Path, *, threads: int, imports: Callable[[], object]) -> None:
    """Be a side until nobody is left to say what to do. `imports` loads the libraries, which is timed by itself."""
    began = time.perf_counter()
    imports()
    imported = time.perf_counter()
    plan = Plan.read(folder / "plan.json")
    contender = open_contender(folder / "model", plan, threads)
    try:
        contender.make([Wanted(PROBE, 1)], greedy=True)
        first = time.perf_counter()
        (probe,) = contender.make([Wanted(PROBE, NUM_PROBED)], greedy=True)
        say(
            "ready",
            spawn_to_first_s=first - float(os.environ[SPAWNED]),
            imports_s=imported - began,
            load_to_first_s=first - imported,
            probe=list(probe.token_ids),
            about=contender.about,
        )
        for line in sys.stdin:
            say("window", **_window(contender, plan, **json.loads(line)))
    finally:
        contender.close()


def _window(contender: Contender, plan: Plan, *, load: str, number: int, most: int | None = None) -> dict[str, Any]:
    wanted = requests(plan, load, number)[:most]
    cpu_s, began = family_cpu_s(), time.perf_counter()
    made = contender.make(wanted)
    seconds, cpu_s = time.perf_counter() - began, family_cpu_s() - cpu_s
    for asked, got in zip(wanted, made, strict=True):
        if len(got.token_ids) != asked.num_new or len(got.logprobs) not in (0, asked.num_new):
            raise RuntimeError(f"{asked.num_new} tokens were asked for, and {len(got.token_ids)} came")
    logprobs = [value for each in made for value in each.logprobs]
    return {
        "tokens": sum(asked.num_new for asked in wanted),
        "seconds": seconds,
        "cpu_seconds": cpu_s,
        "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
    }


def family_cpu_s() -> float:
    """CPU seconds of this process and of those that it started."""
    import psutil

    children = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(times.user + times.system for times in children)
