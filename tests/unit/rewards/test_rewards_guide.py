"""What the guide to rewards shows is what happens."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from forge.cli import main
from forge.config import RewardsConfig
from forge.rewards import arguments, check, find, names
from scored_texts import asked, said

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "rewards.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    own, composed = blocks("python")
    (tmp_path / "my_rewards.py").write_text(f"{composed}\n\n{own}")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sys.modules.pop("my_rewards", None)
    yield
    sys.modules.pop("my_rewards", None)


def test_the_table_has_every_reward_with_its_arguments() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (`[^|]*) \| [^|]+ \|$", GUIDE, flags=re.MULTILINE)
    table = {name: re.findall(r"`(\w+)`", cells) for name, cells in rows}
    assert table == {name: list(arguments(name)) for name in names()}


def test_the_configurations_pass() -> None:
    for text in blocks("yaml"):
        check(RewardsConfig.model_validate(yaml.safe_load(text)["rewards"]))


def test_the_commands_print_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    lines = blocks("console")[0].splitlines()
    assert len(lines) == 8
    for command, shown in zip(lines[::2], lines[1::2], strict=True):
        words = shlex.split(command.removeprefix("$ "))
        assert words.pop(0) == "forge"
        assert main(words) == 0
        assert capsys.readouterr().out == f"{shown}\n"


def test_the_functions_score() -> None:
    assert find("my_rewards:close_to")(asked("18"), said("It is 16"), scale=5.0) == 0.6
    good = said("<think>a</think><answer>18</answer>")
    loose = said("<answer>18</answer>")
    for name, scores in {"right": (1, 1), "strict": (1, 0), "both": (1, 0), "signed": (1, -1)}.items():
        reward = find(f"my_rewards:{name}")
        assert (reward(asked("18"), good), reward(asked("18"), loose)) == scores
