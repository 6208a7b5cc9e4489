"""The section `episode.league`: what it holds, and what it refuses."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.config import GRPOConfig, InvalidConfig, load
from forge.loops.planning import plan_run

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "self_play.md"


def league(text: str) -> Any:
    return load(GRPOConfig, overrides=[f"episode.league={text}"]).episode.league


def test_there_is_no_league_unless_one_is_asked_for() -> None:
    assert load(GRPOConfig).episode.league is None
    assert league("{}").max_members == 8


@pytest.mark.parametrize(
    ("text", "key", "rule"),
    [
        ("{agents: [row]}", "agents", "at least two different agents"),
        ("{agents: [row, row]}", "agents", "at least two different agents"),
        ("{agents: [row, column], learner: judge}", "learner", "one of agents: row, column"),
        ("{power: 2}", "power", "without rule: prioritised"),
        ("{rule: latest, prioritise: variance}", "prioritise", "without rule: prioritised"),
        ("{min_games: 5}", "min_games", "without add_at_win_rate"),
        ("{checkpoints: [a, b], max_members: 2}", "max_members", "more than the 2 of checkpoints"),
        ("{checkpoints: [a, a]}", "checkpoints", "different folders"),
        ("{self_play: 1}", "self_play", "less than 1"),
        ("{rule: oldest}", "rule", "uniform"),
        ("{elo: {k: 0}}", "elo.k", "greater than 0"),
    ],
)
def test_what_is_refused(text: str, key: str, rule: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        league(text)
    (problem,) = caught.value.problems
    assert problem.path == f"episode.league.{key}"
    assert rule in problem.rule


def test_the_configuration_of_the_guide_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    (yaml,) = re.findall(r"^```yaml\n(.*?)^```$", guide, re.M | re.S)
    (tmp_path / "nim.yaml").write_text(yaml)
    (tmp_path / "my_game.py").write_text(re.findall(r"^```python\n(.*?)^```$", guide, re.M | re.S)[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    plan = plan_run(load(GRPOConfig, files=[tmp_path / "nim.yaml"]))
    sys.modules.pop("my_game")
    assert plan.program is not None
    assert (plan.program.agents, plan.run.num_members) == (("first", "second"), 6)
