"""What a run of reinforcement learning will do, worked out and checked before anything is started."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from forge.config import GRPOConfig, ModelConfig, RolloutConfig, Sampling, TrainerConfig
from forge.data.prompts import PromptDataset, PromptOrder, open_prompts
from forge.envs.environment import load_program
from forge.envs.episode import EpisodeProgram
from forge.envs.tool_calls import detect_format
from forge.errors import ConfigError
from forge.loops.agents import check_agents
from forge.loops.bound_versions import check_bound_versions, check_members
from forge.loops.critic import find_critic_checkpoint, policy_steps
from forge.loops.evaluation import check_evaluation
from forge.loops.resuming import check_continues, check_folders, check_resumed_ledger, resumed_state
from forge.loops.reward_models import check_prompts
from forge.loops.run_paths import checkpoint_dir, journal_dir, load_tokenizer, run_dir
from forge.loops.runtime_changes import with_value
from forge.loops.teachers import check_teacher
from forge.loops.worker_checks import check_workers
from forge.memory import Card, ResolvedRun, check_at_start, find_card, resolve_run
from forge.memory.resolved import context_lengths
from forge.models.locate import ResolvedModel, resolve
from forge.models.quantized_names import check_library
from forge.models.tokenizer import ChatTokenizer
from forge.registry import GROUP_REWARDS
from forge.rewards import check as check_rewards
from forge.rollout.credit import AdvantageFunction, find_advantage
from forge.rollout.curriculum_rules import Rule, make_rule
from forge.rollout.episode_worker import EpisodeOptions, GroupReward
from forge.runtime.placement import num_usable_gpus
from forge.trainer.adapter_identity import check_resumed_adapter
from forge.trainer.checkpoint_folder import CheckpointInfo
from forge.trainer.handles import is_rank
from forge.trainer.optimizer_check import check_optimizer
from forge.trainer.schedules import rate_factor

if TYPE_CHECKING:
    from forge.losses import Loss

EPISODES_PER_WORKER: Final = 1024
"""Episodes that a worker process runs at once before more of them wait for each other than for tools."""

_log = logging.getLogger("forge.grpo")


@dataclass(frozen=True, slots=True)
class GRPOPlan:
    """A run, decided.

    Attributes:
        config: what the user asked for, with what was left open filled in.
        run: the devices, ranks, precisions and lengths, as resolved.
        trainer: what the trainer is made from.
        loss: what is minimised.
        advantage: computes advantages from groups.
        tokenizer: the policy's.
        prompts: what is asked, by group number; `heldout` what it is judged on, if anything.
        prompts_digest: tells whether a later run has the same prompts.
        sampling: how a group's tokens are sampled.
        rollout: the section `rollout`, with max_in_flight decided.
        num_groups: how many groups there are in all; None for as many as the steps need.
        num_steps: how many steps there will be.
        prompts_at_once: how many prompts an evaluation asks at the same time.
        checkpoint: what the run resumes from; None to start anew.
        program: the episode that a program plays; None for prompts and rewards.
        group_reward: compares the episodes of a group, if anything does.
        curriculum_rule: weighs the prompts; None where they come in order.
        own_loss, own_advantage: whether these were given in Python and not by the configuration.
        asked: the configuration without what was changed while the run ran, where that differs.
    """

    config: GRPOConfig
    run: ResolvedRun
    trainer: TrainerConfig
    loss: Loss
    advantage: AdvantageFunction
    tokenizer: ChatTokenizer
    prompts: PromptOrder
    heldout: PromptDataset | None
    prompts_digest: str
    sampling: Sampling
    rollout: RolloutConfig
    num_groups: int | None
    num_steps: int
    prompts_at_once: int
    checkpoint: CheckpointInfo | None
    program: EpisodeProgram | None = None
    group_reward: GroupReward | None = None
    curriculum_rule: Rule | None = None
    own_loss: bool = False
    own_advantage: bool = False
    asked: GRPOConfig | None = None

    @property
    def resume_step(self) -> int:
        """The step that the run starts after; 0 for a new run."""
        return 0 if self.checkpoint is None else int(self.checkpoint.extra["caller"]["step"])

    @property
    def temperature(self) -> float:
        """What logits are divided by, in rollouts and in training."""
        return self.sampling.temperature


def _card() -> Card | None:
    """Return the GPUs of this machine; with 0 bytes where the driver does not report their memory."""
    num_gpus = num_usable_gpus()
    return (find_card() or Card(0, num_gpus)) if num_gpus else None


def plan_run(config: GRPOConfig, *, program: EpisodeProgram | None = None) -> GRPOPlan:
    """Work out a run, and refuse whatever would fail later: it takes seconds, and nothing is left behind.

    `program` makes the episodes; None for what the section `episode` names, if anything.
    """
    if is_rank():
        raise refuse_ranks()
    model = resolve(config.model)
    config = _completed(config, model.architecture)
    program = find_program(config) if program is None else program
    if program is None:
        check_run_rewards(config)
        check_evaluation(config.evaluation, [function.label for function in config.rewards.functions])
    else:
        check_agents(config, program)
    run = resolve_run(config, card=_card(), facts=model.architecture)
    check_at_start(config, run=run, log=_log)
    check_library(None if config.adapter is None else config.adapter.base_dtype)
    check_workers(config)
    check_optimizer(config.training)
    checkpoint = check_folders(config)
    template = config.generator.chat_template
    tokenizer = load_tokenizer(model, chat_template=template, purpose="reinforcement learning")
    check_teacher(config, tokenizer)
    if not config.prompts.sources:
        raise _needed("prompts.sources", "at least one source", "such as [{task: arithmetic}]")
    datasets = open_prompts(
        config.prompts, evaluation=config.evaluation, seed=config.run.seed, for_episodes=program is not None
    )
    if program is None:
        check_prompts(config.rewards, datasets.train.read(0))
    order = PromptOrder(datasets.train, seed=config.run.seed, shuffle=config.prompts.shuffle)
    if checkpoint is not None:
        state = resumed_state(checkpoint, "reinforcement learning")
        check_continues(config, state, prompts_digest=order.digest)
        check_resumed_ledger(run_dir(config), state)
        check_members(config, state, most=run.num_members)
        check_resumed_adapter(checkpoint, config.adapter, model.architecture)
        if config.algorithm.has_critic:
            find_critic_checkpoint(checkpoint)
    check_bound_versions(config, checkpoint)
    num_groups, num_steps = _lengths(config, len(datasets.train))
    num_policy_steps = _policy_steps(config, num_steps)
    rate_factor(0, config=config.training, total_steps=num_policy_steps)  # refuses what cannot be
    sampling = config.generator.sampling.model_copy(update={"n": config.rollout.group_size})
    return GRPOPlan(
        config=config,
        run=run,
        trainer=make_trainer_config(config, model, num_steps=num_policy_steps),
        loss=make_run_loss(config, on_gpu=run.trainer_on_gpu),
        advantage=find_advantage(config.algorithm),
        tokenizer=tokenizer,
        prompts=order,
        heldout=datasets.heldout,
        prompts_digest=order.digest,
        sampling=sampling,
        rollout=_rollout(config, has_program=program is not None),
        num_groups=num_groups,
        num_steps=num_steps,
        prompts_at_once=max(1, _capacity(config) // max(1, config.evaluation.num_samples)),
        checkpoint=checkpoint,
        program=program,
        group_reward=find_group_reward(config),
        curriculum_rule=make_rule(config.curriculum, datasets.train),
    )


def check_run_rewards(config: GRPOConfig) -> None:
    """Refuse rewards that cannot run. A run that a teacher alone teaches needs none, unless it is evaluated."""
    if config.rewards.functions or not config.algorithm.distillation.is_alone:
        check_rewards(config.rewards)
    elif config.evaluation.enabled:
        raise _needed("rewards.functions", "at least one reward with `evaluation`", "add one, or remove `evaluation`")


def find_program(config: GRPOConfig) -> EpisodeProgram | None:
    """Return the program that the section `episode` names; None for prompts and rewards."""
    section = config.episode
    if section.kind is not None:
        return load_program(section.kind, section.args)
    if section.chosen_keys:
        raise ConfigError(
            "keys of `episode` have no effect without a program",
            path=f"episode.{section.chosen_keys[0]}",
            value=getattr(section, section.chosen_keys[0]),
            rule="only with episode.kind, or with run_grpo(config, episode=…)",
            repair="name a program, or remove it",
        )
    return None


def find_group_reward(config: GRPOConfig) -> GroupReward | None:
    """Return the function that compares the episodes of a group, if one is named."""
    name = config.episode.group_reward
    return None if name is None else GROUP_REWARDS.find(name, path="episode.group_reward")


def episode_options(plan: GRPOPlan) -> EpisodeOptions | None:
    """Return what all episodes of a run share; None for prompts and rewards."""
    if plan.program is None:
        return None
    config, section = plan.config, plan.config.episode
    assert config.generator.max_seq_len is not None  # see _completed
    sampling = plan.sampling.model_dump(exclude={"n", "seed"})
    tool_format = section.tool_format
    return EpisodeOptions(
        program=plan.program,
        group_reward=plan.group_reward,
        limits=section.limits,
        evaluation_limits=section.evaluation_limits or section.limits,
        sampling=sampling,
        evaluation_sampling=sampling | {"temperature": config.evaluation.temperature},
        max_seq_len=config.generator.max_seq_len,
        tool_format=detect_format(plan.tokenizer.chat_template) if tool_format == "auto" else tool_format,
        run_seed=config.run.seed,
        journal_dir=str(journal_dir(config)),
    )


def make_run_loss(config: GRPOConfig, *, on_gpu: bool) -> Loss:
    """Return the loss that a run minimises."""
    from forge.losses import make_loss

    sampling = config.generator.sampling
    return make_loss(
        config.algorithm,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        iterations=config.rollout.iterations,
        exact_entropy=not on_gpu,  # on a GPU it would cost a kernel
    )


def refuse_ranks() -> ConfigError:
    """Return the error for a program that was started once per rank."""
    return ConfigError(
        "reinforcement learning has one controller, which starts all others",
        path="--nproc_per_node",
        rule="the program is started once",
        repair="leave --nproc_per_node out; `distributed` says how many ranks the trainer has",
    )


def check_rollout_temperature(temperature: float) -> None:
    """Refuse a temperature at which all completions of a group are the same."""
    if temperature == 0:
        raise ConfigError(
            "rollouts at temperature 0 cannot differ from each other",
            path="generator.sampling.temperature",
            value=0.0,
            rule="more than 0 in reinforcement learning",
            repair="set 1.0; evaluation.temperature is another key",
        )


def _completed(config: GRPOConfig, facts: ModelConfig) -> GRPOConfig:
    """Fill in what depends on other keys: no completion may be longer than a trainer takes."""
    generator = config.generator
    check_rollout_temperature(generator.sampling.temperature)
    if generator.sampling.adapter is not None:
        raise ConfigError(
            "rollouts are sampled by the policy that is trained, not by another adapter",
            path="generator.sampling.adapter",
            value=generator.sampling.adapter,
            rule="null in reinforcement learning",
            repair="remove it; episode.agents.NAME.adapter lets an adapter answer for one agent of an episode",
        )
    seq_len, max_tokens = context_lengths(config, facts)
    sampling = generator.sampling.model_copy(update={"max_tokens": max_tokens})
    if sampling.is_truncated:
        _log.warning(
            "top_p, top_k, min_p or penalties shape what is sampled; the policy that learns is the one without them"
        )
    filled = generator.model_copy(update={"max_seq_len": seq_len, "sampling": sampling})
    return config.model_copy(update={"generator": filled})


def _lengths(config: GRPOConfig, num_prompts: int) -> tuple[int | None, int]:
    """How many groups and steps there are. With max_steps, prompts are gone through as often as needed."""
    most = config.training.max_steps
    if most is not None:
        return None, most
    num_groups = num_prompts * config.training.num_epochs
    return num_groups, -(-num_groups // config.rollout.batch_groups)


def _policy_steps(config: GRPOConfig, num_steps: int) -> int:
    """How many optimizer steps the policy takes, if it takes any."""
    found = policy_steps(config, num_steps)
    if found == 0:
        raise ConfigError(
            "the run ends before the policy learns",
            path="critic.warmup_steps",
            value=config.critic.warmup_steps,
            rule=f"less than the steps of the run, which are {num_steps}",
            repair="lower it, or give more prompts or epochs",
        )
    return found


def _capacity(config: GRPOConfig) -> int:
    """Completions that the generators take at once, the queue included."""
    return config.generator.num_replicas * (config.generator.max_batch + config.generator.max_queue)


def _rollout(config: GRPOConfig, *, has_program: bool) -> RolloutConfig:
    """With as many groups in flight as the generators have room for; with a program up to twice as many, since episodes
    that wait for a tool hold no room. Their requests wait where there is none."""
    section = config.rollout
    if has_program:
        slots = _capacity(config)
        most = max(slots, min(2 * slots, EPISODES_PER_WORKER * config.episode.num_replicas)) // section.group_size
        return section.model_copy(update={"max_in_flight": section.max_in_flight or max(1, most)})
    room = _capacity(config) // config.generator.num_replicas // section.group_size
    if room < 1:
        raise ConfigError(
            "a group has more completions than a generator accepts",
            path="rollout.group_size",
            value=section.group_size,
            rule=f"at most generator.max_batch + generator.max_queue, which is {_capacity(config)}",
            repair="raise generator.max_queue, or lower it",
        )
    most = room * config.generator.num_replicas
    return section.model_copy(update={"max_in_flight": min(section.max_in_flight or most, most)})


def in_flight_limit(plan: GRPOPlan, counts: Mapping[str, int]) -> int | None:
    """Return how many groups may be in flight with other numbers of workers, by their keys."""
    config = plan.config
    for key, count in counts.items():
        config = with_value(config, key, count)
    return _rollout(config, has_program=plan.program is not None).max_in_flight


def make_trainer_config(config: GRPOConfig, model: ResolvedModel, *, num_steps: int | None) -> TrainerConfig:
    """Return what the trainer of a run is made from; `num_steps` are the optimizer steps that it will take."""
    training = config.training.model_copy(update={"share_prefixes": config.rollout.share_prompts})
    return TrainerConfig(
        model=model.architecture,
        adapter=config.adapter,
        training=training,
        distributed=config.distributed,
        checkpoint_dir=checkpoint_dir(config),
        checkpointing=config.checkpointing,
        seed=config.run.seed,
        total_steps=num_steps,
    )


def _needed(path: str, rule: str, repair: str) -> ConfigError:
    return ConfigError("a required key is missing", path=path, value=None, rule=rule, repair=repair)
