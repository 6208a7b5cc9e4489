"""What commands can do to one run of reinforcement learning while it runs, and what that changes in its parts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from forge.config import GRPOConfig
from forge.errors import ConfigError, OptionError
from forge.loops.learning import Learner
from forge.loops.live_settings import (
    BATCH_GROUPS,
    CRITIC_LEARNING_RATE,
    LIVE_KEYS,
    STALENESS,
    TEMPERATURE,
    LiveSettings,
)
from forge.loops.planning import GRPOPlan, check_rollout_temperature, make_run_loss
from forge.loops.rollouts import RolloutSource
from forge.loops.run_control import RunCommands, listening
from forge.loops.run_hosts import RunHosts
from forge.loops.run_paths import run_dir
from forge.loops.scaling import RunScaling
from forge.loops.step_commands import StepCommands
from forge.loops.step_profiles import StepProfiles
from forge.loops.waits import Waits
from forge.rollout.buffer import ReplayBuffer

if TYPE_CHECKING:
    from forge.loops.workers import Workers


class GRPOControl:
    """The settings, the commands and the scaling of one run.

    Args:
        plan: what the run does, as it is configured.
        workers: its services.
        buffer, source, learner: what settings change.
        waits: shows what the run waits for, and has what ends it.
        step: returns the steps taken so far.
    """

    def __init__(
        self,
        plan: GRPOPlan,
        workers: Workers,
        *,
        buffer: ReplayBuffer,
        source: RolloutSource,
        learner: Learner,
        waits: Waits,
        step: Callable[[], int],
    ) -> None:
        self._plan, self._buffer, self._source, self._learner = plan, buffer, source, learner
        self._waits, self._step, self._temperature = waits, step, plan.temperature
        folder, keys = run_dir(plan.config), live_keys(plan.config)
        self.settings = LiveSettings(
            plan.config, folder, keys=keys, check=lambda config: check_live(plan, config, source=source)
        )
        self.scaling = RunScaling(plan, workers, buffer, step=step)
        self._hosts = RunHosts(plan, step=step)
        self.commands = StepCommands(
            self.settings,
            stop=waits.stop,
            step=step,
            describe=self._describe,
            refuse_evaluation=self._refuse_evaluation,
        )
        self.profiles = StepProfiles(plan.config.record.profile, folder, commands=self.commands)

    def begin(self, *, is_resumed: bool, saved: Mapping[str, Any] | None) -> GRPOConfig:
        """Take on the settings that hold at the step which the run starts after, and return the configuration with
        them. `saved` are those that the checkpoint knows."""
        self.settings.begin(self._step(), is_resumed=is_resumed, saved=saved)
        self._apply()
        return self.settings.config

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Take commands inside the block."""
        commands = RunCommands(self.commands.handlers, self.scaling.handlers, self._hosts.handlers)
        async with listening(run_dir(self._plan.config), commands.answer), self.scaling.open():
            try:
                yield
            finally:
                self.commands.end("the run is being stopped" if self._waits.stop.is_asked else "the run ended")

    def change(self) -> None:
        """Change the settings between two steps: for the step that comes next."""
        if self.commands.change():
            self._apply()

    def _apply(self) -> None:
        config = self.settings.config
        limits = {"staleness": config.rollout.staleness, "batch_groups": config.rollout.batch_groups}
        if limits != {name: getattr(self._buffer, name) for name in limits}:
            self._buffer.change(**limits)
        if config.generator.sampling.temperature != self._temperature:
            self._temperature = config.generator.sampling.temperature
            self._source.sample_at(self._temperature)
        self._learner.use_rates(config)

    def _describe(self) -> Mapping[str, Any]:
        ready = {"ready": self._buffer.num_ready, "in_flight": len(self._buffer.in_flight)}
        return {
            "kind": "reinforcement learning",
            "max_steps": self._plan.config.training.max_steps,
            "waits_for": list(self._waits.current),
            "groups": ready,
            "workers": self.scaling.numbers,
        }

    def _refuse_evaluation(self) -> None:
        if self._plan.heldout is None:
            raise OptionError(
                "this run has no held-out prompts",
                path="evaluation",
                value=None,
                rule="needed for an evaluation while the run runs",
                repair="stop the run, configure `evaluation`, and continue it with --resume; or use forge eval",
            )


def live_keys(config: GRPOConfig) -> list[str]:
    """Return the keys that can be changed while a run with this configuration runs."""
    return [key for key in LIVE_KEYS if key != CRITIC_LEARNING_RATE or config.algorithm.has_critic]


def check_live(plan: GRPOPlan, config: GRPOConfig, *, source: object) -> None:
    """Refuse values that the schema accepts, and that a run that was started with `plan` cannot take on."""
    check_rollout_temperature(config.generator.sampling.temperature)
    if config.generator.sampling.temperature != plan.temperature:
        _check_temperature(plan, config, source=source)
    if config.rollout.staleness > 0 and plan.rollout.staleness == 0 and config.placement == "shared":
        raise ConfigError(
            "rollouts cannot begin to run ahead while the run runs",
            path=STALENESS,
            value=config.rollout.staleness,
            rule="0 with placement `shared` in a run that was started with 0",
            repair=f"stop the run, and continue it with --resume {STALENESS}={config.rollout.staleness}",
        )
    training = plan.config.training
    is_planned_by_prompts = training.max_steps is None and training.schedule != "constant"
    if config.rollout.batch_groups != plan.rollout.batch_groups and is_planned_by_prompts:
        raise ConfigError(
            "the learning rate's schedule is as long as the prompts last in batches of the configured size",
            path=BATCH_GROUPS,
            value=config.rollout.batch_groups,
            rule=f"{plan.rollout.batch_groups} with the schedule `{training.schedule}` and without training.max_steps",
            repair="give training.max_steps, or training.schedule: constant, when the run starts",
        )


def _check_temperature(plan: GRPOPlan, config: GRPOConfig, *, source: object) -> None:
    from forge.losses.build import check_loss

    temperature = config.generator.sampling.temperature
    if not hasattr(source, "sample_at"):
        raise OptionError(
            "the source of groups cannot change its temperature",
            path=TEMPERATURE,
            value=temperature,
            rule=f"{plan.temperature} with {type(source).__name__}, which has no method `sample_at`",
            repair="add it: see forge.loops.rollouts.RolloutSource",
        )
    if plan.own_loss:
        check_loss(plan.loss, temperature=temperature)
    else:
        make_run_loss(config, on_gpu=plan.run.trainer_on_gpu)
