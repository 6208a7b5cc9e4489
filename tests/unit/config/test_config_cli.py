"""`forge config`, through a real parser and once through a real process."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from forge.cli.config import add_parser
from forge.config import ForgeConfig, dump, load

SCHEMA = """
from pydantic import Field
from forge.config import ConfigModel, ForgeConfig

class Optimizer(ConfigModel):
    lr: float = 1e-3

class AppConfig(ForgeConfig):
    optimizer: Optimizer = Field(default_factory=Optimizer)
"""


def forge(*words: str) -> int:
    parser = argparse.ArgumentParser(prog="forge")
    add_parser(parser.add_subparsers(required=True))
    arguments = parser.parse_args(words)
    code: int = arguments.handler(arguments)
    return code


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("run:\n  seed: 4\n")
    return "a.yaml"


def test_show_without_a_file_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert forge("config", "show") == 0
    assert capsys.readouterr().out == dump(ForgeConfig())


@pytest.mark.parametrize(
    "words",
    [
        ("a.yaml", "run.name=x", "--json"),
        ("--json", "a.yaml", "run.name=x"),
        ("a.yaml", "--json", "run.name=x"),
        ("run.name=x", "a.yaml", "--json"),
        ("./a.yaml", "--json", "run.name=y", "~run.name", "run.name=x"),
    ],
)
def test_words_and_options_stand_in_any_order(
    file: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert forge("config", "show", *words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == load(ForgeConfig, files=[file], overrides=["run.name=x"]).model_dump(mode="json")


def test_origins(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert forge("config", "show", file, "--origins", "model.preset=tiny") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "run.seed: 4 # a.yaml:2" in lines
    assert "model.num_layers: 4 # preset tiny" in lines
    assert "run.name: run # default" in lines
    assert forge("config", "show", file, "--origins", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["config"]["run"]["seed"], found["origins"]["run.seed"]) == (4, "a.yaml:2")


def test_check_says_what_is_wrong_on_stderr(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert forge("config", "check", file) == 0
    assert "valid" in capsys.readouterr().out
    for command in ("check", "show"):
        assert forge("config", command, file, "run.sede=1", "missing.yaml") == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        for part in ("has 2 problems", "missing.yaml", "did you mean `run.seed`?", "set by: override run.sede=1"):
            assert part in captured.err
        assert "Traceback" not in captured.err


def test_a_word_with_equals_is_an_override_even_where_such_a_file_lies(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.seed=9").write_text("run: {seed: 5}\n")
    assert forge("config", "show", "run.seed=9", "--json") == 0
    assert json.loads(capsys.readouterr().out)["run"]["seed"] == 9
    assert forge("config", "show", "./run.seed=9", "--json") == 0
    assert json.loads(capsys.readouterr().out)["run"]["seed"] == 5


def test_the_schema_of_an_application(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("app_schema_for_test.py").write_text(SCHEMA)
    Path("broken_schema_for_test.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "app_schema_for_test", raising=False)
    assert forge("config", "show", "--schema", "app_schema_for_test:AppConfig", "optimizer.lr=1e-4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["optimizer"]["lr"] == 1e-4
    for schema, rule in {
        "app_schema_for_test": "must be MODULE:CLASS",
        "app_schema_for_test:Nothing": "must name a class",
        "app_schema_for_test:Field": "must name a class",
        "no_such_module_for_test:A": "No module named 'no_such_module_for_test'",
        "broken_schema_for_test:A": "No module named 'a_module_that_is_not_there'",
    }.items():
        assert forge("config", "check", "--schema", schema) == 2
        error = capsys.readouterr().err
        assert rule in error
        assert schema in error
        assert "repair:" in error


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert forge("config", "presets") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert any(line.split()[:2] == ["qwen3_1_7b", "Qwen/Qwen3-1.7B"] for line in lines)


def test_a_command_is_needed() -> None:
    with pytest.raises(SystemExit) as caught:
        forge("config")
    assert caught.value.code == 2


def test_registering_the_commands_loads_nothing_heavy() -> None:
    code = (
        "import argparse, sys; from forge.cli.config import add_parser; "
        "add_parser(argparse.ArgumentParser().add_subparsers()); "
        "print(sorted({'pydantic', 'yaml', 'torch', 'monarch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
