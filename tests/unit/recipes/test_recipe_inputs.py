"""What a recipe reads and no file holds yet: the commands that make it, and stand-ins for a check."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forge.config import load
from forge.config.command_line import MODULE_FOLDERS, SCHEMAS, add_module_folders, detect_kind
from forge.errors import ConfigError
from forge.loops.dry_run import dry_run
from forge.recipes import make_inputs, missing_steps, read_command, recipes
from forge.recipes.inputs import Step, steps_for
from forge.recipes.stand_ins import _write_files, stand_ins

LIMIT_S = 600
FOR_CPUS = [
    name
    for name, recipe in recipes().items()
    if recipe.hardware.startswith("CPU") and name not in ("grpo/tiny_vllm", "grpo/gsm8k_smollm2")
]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(MODULE_FOLDERS, "")
    return tmp_path


def commands(name: str, *words: str) -> list[str]:
    settings = read_command([name], words).settings
    assert settings is not None
    return [step.command for step in missing_steps(settings)]


def test_steps_come_in_the_order_in_which_they_depend_on_each_other() -> None:
    assert commands("grpo/curriculum_tiny") == [
        "python quickstart/digits.py runs/quickstart/task",
        "python grpo/mixed_digits.py runs/quickstart/task",
        "forge run quickstart/sft",
    ]
    assert commands("sft/tiny") == []


def test_what_is_there_is_not_made_again(place: Path) -> None:
    task = place / "runs" / "quickstart" / "task"
    task.mkdir(parents=True)
    for name in ("prompts.jsonl", "heldout.jsonl"):
        (task / name).touch()
    assert commands("grpo/curriculum_tiny") == [
        "python grpo/mixed_digits.py runs/quickstart/task",
        "forge run quickstart/sft",
    ]
    assert commands("grpo/tiny") == ["forge run quickstart/sft"]
    assert commands("grpo/tiny", "model.path=models/mine") == []
    (task / "heldout.jsonl").unlink()
    assert commands("grpo/tiny", "model.path=models/mine") == ["python quickstart/digits.py runs/quickstart/task"]


def test_only_paths_inside_of_what_is_made_have_steps() -> None:
    assert [step.path for step in steps_for("runs/quickstart/task/mixed.jsonl")] == [
        "runs/quickstart/task",
        "runs/quickstart/task/mixed.jsonl",
    ]
    assert steps_for("runs/quickstart/tasks.jsonl") == steps_for("runs/other") == []


def test_files_are_made_in_the_working_folder(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = {"prompts": {"sources": [{"path": "runs/quickstart/task/mixed.jsonl"}]}}
    assert make_inputs(settings, command="forge run") == 0
    assert sorted(path.name for path in (place / "runs" / "quickstart" / "task").iterdir()) == [
        *("demonstrations.jsonl", "heldout.jsonl", "mixed.jsonl", "prompts.jsonl", "right.jsonl")
    ]
    assert "forge run: runs/quickstart/task is made first: python quickstart/digits.py" in capfd.readouterr().err
    assert make_inputs(settings, command="forge run") == 0
    assert capfd.readouterr().err == ""
    assert make_inputs(None, command="forge run") == 0


def test_a_step_that_fails_ends_the_command(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (place / "runs").write_text("not a folder")
    assert make_inputs({"path": "runs/quickstart/task/prompts.jsonl"}, command="forge plan") == 1
    assert "`python quickstart/digits.py runs/quickstart/task` ended with exit code 1" in capfd.readouterr().err


def test_a_stand_in_that_cannot_be_made_is_explained(place: Path) -> None:
    with pytest.raises(ConfigError, match="the files of the recipe cannot be made") as caught:
        _write_files(Step("runs/a/task", "python quickstart/none.py runs/a/task"), place)
    assert (caught.value.path, caught.value.value) == ("runs/a/task", "python quickstart/none.py runs/a/task")
    assert "No such file" in str(caught.value.rule)
    assert caught.value.repair == "run the command by itself to see all of its output"


def test_an_interrupted_training_is_continued() -> None:
    training = Step("runs/quickstart/sft", "forge run quickstart/sft run.seed=1")
    assert training.arguments[1:] == [
        *("-m", "forge.cli", "run", "quickstart/sft", "run.seed=1", "checkpointing.resume=auto")
    ]


WAITING = """
import signal, sys
from forge.recipes.inputs import _run
child = "import os, signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); "
child += "os.write(1, b'ready'); signal.pause()"
sys.exit(_run([sys.executable, "-c", child]))
"""


def test_a_signal_reaches_the_step_and_its_exit_code_is_returned() -> None:
    running = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE)
    assert running.stdout is not None
    assert running.stdout.read(5) == b"ready"
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=LIMIT_S) == 7
    running.stdout.close()


# ---- Stand-ins


@pytest.mark.parametrize("name", FOR_CPUS)
def test_a_recipe_would_start_in_an_empty_folder(name: str, place: Path) -> None:
    command = read_command([name], [])
    schema = SCHEMAS[detect_kind(command.files, command.words).kind]
    add_module_folders(command.files)
    with stand_ins(command.settings) as found:
        result = dry_run(load(schema, files=command.files, overrides=[*command.words, *found.overrides]))
        text = found.named(json.dumps([*result.facts, *map(str, result.problems)]))
    expected = ["distillation.store"] if name == "distill/tiny_offline" else []
    assert [problem.path for problem in result.problems] == expected, "forge distill makes it"
    assert "forge-recipe-" not in text
    assert list(place.iterdir()) == []


def test_nothing_stands_in_for_what_is_there() -> None:
    with stand_ins(read_command(["sft/tiny"], []).settings) as found:
        assert (found.folder, found.overrides, found.steps) == (None, (), ())
    with stand_ins(None) as found:
        assert found.named("/tmp/x") == "/tmp/x"
