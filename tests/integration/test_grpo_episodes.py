"""Reinforcement learning on episodes of several turns, whole: tokens, rewards, faults and evaluation."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forge.config import GRPOConfig
from forge.errors import RolloutError
from forge.loops.grpo import run_grpo
from forge.loops.run_paths import run_dir
from forge.rollout.ledger import check_ledger
from grpo_runs import NUM_STEPS, config, episodes, kept_buffer, ledger, metrics, train, train_here
from local_services import services_here
from own_episodes import dialogue

DIALOGUE = ("rewards.functions=[]", "episode.kind=own_episodes:dialogue")
BRANCHING = ("rewards.functions=[]", "episode.kind=own_episodes:branching")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> GRPOConfig:
    """A run of three-turn episodes with everything that a run can write, in processes of its own."""
    chosen = config(
        tmp_path_factory.mktemp("episodes") / "plain",
        *DIALOGUE,
        *("algorithm.advantage.function=turn", "evaluation.fraction=0.2", "evaluation.interval=3"),
        *("episode.group_reward=own_episodes:longest_wins", "record.report=true"),
    )
    result = train(chosen)
    assert result.step == NUM_STEPS
    assert result.evaluation is not None
    return chosen


def test_every_sampled_token_has_the_same_probability_in_trainer_and_sampler(plain: GRPOConfig) -> None:
    """Bit for bit, over all turns: nothing was tokenised again, and the cache of earlier turns changed nothing."""
    seen = list(episodes(plain))
    assert len(seen) > NUM_STEPS * 2 * 2  # a group without signal is left out
    for episode in seen:
        assert episode["logprobs"] == episode["trainer_logprobs"], episode["group"]
        assert {version for version, _, _ in episode["versions"]} == {episode["step"] - 1}
        assert episode["versions"][-1][2] == len(episode["token_ids"]) == len(episode["pieces"])
        assert [turn["parent"] for turn in episode["turns"]] == [None, 0, 1]
        assert [turn["num_cached"] > 0 for turn in episode["turns"][1:]] == [True, True]
        assert episode["turns"][-1]["end"] == len(episode["token_ids"])
    assert set(metrics(plain, "train/mismatch_max")) == {0.0}
    assert metrics(plain, "train/ratio") == pytest.approx([1.0] * NUM_STEPS, abs=1e-6)


def test_rewards_of_turns_of_the_episode_and_of_the_group_add_up(plain: GRPOConfig) -> None:
    for episode in episodes(plain):
        own = sum(turn["reward"] or 0.0 for turn in episode["turns"])
        assert own == episode["parts"]["even"]
        assert episode["reward"] == own + episode["parts"]["reward"] + episode["parts"]["group"]
    groups = {episode["group"]: 0.0 for episode in episodes(plain)}
    for episode in episodes(plain):
        groups[episode["group"]] += episode["parts"]["group"]
    assert all(longest >= 1 for longest in groups.values())


def test_every_turn_has_an_advantage_of_its_own(plain: GRPOConfig) -> None:
    seen = [turn["advantage"] for episode in episodes(plain) for turn in episode["turns"]]
    assert None not in seen
    assert any(len({turn["advantage"] for turn in episode["turns"]}) > 1 for episode in episodes(plain))


def test_every_group_is_in_the_ledger_once_and_only_journals_of_later_ones_are_left(plain: GRPOConfig) -> None:
    lines = ledger(plain)
    check_ledger(lines, pending=kept_buffer(plain)["pending"], next_number=kept_buffer(plain)["next_number"])
    left = {int(path.stem.partition("-")[0]) for path in (run_dir(plain) / "journals").glob("*/*.jsonl")}
    assert left.isdisjoint({line.group for line in lines})


def test_metrics_say_what_episodes_used(plain: GRPOConfig) -> None:
    assert metrics(plain, "episode/num_turns") == [3.0] * NUM_STEPS
    assert metrics(plain, "episode/outcome/finished") == [1.0] * NUM_STEPS
    assert metrics(plain, "episode/num_faults") == [0.0] * NUM_STEPS
    assert len(metrics(plain, "evaluation/reward")) == 3


def test_branches_are_learned_from_once_and_score_the_same_in_trainer_and_reference(tmp_path: Path) -> None:
    """The reference has the policy's first weights: in the first step its logprobs are the sampler's."""
    overrides = ("algorithm.kl.coefficient=0.1", "algorithm.loss.average=sequence_mean", "training.max_steps=2")
    chosen = config(tmp_path / "branching", *BRANCHING, *overrides)
    train(chosen)
    for episode in episodes(chosen):
        assert [turn["parent"] for turn in episode["turns"]] == [None, 0, 0]
        assert episode["logprobs"] == episode["trainer_logprobs"]
        if episode["step"] == 1:
            assert episode["ref_logprobs"] == episode["logprobs"]
    total = sum(len(episode["token_ids"]) for episode in episodes(chosen))
    assert sum(metrics(chosen, "train/num_loss_tokens")) == total


def test_groups_that_fail_by_faults_are_failed_in_the_ledger_and_the_run_goes_on(tmp_path: Path) -> None:
    chosen = config(
        tmp_path / "failing", "rewards.functions=[]", "episode.kind=own_episodes:failing", "episode.max_retries=1"
    )
    assert train_here(chosen).step == NUM_STEPS
    lines = ledger(chosen)
    assert {line.outcome for line in lines} >= {"trained", "failed"}
    failed = [line for line in lines if line.outcome == "failed"]
    assert sum(metrics(chosen, "episode/faults/server")) >= 2 * len(failed)
    check_ledger(lines, pending=kept_buffer(chosen)["pending"], next_number=kept_buffer(chosen)["next_number"])


def test_faults_without_end_stop_the_run_with_its_state_saved(tmp_path: Path) -> None:
    overrides = ("episode.kind=own_episodes:broken", "episode.max_retries=0", "episode.max_failed_groups=3")
    chosen = config(tmp_path / "broken", "rewards.functions=[]", *overrides)
    with pytest.raises(RolloutError, match="KeyError: 'nowhere'"):
        train_here(chosen)
    assert kept_buffer(chosen)["num_taken"] == 0


def test_a_program_may_be_given_instead_of_named(tmp_path: Path) -> None:
    chosen = config(tmp_path / "given", "rewards.functions=[]", "training.max_steps=1", "rollout.no_signal=keep")
    with services_here():
        result = asyncio.run(run_grpo(chosen, episode=dialogue.with_args({"num_turns": 2})))
    assert result.step == 1
    assert {len(episode["turns"]) for episode in episodes(chosen)} == {2}
