"""Placement `shared` with rollouts that run ahead.

Completions in progress wait while the trainer works, and continue with weights that have a version.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.config import GeneratorConfig, GRPOConfig, ModelConfig, TrainerConfig, TrainingConfig, load
from forge.errors import ConfigError
from forge.loops.colocated import SharedPolicy
from forge.losses import CrossEntropy
from forge.rollout.ledger import check_ledger
from forge.types import Batch, Completion
from grpo_runs import NUM_STEPS, config, episodes, ledger, metrics, train_here

PROMPT = list(range(20, 40))
NUM_TOKENS = 40


class ReleasingPolicy(SharedPolicy):
    """The real policy, which treats the engine's cache as it does on a GPU."""

    async def _with_cache_released(self, work: Any, *, until_published: bool) -> Any:
        assert self._native.release_cache(preempt=True)
        result = await work()
        assert until_published
        self._native.stay_paused()
        return result


def make_policy(folder: Path, kind: type[SharedPolicy], *, mode: str) -> SharedPolicy:
    trainer = TrainerConfig(
        model=ModelConfig(preset="tiny"),
        training=TrainingConfig(learning_rate=1e-2, schedule="constant", warmup_steps=0, max_seq_len=128),
        checkpoint_dir=folder / "checkpoints",
    )
    generator = GeneratorConfig(model=ModelConfig(preset="tiny"), max_batch=4, max_seq_len=128, update={"mode": mode})
    return kind(trainer, CrossEntropy(), generator, runs_ahead=True)


def whole(tokens: torch.Tensor) -> Batch:
    """Return a batch of one sample whose tokens all count, but the first, which nothing predicts."""
    weights = torch.ones(len(tokens))
    weights[0] = 0
    return Batch(token_ids=tokens, lengths=(len(tokens),), loss_weights=weights)


def batch() -> Batch:
    tokens = torch.arange(30, 60)
    return whole(tokens)


async def interrupted(policy: SharedPolicy) -> Completion:
    """Return a completion during which the weights changed once."""
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 7}
    native = policy._native
    asked = asyncio.ensure_future(policy.generate(token_ids=PROMPT, sampling=sampling))
    counts = native.thread.serving().counts
    has_begun, may_go_on = threading.Event(), threading.Event()

    def hold(_: Any) -> None:  # on the engine's thread, between two steps
        if counts.num_steps < 5:
            native.thread.ask(hold)
            return
        has_begun.set()
        may_go_on.wait()

    native.thread.ask(hold)
    await asyncio.to_thread(has_begun.wait)
    training = asyncio.ensure_future(policy.train_step(batch()))
    while not native.thread.updates:  # noqa: ASYNC110 - it asks for a pause, which comes before the next step
        await asyncio.sleep(0)
    may_go_on.set()
    await training
    num_steps = counts.num_steps
    for _ in range(200):  # tokens of weights without a version would come now
        await asyncio.sleep(0)
        await asyncio.wrap_future(native.thread.ask(lambda _: None))
    assert counts.num_steps == num_steps
    assert not asked.done()
    await policy.publish_weights(1)
    (completion,) = await asked
    return completion


@pytest.mark.parametrize(
    ("kind", "mode"), [(SharedPolicy, "recompute"), (SharedPolicy, "keep"), (ReleasingPolicy, "keep")]
)
def test_every_token_has_the_version_that_sampled_it(tmp_path: Path, kind: type[SharedPolicy], mode: str) -> None:
    async def body() -> None:
        policy = make_policy(tmp_path, kind, mode=mode)
        await policy.setup()
        try:
            await policy.publish_weights(0)
            old = await scores_of(policy)
            completion = await interrupted(policy)
            assert [part.version for part in completion.versions] == [0, 1]
            change = completion.versions[1].start
            assert 0 < change < NUM_TOKENS
            (before,), (after,) = await old(completion), await (await scores_of(policy))(completion)
            assert list(completion.logprobs[:change]) == before[:change], "sampled by version 0"
            if (kind, mode) != (SharedPolicy, "keep"):  # with `keep`, the cache of version 0 is still used
                assert list(completion.logprobs[change:]) == after[change:], "sampled by version 1"
            assert list(completion.logprobs[change:]) != before[change:]
        finally:
            await policy.close()

    asyncio.run(body())


async def scores_of(policy: SharedPolicy) -> Any:
    """Return a function that scores a completion with the weights of now."""
    weights = {name: tensor.clone() for name, tensor in policy.engine.own_parameters().items()}

    async def score(completion: Completion) -> list[list[float]]:
        current = policy.engine.own_parameters()
        kept = {name: tensor.clone() for name, tensor in current.items()}
        ids = torch.tensor([*completion.prompt_ids, *completion.token_ids])
        try:
            for name, tensor in current.items():
                tensor.copy_(weights[name])
            (found,) = policy.engine.forward_logprobs(whole(ids))
        finally:
            for name, tensor in current.items():
                tensor.copy_(kept[name])
        return [found[len(completion.prompt_ids) :].tolist()]

    return score


def test_a_run_ahead_keeps_its_bound_and_learns_from_every_group_once(tmp_path: Path) -> None:
    chosen = config(
        tmp_path / "ahead",
        *("placement=shared", "rollout.staleness=2", "generator.max_batch=4", "generator.sampling.max_tokens=24"),
    )
    result = train_here(chosen)
    assert result.step == NUM_STEPS
    lines = ledger(chosen)
    assert len({line.group for line in lines}) == len(lines)
    check_ledger(lines, pending=[], next_number=max(line.group for line in lines) + 1)
    assert max(metrics(chosen, "rollout/staleness_max")) <= 2
    seen = list(episodes(chosen))
    assert any(len(episode["versions"]) > 1 for episode in seen), "a completion that a step of training interrupted"
    for episode in seen:
        assert all(episode["step"] - 1 - version <= 2 for version, _, _ in episode["versions"])


def test_waiting_completions_cannot_finish_first() -> None:
    chosen = ["placement=shared", "rollout.staleness=1", "generator.update.mode=drain"]
    with pytest.raises(ConfigError) as caught:
        load(GRPOConfig, overrides=chosen)
    assert "generator.update.mode" in str(caught.value)
    assert "rollout.staleness: 0" in str(caught.value)
    load(GRPOConfig, overrides=[*chosen[:2], "generator.update.mode=abort"])
