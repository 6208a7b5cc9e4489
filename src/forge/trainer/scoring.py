"""`EngineScorer`: a reward model on the training engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from forge.config import DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.config.rewards import RewardModelConfig
from forge.trainer.engine import Engine
from forge.types import Batch, Sample


class EngineScorer:
    """A classifier of a supported family, on the engine that trains reward models.

    Conversations are laid end to end without padding, and what several of them begin with, such as the prompt of a
    group, goes through the model once.
    """

    def __init__(self, config: RewardModelConfig, *, max_seq_len: int, microbatch_tokens: int) -> None:
        precision: Literal["bfloat16_pure", "float32"] = (
            "bfloat16_pure" if config.chosen_precision == "bfloat16" else "float32"
        )
        self._engine = Engine(
            TrainerConfig(
                model=ModelConfig(path=config.path, head="scalar"),
                training=TrainingConfig(
                    max_seq_len=max_seq_len,
                    microbatch_tokens=microbatch_tokens,
                    share_prefixes=True,
                    schedule="constant",
                ),
                distributed=DistributedConfig(shard=1, precision=precision, with_gpus=config.with_gpus),
                frozen=True,
            )
        )

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each row: the value after its last token."""
        order = sorted(range(len(rows)), key=lambda place: tuple(rows[place]))  # those that begin alike are neighbours
        tokens = [torch.tensor(rows[place], dtype=torch.int64) for place in order]
        batch = Batch.of([Sample(each, torch.zeros(len(each))) for each in tokens])
        values = self._engine.forward_values(batch)
        scores = dict(zip(order, (float(each[-1]) for each in values), strict=True))
        return [scores[place] for place in range(len(rows))]

    def close(self) -> None:
        """Leave the engine's process group, so that this process can make another engine."""
        self._engine.close()
