"""What the guide says about reports is so."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from agent_folders import make_agent_run, read_lines
from forge.cli.report import add_parser
from forge.observe.report import page, reading, samples, turns
from run_folders import make_grpo_run

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "report.md").read_text(encoding="utf-8")


def test_the_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    make_grpo_run(Path("runs/mine"), num_steps=3)
    (program,) = re.findall(r"^```python\n(.*?)^```$", GUIDE, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(program, "guide", "exec", dont_inherit=True), names)
    assert capsys.readouterr().out == "runs/mine/report.html 24 of 24\n"


def test_a_line_of_rollouts_has_the_keys_of_the_table(tmp_path: Path) -> None:
    folder = make_grpo_run(tmp_path, num_steps=1)
    fields = json.loads((folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()[0])
    table = GUIDE.split("## The files of rollouts")[1].split("Lines of episodes that a program made")[0]
    assert keys_of(table) == set(fields)


def test_lines_of_programs_and_their_turns_have_the_keys_of_the_guide(tmp_path: Path) -> None:
    lines = read_lines(make_agent_run(tmp_path / "agents", num_steps=1) / "rollouts" / "step_000001.jsonl")
    plain = read_lines(make_grpo_run(tmp_path / "plain", num_steps=1) / "rollouts" / "step_000001.jsonl")
    said, table = GUIDE.split("Lines of episodes that a program made")[1].split("\n\n| key", 1)
    assert set(lines[0]) - set(plain[0]) == {"ending", "stats", "turns"}
    assert {"ending", "stats", "turns"} <= set(re.findall(r"`(\w+)`", said))
    assert keys_of(table) == set(lines[0]["turns"][0])


def keys_of(table: str) -> set[str]:
    rows = re.findall(r"^\| (`.*?`) \|", table, flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_options_and_numbers_are_right() -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    usage = re.sub(r"\s+", " ", parser.parse_args(["report", "x"]).__repr__())
    assert set(re.findall(r"(\w+)=", usage)) == {"run_dir", "output", "open", "max_samples", "handler"}
    numbers = {int(number.replace(" ", "")) for number in re.findall(r"\d[\d ]*\d", GUIDE)}
    assert {page.DEFAULT_SAMPLES, samples.MAX_TOKENS, reading._MAX_POINTS, turns.MAX_TURNS} <= numbers
