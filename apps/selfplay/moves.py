"""Which moves a model makes: the exact probability of each answer, without sampling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from forge.config import DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.models.tokenizer import ChatTokenizer
from forge.trainer.checkpoint_folder import list_checkpoints
from forge.trainer.checkpointer import Checkpointer
from forge.trainer.engine import Engine
from forge.types import Batch, Sample

Question = tuple[Sequence[Mapping[str, Any]], Sequence[str]]
"""A conversation, and the answers whose probabilities are asked for."""


class MoveReader:
    """A model that says how likely each answer is. Close it, or use it in a `with` block.

    Args:
        model: a Hugging Face folder.
        checkpoints: the folder of a run's checkpoints, for `versions` and `load`.
    """

    def __init__(self, model: Path, *, checkpoints: Path | None = None) -> None:
        self._tokenizer, self._checkpoints = ChatTokenizer.load(model), checkpoints
        self._own = TemporaryDirectory()  # the run's folder stays unlocked
        config = TrainerConfig(
            model=ModelConfig(path=str(model)),
            training=TrainingConfig(max_seq_len=256, microbatch_tokens=8192),
            distributed=DistributedConfig(with_gpus=False),
            checkpoint_dir=Path(self._own.name),
            frozen=True,
        )
        self._engine = Engine(config)
        self._checkpointer = Checkpointer(self._engine)

    def __enter__(self) -> MoveReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()
        self._engine.close()
        self._own.cleanup()

    def versions(self) -> list[tuple[int, Path]]:
        """Return the steps that the run saved, with the folders of their checkpoints."""
        assert self._checkpoints is not None
        return sorted((info.step, info.path) for info in list_checkpoints(self._checkpoints))

    def load(self, checkpoint: Path) -> None:
        """Continue with the weights of a checkpoint."""
        self._checkpointer.load(str(checkpoint))

    def probabilities(self, questions: Sequence[Question]) -> list[dict[str, float]]:
        """Return, for each question, how likely the model gives exactly each of the answers at temperature 1.

        An answer is its usual tokens and the end of the turn. What is missing to 1 goes to all other texts.
        """
        samples, num_sampled = [], []
        for messages, answers in questions:
            prompt = list(self._tokenizer.encode_prompt(messages))
            for answer in answers:
                sampled = [*self._tokenizer.encode_rendered(answer), self._tokenizer.stop_token_ids[0]]
                ids = torch.tensor([*prompt, *sampled])
                samples.append(Sample(ids, torch.zeros(len(ids)), identity=answer))
                num_sampled.append(len(sampled))
        logprobs = self._engine.forward_logprobs(Batch.of(samples))
        found = iter(
            math.exp(float(each[-count:].double().sum())) for each, count in zip(logprobs, num_sampled, strict=True)
        )
        return [{answer: next(found) for answer in answers} for _, answers in questions]
