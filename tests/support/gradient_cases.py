"""Computes the gradients of many cases on the ranks of an engine, and compares them with those of a plain case.

A test's module says which cases there are, and which engine, batch and loss each of them has. Weights must not move,
since cases that have the same config share an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from engine_ranks import Ranks, gradients_of, opened
from forge.config import DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.losses import AnyLoss
from forge.types import Batch

TOLERANCE = 1e-10

Case = TypeVar("Case", bound=Hashable)
Options = tuple[tuple[str, Any], ...]


@dataclass
class Outcome:
    """What a step found: on one rank, or on all of them together."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]


def split_options(options: dict[str, Any]) -> tuple[Options, Options]:
    """Return the options of `training` and those of `distributed`."""
    layout = {name: value for name, value in options.items() if name in DistributedConfig.model_fields}
    training = {name: value for name, value in options.items() if name not in layout}
    return tuple(training.items()), tuple(layout.items())


def still_trainer(model: ModelConfig, training: Options, distributed: Options) -> TrainerConfig:
    """Return an engine's configuration in float64 whose weights do not move: the optimizer's rate is far below what
    float64 resolves. Nothing is clipped."""
    chosen = {"max_seq_len": 16, "microbatch_tokens": 1000, **dict(training)}
    fixed = {"schedule": "constant", "learning_rate": 1e-60, "max_grad_norm": None}
    return TrainerConfig(
        model=model,
        training=TrainingConfig(**chosen, **fixed),
        distributed=DistributedConfig(precision="float64", **dict(distributed)),
        seed=5,
    )


def run_on_rank(
    cases: Sequence[Case],
    *,
    config_of: Callable[[Case], TrainerConfig],
    batch_of: Callable[[Case], Batch],
    loss_of: Callable[[Case], AnyLoss],
) -> list[Outcome]:
    """Take a step of every case on this rank. Cases that differ in the batch and the loss alone share an engine."""
    found: dict[Case, Outcome] = {}
    shared: dict[str, list[Case]] = {}
    for one in cases:
        shared.setdefault(config_of(one).model_dump_json(), []).append(one)
    for together in shared.values():
        with opened(config_of(together[0]), loss_of(together[0])) as engine:
            for one in together:
                engine.loss = loss_of(one)
                with gradients_of(engine) as gradients:
                    result = engine.train_step(batch_of(one))
                found[one] = Outcome(result.loss, result.grad_norm, gradients)
    return [found[one] for one in cases]


def outcomes_on(num_ranks: int, run_cases: Callable[[list[Case]], list[Outcome]], cases: Sequence[Case]) -> Any:
    """Make a module's fixture: the outcome of each case, which `run_cases` of that module computes on every rank.

    The module has a fixture `ranks`.
    """

    @pytest.fixture(scope="module")
    def outcomes(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
        scratch: Path = tmp_path_factory.mktemp("cases")
        answers = ranks.run(run_cases, num_ranks, scratch=scratch, cases=list(cases))
        return {one: _together(found) for one, *found in zip(cases, *answers, strict=True)}

    return outcomes


def _together(found: Sequence[Outcome]) -> Outcome:
    """Join what all ranks found. Where several have the gradient of a parameter, it must be the same."""
    gradients: dict[str, Tensor] = {}
    for of_rank in found:
        assert (of_rank.loss, of_rank.grad_norm) == (found[0].loss, found[0].grad_norm)
        for name, gradient in of_rank.gradients.items():
            assert name not in gradients or torch.equal(gradients[name], gradient), name
            gradients[name] = gradient
    return Outcome(found[0].loss, found[0].grad_norm, gradients)


def check_equal(found: Outcome, expected: Outcome) -> None:
    """Check that every gradient is there, in float64, and differs by less than `TOLERANCE` of its largest value."""
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert gradient.dtype == torch.float64
        largest = float(gradient.abs().max())
        assert largest > 0, f"{name} has no gradient, so nothing is compared"
        difference = float((found.gradients[name] - gradient).abs().max())
        assert difference <= TOLERANCE * largest, f"{name}: {difference / largest:.2g}"
    assert found.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=TOLERANCE)
