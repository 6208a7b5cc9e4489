"""The workers of a reinforcement learning run: start the services that a configuration asks for, where it says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from forge.config import (
    GeneratorConfig,
    GRPOConfig,
    ModelConfig,
    ReplicatedWorkerConfig,
    RewardsConfig,
    Sampling,
    TrainerConfig,
)
from forge.errors import ActorFailure, ConfigError, FanoutError, Overloaded, ServiceStopped
from forge.generator.actor import Generator
from forge.generator.engine import UpdateReport
from forge.generator.native.cache_size import ColocatedGeneratorConfig
from forge.loops.agents import agent_options, start_agents
from forge.loops.colocated import SharedPolicy
from forge.loops.critic import start_critic
from forge.loops.run_paths import checkpoint_dir, crash_dir
from forge.loops.teachers import Teacher, frozen_config, start_teacher
from forge.loops.volumes import start_volumes
from forge.memory import ResolvedRun
from forge.models.tokenizer import ChatTokenizer
from forge.rollout.agent_policies import AgentGenerators
from forge.rollout.episode_worker import EpisodeOptions, EpisodeWorker
from forge.rollout.reward_actor import RewardActor
from forge.runtime.placement import GPU_VARIABLE
from forge.service import Service
from forge.trainer.actor import ReferenceModel, Trainer
from forge.trainer.handles import NEVER_REPLACED, PolicyTrainer, ServedTrainer, ServiceTrainer, trainer_options
from forge.trainer.recovering import RecoverySetup, recovering
from forge.types import Completion, Task

if TYPE_CHECKING:
    from forge.losses import Loss

_log = logging.getLogger("forge.grpo")


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of a run. `reference` is None without a KL term and where the trainer is its own reference; `teacher`
    without distillation; `critic` where advantages need no values. `episodes` run a program, and `rewards` score
    prompts without one: one of the two is None. `agents` are generators of agents with a model of their own."""

    trainer: PolicyTrainer
    policy: PolicyHandle
    rewards: Service[RewardActor] | None
    reference: Service[ReferenceModel] | None
    episodes: Service[EpisodeWorker] | None = None
    agents: Mapping[str, AgentGenerators] = field(default_factory=dict)
    teacher: Teacher | None = None
    critic: ServedTrainer | None = None

    async def close(self) -> None:
        """Shut all workers down in order. `forge.run` ends the ones that are left, however a run ends."""
        if self.episodes is not None:  # before the generators that they ask
            await _shut_down(self.episodes)
        services: list[Any] = [service for service in (self.rewards, self.reference) if service is not None]
        services += [each.service for each in self.agents.values()]
        if self.teacher is not None and self.teacher.service is not None:
            services.append(self.teacher.service)
        if self.teacher is not None and self.teacher.endpoint is not None:
            await self.teacher.endpoint.close()
        closing = [self.trainer.close(), self.policy.close(), *(_shut_down(service) for service in services)]
        closing += [] if self.critic is None else [self.critic.close()]
        ends = await asyncio.gather(*closing, return_exceptions=True)
        for end in ends[1:]:
            if isinstance(end, Exception):  # all that counted is done: this does not make the run a failed one
                _log.warning("a service did not shut down cleanly: %s", end)
        if isinstance(ends[0], BaseException):  # it completes the last checkpoint
            raise ends[0]


async def start_workers(
    config: GRPOConfig,
    trainer_config: TrainerConfig,
    *,
    loss: Loss,
    run: ResolvedRun,
    episodes: EpisodeOptions | None = None,
    tokenizer: ChatTokenizer | None = None,
) -> Workers:
    """Start all workers concurrently. Call it inside `async with forge.run(...)`, which ends them.

    `run` is the configuration, resolved: it says which workers use GPUs, and what weights are published in. With
    `episodes`, workers run a program, whose conversations become tokens with `tokenizer`.
    """
    await start_volumes(config.store)
    try:
        async with asyncio.TaskGroup() as tasks:
            # First of all: the trainer may need whole hosts, and the others take what is left.
            policy = tasks.create_task(_start_policy(config, trainer_config, loss=loss, run=run))
            rewards = agents = None
            if episodes is not None:
                agents = tasks.create_task(start_agents(config, trainer_config, run=run))
            else:
                scoring = start_rewards(config.rewards, config.workers, judge_on_gpu=run.judge_on_gpu)
                rewards = tasks.create_task(scoring)
            reference = tasks.create_task(_start_reference(config, trainer_config, run))
            teacher = tasks.create_task(start_teacher(config, trainer_config, run=run, student=tokenizer))
    except BaseExceptionGroup as errors:
        raise _first_of(errors) from None
    trainer, generators, critic = policy.result()
    playing, others = None, {} if agents is None else agents.result()
    if episodes is not None:
        assert tokenizer is not None
        playing = await _start_episodes(config, episodes, tokenizer, generators, others)
    scorers = None if rewards is None else rewards.result()
    taught_by = teacher.result()
    return Workers(trainer, generators, scorers, reference.result(), playing, others, taught_by, critic)


def _first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong first, however deep the groups are that it was started in."""
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first


async def _start_policy(
    config: GRPOConfig, trainer_config: TrainerConfig, *, loss: Loss, run: ResolvedRun
) -> tuple[PolicyTrainer, PolicyHandle, ServedTrainer | None]:
    """The trainer, the generators and the critic, as the placements say."""
    generator = generator_config(config, trainer_config.model, run)

    async def start_learners() -> tuple[PolicyTrainer, ServedTrainer | None]:
        trainer = await _start_trainer(config, trainer_config, loss, run=run)
        return trainer, await _start_critic(config, trainer_config, trainer, run=run)

    if config.placement == "shared":
        shared, handle = await _start_shared(config, trainer_config, loss=loss, generator=generator, run=run)
        return shared, handle, await _start_critic(config, trainer_config, shared, run=run)
    if config.placement in ("beside", "turns"):  # generators go to the trainer's GPU, and take what they find there
        trainer, critic = await start_learners()
        gpus = (await trainer.state())["visible_gpus"]
        return trainer, await _start_generators(config, generator, run=run, on_gpus=gpus), critic
    async with asyncio.TaskGroup() as tasks:
        generating = tasks.create_task(_start_generators(config, generator, run=run))
        trainer, critic = await start_learners()  # its processes are placed before that task begins
    return trainer, generating.result(), critic


async def _start_critic(
    config: GRPOConfig, trainer_config: TrainerConfig, trainer: PolicyTrainer, *, run: ResolvedRun
) -> ServedTrainer | None:
    """The critic, if there is one: on the trainer's GPUs where it is beside it."""
    if not config.algorithm.has_critic:
        return None
    gpus = (await trainer.state())["visible_gpus"]
    return await start_critic(config, trainer_config, with_gpus=run.critic_on_gpu, on_gpus=gpus)


def generator_config(config: GRPOConfig, model: ModelConfig, run: ResolvedRun) -> GeneratorConfig:
    """What a generator is made from, with the part of a GPU that the placement leaves to it."""
    changes = {"gpu_memory_share": config.gpu_memory_share, "pinned_versions": run.num_resident or None}
    made = GeneratorConfig.of(model, config.generator.model_copy(update=changes), adapter=config.adapter)
    if not config.gives_way:
        return made
    expected = run.num_versions * run.published_item * run.published_weights
    fields = {name: getattr(made, name) for name in GeneratorConfig.model_fields}
    return ColocatedGeneratorConfig(**fields, expected_bytes=expected, num_colocated=config.generator.num_replicas)


def gpus_beside(trainer: str, *, tensor_parallel: int) -> str:
    """The GPUs of a generator that runs where a trainer does: the first of the trainer's, as many as it needs."""
    gpus = trainer.split(",")
    if tensor_parallel > len(gpus):
        raise ConfigError(
            "generators share the trainer's GPUs, and need more of them than the trainer has",
            path="generator.tensor_parallel",
            value=tensor_parallel,
            rule=f"at most {len(gpus)} with placement `beside` or `turns`, where the trainer has GPU {trainer}",
            repair="lower it, give the trainer more ranks (distributed.shard), or set placement: apart",
        )
    return ",".join(gpus[:tensor_parallel])


async def _start_trainer(
    config: GRPOConfig, trainer_config: TrainerConfig, loss: Loss, *, run: ResolvedRun
) -> PolicyTrainer:
    options = trainer_options(trainer_config.distributed) | config.workers.trainer.options()

    async def start() -> ServiceTrainer:
        service = await Trainer.options(**options).as_service(trainer_config, loss)
        return ServiceTrainer(service, dtype=run.published_dtype, keep=config.store.keep)

    return await recovering(RecoverySetup("trainer", start, config.recovery, checkpoint_dir(config), crash_dir(config)))


# ---- The policy -----------------------------------------------------------------------------------------------------


async def _shut_down(service: Any) -> None:
    """Close the replicas of a service, then end it."""
    await service.close.options(partial=True).fanout()
    await service.shutdown()


class PolicyHandle:
    """The generators of a run, as one policy: requests wait while all queues are full, and generators that die during
    an update are left out."""

    def __init__(self, service: Service[Generator] | Service[SharedPolicy], *, takes_turns: bool = False) -> None:
        self.service = cast("Service[Generator]", service)
        self._takes_turns = takes_turns
        self._num_open = 0
        self._one_less = asyncio.Event()

    async def generate(self, prompt: Task, *, sampling: Sampling) -> list[Completion]:
        """`sampling.n` completions of a prompt, in order."""
        if prompt.messages:
            return await self._ask(messages=[dict(message) for message in prompt.messages], sampling=sampling)
        return await self._ask(prompt=prompt.text, sampling=sampling)

    async def extend(self, completion: Completion, *, sampling: Sampling) -> Completion:
        """The completion with more tokens."""
        token_ids = completion.prompt_ids + completion.token_ids
        (later,) = await self._ask(token_ids=token_ids, sampling=sampling)
        return completion.continued(later)

    async def _ask(self, **request: Any) -> list[Completion]:
        """Ask a generator. Where all queues are full, because one has died or an evaluation came in between, wait until
        another request of ours is done."""
        self._num_open += 1
        try:
            while True:
                done = self._one_less
                try:
                    return await self.service.generate.route(**request)
                except Overloaded:
                    if self._num_open == 1:  # nothing of ours is under way: the request itself is too large
                        raise
                    await done.wait()
        finally:
            self._num_open -= 1
            self._one_less.set()
            self._one_less = asyncio.Event()

    async def update_weights(self, version: int) -> list[UpdateReport]:
        """Let every generator load a version.

        One that dies meanwhile is not waited for: it is started again at the newest version. What else fails is raised:
        a lost update must not pass for one that was made.
        """
        reports = await _of_the_living(self.service.update_weights.fanout(version), f"the update to version {version}")
        return [report for report in reports if report is not None]

    async def unload_version(self, version: int) -> None:
        """Let every generator free the memory of a pinned version that nothing asks for any more."""
        await _of_the_living(self.service.unload_version.fanout(version), f"the removal of version {version}")

    async def sleep(self) -> None:
        """Let generators release the device's memory, where the trainer uses the same device in turns."""
        if self._takes_turns:
            await _of_the_living(self.service.sleep.fanout(), "sleep")

    async def wake(self) -> None:
        """Let generators restore the memory that `sleep` released."""
        if self._takes_turns:
            await _of_the_living(self.service.wake.fanout(), "wake")

    async def close(self) -> None:
        """Shut the generators down."""
        await _shut_down(self.service)

    async def stats(self) -> list[Any]:
        """What each engine does and has done."""
        outcomes = await self.service.stats.options(partial=True).fanout()
        return [outcome.value for outcome in outcomes if outcome.ok and outcome.value is not None]


async def _of_the_living(fanout: Awaitable[list[Any]], what: str) -> list[Any]:
    """What the replicas answered. Those that died meanwhile are left out; any other failure is raised."""
    try:
        return await fanout
    except FanoutError as error:
        failures = [outcome.error for outcome in error.outcomes if not outcome.ok]
        if not all(isinstance(failure, ActorFailure | ServiceStopped) for failure in failures):
            raise
        _log.warning("%d generator(s) died during %s", len(failures), what)
        return [outcome.value for outcome in error.outcomes if outcome.ok]


class SharedHandle(PolicyHandle):
    """The policy of placement `shared`: the trainer itself."""

    async def update_weights(self, version: int) -> list[UpdateReport]:
        """`publish_weights` has done it."""
        return [UpdateReport(version, "keep", 0.0, 0.0)]

    async def close(self) -> None:
        """The trainer's end is its own."""


async def _start_generators(
    config: GRPOConfig, generator: GeneratorConfig, *, run: ResolvedRun, on_gpus: str | None = None
) -> PolicyHandle:
    section, options = config.generator, config.workers.generator.options()
    if on_gpus:
        options["env"][GPU_VARIABLE] = gpus_beside(on_gpus, tensor_parallel=section.tensor_parallel)
    service = await Generator.options(
        procs=section.tensor_parallel,
        num_replicas=section.num_replicas,
        num_threads=section.num_threads,
        with_gpus=run.generator_on_gpu and not on_gpus,
        routing="least_loaded",
        mesh_name="generator",
        **options,
    ).as_service(generator)
    return PolicyHandle(service, takes_turns=config.placement == "turns")


async def _start_shared(
    config: GRPOConfig, trainer_config: TrainerConfig, *, loss: Loss, generator: GeneratorConfig, run: ResolvedRun
) -> tuple[PolicyTrainer, PolicyHandle]:
    distributed = trainer_config.distributed
    service = await SharedPolicy.options(
        with_gpus=run.trainer_on_gpu,
        num_threads=distributed.num_threads,
        **NEVER_REPLACED,
        mesh_name="policy",
        **config.workers.trainer.options(),
    ).as_service(trainer_config, loss, generator, runs_ahead=config.rollout.staleness > 0)
    return ServiceTrainer(service), SharedHandle(service)


async def _start_episodes(
    config: GRPOConfig,
    options: EpisodeOptions,
    tokenizer: ChatTokenizer,
    policy: PolicyHandle,
    agents: Mapping[str, AgentGenerators],
) -> Service[EpisodeWorker]:
    options = replace(options, agents=await agent_options(config, options.program))
    return await EpisodeWorker.options(
        num_replicas=config.episode.num_replicas,
        routing="least_loaded",
        mesh_name="episodes",
        **config.workers.episodes.options(),
    ).as_service(options, tokenizer, policy.service, dict(agents))


# ---- Rewards and reference ------------------------------------------------------------------------------------------


class RewardProcesses(Protocol):
    """The processes of what scores, as sections `workers` have them."""

    @property
    def rewards(self) -> ReplicatedWorkerConfig: ...

    @property
    def judge(self) -> ReplicatedWorkerConfig: ...

    @property
    def reward_model(self) -> ReplicatedWorkerConfig: ...


async def start_rewards(
    section: RewardsConfig, workers: RewardProcesses, *, judge_on_gpu: bool
) -> Service[RewardActor]:
    """Start what scores completions, with the judge and the reward model where a reward asks them."""
    kinds = {function.kind for function in section.functions}
    judge = reward_model = None
    if "judge" in kinds:
        assert section.judge is not None  # see worker_checks
        judge = await Generator.options(
            procs=section.judge.generator.tensor_parallel,
            num_replicas=section.judge.generator.num_replicas,
            num_threads=section.judge.generator.num_threads,
            with_gpus=judge_on_gpu,
            mesh_name="judge",
            **workers.judge.options(),
        ).as_service(_judge_config(section.judge))
    if "reward_model" in kinds:
        assert section.reward_model is not None
        from forge.loops.reward_models import scorer_of
        from forge.rollout.reward_model import RewardModel

        reward_model = await RewardModel.options(
            num_replicas=section.reward_model.num_replicas,
            num_threads=section.reward_model.num_threads,
            with_gpus=section.reward_model.with_gpus,
            mesh_name="reward_model",
            **workers.reward_model.options(),
        ).as_service(section.reward_model, scorer_of(section.reward_model))
    return await RewardActor.options(
        num_replicas=section.num_replicas,
        routing="least_loaded",
        mesh_name="rewards",
        **workers.rewards.options(),
    ).as_service(section, judge, reward_model)


def _judge_config(judge: Any) -> GeneratorConfig:
    """The judge's own weights: nothing that the trainer publishes reaches it."""
    section = judge.generator.model_copy(update={"weights": "judge"})
    return GeneratorConfig.of(ModelConfig(path=judge.path), section)


async def _start_reference(
    config: GRPOConfig, trainer_config: TrainerConfig, run: ResolvedRun
) -> Service[ReferenceModel] | None:
    if not config.needs_reference:
        return None
    section = config.reference
    model = trainer_config.model
    if section.path is not None:  # another model, whose logits are rounded as the policy's are
        model = ModelConfig(path=section.path, head_precision=model.head_precision)
    return await ReferenceModel.options(
        num_replicas=section.num_replicas,
        num_threads=section.num_threads,
        with_gpus=run.reference_on_gpu,
        routing="least_loaded",
        mesh_name="reference",
        **config.workers.reference.options(),
    ).as_service(frozen_config(trainer_config, model, on_gpu=run.reference_on_gpu))
