"""What was found, as Markdown tables; and the machine on which it was."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    import psutil  # only here: tables are also printed where it is not installed

    names = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torchforge": _own_version(),
        "torchmonarch": version("torchmonarch"),
        "load_before": os.getloadavg()[0],
    }


def _own_version() -> str:
    """Return the version that is installed; a machine without network may run from the sources."""
    try:
        return version("torchforge")
    except PackageNotFoundError:
        return "from sources"


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


def throughput_table(rows: Iterable[dict[str, Any]], *, peer: str = "memcpy") -> str:
    """Rows of `harness.throughput.row`."""
    head = (
        "what",
        "GB/s (best)",
        f"{peer} GB/s (best)",
        "ratio (quartiles)",
        f"CPU s/GB, ours / {peer}",
        "TorchStore GB/s (other run)",
        "goal",
    )
    return table(
        head,
        (
            (
                row["what"],
                f"{row['ours']['gbps']:.2f} ({row['ours']['gbps_best']:.2f})",
                f"{row['peer']['gbps']:.2f} ({row['peer']['gbps_best']:.2f})",
                f"{row['ratio']:.2f} ({row['ratio_quartiles'][0]:.2f}–{row['ratio_quartiles'][1]:.2f})",
                f"{row['ours']['cpu_s_per_gb']:.3f} / {row['peer']['cpu_s_per_gb']:.3f}",
                "" if row["torchstore"] is None else f"{row['torchstore']:.2f}",
                verdict(row, "≥"),
            )
            for row in rows
        ),
    )


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def figures_table(rows: Iterable[dict[str, Any]]) -> str:
    """Rows of `harness.throughput.figure`."""
    return table(
        ("what", "measured", "TorchStore (other run)", "goal"),
        (
            (row["what"], f"{number(row['value'])} {row['unit']}".strip(), row["torchstore"], verdict(row, row["sign"]))
            for row in rows
        ),
    )
