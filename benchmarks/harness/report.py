"""What was found, as Markdown tables; and the machine on which it was."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil


def machine() -> dict[str, Any]:
    names = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torchforge": version("torchforge"),
        "torchmonarch": version("torchmonarch"),
        "load_before": os.getloadavg()[0],
    }


def verdict(row: dict[str, Any], sign: str) -> str:
    if row["goal"] is None:
        return ""
    return f"{sign} {row['goal']}: {'met' if row['met'] else 'missed'}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def comparison_table(rows: Iterable[dict[str, Any]]) -> str:
    head = (
        "routed calls against",
        "ours /s (best)",
        "peer /s (best)",
        "ratio (quartiles)",
        "CPU µs a call, ours / peer",
        "bytes kept a call, ours / peer",
        "goal",
    )
    return table(
        head,
        (
            (
                row["what"],
                f"{row['ours']['rate']:,.0f} ({row['ours']['rate_best']:,.0f})",
                f"{row['peer']['rate']:,.0f} ({row['peer']['rate_best']:,.0f})",
                f"{row['ratio']:.2f} ({row['ratio_quartiles'][0]:.2f}–{row['ratio_quartiles'][1]:.2f})",
                f"{row['ours']['total_cpu_us']:.0f} / {row['peer']['total_cpu_us']:.0f}",
                f"{row['ours']['caller_growth_b']:,.0f} / {row['peer']['caller_growth_b']:,.0f}",
                verdict(row, "≥"),
            )
            for row in rows
        ),
    )
