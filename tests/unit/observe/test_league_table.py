"""The table of a league: its file, its text, the command and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge.cli import main
from forge.errors import DataError
from forge.observe.league_table import LEAGUE_TABLE, read_league
from forge.observe.lines import rollout_line
from forge.observe.report import read_run
from forge.observe.report.charts import choose_charts
from forge.observe.report.page import describe, render
from forge.observe.step_lines import step_line

ROWS = [
    {"member": "version 0", "rating": 941.4, "games": 12, "wins": 9, "draws": 1, "losses": 2, "win_rate": 0.75},
    {"member": "live", "rating": 1058.6, "games": 0, "wins": 0, "draws": 0, "losses": 0, "win_rate": None},
]


def folder(path: Path, text: str | None = None) -> Path:
    table = {"step": 4, "rating": 1058.6, "members": ROWS}
    (path / LEAGUE_TABLE).write_text(json.dumps(table) if text is None else text)
    values = {"rollout/reward_mean": 0.5, "league/elo/live": 1058.6, "league/win_rate/all": 0.75}
    (path / "metrics.jsonl").write_text(json.dumps({"step": 4, "time": 1.0, "values": values}) + "\n")
    return path


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["league", "show", str(folder(tmp_path))]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "after step 4; games of the live policy against each opponent",
        "",
        "opponent      Elo   games    wins   draws  losses  win rate",
        "version 0     941      12       9       1       2     75.0%",
        "live         1059       0       0       0       0         -",
    ]
    assert main(["league", "show", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["members"] == ROWS


def test_a_run_without_a_league(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["league", "show", str(tmp_path)]) == 2
    assert "this run has no table of a league" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 1, "members": [{"member": "live"}]}', '{"members": []}'])
def test_a_file_that_holds_something_else(text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read[\s\S]*league.json"):
        read_league(folder(tmp_path, text))
    run = read_run(tmp_path, max_samples=0)
    assert run.league == {}
    assert any(LEAGUE_TABLE in note for note in run.notes)


def test_the_report_has_the_table_and_the_curves(tmp_path: Path) -> None:
    run = read_run(folder(tmp_path), max_samples=0)
    assert describe(run, made_at=0.0)["league"]["members"] == ROWS
    assert "leagueTable" in render(run, made_at=0.0)
    titles = {(chart["section"], chart["title"]) for chart in choose_charts(run.metrics)}
    assert {("League", "Elo"), ("League", "Win rate")} <= titles


def test_the_console_shows_elo_and_win_rate() -> None:
    values = {"rollout/reward_mean": 0.5, "league/elo/live": 1011.7, "league/win_rate/all": 0.625}
    assert step_line(3, values) == "Step 3 | reward 0.50 | Elo 1012 | win 62%"
    assert rollout_line(3, values) == "Episode 3 | Avg Reward: 0.50 | Elo: 1012 | Win Rate: 62%"
