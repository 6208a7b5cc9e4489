"""The section `curriculum` and `rollout.signal_reward`: what they hold, and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forge.config import GRPOConfig, InvalidConfig, load

ROOT = Path(__file__).resolve().parents[3]
REWARDS = "rewards.functions=[{kind: number, name: right}, {kind: tags, name: form}]"


def test_there_is_no_curriculum_unless_one_is_asked_for() -> None:
    assert load(GRPOConfig).curriculum.kind is None


@pytest.mark.parametrize(
    ("override", "key", "rule", "repair"),
    [
        ("curriculum={kind: prioritized}", "curriculum.kind", "prioritised, range, staged", "prioritised"),
        ("curriculum={kind: range, low: 0.9, high: 0.2}", "curriculum.low", "an empty range", "raise high"),
        ("curriculum={low: 0.2}", "curriculum.low", "no effect with curriculum.kind null", "curriculum.kind: range"),
        ("curriculum={kind: range, target: 0.3}", "curriculum.target", "curriculum.kind range", "kind: prioritised"),
        ("curriculum={kind: range, args: {a: 1}}", "curriculum.args", "no effect", "remove it"),
        ("curriculum={explore: 0.5}", "curriculum.explore", "no effect with curriculum.kind null", "remove it"),
        ("curriculum={kind: range, difficulty_key: level}", "curriculum.difficulty_key", "no effect", "remove it"),
        ("curriculum={kind: staged}", "curriculum.difficulty_key", "needed with curriculum.kind staged", "level"),
        ("curriculum={kind: range, explore: 2}", "curriculum.explore", "less than or equal to 1", ""),
        ("curriculum={kind: range, reward: rigth}", "curriculum.reward", "rewards: right, form", "right"),
        ("rollout.signal_reward=accuracy", "rollout.signal_reward", "rewards: right, form", "name one of them"),
    ],
)
def test_what_is_refused(override: str, key: str, rule: str, repair: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(GRPOConfig, overrides=[REWARDS, override])
    (problem,) = caught.value.problems
    assert problem.path == key
    assert rule in problem.rule
    assert repair in problem.repair


@pytest.mark.parametrize(
    ("override", "key"),
    [("rollout.no_signal=keep", "rollout.signal_reward"), ("rollout.group_size=1", "rollout.group_size")],
)
def test_a_reward_that_decides_the_signal_needs_groups_that_it_can_leave_out(override: str, key: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(GRPOConfig, overrides=[REWARDS, "algorithm.preset=reinforce", "rollout.signal_reward=right", override])
    (problem,) = caught.value.problems
    assert (problem.path, "signal_reward" in problem.rule or "no_signal keep" in problem.rule) == (key, True)


def test_a_program_names_its_rewards_as_it_runs() -> None:
    chosen = load(GRPOConfig, overrides=["episode.kind=m:a", "curriculum={kind: range, reward: won}"])
    assert chosen.curriculum.reward == "won"


def test_the_configurations_of_the_guide_are_valid(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "curricula.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```$", guide, re.M | re.S)
    assert len(blocks) >= 4
    for number, block in enumerate(blocks):
        (tmp_path / f"{number}.yaml").write_text(block)
        load(GRPOConfig, files=[tmp_path / f"{number}.yaml"])
