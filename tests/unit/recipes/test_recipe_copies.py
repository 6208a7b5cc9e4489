"""`forge copy` and `forge new`: the files of a copy hold in their new place, and a new project runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.cli import main
from forge.config import load
from forge.config.command_line import MODULE_FOLDERS, SCHEMAS, detect_kind
from forge.errors import ConfigError
from forge.recipes import recipes
from forge.recipes.command import texts
from forge.recipes.copying import commands, copy_recipe, files_of
from forge.recipes.project import TASKS, make_project, run_command

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 900
OWN = ("digits", "tools", "environment", "sft", "preferences")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["forge"])
    monkeypatch.setenv(MODULE_FOLDERS, "")
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def schema_of(file: Path) -> type[Any]:
    return SCHEMAS[detect_kind([str(file)], []).kind]


# ---- Copies


@pytest.mark.parametrize("name", recipes())
def test_a_copy_has_all_that_it_names(name: str, place: Path) -> None:
    recipe = recipes()[name]
    written = copy_recipe(recipe, place / "mine")
    names = {path.name for path in written}
    assert {"main.py", recipe.config.name} <= names
    for path in written:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            compile(text, str(path), "exec")
        if path.suffix == ".yaml":
            assert load(schema_of(path), files=[path]) == load(schema_of(path), files=[path])
            data = [value for key, value in texts(yaml.safe_load(text)) if value.endswith(".jsonl")]
            assert [each for each in data if not each.startswith("runs/") and each not in names] == []
        for source in files_of(recipe).sources.values():
            gone = f"apps/{source.relative_to(ROOT / 'apps').as_posix()}"
            assert gone not in re.sub(r"https://\S+", "", text), path
    for command in commands(recipe, files_of(recipe)):
        files = re.findall(r"\b[\w]+\.(?:py|yaml)\b", command)
        assert files
        assert set(files) <= names


def test_the_readme_begins_with_the_commands_of_the_copy(place: Path) -> None:
    copy_recipe(recipes()["grpo/tiny"], Path("mine"))
    assert (
        (place / "mine" / "README.md")
        .read_text()
        .startswith(
            "A copy of the recipe `grpo/tiny` of TorchForge 0.1.0. To run it:\n\n```bash\ncd mine\n"
            "python digits.py runs/quickstart/task\nforge run sft --config sft.yaml\n"
            "forge run main.py --config tiny.yaml\n```\n\n# Reinforcement learning\n"
        )
    )


@pytest.mark.parametrize("name", ["sft/tiny", "dpo/tiny", "reward_model/tiny"])
def test_a_copy_would_start(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_recipe(recipes()[name], place / "mine")
    monkeypatch.chdir(place / "mine")
    assert main(["run", "main.py", "--config", "tiny.yaml", "--dry-run"]) == 0


@pytest.mark.parametrize("name", ["tools/grpo", "selfplay/kuhn/league", "rlhf/tiny_grpo"])
def test_the_program_of_a_copy_finds_its_modules(name: str, place: Path) -> None:
    copy_recipe(recipes()[name], place / "mine")
    ran = run(place / "mine", "main.py", "--help")
    assert ran.returncode == 0, ran.stderr
    assert "usage: main.py" in ran.stdout


def test_no_file_is_overwritten(place: Path) -> None:
    (place / "mine").mkdir()
    (place / "mine" / "tiny.yaml").write_text("precious")
    with pytest.raises(ConfigError) as caught:
        copy_recipe(recipes()["sft/tiny"], Path("mine"))
    error = caught.value
    assert (error.path, error.value, error.rule) == ("FOLDER", "mine", "a folder without tiny.yaml")
    assert error.repair == "name another folder, or move them away"
    assert [path.name for path in (place / "mine").iterdir()] == ["tiny.yaml"]
    (place / "other").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        copy_recipe(recipes()["sft/tiny"], Path("other"))
    assert caught.value.path == "FOLDER"


def test_a_copy_goes_beside_other_files(place: Path) -> None:
    (place / "mine").mkdir()
    (place / "mine" / "notes.txt").write_text("mine")
    copy_recipe(recipes()["sft/tiny"], place / "mine")
    assert (place / "mine" / "notes.txt").read_text() == "mine"


# ---- Projects


def test_the_tasks_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuple(TASKS) == OWN
    with pytest.raises(SystemExit):
        main(["new", "--help"])
    assert "digits, tools, environment, sft or preferences" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("task", OWN)
def test_a_new_project_is_whole_and_passes_its_test(task: str, place: Path) -> None:
    written = {path.relative_to(place / "My Project").as_posix() for path in make_project(place / "My Project", task)}
    assert {"README.md", ".gitignore", "pyproject.toml", "main.py"} <= written
    project = tomllib.loads((place / "My Project" / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["dependencies"]) == ("my-project", ["torchforge~=0.1.0"])
    readme = (place / "My Project" / "README.md").read_text()
    assert run_command(task) in readme
    for name in re.findall(r"^- `(\w+\.(?:py|yaml|jsonl))`", readme, re.MULTILINE):
        assert name in written
    for name in written:
        text = (place / "My Project" / name).read_text()
        assert "apps/" not in text or name == "digits.py"
        if name.endswith(".yaml"):
            config = load(schema_of(place / "My Project" / name), files=[place / "My Project" / name])
            assert "my-project" in str(config.run.output_dir / config.run.name)
    changed = (place / "My Project" / ("train.yaml" if TASKS[task].module is None else "grpo.yaml")).read_text()
    assert all(new in changed and old not in changed for old, new in TASKS[task].settings.items())
    ran = run(place / "My Project", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    linted = run(place / "My Project", "-m", "ruff", "check", "--isolated", "--line-length", "120", ".")
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize(
    ("folder", "task", "path", "rule"),
    [
        ("mine", "tool", "--task", "one of digits, tools, environment, sft, preferences"),
        ("full", "tools", "FOLDER", "a folder that is empty, or that does not exist"),
        ("full/file", "tools", "FOLDER", "a folder that is empty, or that does not exist"),
        ("---", "tools", "FOLDER", "a name with a letter or a digit in it"),
    ],
)
def test_a_project_that_cannot_be_made(folder: str, task: str, path: str, rule: str, place: Path) -> None:
    (place / "full").mkdir()
    (place / "full" / "file").write_text("precious")
    with pytest.raises(ConfigError) as caught:
        make_project(Path(folder), task)
    error = caught.value
    assert (error.path, error.rule) == (path, rule)
    assert error.value in (folder, task)
    assert error.repair
    assert sorted(path.name for path in place.iterdir()) == ["full"]
