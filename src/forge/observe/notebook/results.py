"""How the results of runs read in a notebook."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path

from forge.errors import DataError
from forge.observe.jsonl import read_jsonl
from forge.observe.notebook.charts import charts_html, inline_charts, number
from forge.observe.notebook.curves import Curves


def result_html(title: str, facts: Mapping[str, str], *, folder: Path | None) -> str:
    """Return a result with its facts, and the curves of the run where its metrics can be read."""
    charts = "" if folder is None else _charts_of(folder / "metrics.jsonl")
    return f'<div style="max-width:1200px"><b>{html.escape(title)}</b>{table_html(facts)}{charts}</div>'


def table_html(facts: Mapping[str, str]) -> str:
    """Return names and values as a table of two columns."""
    cell = 'style="text-align:left;padding:1px 12px 1px 0"'
    rows = "".join(
        f'<tr><td {cell}><span style="opacity:.75">{html.escape(name)}</span></td>'
        f"<td {cell}>{html.escape(value)}</td></tr>"
        for name, value in facts.items()
    )
    return f'<table style="font-size:13px;margin:4px 0 8px">{rows}</table>'


def evaluation_facts(values: Mapping[str, float]) -> dict[str, str]:
    """Return the metrics of an evaluation under short names."""
    return {
        name.removeprefix("evaluation/"): f"{value:.1%}" if "@" in name else number(value)
        for name, value in values.items()
    }


def _charts_of(path: Path) -> str:
    curves = Curves()
    try:
        for line in read_jsonl(path):
            curves.add(line.step, line.values)
    except (OSError, DataError):  # metrics.jsonl is false, or the folder was moved since
        return ""
    return charts_html(inline_charts(curves))
