"""What may differ from one step of a trainer to the next: temperatures of the samples, and the learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine_ranks import made_batch
from forge.config import ModelConfig, TrainerConfig, TrainingConfig
from forge.errors import ConfigError, DataError
from forge.losses import PolicyLoss
from forge.rollout.step_record import batch_digest
from forge.trainer.engine import Engine
from forge.types import Batch

LENGTHS, TEMPERATURES = (9, 5, 12, 7), (0.6, 1.0, 0.6, 1.4)
FIELDS = ("advantages", "old_logprobs")


def engine(learning_rate: float = 1e-3) -> Engine:
    training = TrainingConfig(max_seq_len=64, schedule="linear", warmup_steps=1, learning_rate=learning_rate)
    model = ModelConfig(preset="tiny")
    return Engine(
        TrainerConfig(model=model, training=training, total_steps=4), loss=PolicyLoss(entropy_coefficient=0.1)
    )


@pytest.fixture
def opened() -> Iterator[Engine]:
    made = engine()
    yield made
    made.close()


def tempered() -> Batch:
    samples = made_batch(LENGTHS, vocab=200, fields=FIELDS, seed=3).samples()
    return Batch.of([replace(each, temperature=at) for each, at in zip(samples, TEMPERATURES, strict=True)])


def test_each_sample_is_scored_at_its_own_temperature(opened: Engine) -> None:
    """With the bits that it has alone."""
    batch = tempered()
    found = opened.forward_logprobs(batch)
    for sample, at, together in zip(batch.samples(), TEMPERATURES, found, strict=True):
        (alone,) = opened.forward_logprobs(Batch.of([replace(sample, temperature=None)]), temperature=at)
        assert torch.equal(together, alone)
    at_one = opened.forward_logprobs(batch, temperature=1.0)
    assert [torch.equal(*pair) for pair in zip(found, at_one, strict=True)] == [False, True, False, False]


def test_a_step_sees_the_logprobs_that_scoring_finds(opened: Engine) -> None:
    batch = tempered()
    found = opened.forward_logprobs(batch)
    result = opened.train_step(batch, keep_logprobs=True)
    assert result.logprobs is not None
    for sample, scored, seen in zip(batch.samples(), found, result.logprobs, strict=True):
        counted = sample.loss_weights != 0
        assert torch.equal(scored[counted], seen[counted])


def test_a_learning_rate_takes_the_place_of_the_schedules_highest() -> None:
    """For one step alone; the schedule continues as planned. Weights are those of an engine made with that rate."""
    plain, changed = engine(5e-3), engine(1e-3)
    try:
        batch = tempered()
        rates = [changed.train_step(batch, learning_rate=rate).learning_rate for rate in (5e-3, 5e-3, None)]
        expected = [plain.train_step(batch).learning_rate for _ in range(2)]
        assert rates[:2] == expected
        assert rates[2] == pytest.approx(1e-3 * 2 / 3, rel=1e-9)
        assert all(torch.equal(*pair) for pair in zip(*map(weights, (plain, changed)), strict=True)) is False
        plain.train_step(batch, learning_rate=1e-3)
        assert all(torch.equal(*pair) for pair in zip(*map(weights, (plain, changed)), strict=True))
    finally:
        plain.close()
        changed.close()


def weights(made: Engine) -> list[torch.Tensor]:
    return list(made.own_parameters().values())


def test_temperatures_that_make_no_sense_are_refused(opened: Engine) -> None:
    batch = tempered()
    with pytest.raises(DataError, match="one temperature for each sample") as raised:
        opened.train_step(replace(batch, temperatures=(1.0,)))
    assert (raised.value.path, raised.value.value) == ("temperatures", 1)
    assert "4 numbers" in str(raised.value.rule)
    assert "all samples a temperature or none" in str(raised.value.repair)
    with pytest.raises(ConfigError, match="positive number"):
        opened.forward_logprobs(replace(batch, temperatures=(1.0, 1.0, 0.0, 1.0)))
    first, *others = batch.samples()
    with pytest.raises(ValueError, match="has no temperature, and others have one"):
        Batch.of([replace(first, temperature=None), *others])


def test_a_batch_keeps_its_temperatures_and_its_digest_shows_them() -> None:
    batch = tempered()
    again = Batch.of(list(batch.samples()))
    assert again.temperatures == TEMPERATURES
    assert batch_digest(again) == batch_digest(batch)
    assert batch_digest(replace(batch, temperatures=())) != batch_digest(batch)
    assert batch_digest(replace(batch, temperatures=TEMPERATURES[::-1])) != batch_digest(batch)
