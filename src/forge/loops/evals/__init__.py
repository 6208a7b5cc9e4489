"""Evaluations: any episode, or prompts with rewards, against a model, a run's checkpoint or an endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge._lazy import lazy_names

if TYPE_CHECKING:
    from forge.loops.evals.comparing import compare_evals
    from forge.loops.evals.results import EvalResult
    from forge.loops.evals.run_defaults import load_eval
    from forge.loops.evals.running import evaluate

__all__ = ["EvalResult", "compare_evals", "evaluate", "load_eval"]

__getattr__ = lazy_names(
    __name__,
    {
        "forge.loops.evals.comparing": "compare_evals",
        "forge.loops.evals.results": "EvalResult",
        "forge.loops.evals.run_defaults": "load_eval",
        "forge.loops.evals.running": "evaluate",
    },
)
