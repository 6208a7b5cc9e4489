"""The charts of `system.jsonl`: what processes use, which versions replicas serve, and what waits in queues."""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

from forge.observe.report.charts import Chart, charts_of
from forge.ui.metric_table import TableRows

_PROCESSES: Final = "Processes"
_GPUS: Final = "GPUs"
_GENERATORS: Final = "Generators"
_QUEUES: Final = "Buffer and queues"

CHARTS: Final = (
    Chart(
        _PROCESSES,
        "CPU",
        (("cpu/*", ""),),
        "Cores that a process kept busy since the line before, with the processes that it started.",
        unit="cores",
    ),
    Chart(
        _PROCESSES,
        "Memory",
        (("memory_gib/*", ""),),
        "Memory of its own. Pages that processes share since they were forked count in each of them.",
        unit="GiB",
    ),
    Chart(
        _PROCESSES,
        "Shared memory",
        (("shared_gib/*", ""),),
        "Shared memory that it has mapped, such as published weights. The same memory counts in each process.",
        unit="GiB",
    ),
    Chart(
        _GPUS,
        "GPU utilization",
        (("gpu/*", ""),),
        "The part of the time in which a GPU computed anything, by its driver.",
        unit="%",
    ),
    Chart(
        _GPUS, "GPU memory", (("gpu_used_gib/*", ""),), "Memory of a GPU that is in use, by any process.", unit="GiB"
    ),
    Chart(
        _GPUS,
        "GPU memory by process",
        (("gpu_memory_gib/*", ""),),
        "What PyTorch holds for a process, used or not.",
        unit="GiB",
    ),
    Chart(
        _GENERATORS,
        "Weight version",
        (("version/*", ""),),
        "The version that each replica serves, the newest that the trainer has published, and the one that all "
        "replicas serve.",
    ),
    Chart(_GENERATORS, "Completions in progress", (("running/*", ""),), "That a replica samples at the moment."),
    Chart(_GENERATORS, "Completions that wait", (("waiting/*", ""),), "In the queue of a replica's engine."),
    Chart(_GENERATORS, "Cache in use", (("cache/*", ""),), "The part of a replica's cache.", unit="%"),
    Chart(
        _QUEUES,
        "Buffer",
        (("buffer/ready", "ready"), ("buffer/in_flight", "being made"), ("buffer/requeued", "requeued")),
        "Groups: finished and not yet trained on, being generated or scored, and to be made again.",
    ),
    Chart(_QUEUES, "Calls in flight", (("calls/*", ""),), "Calls that a replica of a service has not answered yet."),
    Chart(_QUEUES, "Calls that wait", (("queue/*", ""),), "Calls for which no replica of a service had room."),
)


def system_charts(rows: TableRows) -> list[dict[str, Any]]:
    """Return the charts of a table."""
    return charts_of(known_names(rows), CHARTS)


def known_names(rows: TableRows) -> list[str]:
    """Return the metrics that were a number at least once, by name; of numbered ones in the order of their numbers."""
    names = [name for name, column in rows.columns.items() if not np.isnan(column).all()]
    return sorted(names, key=lambda name: [(int(part), "") if part.isdigit() else (-1, part) for part in _parts(name)])


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"(\d{1,9})", name) if part]
