"""GAE of episodes against its definition as a weighted mean of n-step advantages, and against numbers by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from forge.config import AlgorithmConfig
from forge.errors import ConfigError, DataError
from forge.rollout.advantage import gae as of_sequence
from forge.rollout.advantage import token_kl
from forge.rollout.credit import assign_advantages, find_advantage
from forge.rollout.samples import make_batch
from forge.rollout.signal import SignalTest
from forge.rollout.value_credit import CriticBatch, Estimates, Estimator, value_samples, with_values
from forge.trainer.microbatches import plan_batch
from forge.trainer.row_building import build_rows
from forge.types import AgentResult, Batch, Episode, Group, Score, Task, Turn

TASK = Task("maze", messages=({"role": "user", "content": "start"},))
NEAR = 1e-12


def turn(index: int, previous: int | None, num_tokens: int, **changes: Any) -> Turn:
    """A turn that read two tokens and sampled some."""
    fields: dict[str, Any] = {
        "index": index,
        "parent": previous,
        "previous": previous,
        "path": (),
        "messages": (),
        "context_ids": (7, 8),
        "token_ids": tuple(range(10 * index, 10 * index + num_tokens)),
        "logprobs": tuple(-0.1 * (place + 1) for place in range(num_tokens)),
        "full_logprobs": None,
        "text": "go",
        "finish_reason": "stop",
        "versions": (),
    }
    return Turn(**{**fields, **changes})


def algorithm(**keys: Any) -> AlgorithmConfig:
    """Without whitening, unless asked for."""
    kl = keys.pop("kl", {})
    return AlgorithmConfig.model_validate(
        {"preset": "ppo", "advantage": {"whiten": False, **keys}, **({"kl": kl} if kl else {})}
    )


def estimates(episode: Episode, *, charged: AlgorithmConfig | None = None, **args: Any) -> Estimates:
    return Estimator(charged or algorithm(), **args).estimate(episode)


# ---- The definition -------------------------------------------------------------------------------------------------


def by_definition(
    rewards: Sequence[float], values: Sequence[float], end: float, gamma: float, lam: float
) -> list[float]:
    """The mean of the n-step advantages, that of n steps with weight (1 - lam) lam^(n-1), and all of the rest at the
    end: equation 16 of arXiv 1506.02438 for an episode that ends."""
    num, states = len(rewards), [*values, end]
    found = []
    for at in range(num):
        n_step = []
        for steps in range(1, num - at + 1):
            earned = sum(gamma**ahead * rewards[at + ahead] for ahead in range(steps))
            n_step.append(earned + gamma**steps * states[at + steps] - values[at])
        weights = [(1 - lam) * lam**place for place in range(len(n_step) - 1)]
        weights.append(1 - sum(weights))
        found.append(sum(weight * each for weight, each in zip(weights, n_step, strict=True)))
    return found


def paths(episode: Episode, at: int) -> Iterator[tuple[float, list[int]]]:
    """All ways from a turn to an end, each with its probability when every branch is as likely as its siblings."""
    after = [each.index for each in episode.turns if each.previous == at]
    if not after:
        yield 1.0, [at]
    for index in after:
        for probability, path in paths(episode, index):
            yield probability / len(after), [at, *path]


def expected(episode: Episode, costs: Sequence[float], over: str, end: float, **factors: float) -> list[float]:
    """The advantage of every token: the mean over all ways on from its turn, each by the definition."""
    assert episode.values is not None
    starts = [sum(len(each) for each in episode.turns[:index]) for index in range(len(episode.turns))]
    of_all = episode.score.reward - sum(episode.turn_rewards.values())
    found: list[float] = []
    for own in episode.turns:
        total = [0.0] * len(own)
        for probability, path in paths(episode, own.index):
            rewards, values = [], []
            for index in path:
                span = slice(starts[index], starts[index] + len(episode.turns[index]))
                earned = episode.turn_rewards.get(index, 0.0) + (of_all if index == path[-1] else 0.0)
                paid = [-cost for cost in costs[span]]
                if over == "tokens":
                    rewards += [*paid[:-1], paid[-1] + earned]
                    values += episode.values[span]
                else:
                    rewards.append(sum(paid) + earned)
                    values.append(episode.values[starts[index]])
            along = by_definition(rewards, values, end, **factors)
            of_own = along[: len(own)] if over == "tokens" else [along[0]] * len(own)
            total = [before + probability * each for before, each in zip(total, of_own, strict=True)]
        found += total
    return found


@pytest.mark.parametrize("over", ["tokens", "turns"])
@pytest.mark.parametrize("seed", range(6))
def test_estimates_are_those_of_the_definition(seed: int, over: Any) -> None:
    """Random trees of turns with rewards of turns and of all, a price for each token, and an end that is worth
    something."""
    chance = random.Random(seed)
    num_turns = chance.randint(1, 6)
    turns = [
        turn(index, chance.randrange(max(0, index - 2), index) if index else None, chance.randint(1, 4))
        for index in range(num_turns)
    ]
    num_tokens = sum(map(len, turns))
    episode = Episode(
        TASK,
        tuple(turns),
        Score(chance.uniform(-2, 2)),
        values=tuple(chance.uniform(-1, 1) for _ in range(num_tokens)),
        end_values=dict.fromkeys(range(num_turns), 0.7),
        ref_logprobs=tuple(chance.uniform(-3, 0) for _ in range(num_tokens)),
        turn_rewards={index: chance.uniform(-1, 1) for index in range(num_turns) if chance.random() < 0.5},
        outcome="truncated",
    )
    factors = {"gamma": chance.uniform(0.5, 1), "lam": chance.uniform(0, 1)}
    charged = algorithm(kl={"coefficient": 0.3})
    assert episode.ref_logprobs is not None
    costs = [0.3 * cost for cost in token_kl(episode.logprobs, episode.ref_logprobs, "k1")]
    found = estimates(episode, charged=charged, over=over, **factors)
    assert found.advantages == pytest.approx(expected(episode, costs, over, 0.7, **factors), abs=NEAR)
    starts = {sum(map(len, turns[:index])) for index in range(num_turns)}
    assert [place for place, target in enumerate(found.is_target) if target] == (
        list(range(num_tokens)) if over == "tokens" else sorted(starts)
    )
    assert episode.values is not None
    for value, advantage, result in zip(episode.values, found.advantages, found.returns, strict=True):
        assert over == "turns" or result == pytest.approx(value + advantage, abs=NEAR)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_a_sequence_that_goes_on_is_the_first_part_of_the_whole(lam: float) -> None:
    rewards, values = [0.1, -0.4, 0.0, 2.0], [0.5, 0.2, -0.3, 1.1]
    whole, _ = of_sequence(rewards, values, gamma=0.9, lam=lam, last_value=0.3)
    assert whole == pytest.approx(by_definition(rewards, values, 0.3, 0.9, lam), abs=NEAR)
    first, _ = of_sequence(rewards[:2], values[:2], gamma=0.9, lam=lam, last_value=-0.3, last_advantage=whole[2])
    assert first == pytest.approx(whole[:2], abs=NEAR)


# ---- By hand --------------------------------------------------------------------------------------------------------


def test_two_turns_by_hand() -> None:
    """Turns of 2 and 1 tokens, with the values 0.5, 0.25 and 1, and the reward 1 at the end; gamma 1, lam 0.5.

    Tokens: deltas -0.25, 0.75 and 0. Turns: deltas 1 - 0.5 and 1 - 1.
    """
    episode = Episode(TASK, (turn(0, None, 2), turn(1, 0, 1)), Score(1.0), values=(0.5, 0.25, 1.0))
    tokens = estimates(episode, lam=0.5)
    assert tokens.advantages == (-0.25 + 0.5 * 0.75, 0.75, 0.0)
    assert tokens.returns == (0.5 + 0.125, 1.0, 1.0)
    turns = estimates(episode, lam=0.5, over="turns")
    assert turns.advantages == (0.5, 0.5, 0.0)
    assert turns.returns == (1.0, 1.0, 1.0)
    assert turns.is_target == (True, False, True)


def test_a_fork_is_worth_the_mean_of_its_branches() -> None:
    """One token, then two branches of one, whose values are 0 and 1. The episode earns 2, the first branch 1 of it."""
    turns = (turn(0, None, 1), turn(1, 0, 1), turn(2, 0, 1))
    episode = Episode(TASK, turns, Score(2.0), values=(0.25, 0.0, 1.0), turn_rewards={1: 1.0})
    found = estimates(episode, lam=1.0)
    assert found.advantages == (1.5 - 0.25, 2.0, 0.0)
    assert estimates(episode, lam=0.0).advantages == (0.5 - 0.25, 2.0, 0.0)


def test_what_is_not_trained_on_is_no_action() -> None:
    """The middle turn is left out by the program: what it earned counts for the turn before it. The last answer never
    arrived, so the episode ends with the turn before."""
    turns = (
        turn(0, None, 1),
        turn(1, 0, 2, is_trained=False),
        turn(2, 1, 1),
        turn(3, 2, 1, is_delivered=False),
    )
    values = (0.5, 9.0, 9.0, 0.25, 9.0)
    episode = Episode(TASK, turns, Score(3.0), values=values, turn_rewards={1: 2.0})
    found = estimates(episode, lam=0.0)
    assert found.advantages == (2.0 + 0.25 - 0.5, 0.0, 0.0, 1.0 - 0.25, 0.0)
    assert found.is_target == (True, False, False, True, False)


@pytest.mark.parametrize(
    ("bootstrap", "outcome", "finish", "last"),
    [
        ("environment", "truncated", "stop", 0.75),
        ("environment", "finished", "length", 0.0),
        ("environment", "turn_limit", "stop", 0.0),
        ("always", "finished", "length", 0.75),
        ("always", "turn_limit", "stop", 0.75),
        ("always", "finished", "stop", 0.0),
        ("never", "truncated", "length", 0.0),
    ],
)
def test_which_ends_are_worth_something(bootstrap: Any, outcome: Any, finish: Any, last: float) -> None:
    episode = Episode(
        TASK,
        (turn(0, None, 1, finish_reason=finish),),
        Score(1.0),
        values=(0.5,),
        end_values={0: 0.75},
        outcome=outcome,
    )
    assert estimates(episode, gamma=0.5, bootstrap=bootstrap).advantages == (1.0 + 0.5 * last - 0.5,)


# ---- In a batch -----------------------------------------------------------------------------------------------------


def batch_of_groups() -> list[Group]:
    """Groups of one: two that finished, and one that was cut off."""
    first = Episode(TASK, (turn(0, None, 2),), Score(1.0), values=(0.0, 0.5))
    second = Episode(TASK, (turn(0, None, 1), turn(1, 0, 1, is_trained=False)), Score(0.0), values=(0.25, 0.0))
    third = Episode(TASK, (turn(0, None, 1, finish_reason="length"),), Score(0.0), values=(4.0,))
    return [Group(number, 0, (each,)) for number, each in enumerate((first, second, third))]


def test_whitening_is_over_the_tokens_that_count_in_the_loss() -> None:
    config = algorithm(whiten=True, args={"lam": 0.0})
    raw = [0.5, 0.5, -0.25]  # of the tokens that count: the third group is masked, and the last turn is not trained on
    mean = sum(raw) / 3
    scale = math.sqrt(sum((each - mean) ** 2 for each in raw) / 2) + config.advantage.epsilon
    groups = assign_advantages(batch_of_groups(), config, mask_truncated=True)
    first, second, _ = (group.episodes[0].token_advantages for group in groups)
    assert first == pytest.approx([(each - mean) / scale for each in raw[:2]], abs=NEAR)
    assert second is not None
    assert second[0] == pytest.approx((raw[2] - mean) / scale, abs=NEAR)
    clipped = assign_advantages(batch_of_groups(), algorithm(clip=0.3, args={"lam": 0.0}), mask_truncated=True)
    assert clipped[0].episodes[0].token_advantages == (0.3, 0.3)


def test_the_critic_learns_the_returns_of_the_tokens_that_count() -> None:
    made = CriticBatch.of(batch_of_groups(), algorithm(args={"lam": 0.0}), mask_truncated=True)
    batch = made.batch
    assert batch.lengths == make_batch(assign_advantages(batch_of_groups(), algorithm(), mask_truncated=True)).lengths
    assert batch.loss_weights.tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 0, 0]
    counted = batch.loss_weights == 1
    assert batch.fields["returns"][counted].tolist() == [0.5, 1.0, 0.0]
    assert batch.fields["old_values"][counted].tolist() == [0.0, 0.5, 0.25]
    assert made.returns == (0.5, 1.0, 0.0)
    errors = [0.5, 0.5, -0.25]
    spread = sum((each - 0.5) ** 2 for each in made.returns)
    mean = sum(errors) / 3
    assert made.metrics() == {
        "value_mean": 0.25,
        "return_mean": 0.5,
        "explained_variance": pytest.approx(1 - sum((each - mean) ** 2 for each in errors) / spread),
    }


def test_over_turns_the_critic_learns_at_the_first_token_of_each_turn() -> None:
    episode = Episode(TASK, (turn(0, None, 3), turn(1, 0, 2)), Score(1.0), values=(0.0,) * 5)
    made = CriticBatch.of([Group(0, 0, (episode,))], algorithm(args={"over": "turns"}), mask_truncated=False)
    assert made.batch.loss_weights.tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 0]
    assert len(made.returns) == 2


def test_values_are_those_before_each_token_and_after_the_last() -> None:
    """Two rows: a branch shares its first turn with another, and its values are taken from the first of both."""
    turns = (turn(0, None, 2), turn(1, 0, 1), turn(2, 0, 1))
    group = Group(0, 0, (Episode(TASK, turns, Score(1.0)),))
    samples = value_samples([group])
    assert [sample.token_ids.tolist() for sample in samples] == [[7, 8, 0, 1, 7, 8, 10], [7, 8, 0, 1, 7, 8, 20]]
    answers = [torch.arange(7.0), torch.arange(100.0, 107.0)]
    ((valued,),) = (each.episodes for each in with_values([group], answers))
    assert valued.values == (1.0, 2.0, 5.0, 105.0)
    assert valued.end_values == {1: 6.0, 2: 106.0}


def test_the_critic_reads_the_prompt_of_a_group_once() -> None:
    members = [Episode(TASK, (turn(0, None, 3),), Score(1.0), member=member) for member in range(4)]
    prompts = [(number, 50, 51, 52, 53, 54, 55) for number in range(3)]
    groups = [
        Group(number, 0, tuple(replace(each, turns=(replace(each.turns[0], context_ids=prompt),)) for each in members))
        for number, prompt in enumerate(prompts)
    ]
    batch = Batch.of(value_samples(groups))
    plan = plan_batch(batch, num_ranks=1, max_tokens=20, share_prefixes=True)
    assert sum(len(row.token_ids_L) for row in build_rows(batch, plan, 0)) == 3 * (7 + 4 * 3)


def test_each_agent_has_an_episode_of_its_own() -> None:
    """B moves between two turns of A, who is declared first and so comes first in a batch. A wins, B loses."""
    turns = (turn(0, None, 1, agent="a"), turn(1, None, 2, agent="b"), turn(2, 0, 1, agent="a"))
    agents = {"a": AgentResult(Score(1.0)), "b": AgentResult(Score(-1.0))}
    group = Group(0, 0, (Episode(TASK, turns, Score(1.0), agents=agents),))
    assert [len(sample) for sample in value_samples([group])] == [6, 4]
    answers = [torch.tensor([0.0, 0.5, 0.0, 0.0, 0.25, 0.0]), torch.tensor([0.0, -0.25, -0.5, 0.0])]
    valued = with_values([group], answers)
    assert valued[0].episodes[0].values == (0.5, -0.25, -0.5, 0.25)
    (found,) = assign_advantages(valued, algorithm(args={"lam": 0.0}), mask_truncated=False)
    assert found.episodes[0].token_advantages == (0.25 - 0.5, -0.5 + 0.25, -1.0 + 0.5, 1.0 - 0.25)
    made = CriticBatch.of(valued, algorithm(args={"lam": 0.0}), mask_truncated=False)
    assert made.batch.lengths == (6, 4)
    assert made.returns == (0.25, 1.0, -0.5, -1.0)


def test_equal_rewards_are_a_signal() -> None:
    """Of a group of one, and with dynamic sampling: the critic does not know them. What is masked teaches nothing."""
    done, _, cut_off = batch_of_groups()
    test = SignalTest(algorithm(whiten=True), mask_truncated=True, before_shaping=True)
    assert not test.is_of_batch
    bare = [
        replace(each, episodes=tuple(replace(one, values=None) for one in each.episodes)) for each in (done, cut_off)
    ]
    assert test.passes(bare[:1])
    assert not test.passes(bare[1:])
    assert test.reason(bare[1]) == "cut_off"


# ---- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ({"gamma": 1.5}, "algorithm.advantage.args.gamma"),
        ({"lam": -0.1}, "algorithm.advantage.args.lam"),
        ({"over": "words"}, "algorithm.advantage.args.over"),
        ({"bootstrap": True}, "algorithm.advantage.args.bootstrap"),
    ],
)
def test_arguments_out_of_range_are_refused(args: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_advantage(algorithm(args=args))
    assert (caught.value.path, caught.value.value) == (path, next(iter(args.values())))
    assert caught.value.rule
    assert caught.value.repair


@pytest.mark.parametrize("values", [None, (1.0,)])
def test_episodes_without_their_values_are_refused(values: Any) -> None:
    episode = Episode(TASK, (turn(0, None, 2),), Score(1.0), values=values)
    with pytest.raises(DataError) as caught:
        estimates(episode)
    assert caught.value.path == "group 0, sample 0 (maze)"
    assert caught.value.rule
    assert caught.value.repair
