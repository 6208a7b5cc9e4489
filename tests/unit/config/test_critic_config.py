"""The section `critic` and the advantage function `gae`: what is set, and what is refused."""

from __future__ import annotations

import pytest

from forge.config import GRPOConfig, load
from forge.config.problems import InvalidConfig

PPO = ("algorithm.preset=ppo", "rollout.group_size=1")


def test_the_preset_needs_no_groups() -> None:
    config = load(GRPOConfig, overrides=[*PPO, "rollout.batch_groups=1"])
    assert config.algorithm.has_critic
    assert (config.algorithm.advantage.whiten, config.algorithm.advantage.whiten_over) == (True, "tokens")
    assert (config.algorithm.kl.place, config.algorithm.kl.credit) == ("reward", "token")
    assert config.critic_iterations == config.rollout.iterations
    assert config.critic_distributed is config.distributed


@pytest.mark.parametrize("convention", ["trl", "verl", "openrlhf", "nemo"])
def test_every_convention_has_it(convention: str) -> None:
    config = load(GRPOConfig, overrides=[*PPO, f"algorithm.convention={convention}", "algorithm.kl.coefficient=0.1"])
    assert config.algorithm.advantage.function == "gae"
    assert config.algorithm.charges_tokens


def test_what_the_critic_says_wins_over_training() -> None:
    words = [*PPO, "training.learning_rate=0.5", "training.weight_decay=0.1", "critic.training.learning_rate=0.25"]
    config = load(GRPOConfig, overrides=words)
    training = config.critic.training.over(config.training)
    assert (training.learning_rate, training.weight_decay) == (0.25, 0.1)


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (("critic.warmup_steps=3",), "critic.warmup_steps"),
        (("critic.training.learning_rate=0.1",), "critic.training"),
        ((*PPO, "training.max_steps=5", "critic.warmup_steps=5"), "critic.warmup_steps"),
        ((*PPO, "critic.training.microbatch_tokens=64"), "critic.training.microbatch_tokens"),
        ((*PPO, "critic.training.optimizer_dtype=bf16", "training.beta2=0.999"), "critic.training.optimizer_dtype"),
        ((*PPO, "critic.value_clip=0"), "critic.value_clip"),
        (
            (*PPO, "episode.kind=own_episodes:dialogue", "episode.agents.a.advantage=baseline"),
            "episode.agents.a.advantage",
        ),
        ((*PPO, "algorithm.advantage.whiten_over=completions"), "algorithm.advantage.whiten_over"),
        ((*PPO, "algorithm.advantage.baseline=leave_one_out"), "algorithm.advantage.baseline"),
        ((*PPO, "algorithm.advantage.scale=batch_std"), "algorithm.advantage.scale"),
        ((*PPO, "algorithm.advantage.gamma=0.9"), "algorithm.advantage.gamma"),
        ((*PPO, "algorithm.kl.coefficient=0.1", "algorithm.kl.credit=return_to_go"), "algorithm.kl.credit"),
        (
            (*PPO, "algorithm.distillation={coefficient: 1, reward_coefficient: 0}", "teacher.path=models/x"),
            "algorithm.distillation.reward_coefficient",
        ),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(words: tuple[str, ...], path: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(GRPOConfig, overrides=list(words))
    (problem,) = caught.value.problems
    assert problem.path == path
    assert problem.rule
    assert problem.repair
