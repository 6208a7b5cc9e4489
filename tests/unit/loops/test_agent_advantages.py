"""Which advantages of agents a run refuses before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from forge.errors import ConfigError
from forge.loops.planning import plan_run
from grpo_runs import config

GAME = ("rewards.functions=[]", "episode.kind=own_games:pennies")
BOTH = "episode.agents={row: {advantage: baseline}, column: {advantage: zero_sum}}"
ONE = "episode.agents={column: {advantage: zero_sum}}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([BOTH, "algorithm.kl={coefficient: 0.1, place: reward}"], r"do not add up to 0[\s\S]*column[\s\S]*kl.place"),
        ([BOTH, "algorithm.distillation.coefficient=1", "teacher.path=nowhere"], "what the teacher adds"),
        ([ONE, "algorithm.advantage.function=gigpo"], r"no opponent[\s\S]*`gigpo`"),
        ([ONE, "algorithm.advantage.gamma=0.9"], r"no opponent[\s\S]*gamma"),
        (
            ["episode.agents={row: {advantage: baseline}}", "rollout.group_size=1"],
            r"column would be compared with itself alone[\s\S]*rollout.group_size",
        ),
    ],
)
def test_advantages_that_are_refused(overrides: Sequence[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_run(config(tmp_path / "refused", *GAME, *overrides))


@pytest.mark.parametrize("more", [(), ("algorithm.advantage.function=turn",), ("algorithm.kl.coefficient=0.1",)])
def test_a_running_mean_needs_no_group(more: Sequence[str], tmp_path: Path) -> None:
    plan = plan_run(config(tmp_path / "alone", *GAME, BOTH, "rollout.group_size=1", *more))
    assert plan.rollout.group_size == 1
