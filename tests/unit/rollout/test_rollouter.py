"""From a number to a finished group, and from groups to a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from episodes import make_completion, make_group, with_turn
from forge.config import AlgorithmConfig, KLConfig, Sampling
from forge.rollout.references import References
from forge.rollout.rollouter import Rollouter, group_seed
from forge.rollout.samples import logprobs_by_episode, make_batch, with_field
from forge.types import Batch, Completion, Score, Task, Turn, VersionSpan


def run(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, 600))


class Numbered:
    """Prompts that are their numbers."""

    def at(self, number: int) -> tuple[int, Task]:
        return number // 10, Task(f"p{number}", text=str(number), answer=str(number))


class Scripted:
    """A policy that answers as it was told, and remembers how it was asked."""

    def __init__(self, *answers: Completion) -> None:
        self.answers, self.asked = list(answers), list[Sampling]()

    async def generate(self, prompt: Task, *, sampling: Sampling) -> list[Completion]:
        self.asked.append(sampling)
        return [replace(self.answers.pop(0), index=index) for index in range(sampling.n)]

    async def extend(self, completion: Completion, *, sampling: Sampling) -> Completion:
        self.asked.append(sampling)
        later = replace(self.answers.pop(0), prompt_ids=completion.prompt_ids + completion.token_ids)
        return completion.continued(later)


class ByLength:
    """The reward is the number of tokens."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    async def score(self, prompt: Task, completions: Sequence[Completion]) -> list[Score]:
        if self.error is not None:
            raise self.error
        return [Score(float(len(completion)), {"length": float(len(completion))}) for completion in completions]


class Constant:
    """A reference that gives every token the same logprob; it may hang."""

    def __init__(self, logprob: float, *, hangs: bool = False) -> None:
        self.logprob, self.hangs, self.was_cancelled, self.temperature = logprob, hangs, False, 0.0

    async def logprobs(self, batch: Batch, temperature: float) -> list[Any]:
        self.temperature = temperature
        try:
            if self.hangs:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return [torch.full((length,), self.logprob) for length in batch.lengths]


def rollouter(policy: Scripted, **changes: Any) -> Rollouter:
    sampling = Sampling(n=2, max_tokens=10, temperature=0.7)
    references = References(
        changes.pop("ref_logprobs", None),
        algorithm=changes.pop("algorithm", AlgorithmConfig()),
        temperature=sampling.temperature,
        teacher=changes.pop("teacher", None),
    )
    fields = {"score": ByLength().score, "references": references, "sampling": sampling, "seed": 3}
    return Rollouter(Numbered(), policy=policy, **{**fields, **changes})


def test_a_group_has_its_number_its_epoch_and_a_seed_of_its_own() -> None:
    async def body() -> None:
        policy = Scripted(*[make_completion()] * 4)
        roller = rollouter(policy)
        group = await roller.roll_out(17)
        await roller.roll_out(18)
        assert (group.number, group.epoch, group.task.id, group.rewards) == (17, 1, "p17", (3.0, 3.0))
        assert [sampling.seed for sampling in policy.asked] == [group_seed(3, 17), group_seed(3, 18)]
        assert roller.stages() == {}

    run(body())


def test_the_reference_speaks_of_the_tokens_that_were_drawn() -> None:
    """Not of the prompt's: one token further, the divergence would be that of other tokens."""

    class ByPlace:
        async def logprobs(self, batch: Batch, temperature: float) -> list[Any]:
            return [-torch.arange(length, dtype=torch.float32) for length in batch.lengths]

    async def body() -> None:
        group = await rollouter(Scripted(*[make_completion((5, 6, 7))] * 2), ref_logprobs=ByPlace().logprobs).roll_out(
            1
        )
        assert [episode.ref_logprobs for episode in group.episodes] == [(-2.0, -3.0, -4.0)] * 2

    run(body())


def test_completions_that_are_cut_short_go_on_with_seeds_of_their_own() -> None:
    async def body() -> None:
        cut = make_completion((5, 6, 7), finish_reason="abort")
        policy = Scripted(cut, cut, cut, cut, make_completion((8,)), make_completion((9,)))
        await rollouter(policy).roll_out(1)
        assert len({sampling.seed for sampling in policy.asked}) == len(policy.asked) == 5

    run(body())


def test_seeds_differ_by_run_and_by_number() -> None:
    seeds = {group_seed(seed, number) for seed in range(20) for number in range(200)}
    assert len(seeds) == 4000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert group_seed(0, 0) == 7689419447139100721


def test_what_an_update_cut_short_is_gone_on_with() -> None:
    async def body() -> None:
        cut = make_completion((5, 6, 7), version=1, finish_reason="abort")
        rest = make_completion((8, 9), version=2)
        policy = Scripted(cut, make_completion((4,)), rest)
        group = await rollouter(policy).roll_out(0)
        first, second = (episode.turns[0] for episode in group.episodes)
        assert (first.token_ids, first.finish_reason) == ((5, 6, 7, 8, 9), "stop")
        assert first.versions == (VersionSpan(1, 0, 3), VersionSpan(2, 3, 5))
        assert second.token_ids == (4,)
        assert (policy.asked[1].n, policy.asked[1].max_tokens) == (1, 7)
        assert policy.asked[1].seed not in (None, policy.asked[0].seed)
        assert group.version == 0

    run(body())


def test_a_completion_that_was_cut_at_its_last_token_is_done() -> None:
    async def body() -> None:
        policy = Scripted(make_completion(range(10), finish_reason="abort"), make_completion())
        group = await rollouter(policy).roll_out(0)
        assert group.episodes[0].turns[0].finish_reason == "length"

    run(body())


def test_the_divergence_is_taken_from_rewards_where_it_is_asked_for() -> None:
    async def body() -> None:
        reference = Constant(-1.0)
        algorithm = AlgorithmConfig(kl=KLConfig(coefficient=0.5, estimator="k1", place="reward"))
        policy = Scripted(make_completion(), make_completion())
        group = await rollouter(policy, ref_logprobs=reference.logprobs, algorithm=algorithm).roll_out(0)
        # logprobs -0.5, -0.6, -0.7 against -1: k1 sums to 0.5 + 0.4 + 0.3 = 1.2
        assert group.rewards == pytest.approx((3.0 - 0.6, 3.0 - 0.6))
        assert group.episodes[0].score.parts == pytest.approx({"length": 3.0, "kl": -1.2})
        assert group.unshaped_rewards[0] == 3.0, "the divergence only shapes the reward"
        assert group.episodes[0].ref_logprobs == (-1.0, -1.0, -1.0)
        assert reference.temperature == 0.7

    run(body())


@pytest.mark.parametrize("credit", ["return_to_go", "token"])
def test_where_tokens_are_charged_the_divergence_is_only_reported(credit: Any) -> None:
    async def body() -> None:
        algorithm = AlgorithmConfig(kl=KLConfig(coefficient=0.5, estimator="k1", place="reward", credit=credit))
        policy = Scripted(make_completion(), make_completion())
        group = await rollouter(policy, ref_logprobs=Constant(-1.0).logprobs, algorithm=algorithm).roll_out(0)
        assert group.rewards == (3.0, 3.0)
        assert group.episodes[0].score.parts == pytest.approx({"length": 3.0, "kl": -1.2})

    run(body())


def test_the_divergence_in_the_reward_is_clamped_token_by_token() -> None:
    async def body() -> None:
        kl = KLConfig(coefficient=0.5, estimator="k1", place="reward", clamp=0.35)
        policy = Scripted(make_completion(), make_completion())
        group = await rollouter(
            policy, ref_logprobs=Constant(-1.0).logprobs, algorithm=AlgorithmConfig(kl=kl)
        ).roll_out(0)
        # 0.5, 0.4 and 0.3 count as 0.35, 0.35 and 0.3
        assert group.rewards == pytest.approx((3.0 - 0.5, 3.0 - 0.5))

    run(body())


def test_a_reward_that_raises_ends_the_rollout_and_leaves_nothing_waiting() -> None:
    async def body() -> None:
        rewards, reference = ByLength(), Constant(0.0, hangs=True)
        rewards.error = RuntimeError("no")
        roller = rollouter(Scripted(*[make_completion()] * 2), score=rewards.score, ref_logprobs=reference.logprobs)
        with pytest.raises(RuntimeError, match="no"):
            await roller.roll_out(0)
        await asyncio.sleep(0)
        assert reference.was_cancelled
        assert roller.stages() == {}

    run(body())


def test_stages_say_what_a_group_waits_for() -> None:
    async def body() -> None:
        roller = rollouter(Scripted(*[make_completion()] * 2), ref_logprobs=Constant(0.0, hangs=True).logprobs)
        task = asyncio.ensure_future(roller.roll_out(5))
        for _ in range(10):
            await asyncio.sleep(0)
        assert roller.stages()[5][0] == "scoring"
        task.cancel()
        await asyncio.wait([task])

    run(body())


def test_a_batch_has_the_samplers_logprobs_where_tokens_were_drawn() -> None:
    group = make_group(4, (0.0, 1.0))
    episodes = tuple(replace(each, advantage=1.0 - 2.0 * index) for index, each in enumerate(group.episodes))
    batch = make_batch([replace(group, episodes=episodes)])
    assert batch.lengths == (5, 5)
    assert batch.loss_weights.tolist() == [0, 0, 1, 1, 1] * 2
    assert batch.fields["advantages"].tolist() == [0, 0, 1, 1, 1, 0, 0, -1, -1, -1]
    assert batch.fields["old_logprobs"].tolist() == pytest.approx([0, 0, -0.5, -0.6, -0.7] * 2)
    assert batch.identities == ("group 4, sample 0 (made-up:4)", "group 4, sample 1 (made-up:4)")
    assert "ref_logprobs" not in batch.fields
    more = with_field(batch, "extra", [torch.arange(5.0), torch.arange(5.0)])
    assert more.fields["extra"].tolist() == [*range(5), *range(5)]


def test_completions_cut_by_length_can_be_left_out_of_the_loss() -> None:
    group = make_group(0)
    cut = with_turn(group.episodes[0], finish_reason="length")
    batch = make_batch([replace(group, episodes=(cut, group.episodes[1]))], mask_truncated=True)
    assert batch.loss_weights.tolist() == [0] * 5 + [0, 0, 1, 1, 1]


def test_the_logprobs_before_truncation_are_preferred() -> None:
    assert Turn.of(make_completion()).policy_logprobs == (-0.5, -0.6, -0.7)
    assert Turn.of(make_completion(full_logprobs=(-1.0, -2.0, -3.0))).policy_logprobs == (-1.0, -2.0, -3.0)


def test_the_trainers_logprobs_find_their_completions() -> None:
    groups = [make_group(2), make_group(5)]
    empty = replace(groups[0].episodes[0], turns=(Turn.of(make_completion(())),))
    groups[0] = replace(groups[0], episodes=(empty, groups[0].episodes[1]))
    batch = make_batch(groups)
    assert len(batch) == 3
    found = logprobs_by_episode(groups, [torch.arange(5.0) + 10 * index for index in range(3)])
    assert found == {(2, 1): [2.0, 3.0, 4.0], (5, 0): [12.0, 13.0, 14.0], (5, 1): [22.0, 23.0, 24.0]}
