"""The list of recipes: complete, and names that mean the right files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forge.config import load
from forge.config.command_line import SCHEMAS, detect_kind
from forge.recipes import (
    all_steps,
    apps_folder,
    find_config,
    find_program,
    find_recipe,
    read_command,
    recipes,
    unknown_recipe,
)
from forge.recipes.catalogue import programs, read_list, recipe_named
from forge.recipes.command import texts

APPS = Path(__file__).resolve().parents[3] / "apps"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- The list


def test_every_configuration_is_listed_and_every_name_is_a_file() -> None:
    assert apps_folder() == APPS
    files = {path.relative_to(APPS).with_suffix("").as_posix() for path in APPS.rglob("*.yaml")}
    tutorial = {name for name in files if name.startswith("diagnosis/")}  # runs that fail on purpose
    assert tutorial
    assert set(recipes()) == files - tutorial


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_says_what_it_is(name: str) -> None:
    recipe = recipes()[name]
    facts = (recipe.teaches, recipe.method, recipe.hardware)
    assert all(facts) or not any(facts)
    assert recipe.program.is_file()
    assert len(recipe.teaches) < 70
    if recipe.hardware.startswith("CPU") and "vllm" not in name and "smollm2" not in name:
        assert recipe.cpu_time is not None or "chat" in recipe.method


def test_every_step_is_a_step_of_something() -> None:
    made = [command.split()[2] for command in read_list()["made"].values() if command.startswith("forge run ")]
    needs = [name for facts in read_list()["copies"].values() for name in facts.get("needs", ())]
    assert {name for name, recipe in recipes().items() if recipe.is_step} <= {*made, *needs}


@pytest.mark.parametrize("path", read_list()["made"])
def test_a_path_is_made_by_a_command_that_exists(path: str) -> None:
    program, *words = read_list()["made"][path].split()
    if program == "python":
        assert (APPS / words[0]).is_file()
        assert path.startswith(words[1])
        return
    assert (program, words[0]) == ("forge", "run")
    config = read_command([words[1]], words[2:])
    schema = SCHEMAS[detect_kind(config.files, config.words).kind]
    run = load(schema, files=config.files, overrides=config.words).run
    assert path == str(run.output_dir / run.name)


@pytest.mark.parametrize("name", recipes())
def test_what_a_recipe_for_a_cpu_reads_is_there_or_made(name: str) -> None:
    recipe = recipes()[name]
    settings = read_command([name], []).settings
    assert settings is not None
    made = [step.path for step in all_steps(settings)]
    for path, text in texts(settings):
        is_input = path.endswith("path") and not text.startswith(("models/", "/models", "/tmp"))
        if is_input and not recipe.hardware.startswith(("1 GPU", "2 GPUs", "3 GPUs", "8 GPUs")):
            assert os.path.isfile(text) or any(text.startswith(f"{each}/") for each in made), path


# ---- Names


def test_a_name_and_the_path_of_a_checkout_mean_the_same_recipe() -> None:
    tiny = recipes()["grpo/tiny"]
    assert [find_recipe(word) for word in ("grpo/tiny", "apps/grpo/tiny.yaml", "grpo/tiny.yaml")] == [tiny] * 3
    assert find_config("apps/grpo/tiny.yaml") == str(APPS / "grpo" / "tiny.yaml")
    program = APPS / "grpo" / "main.py"
    assert [find_program(word) for word in ("grpo", "apps/grpo/main.py", "grpo/main.py")] == [program] * 3
    assert tiny.program == program
    assert programs()["selfplay/kuhn"] == APPS / "selfplay" / "kuhn" / "main.py"


def test_a_file_is_never_a_recipe(place: Path) -> None:
    (place / "grpo").mkdir()
    (place / "grpo" / "tiny").write_text("run: {name: mine}\n")
    (place / "sft").write_text("")
    assert find_recipe("grpo/tiny") is None
    assert find_config("grpo/tiny") == "grpo/tiny"
    assert find_program("sft") is None
    assert recipe_named("grpo/tiny") is recipes()["grpo/tiny"]


@pytest.mark.parametrize(
    "word", ["grpo/none", "../apps/grpo/tiny", "", "apps", "recipes.toml", str(APPS / "grpo/tiny")]
)
def test_other_words_mean_nothing(word: str) -> None:
    assert find_recipe(word) is None
    assert find_program(word) is None
    assert find_config(word) == word


def test_the_error_names_the_nearest_recipe() -> None:
    error = unknown_recipe("grpo/tinny")
    assert (error.path, error.value, error.repair) == ("RECIPE", "grpo/tinny", "did you mean `grpo/tiny`?")
    assert unknown_recipe("zzz").repair == "run `forge recipes` for the list"


# ---- What a recipe is run with


def test_data_beside_a_recipe_is_read_from_there() -> None:
    command = read_command(["sft/tiny"], ["training.max_steps=3"])
    assert command.files == (str(APPS / "sft" / "tiny.yaml"),)
    assert command.words == ("training.max_steps=3", f"data.sources.0.path={json.dumps(str(APPS / 'sft/sums.jsonl'))}")
    assert command.settings is not None
    assert command.settings["data"]["sources"][0]["path"] == str(APPS / "sft" / "sums.jsonl")


def test_data_of_the_user_wins_wherever_it_is_named(place: Path) -> None:
    (place / "mine.yaml").write_text("data: {sources: [{path: mine.jsonl}]}\n")
    assert read_command(["sft/tiny", "mine.yaml"], []).words == ()
    assert read_command(["sft/tiny"], ["data.sources=[{path: a.jsonl}]"]).words == ("data.sources=[{path: a.jsonl}]",)
    (place / "apps" / "sft").mkdir(parents=True)
    (place / "apps" / "sft" / "sums.jsonl").write_text("")
    assert read_command(["sft/tiny"], []).words == ()


def test_flags_among_the_words_stay() -> None:
    command = read_command(["sft/tiny"], ["--resume", "training.max_steps=3"])
    assert command.words[:2] == ("--resume", "training.max_steps=3")


def test_a_configuration_of_the_users_is_left_as_it_is(place: Path) -> None:
    (place / "mine.yaml").write_text("data: {sources: [{path: apps/sft/sums.jsonl}]}\n")
    command = read_command(["mine.yaml"], ["run.seed=1"])
    assert (command.files, command.words, command.settings) == (("mine.yaml",), ("run.seed=1",), None)
