"""A run without running: what is decided before the first process starts, or everything that would be refused.

The verdict is that of the run's own code, `forge.loops.preflight`. Only when that refuses, the checks are made one by
one as well, so that the report has every problem and not just the first.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from forge.config import (
    EvaluationConfig,
    ForgeConfig,
    GRPOConfig,
    InvalidConfig,
    PolicyConfig,
    Problem,
    SupervisedConfig,
)
from forge.data.opening import open_corpus
from forge.data.prompts import PromptDataset, open_prompts
from forge.errors import ForgeError
from forge.loops.agents import agent_errors
from forge.loops.bound_versions import resumed_step, version_errors
from forge.loops.curriculum import describe_curriculum
from forge.loops.evaluation import check_evaluation
from forge.loops.planning import (
    GRPOPlan,
    _completed,
    _rollout,
    check_run_rewards,
    find_group_reward,
    find_program,
    make_run_loss,
    refuse_ranks,
)
from forge.loops.preflight import PreparedRun, check_grpo, for_ranks, prepare_supervised
from forge.loops.resuming import check_folders
from forge.loops.run_kinds import kind_of
from forge.loops.run_paths import load_tokenizer, run_dir
from forge.loops.teachers import describe_teacher, teacher_errors
from forge.loops.worker_checks import grpo_worker_errors, policy_worker_errors, supervised_worker_errors
from forge.memory import check_at_start, find_card, plan_memory, resolve_run
from forge.memory.card import host_memory
from forge.memory.text import gib, summary_lines
from forge.models.locate import ResolvedModel, resolve
from forge.rollout.credit import find_advantage
from forge.trainer.checkpoint_folder import CheckpointInfo
from forge.trainer.handles import planned_ranks
from forge.trainer.layout import check_layout
from forge.trainer.optimizer_check import check_optimizer
from forge.types import Task

_log = logging.getLogger("forge.dry_run")
_MOST_CHARACTERS = 100

P = ParamSpec("P")
T = TypeVar("T")
Facts = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a run would do, or why it would not start.

    Attributes:
        facts: what would happen, as pairs of a label and a text; empty where there are problems.
        problems: everything that the run would refuse before its first step, as far as one machine can tell.
        warnings: what the run would log as warnings before it starts.
    """

    facts: tuple[tuple[str, str], ...]
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]


def dry_run(config: ForgeConfig, *, num_ranks: int | None = None) -> DryRun:
    """Check a run as it would check itself, read its data and plan its memory. No process is started.

    `num_ranks` is that of `forge run --nproc_per_node`; None where one controller starts the ranks.
    """
    found = _Found()
    facts: Facts = []
    with _kept_warnings() as warnings:
        if isinstance(config, GRPOConfig):
            facts = _try_grpo(config, num_ranks, found)
        elif isinstance(config, SupervisedConfig):
            facts = _try_supervised(config, num_ranks, found)
        elif isinstance(config, PolicyConfig):
            facts = _try_policy(config, found)
    return DryRun(() if found.problems else tuple(facts), tuple(found.problems), tuple(warnings))


class _Found:
    """The problems found so far, one for each path: what else is wrong there may follow from it."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, error: ForgeError) -> None:
        for problem in _as_problems(error):
            if not problem.path or not self.names(problem.path):
                self.problems.append(problem)

    def names(self, *paths: str | None) -> bool:
        """Whether one of these paths has a problem already."""
        return any(problem.path in paths for problem in self.problems)

    def attempt(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what a check returns, or keep what it raises."""
        try:
            return check(*args, **kwargs)
        except ForgeError as error:
            self.add(error)
            return None


def _as_problems(error: ForgeError) -> list[Problem]:
    if isinstance(error, InvalidConfig):
        return list(error.problems)
    rule = error.message if error.rule is None else f"{error.message.rstrip('.')}: {error.rule}"
    repair = error.repair or "change it"
    return [Problem(path=error.path or "", value=error.value, rule=rule, repair=repair)]


@contextmanager
def _kept_warnings() -> Iterator[list[str]]:
    """Keep what the library warns of, instead of printing it."""
    kept: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    logger = logging.getLogger("forge")
    handler, propagates = Keeper(logging.WARNING), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield kept
    finally:
        logger.propagate = propagates
        logger.removeHandler(handler)


# ---- Reinforcement learning -----------------------------------------------------------------------------------------


def _try_grpo(config: GRPOConfig, num_ranks: int | None, found: _Found) -> Facts:
    if num_ranks is not None:
        found.add(refuse_ranks())
    try:
        plan = check_grpo(config)
    except ForgeError as error:
        found.add(error)
        _find_grpo(config, found)
        return []
    return _describe_grpo(plan)


def _find_grpo(config: GRPOConfig, found: _Found) -> None:
    """Find what is wrong besides the first problem. The order is that of `plan_run`."""
    model = found.attempt(resolve, config.model)
    if config.episode.kind is None:
        found.attempt(check_run_rewards, config)
        found.attempt(check_evaluation, config.evaluation, [function.label for function in config.rewards.functions])
    else:
        program = found.attempt(find_program, config)
        for problem in () if program is None else agent_errors(config, program):
            found.add(problem)
        found.attempt(find_group_reward, config)
    if model is not None:
        _find_layout(config, model, planned_ranks(config.distributed), found)
        completed = found.attempt(_completed, config, model.architecture)
        if completed is not None:
            found.attempt(make_run_loss, completed, on_gpu=False)
            found.attempt(check_optimizer, completed.training)
        template = config.generator.chat_template
        tokenizer = found.attempt(load_tokenizer, model, chat_template=template, purpose="reinforcement learning")
        for error in teacher_errors(config, tokenizer):
            found.add(error)
    for error in grpo_worker_errors(config):
        found.add(error)
    found.attempt(find_advantage, config.algorithm)
    checkpoint = found.attempt(check_folders, config)
    for problem in version_errors(config, resume_step=resumed_step(checkpoint)):
        found.add(problem)
    _find_prompts(config, found)
    found.attempt(_rollout, config, has_program=config.episode.kind is not None)


def _find_prompts(config: GRPOConfig, found: _Found) -> None:
    """Read every source by itself, because one that cannot be read must not hide the next; then all together.

    A source that is known to be a problem is not read again: one that cannot be reached takes long to fail.
    """
    sources = (*config.prompts.sources, *config.evaluation.sources)
    seed, for_episodes = config.run.seed, config.episode.kind is not None
    for source in sources:
        if not found.names(source.path, source.hf_dataset):
            alone = config.prompts.model_copy(update={"sources": (source,)})
            found.attempt(open_prompts, alone, evaluation=EvaluationConfig(), seed=seed, for_episodes=for_episodes)
    if not any(found.names(source.path, source.hf_dataset) for source in sources):
        evaluation = config.evaluation
        found.attempt(open_prompts, config.prompts, evaluation=evaluation, seed=seed, for_episodes=for_episodes)


def _describe_grpo(plan: GRPOPlan) -> Facts:
    config = plan.config
    rewards = [f"{function.label} ({function.kind})" for function in config.rewards.functions]
    members = "completions" if config.episode.kind is None else "episodes"
    groups = f"{config.rollout.batch_groups} groups of {config.rollout.group_size} {members}"
    facts = _describe_run(config, resolve(config.model), checkpoint=plan.checkpoint)
    dataset = plan.prompts.dataset
    if isinstance(dataset, PromptDataset):
        sources = ", ".join(f"{name} ({kind})" for name, kind in dataset.formats.items())
        facts.append(("prompts", f"{len(dataset)} to learn from: {sources}"))
        facts += [("first", _shown(dataset.read(0))), ("last", _shown(dataset.read(len(dataset) - 1)))]
        if dataset.num_skipped:
            facts.append(("skipped", f"{dataset.num_skipped} records that could not be read"))
    if plan.curriculum_rule is not None:
        facts.append(("curriculum", describe_curriculum(config.curriculum, len(plan.prompts))))
    if plan.heldout is not None:
        facts.append(("held out", f"{len(plan.heldout)} prompts for evaluation"))
    if config.episode.kind is None:
        facts.append(("rewards", ", ".join(rewards) or "none: the teacher alone"))
    else:
        args = ", ".join(f"{name}={value!r}" for name, value in config.episode.args.items())
        facts.append(("episode", f"{config.episode.kind}({args}), in {config.episode.num_replicas} process(es)"))
    if config.teacher.is_given:
        facts.append(("teacher", describe_teacher(config.teacher)))
    facts.append(("steps", f"{plan.num_steps:,}, each from {groups}"))
    facts.append(("trainer", f"{planned_ranks(config.distributed)} rank(s), placement {config.placement}"))
    if config.algorithm.has_critic:
        ranks, warmup = planned_ranks(config.critic_distributed), config.critic.warmup_steps
        facts.append(("critic", f"{ranks} rank(s), {config.critic.placement} the trainer, {warmup} steps of warm-up"))
    facts.append(("generators", f"{config.generator.num_replicas} of engine {config.generator.engine}"))
    return [*facts, *_describe_memory(config)]


def _shown(prompt: Task) -> str:
    asked = prompt.text if prompt.text is not None else " / ".join(str(turn["content"]) for turn in prompt.messages)
    answer = "" if prompt.answer is None else f" -> {_cut(str(prompt.answer))}"
    return f"{prompt.id}: {_cut(asked)}{answer}"


# ---- Supervised runs -------------------------------------------------------------------------------------------------


def _try_supervised(config: SupervisedConfig, num_ranks: int | None, found: _Found) -> Facts:
    try:
        with prepare_supervised(config, num_ranks=num_ranks) as prepared:
            return _describe_supervised(config, prepared, num_ranks)
    except ForgeError as error:
        found.add(error)
    _find_supervised(config, num_ranks, found)
    return []


def _find_supervised(config: SupervisedConfig, num_ranks: int | None, found: _Found) -> None:
    """Find what is wrong besides the first problem. The order is that of `prepare_supervised`."""
    kind, model = kind_of(config), found.attempt(resolve, config.model)
    tokenizer = None
    if model is not None:
        ranks = planned_ranks(config.distributed) if num_ranks is None else num_ranks
        _find_layout(for_ranks(config, num_ranks), model, ranks, found)
        template = config.data.chat_template
        tokenizer = found.attempt(load_tokenizer, model, chat_template=template, purpose=kind.name)
    found.attempt(kind.check, config, num_ranks)
    for error in supervised_worker_errors(config):
        found.add(error)
    found.attempt(check_optimizer, config.training)
    found.attempt(kind.make_loss, config)
    found.attempt(check_folders, config)
    sources = (*config.data.sources, *config.validation.sources)
    for source in sources:
        if not found.names(source.path, source.hf_dataset):
            found.attempt(open_corpus, [source], data=config.data, seed=config.run.seed, formats=kind.formats)
    if any(found.names(source.path, source.hf_dataset) for source in sources):
        return
    found.attempt(open_corpus, config.data.sources, data=config.data, seed=config.run.seed, formats=kind.formats)
    if tokenizer is not None:
        opened = found.attempt(kind.open_loaders, config, tokenizer)
        if opened is not None:
            opened.close()


def _describe_supervised(config: SupervisedConfig, prepared: PreparedRun, num_ranks: int | None) -> Facts:
    training, loader = config.training, prepared.loaders.train
    facts = _describe_run(config, prepared.model, checkpoint=prepared.checkpoint)
    formats = [
        f"{source.path or source.hf_dataset} ({kind})"
        for source, kind in zip(config.data.sources, loader.formats, strict=True)
    ]
    count = "a stream" if loader.num_samples is None else f"{loader.num_samples:,} samples"
    facts.append(("data", f"{count} to train on: {', '.join(formats)}"))
    for label, record in zip(("first", "last"), loader.ends() or (), strict=False):
        text = record.raw.decode(errors="replace") if isinstance(record.raw, bytes) else json.dumps(record.raw)
        facts.append((label, f"{record.place}: {_cut(text)}"))
    held = prepared.loaders.validation
    if held is not None:
        facts.append(("held out", f"{held.num_samples:,} samples for validation"))
    rows = training.batch_size * training.gradient_accumulation_steps
    steps = "until it is stopped" if prepared.trainer.total_steps is None else f"{prepared.trainer.total_steps:,}"
    facts.append(("steps", f"{steps}, each of at most {rows} rows of {training.max_seq_len} tokens"))
    at_once = training.microbatch_tokens or training.max_seq_len
    facts.append(("at once", f"{at_once} tokens on each rank (training.microbatch_tokens), which decides the memory"))
    ranks = planned_ranks(config.distributed) if num_ranks is None else num_ranks
    facts.append(("trainer", f"{ranks} rank(s) in {config.distributed.precision}"))
    return [*facts, *prepared.kind.describe(config), *_describe_memory(for_ranks(config, num_ranks))]


# ---- Generation -----------------------------------------------------------------------------------------------------


def _try_policy(config: PolicyConfig, found: _Found) -> Facts:
    model = found.attempt(resolve, config.model)
    if model is not None:
        template = config.generator.chat_template
        found.attempt(load_tokenizer, model, chat_template=template, purpose="a conversation")
        found.attempt(check_at_start, config, facts=model.architecture, log=_log)
    for error in policy_worker_errors(config):
        found.add(error)
    if model is None or found.problems:
        return []
    facts = [("run", config.run.name), ("model", _described(model))]
    facts.append(("generators", f"{config.generator.num_replicas} of engine {config.generator.engine}"))
    return [*facts, *_describe_memory(config)]


# ---- What all runs have ---------------------------------------------------------------------------------------------


def _find_layout(config: GRPOConfig | SupervisedConfig, model: ResolvedModel, num_ranks: int, found: _Found) -> None:
    found.attempt(check_layout, config.distributed, model.architecture, config.training, num_ranks=num_ranks)
    found.attempt(check_at_start, config, facts=model.architecture, log=_log)


def _describe_run(
    config: GRPOConfig | SupervisedConfig, model: ResolvedModel, *, checkpoint: CheckpointInfo | None
) -> Facts:
    facts = [
        ("run", f"{config.run.name}, written to {run_dir(config)}"),
        ("start", _start(checkpoint)),
        ("model", _described(model)),
    ]
    if config.launcher.kind != "local":
        facts.append(("launcher", f"{config.launcher.kind}; its hosts were not contacted"))
    return facts


def _start(checkpoint: CheckpointInfo | None) -> str:
    if checkpoint is None:
        return "from the model's weights; there is no checkpoint in the way"
    return f"resumes after step {checkpoint.step}, from {checkpoint.path}"


def _described(model: ResolvedModel) -> str:
    from forge.models.sizes import Sizes

    count = Sizes.of(model.architecture).total
    return f"{model.name}, {count:,} parameters, in {model.folder or 'no folder: random weights'}"


def _describe_memory(config: ForgeConfig) -> Facts:
    card = find_card()
    run = resolve_run(config, card=card)
    if run.uses_gpus and card is None:
        return [("memory", "not planned: no GPU is visible here; see `forge plan FILE --gpu-memory 80GB`")]
    plan = plan_memory(run, card=card, host_bytes=host_memory())
    lines = [] if plan.card is None else list(summary_lines(plan))
    host, capacity = plan.host, plan.host.capacity
    of_all = "" if capacity is None else f" of {gib(capacity)}"
    lines.append(f"host: {gib(host.peak.num_bytes)}{of_all} GiB at its fullest{'' if host.fits else ': NOT enough'}")
    return [("memory", line) for line in lines]


def _cut(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= _MOST_CHARACTERS else f"{plain[: _MOST_CHARACTERS - 1]}…"
