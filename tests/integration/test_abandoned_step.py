"""A training step that is abandoned in the middle leaves no trace, on one rank and on several."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_ranks import Ranks, made_batch, opened, ranks_of, whole_weights
from forge.config import CheckpointConfig, DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.errors import StepAbandoned

MODEL = ModelConfig(
    family="qwen3",
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=64,
    tie_embeddings=False,
    max_seq_len=64,
    rope_theta=1000.0,
    norm_eps=1e-6,
)
BATCH = made_batch((9, 15, 4, 11, 16, 3, 7, 12, 14, 13), vocab=64)
"""Several rows of 16 tokens on every rank."""


def config_of(distributed: dict[str, Any], **options: Any) -> TrainerConfig:
    training = {"max_seq_len": 16, "schedule": "constant", "warmup_steps": 0, "learning_rate": 1e-2}
    return TrainerConfig(
        model=MODEL,
        training=TrainingConfig(**training),
        distributed=DistributedConfig(with_gpus=False, **distributed),
        seed=3,
        **options,
    )


def abandon_in_the_middle(distributed: dict[str, Any]) -> tuple[int, bool, bool]:
    """One rank asks for it before its second row. How often that was asked, and whether a trace is left."""
    with opened(config_of(distributed)) as plain:
        plain.train_step(BATCH)
        expected = whole_weights(plain)
    with opened(config_of(distributed)) as engine:
        before = whole_weights(engine)
        asked = 0

        def is_late() -> bool:
            nonlocal asked
            asked += 1
            return engine.ranks.rank == engine.ranks.size - 1 and asked == 2

        engine.should_abandon = is_late
        try:
            engine.train_step(BATCH)
        except StepAbandoned:
            kept = _equal(before, whole_weights(engine)) and engine.step == 0
        else:
            raise AssertionError("the step was not abandoned")
        engine.should_abandon = lambda: False
        engine.train_step(BATCH)
        return asked, kept, _equal(expected, whole_weights(engine))


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield from ranks_of(__name__)


@pytest.mark.parametrize(
    ("num_ranks", "distributed"),
    [(1, {}), (2, {"strategy": "fsdp"}), (2, {"tensor": 2})],
    ids=["one", "fsdp", "tensor"],
)
def test_an_abandoned_step_leaves_no_trace(
    num_ranks: int, distributed: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    found = ranks.run(abandon_in_the_middle, num_ranks, scratch=tmp_path, distributed=distributed)
    assert found == [(2, True, True)] * num_ranks


def abandon_a_trainer(folder: str) -> tuple[list[str], int]:
    """What a trainer saves after a step that it abandoned, and after which step."""
    from forge.trainer.actor import Trainer

    os.environ.update(RANK="0", WORLD_SIZE="1")
    trainer = Trainer(config_of({}, checkpoint_dir=Path(folder), checkpointing=CheckpointConfig(grace_s=30.0)))

    async def body() -> int:
        await trainer.setup()
        await trainer.train_step(BATCH)
        await trainer.abandon_step()
        with pytest.raises(StepAbandoned):
            await trainer.train_step(BATCH)
        await trainer.save({})
        step = (await trainer.state())["step"]
        await trainer.close()
        return int(step)

    step = asyncio.run(body())
    return sorted(path.name for path in Path(folder).glob("step-*")), step


def test_a_trainer_saves_the_state_before_the_step_that_it_abandoned(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    assert ranks.run(abandon_a_trainer, 1, scratch=tmp_path, folder=folder) == [(["step-00000001"], 1)]
