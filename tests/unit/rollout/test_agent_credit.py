"""Advantages, samples and signal of episodes with several agents, against exact values."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from forge.config import AgentConfig, AlgorithmConfig, RolloutConfig
from forge.config.agents import RunningBaselineConfig
from forge.envs.agent_scores import episode_score
from forge.errors import DataError, RewardError
from forge.rollout.agent_credit import AgentCredit
from forge.rollout.agent_views import agent_view, parts_of
from forge.rollout.buffer import ReplayBuffer
from forge.rollout.credit import assign_advantages
from forge.rollout.record import EpisodeLines
from forge.rollout.references import References
from forge.rollout.samples import logprobs_by_episode, make_batch, plain_samples
from forge.rollout.signal import SignalTest
from forge.types import AgentResult, Batch, Episode, Group, Score, Task, Turn, VersionSpan

TASK = Task("made-up")
MEAN = AlgorithmConfig.model_validate({"advantage": {"baseline": "group_mean", "scale": "none"}})
TURNS = AlgorithmConfig.model_validate({"advantage": {"function": "turn"}})


def a_turn(index: int, agent: str, sampled: Sequence[int], *, parent: int | None = None, **changes: Any) -> Turn:
    fields: dict[str, Any] = {
        "index": index, "parent": parent, "previous": parent, "path": (), "messages": (), "context_ids": (1, 2),
        "token_ids": tuple(sampled), "logprobs": tuple(-float(token) for token in sampled), "full_logprobs": None,
        "text": "", "finish_reason": "stop", "versions": (VersionSpan(0, 0, len(sampled)),), "agent": agent,
    }  # fmt: skip
    return Turn(**{**fields, **changes})


def an_episode(rewards: Mapping[str, float | None], member: int = 0, **changes: Any) -> Episode:
    """Two turns of `a` and one of `b`; an agent with the reward None does not learn."""
    results = {
        name: AgentResult(None if reward is None else Score(reward), learns=reward is not None)
        for name, reward in rewards.items()
    }
    turns = [a_turn(0, "a", (10, 11)), a_turn(1, "a", (12,), parent=0), a_turn(2, "b", (20, 21, 22))]
    turns = [replace(turn, is_trained=results[turn.agent].learns) for turn in turns]
    fields: dict[str, Any] = {"member": member, "agents": results, "stats": {"num_turns": 3.0}}
    return Episode(TASK, tuple(turns), episode_score(results), **{**fields, **changes})


def a_group(*rewards: tuple[float | None, float | None], number: int = 0) -> Group:
    episodes = (an_episode({"a": a, "b": b}, member) for member, (a, b) in enumerate(rewards))
    return Group(number, 0, tuple(episodes))


def advantages_of(group: Group) -> list[dict[str, float]]:
    return [{name: result.advantage for name, result in each.agents.items()} for each in group.episodes]


def assign(
    groups: Sequence[Group], credit: AgentCredit | None = None, algorithm: AlgorithmConfig = MEAN
) -> list[Group]:
    return assign_advantages(groups, algorithm, mask_truncated=False, agents=credit)


def test_each_agent_is_compared_with_itself_over_the_group() -> None:
    (group,) = assign([a_group((1.0, 5.0), (0.0, 5.0), (2.0, 11.0))])
    assert advantages_of(group) == [{"a": 0.0, "b": -2.0}, {"a": -1.0, "b": -2.0}, {"a": 1.0, "b": 4.0}]
    first = group.episodes[0]
    assert first.token_advantages == (0.0, 0.0, 0.0, -2.0, -2.0, -2.0)
    assert first.advantage == 0.0  # that of the first agent that learns
    assert group.episodes[2].token_advantages == (1.0, 1.0, 1.0, 4.0, 4.0, 4.0)


def test_an_agent_that_does_not_learn_has_no_advantage() -> None:
    (group,) = assign([a_group((1.0, None), (0.0, None))])
    assert [each.token_advantages for each in group.episodes] == [
        (0.5, 0.5, 0.5, 0.0, 0.0, 0.0),
        (-0.5, -0.5, -0.5, 0.0, 0.0, 0.0),
    ]


def test_advantages_per_turn_are_those_of_the_agents_own_turns() -> None:
    """`a` earns 1 in its second turn in one episode; the turn of `b` is at depth 0 of its own conversation."""
    group = a_group((1.0, 4.0), (0.0, 2.0))
    episodes = (replace(group.episodes[0], turn_rewards={0: 1.0, 2: 4.0}), group.episodes[1])
    (found,) = assign([replace(group, episodes=episodes)], algorithm=TURNS)
    assert found.episodes[0].token_advantages == (1.0, 1.0, 0.0, 2.0, 2.0, 2.0)
    assert found.episodes[1].token_advantages == (-1.0, -1.0, 0.0, -2.0, -2.0, -2.0)


def running(**fields: Any) -> AgentCredit:
    return AgentCredit(
        {"b": AgentConfig(advantage="baseline", baseline=RunningBaselineConfig(**fields))}, names=("a", "b")
    )


def test_a_running_baseline_is_the_mean_of_earlier_batches() -> None:
    credit = running(decay=0.75, start=1.0)
    first = [a_group((0.0, 2.0), (1.0, 4.0))]
    assert [each["b"] for each in advantages_of(assign(first, credit)[0])] == [1.0, 3.0]
    assert [each["a"] for each in advantages_of(assign(first, credit)[0])] == [-0.5, 0.5]
    credit.learned_from(first)
    assert (credit.baselines["b"].value, credit.baselines["b"].num_batches) == (3.0, 1)  # the first one replaces start
    second = [a_group((0.0, 7.0))]
    assert advantages_of(assign(second, credit)[0])[0]["b"] == 4.0
    credit.learned_from(second)
    assert credit.baselines["b"].value == 0.75 * 3.0 + 0.25 * 7.0


def test_a_running_baseline_is_restored_bit_for_bit() -> None:
    credit = running(decay=0.9)
    for reward in (0.1, 0.2, 1 / 3):
        credit.learned_from([a_group((0.0, reward), (0.0, reward / 7))])
    kept = json.loads(json.dumps(credit.state()))
    again = running(decay=0.9)
    again.load({**kept, "gone": ["0x0p+0", 1]})
    assert again.baselines["b"] == credit.baselines["b"]
    assert AgentCredit({"a": AgentConfig()}).state() == {}


def test_zero_sum_is_the_negative_of_the_opponents() -> None:
    config = {"a": AgentConfig(advantage="baseline"), "b": AgentConfig(advantage="zero_sum")}
    (group,) = assign([a_group((1.0, -1.0), (-0.25, 0.25))], AgentCredit(config))
    assert advantages_of(group) == [{"a": 1.0, "b": -1.0}, {"a": -0.25, "b": 0.25}]
    for episode in group.episodes:
        assert episode.token_advantages is not None
        assert episode.token_advantages[0] == -episode.token_advantages[3]


def test_zero_sum_is_checked() -> None:
    credit = AgentCredit({"b": AgentConfig(advantage="zero_sum")})
    with pytest.raises(RewardError, match=r"do not add up to 0[\s\S]*group 4, sample 1[\s\S]*'b': 1.0, 'a': 0.5"):
        assign([a_group((1.0, -1.0), (0.5, 1.0), number=4)], credit)
    with pytest.raises(DataError, match="advantages of their own"):
        assign([a_group((1.0, -1.0), (0.0, 0.0))], credit, TURNS)


def test_zero_sum_against_an_opponent_that_does_not_learn() -> None:
    opponent = AgentResult(Score(-1.0), learns=False, policy="model x")
    group = a_group((1.0, -1.0), (-1.0, 1.0))
    episodes = [
        replace(each, agents={**each.agents, "b": replace(opponent, score=each.agents["b"].score)})
        for each in group.episodes
    ]
    config = {"a": AgentConfig(advantage="zero_sum"), "b": AgentConfig(learns=False)}
    (found,) = assign([replace(group, episodes=tuple(episodes))], AgentCredit(config))
    assert advantages_of(found) == [{"a": 1.0, "b": 0.0}, {"a": -1.0, "b": 0.0}]


# ---- Samples --------------------------------------------------------------------------------------------------------


def with_root(episode: Episode) -> Episode:
    """The episode with a second root of `b`: two rows of `b`, one of `a`."""
    return replace(episode, turns=(*episode.turns, a_turn(3, "b", (30,))))


def test_a_sequence_is_an_episode_times_an_agent() -> None:
    group = Group(0, 0, tuple(with_root(an_episode({"a": r, "b": -r}, m)) for m, r in enumerate((1.0, 0.0))))
    batch = make_batch(assign([group]))
    samples = list(batch.samples())
    assert [sample.token_ids.tolist() for sample in samples[:3]] == [
        [1, 2, 10, 11, 1, 2, 12],
        [1, 2, 20, 21, 22],
        [1, 2, 30],
    ]
    assert [sample.sequence for sample in samples] == [0, 1, 1, 2, 3, 3]
    advantages = [sample.fields["advantages"].tolist() for sample in samples[:3]]
    assert advantages == [[0, 0, 0.5, 0.5, 0, 0, 0.5], [0, 0, -0.5, -0.5, -0.5], [0, 0, -0.5]]


def test_only_turns_of_agents_that_learn_are_samples() -> None:
    batch = make_batch(assign([a_group((1.0, None), (0.0, None))]))
    assert [sample.token_ids.tolist() for sample in batch.samples()] == [[1, 2, 10, 11, 1, 2, 12]] * 2
    (sample,) = plain_samples(a_group((1.0, None)).episodes[0], number=0)
    assert sample.loss_weights.sum() == 3


def test_an_agent_that_was_cut_off_is_masked_alone() -> None:
    episode = an_episode({"a": 1.0, "b": -1.0})
    turns = (episode.turns[0], replace(episode.turns[1], finish_reason="length"), episode.turns[2])
    batch = make_batch([Group(0, 0, (replace(episode, turns=turns),))], mask_truncated=True)
    assert [float(sample.loss_weights.sum()) for sample in batch.samples()] == [0.0, 3.0]


def test_logprobs_of_samples_go_back_to_their_turns() -> None:
    group = Group(7, 0, (with_root(an_episode({"a": 1.0, "b": -1.0})),))
    rows = [sample.token_ids.float() for sample in make_batch([group]).samples()]
    assert logprobs_by_episode([group], rows) == {(7, 0): [10, 11, 12, 20, 21, 22, 30]}


def test_a_view_has_its_own_values_and_no_others() -> None:
    episode = replace(with_root(an_episode({"a": 1.0, "b": -1.0})), ref_logprobs=tuple(map(float, range(7))))
    episode = replace(episode, turn_rewards={1: 0.5, 3: 0.25})
    first, second = parts_of(episode)
    assert (first.ref_logprobs, first.turn_rewards, first.score.reward) == ((0.0, 1.0, 2.0), {1: 0.5}, 1.0)
    assert (second.ref_logprobs, second.turn_rewards, second.score.reward) == ((3.0, 4.0, 5.0, 6.0), {1: 0.25}, -1.0)
    assert [turn.parent for turn in first.turns] == [None, 0]
    assert agent_view(episode, "b").agents == {}


def test_the_divergence_is_taken_from_the_agent_that_diverged() -> None:
    kl = {"kl": {"coefficient": 0.5, "place": "reward", "estimator": "k1", "credit": "completion"}}
    algorithm = AlgorithmConfig.model_validate(kl)
    episode = an_episode({"a": 1.0, "b": 2.0})

    async def logprobs(batch: Batch, temperature: float) -> list[torch.Tensor] | None:
        """The reference has 1 less for every token of `b`, and the same for those of `a`."""
        samples = list(batch.samples())
        return [-sample.token_ids.float() - float(20 in sample.token_ids.tolist()) for sample in samples]

    async def charge() -> Episode:
        references = References(logprobs, algorithm=algorithm, temperature=1.0)
        (found,) = await references.compared([episode], number=0)
        return references.charged(found)

    charged = asyncio.run(charge())
    scores = {name: result.score for name, result in charged.agents.items()}
    assert scores["a"] is not None
    assert scores["b"] is not None
    assert (scores["a"].reward, scores["b"].reward, scores["b"].unshaped) == (1.0, 2.0 - 0.5 * 3.0, 2.0)
    assert charged.score.parts["b/kl"] == -3.0


# ---- Signal ---------------------------------------------------------------------------------------------------------


def test_a_group_has_signal_where_one_agent_has() -> None:
    signal = SignalTest(MEAN)
    assert signal.passes([a_group((0.0, 1.0), (0.0, 2.0))])
    assert not signal.passes([a_group((0.0, 1.0), (0.0, 1.0 + 1e-12))])
    assert not signal.passes([a_group((0.0, None), (0.0, None))])
    assert signal.reason(a_group((0.0, 1.0), (0.0, 1.0))) == "all_equal"
    assert signal.reason(a_group((0.0, 0.0), (0.0, 0.0))) == "all_zero"
    assert signal.counts(a_group((0.0, None)))


def test_an_advantage_of_an_agent_without_a_token_is_no_signal() -> None:
    group = a_group((0.0, 1.0), (0.0, 2.0))
    silent = tuple(replace(each, turns=each.turns[:2]) for each in group.episodes)
    assert not SignalTest(MEAN).passes([replace(group, episodes=silent)])


def test_with_running_baselines_a_group_of_one_has_signal() -> None:
    credit = AgentCredit({name: AgentConfig(advantage="baseline") for name in "ab"}, names=("a", "b"))
    batch_mean = AlgorithmConfig.model_validate({"advantage": {"baseline": "batch_mean", "scale": "none"}})
    signal = SignalTest(batch_mean, agents=credit)
    assert not signal.is_of_batch
    assert signal.passes([a_group((1.0, 0.0))])
    assert not signal.passes([a_group((0.0, 0.0))])
    assert SignalTest(batch_mean, agents=AgentCredit(names=("a", "b"))).is_of_batch


def test_rewards_before_shaping_are_those_of_each_agent() -> None:
    def shaped(reward: float) -> Episode:
        episode = an_episode({"a": reward, "b": 0.0})
        result = AgentResult(Score(reward, unshaped=1.0))
        return replace(episode, agents={**episode.agents, "a": result})

    group = Group(0, 0, (shaped(0.5), shaped(0.75)))
    assert SignalTest(MEAN).passes([group])
    assert not SignalTest(MEAN, before_shaping=True).passes([group])
    assert SignalTest(MEAN).reason(group) == "equal_before_shaping"


def test_staleness_is_that_of_the_oldest_live_turn_of_any_agent() -> None:
    episode = an_episode({"a": 1.0, "b": 0.0})
    turns = [replace(turn, versions=(VersionSpan(3, 0, len(turn)),)) for turn in episode.turns]
    turns[2] = replace(turns[2], versions=(VersionSpan(2, 0, 3),))
    other = a_turn(3, "c", (40,), versions=()).without_tokens()
    found = replace(episode, turns=(*turns, other))
    assert found.version == 2
    buffer = ReplayBuffer(RolloutConfig(staleness=1))
    buffer.num_taken = 4
    assert buffer.is_stale(Group(0, 0, (found,)))
    buffer.num_taken = 3
    assert not buffer.is_stale(Group(0, 0, (found,)))


# ---- Record ---------------------------------------------------------------------------------------------------------


def test_a_line_says_who_said_what_and_what_each_agent_earned() -> None:
    (group,) = assign([a_group((1.0, None), (0.0, None))])
    episode = replace(group.episodes[0])
    episode = replace(episode, agents={**episode.agents, "b": AgentResult(None, learns=False, policy="model x")})
    line = json.loads(EpisodeLines(None).line(episode, {"step": 1, "group": 0, "epoch": 0, "index": 0}))
    assert [turn["agent"] for turn in line["turns"]] == ["a", "a", "b"]
    assert [turn["advantage"] for turn in line["turns"]] == [0.5, 0.5, None]
    assert line["agents"] == {
        "a": {"policy": "live", "learns": True, "reward": 1.0, "parts": {}, "advantage": 0.5},
        "b": {"policy": "model x", "learns": False, "reward": None, "parts": {}, "advantage": None},
    }
    alone = replace(episode, agents={})
    line = json.loads(EpisodeLines(None).line(alone, {"step": 1, "group": 0, "epoch": 0, "index": 0}))
    assert "agents" not in line
    assert not any({"agent", "order"} & set(turn) for turn in line["turns"])


def sides(number: int, learner: str, *rewards: tuple[float, float]) -> Group:
    """A group of a league: one side learns, the other one only has rewards."""
    found = a_group(*rewards, number=number)
    episodes = []
    for each in found.episodes:
        results = {name: replace(result, learns=name == learner) for name, result in each.agents.items()}
        turns = tuple(replace(turn, is_trained=turn.agent == learner) for turn in each.turns)
        episodes.append(replace(each, turns=turns, agents=results, score=episode_score(results)))
    return replace(found, episodes=tuple(episodes))


def test_a_side_that_learns_is_compared_where_it_learns() -> None:
    """What one side earned as the opponent is neither in the mean of the batch nor in its running baseline."""
    batch = AlgorithmConfig.model_validate({"advantage": {"baseline": "batch_mean", "scale": "none"}})
    groups = [sides(0, "a", (1.0, -1.0), (3.0, -3.0)), sides(1, "b", (-9.0, 4.0), (-9.0, 8.0))]
    found = assign(groups, algorithm=batch)
    assert [advantages_of(group) for group in found] == [
        [{"a": -1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}],
        [{"a": 0.0, "b": -2.0}, {"a": 0.0, "b": 2.0}],
    ]
    assert [each.score.reward for group in found for each in group.episodes] == [1.0, 3.0, 4.0, 8.0]
    assert found[1].episodes[0].token_advantages == (0.0, 0.0, 0.0, -2.0, -2.0, -2.0)
    running = AgentConfig(advantage="baseline")
    credit = AgentCredit({"a": running, "b": running})
    assert advantages_of(assign(groups, credit)[1]) == [{"a": 0.0, "b": 4.0}, {"a": 0.0, "b": 8.0}]
    credit.learned_from(groups)
    assert {name: each.value for name, each in credit.baselines.items()} == {"a": 2.0, "b": 6.0}


def test_a_batch_in_which_a_side_never_learns_leaves_its_baseline() -> None:
    credit = AgentCredit({"b": AgentConfig(advantage="baseline")})
    groups = [sides(0, "a", (1.0, -1.0), (3.0, -3.0))]
    assert advantages_of(assign(groups, credit)[0]) == [{"a": -1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}]
    credit.learned_from(groups)
    assert credit.baselines["b"].num_batches == 0
