"""The likeliest tokens of a model at given places: what a teacher's logprobs are stored from."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from forge.errors import LayoutError
from forge.models.locate import check_head
from forge.trainer.engine import Engine
from forge.trainer.microbatches import check_batch
from forge.trainer.row_jobs import top_job
from forge.types import Batch


def top_logprobs(engine: Engine, batch: Batch, k: int) -> list[tuple[Tensor, Tensor]]:
    """Return the k likeliest tokens at the place of each token that counts, for every sample: logprobs [C, k] float32
    and ids [C, k] int64, the likeliest first. Not with a pipeline, nor where the vocabulary is split over ranks."""
    check_head(engine.model, "language")
    check_batch(batch, vocab_size=engine.model.architecture.vocab_size)
    if engine.layout.pipeline > 1:
        raise LayoutError(
            "the stages of a pipeline do not give the likeliest tokens",
            path="distributed.pipeline",
            value=engine.layout.pipeline,
            rule="1 where a model gives its likeliest tokens",
            repair="score with one rank, or with teacher.generator.engine: vllm",
        )
    found = engine.score(batch, partial(top_job, k=k))
    counted = [sample.loss_weights != 0 for sample in batch.samples()]
    both = [each[is_counted, :, 0] for each, is_counted in zip(found, counted, strict=True)]
    return [(each[:, :k].float(), each[:, k:].to(torch.int64)) for each in both]
