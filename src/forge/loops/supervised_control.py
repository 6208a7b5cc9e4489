"""What commands can do to one supervised run while it runs: its learning rate, and what is done between two steps.

Where the program is started once per rank, the leader takes the commands, and all ranks carry them out at the same
step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, NamedTuple

from forge.config import SupervisedConfig
from forge.errors import OptionError
from forge.loops.live_settings import LEARNING_RATE, LiveSettings
from forge.loops.preflight import PreparedRun
from forge.loops.run_control import RunCommands, listening
from forge.loops.run_paths import run_dir
from forge.loops.step_commands import Action, StepCommands
from forge.loops.step_profiles import StepProfiles
from forge.loops.stopping import Stop
from forge.loops.waits import Waits
from forge.trainer.handles import TrainerHandle, is_rank

_TURNS: Final = 8
"""Turns of the event loop between two steps: enough for a command to be accepted, read and noted."""


class Agreed(NamedTuple):
    """What all ranks do between two steps."""

    is_stopping: bool
    is_save_due: bool
    has_changed: bool
    evaluates: bool
    saves: bool


class SupervisedControl:
    """The settings and the commands of one run.

    Args:
        config: the run's.
        prepared: what was made of it.
        stop: says when the run is asked to end.
        step: returns the steps taken so far.
    """

    def __init__(
        self,
        config: SupervisedConfig,
        prepared: PreparedRun,
        *,
        stop: Stop,
        step: Callable[[], int],
    ) -> None:
        self._config, self._prepared, self._stop, self._step = config, prepared, stop, step
        self._trainer: TrainerHandle
        self._rate = config.training.learning_rate
        self.waits = Waits(stop, report_s=float("inf"), step=step)
        self.settings = LiveSettings(config, run_dir(config), keys=[LEARNING_RATE])
        self._commands = StepCommands(
            self.settings, stop=stop, step=step, describe=self._describe, refuse_evaluation=self._refuse_evaluation
        )
        rank = f"-rank{os.environ['RANK']}" if is_rank() else ""
        self.profiles = StepProfiles(config.record.profile, run_dir(config), commands=self._commands, suffix=rank)

    async def begin(self, trainer: TrainerHandle) -> None:
        """Take on the leader's settings, after it has called `settings.begin`."""
        self._trainer = trainer
        await self._take_rate()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Take commands inside the block, in the leader's process."""
        if not self._trainer.is_leader:
            yield
            return
        async with listening(run_dir(self._config), RunCommands(self._commands.handlers).answer):
            try:
                yield
            finally:
                self._commands.end("the run is being stopped" if self._stop.is_asked else "the run ended")

    @property
    def step_options(self) -> Mapping[str, Any]:
        """The learning rate of the next step, where it was changed."""
        return {} if self._rate == self._config.training.learning_rate else {"learning_rate": self._rate}

    async def agree(self, *, is_save_due: bool = False) -> Agreed:
        """Change the settings as commands ask, and return what is to be done between two steps."""
        for _ in range(_TURNS):  # in a rank, steps block the event loop
            await asyncio.sleep(0)
        waits = self._commands.is_waiting
        saves = waits("save") and self._step() > 0  # there is nothing to save before the first step
        flags = self._stop.is_asked, is_save_due, self._commands.change(), waits("evaluate"), saves
        agreed = Agreed(*await self._trainer.agree(*flags))
        if agreed.has_changed:
            await self._take_rate()
        return agreed

    async def _take_rate(self) -> None:
        self._rate = await self._trainer.share(self.settings.config.training.learning_rate)

    async def carry_out(self, name: str, action: Action) -> None:
        """Do what commands ask for, on all ranks, and let the leader answer them."""
        if self._trainer.is_leader:
            await self._commands.carry_out(name, action)
        else:
            await action()

    async def stop_all(self) -> None:
        """Let all ranks end as the leader does: a command reaches it alone."""
        number = await self._trainer.share(self._stop.signal)
        if number is not None:
            self._stop.ask(number)

    def _describe(self) -> Mapping[str, Any]:
        most = self._prepared.trainer.total_steps
        return {"kind": self._prepared.kind.name, "max_steps": most, "waits_for": list(self.waits.current)}

    def _refuse_evaluation(self) -> None:
        if self._prepared.loaders.validation is None:
            raise OptionError(
                "this run has no held-out samples",
                path="validation.sources",
                value=None,
                rule="needed for a validation while the run runs",
                repair="stop the run, give validation.sources, and continue it with --resume",
            )
