"""Episodes of several turns as samples: every sampled token once, with its own values."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import torch

from forge.config import AlgorithmConfig
from forge.rollout.references import References
from forge.rollout.samples import logprobs_by_episode, make_batch, plain_samples, sampled_values
from forge.rollout.signal import SignalTest
from forge.rollout.turn_credit import turn as turn_advantage
from forge.types import Batch, Episode, Group, Score, Task, Turn, VersionSpan

TASK = Task("made-up")


def a_turn(
    index: int, parent: int | None, context: tuple[int, ...], sampled: tuple[int, ...], **changes: object
) -> Turn:
    logprobs = tuple(-float(token) for token in sampled)
    fields: dict[str, object] = {
        "index": index, "parent": parent, "previous": parent, "path": (), "messages": (), "context_ids": context,
        "token_ids": sampled, "logprobs": logprobs, "full_logprobs": None, "text": "", "finish_reason": "stop",
        "versions": (VersionSpan(index, 0, len(sampled)),),
    }  # fmt: skip
    return Turn(**{**fields, **changes})  # type: ignore[arg-type]


def chain() -> Episode:
    turns = (a_turn(0, None, (1, 2), (10, 11)), a_turn(1, 0, (3,), (12,)), a_turn(2, 1, (4, 5), (13, 14)))
    return Episode(TASK, turns, Score(6.0), turn_rewards={0: 1.0, 1: 2.0})


def tree() -> Episode:
    """Two continuations of one turn, and a root of its own."""
    turns = (
        a_turn(0, None, (1, 2), (10, 11)),
        a_turn(1, 0, (3,), (12,)),
        a_turn(2, 0, (4,), (13, 14)),
        a_turn(3, None, (7, 8, 9), (15,)),
    )
    return Episode(TASK, turns, Score(1.0), advantage=0.5)


def test_a_chain_of_turns_is_one_sample_in_which_only_sampled_tokens_count() -> None:
    (sample,) = plain_samples(chain(), number=3)
    assert sample.token_ids.tolist() == [1, 2, 10, 11, 3, 12, 4, 5, 13, 14]
    assert sample.loss_weights.tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 1, 1]
    assert sample.identity == "group 3, sample 0 (made-up)"


def test_a_tree_is_a_sample_for_each_leaf_and_shared_tokens_count_once() -> None:
    batch = make_batch([Group(0, 0, (tree(),))])
    rows = list(batch.samples())
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 10, 11, 3, 12], [1, 2, 10, 11, 4, 13, 14], [7, 8, 9, 15]]
    assert [row.loss_weights.tolist() for row in rows] == [[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1]]
    assert batch.total_weight == tree().num_tokens
    assert batch.sequences == (0, 0, 0)
    assert rows[1].fields["old_logprobs"].tolist() == [0, 0, 0, 0, 0, -13, -14]


def test_episodes_of_one_row_are_sequences_of_their_own() -> None:
    assert make_batch([Group(0, 0, (chain(), chain()))]).sequences == ()
    mixed = make_batch([Group(0, 0, (chain(), tree(), chain()))])
    assert mixed.sequences == (0, 1, 1, 1, 2)


def test_values_of_rows_come_back_to_their_tokens() -> None:
    episode = tree()
    rows = [torch.arange(6.0), 100 + torch.arange(7.0), 200 + torch.arange(4.0)]
    assert sampled_values(episode, rows) == (2.0, 3.0, 5.0, 105.0, 106.0, 203.0)
    found = logprobs_by_episode([Group(4, 0, (episode,))], rows)
    assert found == {(4, 0): [2.0, 3.0, 5.0, 105.0, 106.0, 203.0]}


def test_what_never_reached_its_client_is_read_but_not_learned_from() -> None:
    turns = (a_turn(0, None, (1,), (10,)), a_turn(1, 0, (2,), (11,), is_delivered=False), a_turn(2, 0, (3,), (12,)))
    episode = Episode(TASK, turns, Score(1.0))
    (row,) = plain_samples(episode, number=0)
    assert row.token_ids.tolist() == [1, 10, 3, 12]
    assert episode.num_tokens == 3
    assert sampled_values(episode, [torch.arange(4.0)]) == (1.0, 0.0, 3.0)


def test_turns_have_advantages_of_their_own() -> None:
    short = Episode(TASK, (a_turn(0, None, (1,), (10, 11)),), Score(2.0), member=1)
    ((first, second),) = turn_advantage([Group(0, 0, (chain(), short))])
    # returns to go of the chain: 6, 5 and 3 (what is not of a single turn counts to the end); the other's: 2, 0, 0
    assert first == [4.0, 4.0, 5.0, 3.0, 3.0]
    assert second == [-4.0, -4.0]


def test_tokens_that_were_not_delivered_add_nothing_to_the_divergence() -> None:
    lost = a_turn(1, 0, (3,), (12,), is_delivered=False)
    made = Episode(TASK, (a_turn(0, None, (1, 2), (10, 11)), lost), Score(1.0))
    algorithm = AlgorithmConfig(kl={"coefficient": 0.5, "place": "reward", "estimator": "k1", "credit": "completion"})

    async def ask(batch: Batch, temperature: float) -> list[torch.Tensor]:
        return [sample.token_ids.float().neg() - 1.0 for sample in batch.samples()]

    references = References(ask, algorithm=algorithm, temperature=1.0)
    (compared,) = asyncio.run(references.compared([made], number=0))
    assert compared.ref_logprobs == (-11.0, -12.0, -12.0)
    assert references.charged(compared).score.parts["kl"] == -2.0


def test_a_group_of_which_nothing_was_delivered_does_not_count() -> None:
    lost = Episode(TASK, (a_turn(0, None, (1, 2), (10, 11), is_delivered=False),), Score(1.0))
    assert (lost.num_tokens, lost.num_trained_tokens) == (2, 0)
    assert not SignalTest(AlgorithmConfig()).counts(Group(0, 0, (lost, replace(lost, score=Score(0.0)))))


def test_an_episode_is_cut_off_by_its_last_answer_that_was_delivered() -> None:
    first = a_turn(0, None, (1,), (10,))
    lost = a_turn(1, 0, (2,), (11,), finish_reason="length", is_delivered=False)
    assert not Episode(TASK, (first, lost), Score(1.0)).is_truncated
    assert Episode(TASK, (first, replace(lost, is_delivered=True)), Score(1.0)).is_truncated
    assert Episode(TASK, (first,), Score(1.0), outcome="turn_limit").is_truncated
    batch = make_batch([Group(0, 0, (Episode(TASK, (first, lost), Score(1.0)),))], mask_truncated=True)
    assert batch.loss_weights.tolist() == [0.0, 1.0]
