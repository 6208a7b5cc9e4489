"""Runs in a real Jupyter kernel: demo.ipynb, progress, interrupts, errors, and what a kernel leaves behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foreign_packages import JUPYTER
from forge.envs.external.venvs import VenvError, python_of

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "demo.ipynb"
DRIVER = ROOT / "tests" / "support" / "jupyter_driver.py"
LIMIT_S = 900

Outputs = list[dict[str, Any]]


@pytest.fixture(scope="module")
def jupyter() -> Path:
    """The Python with ipykernel. Tests are skipped where it cannot be installed."""
    try:
        return python_of(JUPYTER)
    except VenvError as error:
        pytest.skip(f"ipykernel cannot be installed here: {str(error)[-400:]}")


def drive(jupyter: Path, folder: Path, steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run cells in a kernel of this environment, and return what each put out."""
    version = "python" + sysconfig.get_python_version()
    scenario = {
        "python": sys.executable,
        "site": os.fspath(jupyter.parents[1] / "lib" / version / "site-packages"),
        "cwd": os.fspath(folder),
        "env": {"OMP_NUM_THREADS": "1", "IPYTHONDIR": os.fspath(folder / "ipython"), "TMPDIR": os.fspath(folder)},
        "steps": list(steps),
    }
    done = subprocess.run(
        [jupyter, DRIVER],
        input=json.dumps(scenario),
        env=os.environ | {"JUPYTER_RUNTIME_DIR": os.fspath(folder / "jupyter")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def printed(outputs: Outputs) -> str:
    return "".join(each["text"] for each in outputs if each["kind"] == "stream")


def errors(outputs: Outputs) -> list[dict[str, Any]]:
    return [each for each in outputs if each["kind"] == "error"]


def pages(outputs: Outputs, *kinds: str) -> list[str]:
    """The HTML of the outputs of these kinds, in their order."""
    return [each["data"]["text/html"] for each in outputs if each["kind"] in kinds and "text/html" in each["data"]]


# ---- The notebook of the repository --------------------------------------------------------------------------------


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


def test_all_cells_run(notebook: dict[str, Any], jupyter: Path, tmp_path: Path, leaves_nothing: None) -> None:
    code = ["".join(cell["source"]).strip() for cell in notebook["cells"] if cell["cell_type"] == "code"]
    cells = [step["outputs"] for step in drive(jupyter, tmp_path, [{"cell": each} for each in code])]
    assert [errors(outputs) for outputs in cells if errors(outputs)] == []
    lines = "\n".join(map(printed, cells)).splitlines()
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
        assert said in lines, lines
    assert any(re.fullmatch(r"gradient norm \d+\.\d+, ratio 1\.000000", line) for line in lines), lines
    ((_, _, numbers),) = [line.partition("reward of each step: ") for line in lines if line.startswith("reward of")]
    rewards = list(map(float, numbers.split()))
    assert len(rewards) == 10
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3  # it learned: the seeds are fixed, so this is no matter of luck
    (report,) = [line.removeprefix("report: ") for line in lines if line.startswith("report: ")]
    assert Path(report).stat().st_size > 10_000
    (run,) = [outputs for source, outputs in zip(code, cells, strict=True) if "await run_grpo" in source]
    progress = pages(run, "display_data", "update_display_data")
    shown_in = {each["transient"]["display_id"] for each in run if each["kind"].endswith("display_data")}
    assert len(shown_in) == 2  # the start, and then the run
    assert "step 10/10" in progress[-1]
    assert "<svg" in progress[-1]
    (shown,) = pages(run, "execute_result")
    assert "Done after 10 steps" in shown
    assert shown.count("<svg") >= 4
    assert not re.search(r"^(Step|Start)", printed(run), re.MULTILINE)  # the displays take the place of lines
    start, *_ = pages(run, "display_data", "update_display_data")
    assert start == "<div>Starting 0:00</div>"
    ended = [page for page in pages(run, "update_display_data") if page.startswith("<div>Started in ")]
    assert len(ended) == 1
    (completions,) = pages(cells[code.index("run.completions(4)")], "execute_result")
    assert completions.count("advantage") == 4


# ---- Interrupts, errors, restarts ----------------------------------------------------------------------------------

BEGIN = """
from forge.config import GRPOConfig, load
from forge.loops.grpo import run_grpo

text = r'''
run: {name: long, output_dir: runs}
model: {preset: tiny}
prompts: {sources: [{task: arithmetic}]}
rewards: {functions: [{kind: regex, name: digit, args: {pattern: '\\d'}}]}
rollout: {batch_groups: 2, group_size: 4, no_signal: keep}
placement: shared
generator: {max_seq_len: 128, sampling: {max_tokens: 8}}
training: {max_steps: 100000, max_seq_len: 128, learning_rate: 1e-5, schedule: constant}
checkpointing: {export_hf: false}
record: {trace: false, report: false}
metrics: {tensorboard: false}
'''
open("long.yaml", "w").write(text)
new = load(GRPOConfig, files=["long.yaml"])
resumed = load(GRPOConfig, files=["long.yaml"], overrides=["checkpointing.resume=auto"])
result = None
"""
RUNNING = "Gradient norm"
"""Appears in the progress with the first step."""
STOPPING = "stopping on SIGINT"


@pytest.fixture(scope="module")
def outcomes(jupyter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What cells put out that run, interrupt and lose a run, all in one kernel and its successor."""
    steps = {
        "begin": {"cell": BEGIN},
        "stopped": {"cell": "result = await run_grpo(new)\nresult", "interrupts": [RUNNING]},
        "refused": {"cell": "await run_grpo(new)"},
        "unknown": {"cell": "load(GRPOConfig, overrides=['training.learning_rte=1'])"},
        "ended": {"cell": "again = await run_grpo(resumed)", "interrupts": [RUNNING, STOPPING]},
        "after": {"cell": "print(result.step, result.is_stopped, result.exit_code)"},
        "background": {"cell": "import asyncio\ntask = asyncio.create_task(run_grpo(resumed))"},
        "meanwhile": {"cell": "while not (result.folder / 'metrics.jsonl').exists(): await asyncio.sleep(0.01)\n1 + 1"},
        "restarted": {"cell": "await task", "when": RUNNING, "then": "restart"},
        "begin again": {"cell": BEGIN},
        "killed": {"cell": "await run_grpo(resumed)", "when": RUNNING, "then": "kill"},
    }
    found = drive(jupyter, tmp_path_factory.mktemp("kernel"), list(steps.values()))
    return dict(zip(steps, found, strict=True))


def test_the_first_interrupt_finishes_the_step_and_returns_the_result(outcomes: dict[str, dict[str, Any]]) -> None:
    outputs = outcomes["stopped"]["outputs"]
    assert errors(outputs) == []
    assert "this step is finished and saved; interrupt the kernel again to end at once" in printed(outputs)
    step = int(re.findall(r"stopped after step (\d+); checkpointing.resume=auto continues", printed(outputs))[0])
    assert step >= 1
    (shown,) = pages(outputs, "execute_result")
    assert f"Stopped after {step} steps" in shown
    assert f"step {step}/100000" in pages(outputs, "display_data", "update_display_data")[-1]
    assert printed(outcomes["after"]["outputs"]) == f"{step} True 130\n"


def test_an_error_of_the_user_is_shown_without_the_lines_of_the_library(outcomes: dict[str, dict[str, Any]]) -> None:
    (error,) = errors(outcomes["refused"]["outputs"])
    assert error["ename"] == "CheckpointError"
    shown = "\n".join(error["traceback"])
    assert "in Python, set checkpointing.resume=auto instead of --resume" in shown
    assert "  cell:   await run_grpo(new)" in shown
    assert "forge/loops" not in shown
    (error,) = errors(outcomes["unknown"]["outputs"])
    assert "did you mean `training.learning_rate`?" in "\n".join(error["traceback"])


def test_a_second_interrupt_ends_the_run_and_not_the_kernel(outcomes: dict[str, dict[str, Any]]) -> None:
    outputs = outcomes["ended"]["outputs"]
    (error,) = errors(outputs)
    assert error["ename"] == "RunInterrupted"
    assert error["traceback"] == ["RunInterrupted: the run was ended at once, by a second interrupt"]
    assert errors(outcomes["after"]["outputs"]) == []


def test_a_task_runs_while_the_notebook_is_used(outcomes: dict[str, dict[str, Any]]) -> None:
    assert errors(outcomes["background"]["outputs"]) == errors(outcomes["meanwhile"]["outputs"]) == []


@pytest.mark.parametrize("how", ["restarted", "killed"])
def test_nothing_is_left_of_a_run_whose_kernel_ends(how: str, outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes[how]["left"] == []
