"""Supervised fine-tuning: the loop of `forge.loops.supervised` on conversations or texts, with cross-entropy."""

from __future__ import annotations

from collections.abc import Callable

from forge.config import SFTConfig
from forge.loops.supervised import SupervisedResult, run_supervised
from forge.observe.clock import monotonic_s

SFTResult = SupervisedResult


async def run_sft(config: SFTConfig, *, clock: Callable[[], float] = monotonic_s) -> SFTResult:
    """Fine-tune as a configuration says. In every rank of `forge run --nproc_per_node`, or once as the controller.

    SIGINT, SIGTERM and SIGHUP end it after a checkpoint; a second signal ends it at once, with SystemExit. `clock`
    gives the seconds between two checkpoints.
    """
    return await run_supervised(config, clock=clock)
