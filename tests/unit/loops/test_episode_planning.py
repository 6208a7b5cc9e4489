"""What is worked out of the section `episode` before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.errors import ConfigError
from forge.loops.planning import episode_options, plan_run
from forge.loops.run_paths import journal_dir
from grpo_runs import config
from own_episodes import dialogue

NO_REWARDS = "rewards.functions=[]"
NAMED = (NO_REWARDS, "episode.kind=own_episodes:dialogue")


def test_keys_of_episodes_without_a_program_are_refused(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run", "episode.max_retries=1", "episode.num_replicas=2")
    with pytest.raises(ConfigError, match="no effect without a program") as refused:
        plan_run(chosen)
    assert (refused.value.path, refused.value.value) == ("episode.num_replicas", 2)


def test_a_program_from_python_has_the_limits_of_the_configuration(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run", NO_REWARDS, "episode.limits.max_turns=3", "episode.evaluation_limits.max_turns=5")
    options = episode_options(plan_run(chosen, program=dialogue))
    assert options is not None
    assert (options.limits.max_turns, options.evaluation_limits.max_turns) == (3, 5)


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (("generator.max_batch=16", "generator.max_queue=48"), 2 * 64 // 4),
        (("generator.max_batch=64", "generator.max_queue=1024"), (64 + 1024) // 4),
        (("generator.max_batch=64", "generator.max_queue=1024", "episode.num_replicas=4"), 2 * (64 + 1024) // 4),
        (("generator.max_batch=16", "generator.max_queue=48", "rollout.max_in_flight=500"), 500),
        (("generator.max_batch=1", "generator.max_queue=0"), 1),
    ],
)
def test_more_episodes_are_in_flight_than_generators_have_room_for(
    words: tuple[str, ...], most: int, tmp_path: Path
) -> None:
    plan = plan_run(config(tmp_path / "run", *NAMED, "rollout.group_size=4", *words))
    assert plan.rollout.max_in_flight == most


def test_journals_of_another_program_or_other_arguments_are_not_found(tmp_path: Path) -> None:
    base = config(tmp_path / "run", *NAMED)
    assert journal_dir(config(tmp_path / "run", *NAMED, "episode.max_retries=1")) == journal_dir(base)
    for changed in ("episode.args={num_turns: 2}", "episode.kind=own_episodes:branching", "episode.limits.max_turns=9"):
        assert journal_dir(config(tmp_path / "run", *NAMED, changed)) != journal_dir(base)
