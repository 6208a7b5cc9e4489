"""demo.ipynb is a notebook that opens, and its cells run and show what their text says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "demo.ipynb"
RUNNER = ROOT / "tests" / "support" / "run_notebook.py"


@pytest.fixture(scope="module")
def notebook() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return content


def test_it_is_what_jupyter_opens(notebook: dict[str, Any]) -> None:
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        expected = {"cell_type", "id", "metadata", "source"}
        expected |= {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == expected
        assert cell["cell_type"] in ("code", "markdown")


def test_it_is_kept_without_outputs(notebook: dict[str, Any]) -> None:
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_its_links_lead_somewhere(notebook: dict[str, Any]) -> None:
    text = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_all_cells_run(tmp_path: Path, leaves_nothing: None) -> None:
    done = subprocess.run(
        [sys.executable, str(RUNNER), str(NOTEBOOK)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for said in (
        "7 / 2 = 3.5",
        "replicas in processes of their own: True",
        "raised to the caller: division by zero",
        "after kill -9: [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]",
        "version 1 arrived whole: True",
        "the same numbers: True",
        "8 completions, made by version {-1}",
        "the generator has version 1 - canary 0.0",
        "now version {1}",
    ):
        assert said in lines, done.stdout
    assert any(re.fullmatch(r"gradient norm \d+\.\d+, ratio 1\.000000", line) for line in lines), done.stdout
    rewards = [float(line.split()[1]) for line in lines if re.fullmatch(r" *\d+  \d\.\d\d  #*", line)]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3  # it learned: the seeds are fixed, so this is no matter of luck
    (report,) = [line.removeprefix("report: ") for line in lines if line.startswith("report: ")]
    assert Path(report).stat().st_size > 10_000
