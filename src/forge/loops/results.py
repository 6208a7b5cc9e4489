"""How a run ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge.loops.evaluation import Evaluation


@dataclass(frozen=True, slots=True)
class GRPOResult:
    """How a run ended.

    Attributes:
        step: steps taken, those before a resume included.
        reward: the mean reward of the last batch, groups without signal included; NaN if there was none.
        first_evaluation, evaluation: the first and the last one, those before a resume included, if there was any.
        is_stopped: whether it was stopped by a signal before its end.
        export: the Hugging Face folder, if one was written.
        report: the report's page, if one was made.
        exit_code: what a program exits with: 0, or 128 plus the number of the signal that stopped it.
    """

    step: int
    reward: float
    first_evaluation: Evaluation | None
    evaluation: Evaluation | None
    is_stopped: bool
    export: Path | None
    report: Path | None
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class SupervisedResult:
    """How a run ended.

    Attributes:
        step: optimizer steps taken, those before a resume included.
        loss: of the last step; NaN if there was none.
        validation_loss: the last one, if there was any; `best_validation_loss` the lowest.
        export: the Hugging Face folder, if one was written.
        is_stopped: whether it was stopped by a signal before its end.
        exit_code: what a program exits with: 0, or 128 plus the number of the signal that stopped it.
        validation_metrics: the loss's metrics at the last validation of this process, where its kind of run has any.
    """

    step: int
    loss: float
    validation_loss: float | None
    best_validation_loss: float | None
    export: Path | None
    is_stopped: bool = False
    exit_code: int = 0
    validation_metrics: Mapping[str, float] = field(default_factory=dict)
