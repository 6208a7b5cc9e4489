"""Preference optimisation: the loop of `forge.loops.supervised` on preferences, with DPO, IPO, KTO, ORPO or SimPO."""

from __future__ import annotations

from collections.abc import Callable

from forge.config import PreferenceConfig
from forge.loops.supervised import SupervisedResult, run_supervised
from forge.observe.clock import monotonic_s

PreferenceResult = SupervisedResult


async def run_preference(config: PreferenceConfig, *, clock: Callable[[], float] = monotonic_s) -> PreferenceResult:
    """Optimise a policy on preferences as a configuration says, in every rank or once as the controller.

    SIGINT, SIGTERM and SIGHUP end it after a checkpoint; a second signal ends it at once, with SystemExit. `clock`
    gives the seconds between two checkpoints.
    """
    return await run_supervised(config, clock=clock)
