"""`forge recipes`, `forge copy`, `forge new` and `forge quickstart`, and names of recipes in other commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from forge.cli import main
from forge.config.command_line import MODULE_FOLDERS
from forge.recipes import apps_folder, recipes

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "recipes.md"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["forge"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(MODULE_FOLDERS, "")
    return tmp_path


def forge(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    status = main(list(words))
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def names(table: str) -> list[str]:
    return [line.split()[0] for line in table.split("\n\n")[0].splitlines()[1:]]


def test_the_list_and_its_filters(capsys: pytest.CaptureFixture[str]) -> None:
    own = [name for name, recipe in recipes().items() if not recipe.is_step]
    assert names(forge(capsys, "recipes")) == own
    assert names(forge(capsys, "recipes", "--all")) == list(recipes())
    assert names(forge(capsys, "recipes", "CPU", "agent")) == ["tools/grpo", "games/grpo", "coding/grpo", "critic/grpo"]
    assert names(forge(capsys, "recipes", "qlora")) == ["grpo/qwen3_8b_qlora_24gb"]
    found = json.loads(forge(capsys, "recipes", "distillation", "--json"))
    assert [each["name"] for each in found if each["hardware"] == "CPU"] == [
        "distill/tiny_onpolicy",
        "distill/tiny_offline",
    ]


def test_one_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    shown = forge(capsys, "recipes", "grpo/tiny").splitlines()
    assert shown[0] == "grpo/tiny: the quick start's task: the largest or smallest of four digits"
    assert "  before    forge run quickstart/sft (unless it was done)" in shown
    assert "  run       forge run grpo/tiny" in shown
    assert shown[-1] == "  forge run grpo/tiny"
    plain = json.loads(forge(capsys, "recipes", "grpo/tiny", "--json"))
    assert plain["before"] == ["python quickstart/digits.py runs/quickstart/task", "forge run quickstart/sft"]
    assert Path(plain["config"]).is_file()


def test_the_guide_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = GUIDE.read_text(encoding="utf-8")
    for words in (["recipes", "cpu", "agent"], ["recipes", "grpo/tiny"], ["new", "my_project", "--task", "tools"]):
        printed = forge(capsys, *words).replace(str(apps_folder()), "…/forge/recipes/apps")
        assert f"```console\n$ forge {' '.join(words)}\n{printed}```\n" in page


def test_copy_and_new_say_how_to_go_on(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    assert forge(capsys, "copy", "sft/tiny", "my copy").endswith(
        "\n\nRun it:\n  cd 'my copy'\n  forge run main.py --config tiny.yaml\n"
    )
    assert forge(capsys, "new", "mine", "--task", "tools").endswith(
        "\n\nRun it:\n  cd mine\n  python main.py\n  python -m pytest\n"
    )
    assert (place / "mine" / "tests" / "test_boxes.py").is_file()


def test_names_of_recipes_where_a_configuration_is_expected(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    shown = forge(capsys, "config", "show", "grpo/tiny", "run.seed=7")
    assert "seed: 7" in shown
    assert "path: runs/quickstart/sft/checkpoints/hf" in shown
    origins = forge(capsys, "config", "show", "sft/tiny", "--origins")
    assert "sums.jsonl  # override data.sources.0.path=" in origins
    plan = forge(capsys, "plan", "rlhf/tiny_grpo")
    assert "361,216 parameters" in plan
    plan = forge(capsys, "plan", "grpo/qwen3_1_7b", "--gpu-memory", "80GB", "--gpus", "1")
    assert plan.startswith("qwen3_1_7b: ")
    assert forge(capsys, "config", "check", "grpo/tiny").endswith("Nothing was started.\n")
    script = forge(capsys, "job", "slurm", "grpo/qwen3_32b_64gpu_slurm", "launcher.bind=127.0.0.1")
    assert "run --supervise grpo/qwen3_32b_64gpu_slurm" in script
    assert sorted(path.name for path in place.iterdir() if path.name != "runs") == []


def test_a_program_of_the_recipes_runs_a_configuration_of_the_users(
    capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    (place / "mine.yaml").write_text("data: {sources: [{path: mine.jsonl}]}\ntraining: {max_seq_len: 64}\n")
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    (place / "mine.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    said = forge(capsys, "run", "sft", "--config", "mine.yaml", "model.preset=tiny", "--dry-run")
    assert "1 samples to train on: mine.jsonl" in said


def test_a_whole_program_is_run_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["quickstart", "--help"])
    assert ended.value.code == 0
    assert "--seed N" in capsys.readouterr().out
    assert main(["run", "tools", "--help"]) == 0
    assert "usage: main.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "path", "said"),
    [
        (["run", "grpo/tinny"], "SCRIPT", "did you mean `grpo/tiny`?"),
        (["run", "grpo/tiny", "--config", "nowhere.yaml"], "--config", "a YAML file that exists, or a recipe"),
        (["copy", "grpo", "mine"], "RECIPE", "a name that `forge recipes` lists"),
        (["quickstart", "training.max_stepz=1"], "training.max_stepz", "did you mean `training.max_steps`?"),
        (["chaos", "grpo/none"], "CONFIG", "a YAML file that exists, or a recipe"),
        (["chaos", "sft/tiny"], "CONFIG", "a configuration of grpo"),
    ],
)
def test_wrong_names(words: list[str], path: str, said: str, capsys: pytest.CaptureFixture[str], place: Path) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert path in err
    assert said in err
    assert list(place.iterdir()) == []
