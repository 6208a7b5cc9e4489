"""What the guide on agents says about configurations, metrics and kinds is so. Its programs run in test_docs_pages."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from forge.cli import main, make_parser
from forge.config import GRPOConfig, load
from forge.envs.tools import ToolError
from forge.loops.planning import plan_run
from forge.testing import play
from forge.types import EpisodeOutcome, PrefixBreakKind

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "guides" / "agents.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return GUIDE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def block(kind: str, containing: str) -> str:
    found: list[str] = [
        text for text in re.findall(rf"^```{kind}\n(.*?)^```$", GUIDE, re.M | re.S) if containing in text
    ]
    assert len(found) == 1
    return found[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the section on configuration speaks of."""
    parts = [
        block("python", "async def solve"),
        block("python", "class Guess"),
        block("python", "def shortest_wins"),
        block("python", "def solutions"),
    ]
    program = "\n\n".join(part.split("run = await")[0] for part in parts)
    (tmp_path / "my_agents.py").write_text(program, encoding="utf-8")
    record = '{"messages": [{"role": "user", "content": "Guess."}], "answer": "%d", "secret": %d}\n'
    (tmp_path / "tasks.jsonl").write_text("".join(record % (number, number) for number in range(1, 9)))
    (tmp_path / "heldout.jsonl").write_text(record % (9, 9))
    (tmp_path / "agents.yaml").write_text(block("yaml", "# agents.yaml"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_agents", raising=False)
    return tmp_path


def test_the_configuration_can_be_run(folder: Path) -> None:
    plan = plan_run(load(GRPOConfig, files=["agents.yaml"]))
    assert plan.program is not None
    assert dict(plan.program.args) == {"max_guesses": 4}
    assert plan.group_reward is not None
    assert plan.config.episode.evaluation_limits is not None
    _, task = plan.prompts.at(0)
    run = asyncio.run(play(plan.program, ["0", "0", "0", str(task.metadata["secret"])], task=task))
    assert run.score.reward == 1.0


def test_credit_per_turn_can_be_configured(folder: Path) -> None:
    values = yaml.safe_load((folder / "agents.yaml").read_text()) | yaml.safe_load(block("yaml", "function: turn"))
    (folder / "turns.yaml").write_text(yaml.safe_dump(values))
    plan = plan_run(load(GRPOConfig, files=["turns.yaml"]))
    assert (plan.config.algorithm.advantage.function, plan.config.algorithm.advantage.args["gamma"]) == ("turn", 1.0)


def kinds_of(text: str) -> set[str]:
    rows = re.findall(r"^\| (`.*?`) \|", text, flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w/]+)`", row)}


def test_every_kind_is_listed() -> None:
    assert kinds_of(section("Tools")) == set(get_args(ToolError))
    assert kinds_of(section("Token exactness and prefix breaks")) == set(get_args(PrefixBreakKind))
    limits = section("Limits, outcomes and faults")
    assert {kind for kind in get_args(EpisodeOutcome) if f"`{kind}`" in limits} == set(get_args(EpisodeOutcome))


def test_every_metric_is_listed() -> None:
    names: dict[str, Any] = {}
    exec(compile(block("python", "async def solve"), "guide", "exec"), names)
    run = asyncio.run(play(names["solve"], ["4"]))
    added = {"seconds", "num_replayed", "num_replay_mismatches", "num_faults", "faults/KIND", "outcome/KIND"}
    kinds = {"tool_errors/KIND", "prefix_breaks/KIND"}
    expected = {f"episode/{name}" for name in {*run.counts.as_stats(), *added, *kinds}}
    of_evaluations = {"evaluation/num_faults", "evaluation/faults/KIND"}
    assert kinds_of(section("Look at it")) == expected | of_evaluations


def commands() -> list[list[str]]:
    lines = re.findall(r"^forge (.*?)(?:  +#.*)?$", block("bash", "forge template check"), re.MULTILINE)
    return [line.split() for line in lines]


def test_its_commands_exist() -> None:
    parser = make_parser()
    assert [parser.parse_args(words).command for words in commands()] == ["template", "episode", "episode", "env"]


def test_the_environment_passes_its_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(commands()[-1]) == 0
    assert "All checks passed." in capsys.readouterr().out
