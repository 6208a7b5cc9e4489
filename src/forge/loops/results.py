"""How a run ended. In a notebook a result shows its curves, too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from forge.errors import DataError
from forge.observe.notebook.completions import RecordedCompletions, read_completions
from forge.observe.notebook.results import result_html

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
        folder: the run's folder.
    """

    step: int
    reward: float
    first_evaluation: Evaluation | None
    evaluation: Evaluation | None
    is_stopped: bool
    export: Path | None
    report: Path | None
    exit_code: int = 0
    folder: Path | None = None

    @classmethod
    def not_started(cls, step: int, *, exit_code: int, folder: Path) -> GRPOResult:
        """Return the result of a run that was stopped before its workers were ready."""
        return cls(step, math.nan, None, None, True, None, None, exit_code, folder)

    def completions(self, num: int = 4, *, step: int | None = None) -> RecordedCompletions:
        """Return `num` recorded completions of a step, the last one by default, from the lowest reward to the highest.

        `DataError` where the run recorded none of that step. A notebook shows them with their tokens colored.
        """
        if self.folder is None:
            raise DataError(
                "this result does not say where its run is",
                path="folder",
                value=None,
                rule="the folder of a run, as `run_grpo` sets it",
                repair="make the result with folder=Path('RUN_OUTPUT_DIR/RUN_NAME')",
            )
        return read_completions(self.folder, num=num, step=step)

    def _repr_html_(self) -> str:
        facts = {} if math.isnan(self.reward) else {"mean reward of the last batch": f"{self.reward:.3f}"}
        if self.first_evaluation is not None and self.evaluation is not None:
            solved = f"{self.first_evaluation.solved:.1%} → {self.evaluation.solved:.1%}"
            facts["held-out"] = f"{solved} of {self.evaluation.num_prompts} prompts solved"
        facts |= _places(report=self.report, model=self.export)
        return result_html(_title(self.step, self.is_stopped), facts, folder=self.folder)


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
        folder: the run's folder.
    """

    step: int
    loss: float
    validation_loss: float | None
    best_validation_loss: float | None
    export: Path | None
    is_stopped: bool = False
    exit_code: int = 0
    validation_metrics: Mapping[str, float] = field(default_factory=dict)
    folder: Path | None = None

    def _repr_html_(self) -> str:
        losses = {"loss of the last step": self.loss, "validation loss": self.validation_loss}
        losses["lowest validation loss"] = self.best_validation_loss
        facts = {name: f"{loss:.4g}" for name, loss in losses.items() if loss is not None and not math.isnan(loss)}
        return result_html(_title(self.step, self.is_stopped), facts | _places(model=self.export), folder=self.folder)


def _title(step: int, is_stopped: bool) -> str:
    return f"{'Stopped' if is_stopped else 'Done'} after {step} steps"


def _places(**paths: Path | None) -> dict[str, str]:
    return {name: str(path) for name, path in paths.items() if path is not None}
