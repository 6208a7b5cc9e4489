"""The programs of the pages that users begin with run as they stand there, and print what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "writing_your_own.md"
FIRST = ROOT / "docs" / "first_run.md"


def files() -> dict[str, str]:
    """The blocks of the page that name a file in their first line, and its record of a prompt file."""
    text = PAGE.read_text(encoding="utf-8")
    found = dict(re.findall(r"^```(?:python|yaml)\n# ([\w.]+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    (record,) = re.findall(r"^```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return found | {"my_prompts.jsonl": record}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in files().items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    return tmp_path


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_the_files_that_it_speaks_of() -> None:
    modules = {f"my_{kind}.py" for kind in ("rewards", "tasks", "losses", "advantages", "engines", "sinks")}
    configurations = {f"my_{name}.yaml" for name in ("run", "surrogate", "advantages", "sinks")}
    assert set(files()) == {*modules, *configurations, "loop.py", "my_prompts.jsonl"}


def test_the_reward_can_be_tried(folder: Path) -> None:
    assert run(folder, "-m", "forge.cli", "rewards", "try", "my_rewards:digits", "--text", "a1", "most=2") == "0.5\n"


def test_the_first_service_answers(tmp_path: Path, leaves_nothing: None) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", FIRST.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "hello.py").write_text(program, encoding="utf-8")
    assert "hello world" in run(tmp_path, "hello.py").splitlines()


def test_the_first_configuration_is_valid(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", FIRST.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "first.yaml").write_text(text, encoding="utf-8")
    command = ["-m", "forge.cli", "run", str(ROOT / "apps" / "grpo" / "main.py"), "--config", "first.yaml", "--dry-run"]
    said = run(tmp_path, *command)
    assert said.startswith("The configuration is valid, and the run would start:\n")
    assert said.endswith("Nothing was started.\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.yaml"]


def test_a_loss_of_ones_own_goes_through_the_loop(folder: Path, leaves_nothing: None) -> None:
    program = str(ROOT / "apps" / "grpo" / "main.py")
    printed = run(folder, "-m", "forge.cli", "run", program, "--config", "my_run.yaml").splitlines()
    steps = [line for line in printed if line.startswith("Step ")]
    assert len(steps) == 4
    assert all(" | entropy " in line for line in steps)


def test_all_other_parts_of_ones_own_go_through_the_loop(folder: Path, leaves_nothing: None) -> None:
    program = str(ROOT / "apps" / "grpo" / "main.py")
    names = ("run", "surrogate", "advantages", "sinks")
    files = [word for name in names for word in ("--config", f"my_{name}.yaml")]
    parts = ["algorithm.loss.function=policy", "generator.engine=my_engines:Counting", "run.name=own-parts"]
    task = "prompts.sources=[{task: 'my_tasks:Digits', task_args: {most: 3}}]"
    run(folder, "-m", "forge.cli", "run", program, *files, *parts, task)
    (written,) = folder.glob("**/metric.csv")
    assert [line.partition(",")[0] for line in written.read_text().splitlines()] == ["1", "2", "3", "4"]


def test_a_loop_of_ones_own_learns_within_its_staleness(folder: Path, leaves_nothing: None) -> None:
    said = run(folder, "loop.py").splitlines()
    assert said[-1] == "done after 4 steps"
    steps = [re.fullmatch(r"step (\d): reward \d\.\d\d, staleness (\d), gradient (\d+\.\d\d)", line) for line in said]
    found = [step.groups() for step in steps if step is not None]
    assert [int(number) for number, _, _ in found] == [1, 2, 3, 4]
    assert {int(staleness) for _, staleness, _ in found} <= {0, 1}
    assert all(float(norm) > 0 for _, _, norm in found)
