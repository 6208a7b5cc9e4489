"""Trains recorded steps again, in order, and compares each with its record."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from forge.errors import ReplayError
from forge.loops.critic import Critic, in_warmup, start_critic_service
from forge.loops.learning import StepRule
from forge.loops.planning import make_run_loss
from forge.loops.replay.comparing import (
    DEFAULT_TOLERANCE,
    Component,
    Difference,
    Replayed,
    advantage_differences,
    critic_differences,
    in_order,
    outcome_differences,
    record_differences,
)
from forge.loops.replay.recorded import RecordedRun, Start
from forge.loops.replay.session import Session
from forge.rollout.agent_credit import AgentCredit
from forge.rollout.credit import AdvantageFunction, find_advantage
from forge.rollout.samples import make_batch
from forge.rollout.step_record import (
    CriticRecord,
    StepRecord,
    batch_digest,
    logprobs_digest,
    outcome_of,
    values_digest,
)
from forge.runtime.lifetime import run
from forge.runtime.placement import wants_gpus
from forge.trainer.actor import Trainer
from forge.trainer.handles import ServiceTrainer, trainer_options
from forge.types import Batch, Episode, Group, StepResult

if TYPE_CHECKING:
    from forge.losses import Loss


class Replayer:
    """The trainer of a run, started again. `open_replayer` makes one.

    Call `begin` with a state to start from, and then `step` as often as there are recorded steps.
    """

    def __init__(
        self,
        recorded: RecordedRun,
        folder: Path,
        *,
        loss: Loss | None = None,
        advantage: AdvantageFunction | None = None,
        tolerance: float = DEFAULT_TOLERANCE,
    ) -> None:
        self._run, self._folder = recorded, folder
        self._loss, self._advantage, self._tolerance = loss, advantage, tolerance
        self._trainer: ServiceTrainer | None = None
        self._critic_service: ServiceTrainer | None = None
        self._critic: Critic | None = None
        self._session: Session | None = None
        self._rule: StepRule | None = None
        self._other_hardware: tuple[str, ...] = ()
        self._is_fresh = False
        self.at = 0
        """The step after which the trainer is."""

    @property
    def is_running(self) -> bool:
        """Whether `begin` has put the trainer into a state."""
        return self._trainer is not None

    @property
    def weights_name(self) -> str:
        """Under which name the store has the version of the last step."""
        assert self._session is not None
        return self._session.config.generator.weights

    async def begin(self, start: Start) -> Replayed:
        """Put the trainer into a state, and compare its weights with those that the run published then."""
        session = self._run.session_of(start.step + 1)
        is_usable = self._session is not None and session.trains_like(self._session)
        if not is_usable or (start.checkpoint is None and not self._is_fresh):
            await self.close()
            await self._start(session)
        assert self._trainer is not None
        self._set_rule(session)
        self.at, self._is_fresh = start.step, False
        if start.checkpoint is not None:
            await self._trainer.load(str(start.checkpoint.path))
            if self._critic is not None:
                await self._critic.load(start.checkpoint, step=start.step)
            assert self._rule is not None
            self._rule.credit.load(dict(start.extra.get("agents", {})))
        from forge.store import Weights

        await Weights(self.weights_name).rewind(to=start.step - 1)
        weights = await self._trainer.publish_weights(start.step, name=self.weights_name)
        found = self._found(start.step, (), weights)
        if start.weights is None or start.weights == weights or self._other_hardware:
            return found  # other hardware loads the same weights, but may draw others
        component: Component = "initial weights" if start.checkpoint is None else "checkpoint"
        return replace(found, differences=(Difference(component, "digest of the weights", start.weights, weights),))

    async def step(self) -> Replayed:
        """Train the next step, and compare it with its record. A step whose record was changed is not trained."""
        number = self.at + 1
        session = self._run.session_of(number)
        assert self._session is not None
        assert self._trainer is not None
        assert self._rule is not None
        if session is not self._session and session.start_step == self.at and not session.trains_like(self._session):
            raise ValueError(f"step {number} belongs to another session: begin again from its start")
        record = self._run.read(number)
        valued = await self._value(record)
        groups, batch = self._batch(record, valued)
        before = self._differences_before(record, valued, groups, batch)
        if before:
            return self._found(number, before, None)
        if self._critic is not None and self._exactness:
            _, batch = self._recorded_batch(record)  # the critic's values differ in their last bits
        result, critic = await self._take_steps(record, valued, batch)
        self._rule.credit.learned_from(groups)
        self.at = number
        weights = await self._trainer.publish_weights(number, name=self.weights_name)
        differences = outcome_differences(record.outcome, outcome_of(result), tolerance=self._exactness)
        if not self._other_hardware:
            differences += _digest_differences(record, logprobs_digest(result.logprobs), weights)
        if record.critic is not None and critic is not None:
            differences += critic_differences(record.critic, critic, tolerance=self._exactness)
        return self._found(number, in_order(differences), weights)

    @property
    def _exactness(self) -> float:
        """How far numbers may be apart: 0 on the hardware of the run."""
        return self._tolerance if self._other_hardware else 0.0

    async def _value(self, record: StepRecord) -> Sequence[Group]:
        """Return the groups of a step without advantages, with the critic's values where there is one."""
        plain = [_without_advantages(group) for group in record.groups]
        return plain if self._critic is None else await self._critic.value(plain)

    def _batch(self, record: StepRecord, valued: Sequence[Group]) -> tuple[Sequence[Group], Batch]:
        """Return the groups with advantages, computed again where that is possible, and the batch that they make."""
        assert self._rule is not None
        assert self._session is not None
        if self._session.own_advantage and self._advantage is None:
            return self._recorded_batch(record)
        return self._rule.batch(valued)

    def _recorded_batch(self, record: StepRecord) -> tuple[Sequence[Group], Batch]:
        """Return the groups with the advantages that are recorded, and the batch that they make."""
        assert self._rule is not None
        assert self._session is not None
        config = self._session.config
        with_reference = "ref_logprobs" in self._rule.loss.fields and not config.base_is_reference
        mask = config.rollout.mask_truncated
        return record.groups, make_batch(record.groups, mask_truncated=mask, with_reference=with_reference)

    def _differences_before(
        self, record: StepRecord, valued: Sequence[Group], groups: Sequence[Group], batch: Batch
    ) -> list[Difference]:
        """Return what differs before anything is trained: with a difference, the step would be another one."""
        found = list(record_differences(record))
        is_exact = self._critic is None or not self._exactness
        if record.critic is not None and is_exact and values_digest(valued) != record.critic.values:
            found.append(Difference("values", "digest", record.critic.values, values_digest(valued)))
        tolerance = 0.0 if is_exact else self._exactness
        found += advantage_differences(record.groups, groups, tolerance=tolerance)
        if not found and is_exact and batch_digest(batch) != record.batch:
            found.append(Difference("batch", "digest", record.batch, batch_digest(batch)))
        return found

    async def _take_steps(
        self, record: StepRecord, valued: Sequence[Group], batch: Batch
    ) -> tuple[StepResult, CriticRecord | None]:
        """Train the policy and the critic as the run did. Return what they saw."""
        assert self._rule is not None
        assert self._trainer is not None
        if self._critic is None:
            return await self._rule.take_steps(self._trainer, batch, learning_rate=record.learning_rate), None
        self._critic.use_rate(None if record.critic is None else record.critic.learning_rate)
        if self._critic.learns_alone(after=record.step - 1):
            result = in_warmup(await self._critic.learn(valued))
        else:
            result = await self._rule.take_steps(self._trainer, batch, learning_rate=record.learning_rate)
            await self._critic.learn(valued)
        return result, self._critic.record(valued)

    def _found(self, step: int, differences: Sequence[Difference], weights: str | None) -> Replayed:
        return Replayed(step, tuple(differences), self._other_hardware, self._exactness, weights)

    # ---- The trainer --------------------------------------------------------------------------------------------

    async def _start(self, session: Session) -> None:
        config = session.config
        if session.own_loss and self._loss is None:
            raise ReplayError(
                "the run was given its loss in Python, which is not recorded",
                path=str(self._run.folder),
                rule="run_grpo(config, loss=…) is replayed with the same loss",
                repair="call forge.loops.replay.steps.open_replayer(run, loss=…) in Python",
            )
        made = session.trainer_config(self._folder)
        loss = self._loss if self._loss is not None else make_run_loss(config, on_gpu=session.on_gpu)
        options = trainer_options(made.distributed) | config.workers.trainer.options()
        service = await Trainer.options(**options).as_service(made, loss)
        self._trainer = ServiceTrainer(service, dtype=session.published_dtype, keep=config.store.keep)
        if config.algorithm.has_critic:
            gpus = (await self._trainer.state())["visible_gpus"]
            on_gpu = session.on_gpu and wants_gpus(config.critic_distributed.with_gpus)
            self._critic_service = await start_critic_service(config, made, with_gpus=on_gpu, on_gpus=gpus)
            self._critic = Critic(config, self._critic_service, mask_truncated=config.rollout.mask_truncated)
        self._session, self._is_fresh = session, True
        now: Mapping[str, Any] = (await self._trainer.state()).get("hardware", {})
        self._other_hardware = tuple(
            f"{name}: {session.hardware.get(name)} then, {now.get(name)} now"
            for name in dict.fromkeys((*session.hardware, *now))
            if session.hardware.get(name) != now.get(name)
        )
        self._set_rule(session, loss=loss)

    def _set_rule(self, session: Session, loss: Loss | None = None) -> None:
        chosen = loss if self._rule is None or loss is not None else self._rule.loss
        assert chosen is not None
        advantage = self._advantage or find_advantage(session.config.algorithm)
        credit = AgentCredit(session.config.episode.agents, session.agents)
        self._session, self._rule = session, StepRule(session.config, chosen, advantage, credit)

    async def close(self) -> None:
        """End the trainer, and the critic."""
        services = [service for service in (self._trainer, self._critic_service) if service is not None]
        self._trainer = self._critic_service = self._critic = None
        for service in services:
            await service.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


@contextlib.asynccontextmanager
async def open_replayer(
    recorded: RecordedRun,
    *,
    loss: Loss | None = None,
    advantage: AdvantageFunction | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
) -> AsyncIterator[Replayer]:
    """Open what replays the steps of a run, and end all that it starts with the block.

    `loss` and `advantage` are those that `run_grpo` was given in Python, if it was. Advantages of such a function that
    is not given are taken as recorded.
    """
    launcher = recorded.session_of(max(recorded.steps)).config.launcher
    with tempfile.TemporaryDirectory(prefix="forge-replay-") as folder:
        async with run(launcher):
            made = Replayer(recorded, Path(folder), loss=loss, advantage=advantage, tolerance=tolerance)
            async with made as replayer:
                yield replayer


async def replay_step(recorded: RecordedRun, step: int, **options: Any) -> tuple[Start, list[Replayed]]:
    """Replay a step from the nearest earlier checkpoint. Returns where it started, and what was found of that state and
    of each step up to the first that differs. `options` are those of `open_replayer`."""
    start = recorded.find_start(step)
    async with open_replayer(recorded, **options) as replayer:
        found = [await replayer.begin(start)]
        while found[-1].is_same and replayer.at < step:
            found.append(await replayer.step())
    return start, found


def _digest_differences(record: StepRecord, logprobs: str | None, weights: str | None) -> list[Difference]:
    found = []
    if record.logprobs is not None and record.logprobs != logprobs:
        found.append(Difference("forward pass", "digest of the trainer's logprobs", record.logprobs, logprobs))
    if record.weights is not None and record.weights != weights:
        found.append(Difference("optimizer", "digest of the weights", record.weights, weights))
    return found


def _without_advantages(group: Group) -> Group:
    return replace(group, episodes=tuple(map(_uncredited, group.episodes)))


def _uncredited(episode: Episode) -> Episode:
    agents = {name: replace(result, advantage=0.0) for name, result in episode.agents.items()}
    return replace(episode, advantage=0.0, token_advantages=None, agents=agents)
