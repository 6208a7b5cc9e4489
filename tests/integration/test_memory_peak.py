"""The predicted peak of a training step against the bytes of all tensors that were alive in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge.config import DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.memory.records import holdings
from forge.memory.trainer import TrainerJob, lasting_parts, training_moments
from forge.models.sizes import Sizes
from forge.trainer.layout import Layout
from forge.types import Batch, Sample
from memory_tracking import tracked_step

MODEL = ModelConfig(
    family="qwen3",
    num_layers=4,
    hidden_size=192,
    intermediate_size=512,
    num_heads=4,
    num_kv_heads=2,
    head_dim=48,
    vocab_size=4096,
    tie_embeddings=True,
    max_seq_len=4096,
    rope_theta=1e4,
    norm_eps=1e-6,
)
WORDY = MODEL.model_copy(update={"num_layers": 2, "hidden_size": 96, "intermediate_size": 128, "vocab_size": 32768})
"""Most of it is the embedding, so that its gradient and its update are the fullest moments."""
WIDE = MODEL.model_copy(update={"num_layers": 2, "intermediate_size": 4096, "vocab_size": 256})
"""Most of it is in its layers, so that the sums of their gradients are."""
UNTIED = MODEL.model_copy(update={"tie_embeddings": False})
CASES: dict[str, tuple[ModelConfig, str, dict[str, Any]]] = {
    "mixed": (MODEL, "bfloat16", {}),
    "mixed, selective": (MODEL, "bfloat16", {"activation_checkpointing": "selective"}),
    "mixed, full, untied": (UNTIED, "bfloat16", {"activation_checkpointing": "full"}),
    "mixed, wordy": (WORDY, "bfloat16", {"max_seq_len": 16, "head_chunk_tokens": 8}),
    "mixed, wide": (WIDE, "bfloat16", {"max_seq_len": 16}),
    "pure, full": (MODEL, "bfloat16_pure", {"activation_checkpointing": "full"}),
    "pure, half states, wordy": (
        WORDY,
        "bfloat16_pure",
        {"optimizer_dtype": "bfloat16", "max_seq_len": 16, "head_chunk_tokens": 8},
    ),
    "float32, untied, short rows": (UNTIED, "float32", {"max_seq_len": 64}),
}


def batch_of(num: int, length: int, vocab: int) -> Batch:
    made = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (num, length), generator=made)
    weights = torch.ones(length)
    weights[0] = 0
    return Batch.of([Sample(row, weights, identity=str(index)) for index, row in enumerate(tokens)])


def without_allocator(parts: Any) -> int:
    return sum(part.num_bytes for part in parts if part.name != "allocator slack")


@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_a_step_is_predicted(case: str) -> None:
    model, precision, chosen = CASES[case]
    usual = {"max_seq_len": 1024, "schedule": "constant", "warmup_steps": 0, "head_chunk_tokens": 64}
    training = TrainingConfig(**(usual | chosen))
    distributed = DistributedConfig(shard=1, precision=precision, with_gpus=False)
    sizes = Sizes.of(model)
    ((_, holding),) = holdings(sizes, Layout())
    job = TrainerJob(sizes, holding, Layout(), training, distributed, on_gpu=False)
    config = TrainerConfig(model=model, training=training, distributed=distributed)
    length = training.max_seq_len if training.max_seq_len < 1024 else 512
    lasting, peak = tracked_step(config, batch_of(4, length, sizes.vocab))
    assert without_allocator(lasting_parts(job)) == pytest.approx(lasting, rel=0.02)
    assert max(without_allocator(moment.parts) for moment in training_moments(job)) == pytest.approx(peak, rel=0.1)
