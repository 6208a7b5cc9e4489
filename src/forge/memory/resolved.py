"""What a configuration leaves open, decided once: devices, ranks, precisions, context lengths and placement.

Planning, the start of workers, the publication of weights and the memory planner all use the same `ResolvedRun`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from forge.config import (
    AdapterConfig,
    DistributedConfig,
    ForgeConfig,
    GenerationConfig,
    GeneratorServiceConfig,
    GRPOConfig,
    ModelConfig,
    PolicyConfig,
    PreferenceConfig,
    SupervisedConfig,
    TeacherConfig,
    TrainingConfig,
)
from forge.errors import ConfigError, ModelError
from forge.memory.advice import ACCUMULATION_NOTE, placement_notes
from forge.memory.card import Card
from forge.memory.league import max_league_versions
from forge.memory.records import MASTER_BYTES
from forge.memory.scoring import Scoring, read_reward_model
from forge.models.adapter_names import AdapterSpec, adapter_map, num_adapter_parameters
from forge.models.architecture import complete, merge
from forge.models.hf_config import read_hf_config
from forge.models.peft_files import resolve_adapter
from forge.models.quantized_names import QuantizedSizes
from forge.models.sizes import Sizes
from forge.trainer.layout import Layout, check_layout

Placement = Literal["apart", "beside", "turns", "shared"]


@dataclass(frozen=True, slots=True)
class ResolvedCritic:
    """The critic of a run: a trainer of its own.

    Attributes:
        sizes: the widths of its model.
        training, distributed, layout: as those of the trainer.
        on_gpu: whether it uses GPUs; `is_beside` whether those are the trainer's.
    """

    sizes: Sizes
    training: TrainingConfig
    distributed: DistributedConfig
    layout: Layout
    on_gpu: bool
    is_beside: bool


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run with everything decided that its configuration leaves open.

    Attributes:
        name: the model's.
        facts: the architecture, complete, and `sizes` its widths.
        training, distributed, layout: the trainer's; None for a run that only generates.
        generator: None for a run that only trains.
        num_generators, tensor_parallel: how many, and over how many GPUs each.
        generator_seq_len, completion_tokens: the longest sequence, and the longest completion in it.
        placement: where generators are.
        share: the part of a GPU that each may take, where that was decided.
        num_references: replicas of the reference model; 0 for none.
        critic: what gives values; None for none.
        reward_model: the model behind the reward `reward_model`, if there is one of known size.
        num_teachers: replicas of the teacher of distillation; 0 for none, and for one behind an endpoint.
        teacher_facts, teacher_generator: its architecture, and the engine that scores; None for forward passes.
        trainer_on_gpu, generator_on_gpu, reference_on_gpu, judge_on_gpu, teacher_on_gpu: which workers use GPUs.
        num_versions: for how many versions of the weights the store has memory.
        num_members: how many more versions it keeps for a self-play league, at most.
        num_pinned: versions that it keeps in addition, because agents are bound to them.
        num_resident: how many of those each generator of the policy has loaded; 0 where it serves live weights only.
        published_dtype: what weights are published in: bfloat16 or float16 where that is what generators make of them,
            which halves the bytes that are kept and sent; None for what the trainer keeps them in.
        is_spread: whether processes are on several hosts, so that published weights go to host memory.
        num_relays: hosts that have a copy of the weights for the generators on them, at most.
        group_size, share_prompts: how much attention repeats of what is shared.
        entropy: whether the loss needs the gradient of entropies.
        reads_logprobs: whether the loss reads logprobs of tokens, so that logits may wait for the backward pass.
        saves_beside: whether checkpoints are written while training continues, from a copy in host memory.
        notes: what had to be assumed.
        adapter, adapter_parameters: the LoRA adapter that is trained, and its weights; None where all weights are.
        quantized: what of each layer below the adapter is kept in few bits; None where nothing is.
    """

    name: str
    facts: ModelConfig
    sizes: Sizes
    training: TrainingConfig | None = None
    distributed: DistributedConfig | None = None
    layout: Layout | None = None
    generator: GenerationConfig | None = None
    num_generators: int = 0
    tensor_parallel: int = 1
    generator_seq_len: int = 0
    placement: Placement = "apart"
    share: float | None = None
    num_references: int = 0
    critic: ResolvedCritic | None = None
    reward_model: Scoring | None = None
    trainer_on_gpu: bool = False
    generator_on_gpu: bool = False
    reference_on_gpu: bool = False
    judge_on_gpu: bool = False
    num_teachers: int = 0
    teacher_facts: ModelConfig | None = None
    teacher_generator: GeneratorServiceConfig | None = None
    teacher_on_gpu: bool = False
    num_versions: int = 0
    num_members: int = 0
    num_pinned: int = 0
    num_resident: int = 0
    published_dtype: Literal["bfloat16", "float16"] | None = None
    is_spread: bool = False
    num_relays: int = 0
    group_size: int = 1
    share_prompts: bool = False
    completion_tokens: int = 0
    entropy: bool = False
    reads_logprobs: bool = False
    saves_beside: bool = True
    notes: tuple[str, ...] = ()
    adapter_parameters: int | None = None
    adapter: AdapterSpec | None = None
    quantized: QuantizedSizes | None = None

    @property
    def published_weights(self) -> int:
        """The number of weights in a published version."""
        return self.sizes.total if self.adapter_parameters is None else self.adapter_parameters

    @property
    def attended_ratio(self) -> float:
        """Tokens in attention for each that is computed, when a row is full of groups of the longest samples.

        A prompt of p tokens with g completions of c is computed as p + g c tokens and attended to as g (p + c).
        """
        if self.training is None or not self.share_prompts or self.layout is None or self.layout.fixed_shape:
            return 1.0
        completion = max(1, self.completion_tokens)
        prompt = max(0, self.training.max_seq_len - completion)
        tokens = self.training.microbatch_tokens or self.training.max_seq_len
        together = max(1, min(self.group_size, (tokens - prompt) // completion))
        return together * (prompt + completion) / (prompt + together * completion)

    @property
    def takes_turns(self) -> bool:
        """Whether generators give their cache back while the trainer works.

        In `shared` on a GPU they do so too, though they keep their weights.
        """
        return self.placement == "turns" or (self.placement == "shared" and self.generator_on_gpu)

    @property
    def published_item(self) -> int:
        """The bytes of one published weight; 0 for a run that publishes none."""
        if self.distributed is None:
            return 0
        return 2 if self.published_dtype is not None else MASTER_BYTES[self.distributed.precision]

    @property
    def uses_gpus(self) -> bool:
        own = self.trainer_on_gpu or self.generator_on_gpu or self.reference_on_gpu or self.teacher_on_gpu
        return own or self.critic_on_gpu or (self.reward_model is not None and self.reward_model.on_gpu)

    @property
    def critic_on_gpu(self) -> bool:
        return self.critic is not None and self.critic.on_gpu


def resolve_run(config: ForgeConfig, *, card: Card | None = None, facts: ModelConfig | None = None) -> ResolvedRun:
    """What the memory of a run depends on, planned for `card`; None for a run on CPUs.

    `facts` are the model's, where they are known already. A model whose folder is not there yet is planned from its
    preset. Raises `ConfigError` or `ModelError` for what cannot run at all, such as a layout that the model does not
    admit.
    """
    notes: list[str] = []
    facts = _facts(config.model, notes) if facts is None else complete(facts)
    name = config.model.name or config.model.preset or config.model.hf_repo or Path(config.model.path or "model").name
    sizes = Sizes.of(facts)
    if isinstance(config, GRPOConfig):
        return _read_grpo(config, ResolvedRun(name, facts, sizes), card, notes)
    if isinstance(config, SupervisedConfig):
        return _read_supervised(config, ResolvedRun(name, facts, sizes), card, notes)
    if isinstance(config, PolicyConfig):
        return _read_policy(config, ResolvedRun(name, facts, sizes), card, notes)
    raise ConfigError(
        "this kind of configuration has no memory to plan",
        path="--kind",
        value=type(config).__name__,
        rule="a run of reinforcement learning, of fine-tuning, of preference optimisation, or of generators",
        repair="use forge.config:GRPOConfig, SFTConfig, PreferenceConfig, PolicyConfig, or a class derived from one",
    )


def _facts(model: ModelConfig, notes: list[str]) -> ModelConfig:
    """The architecture: of the folder where it is there, else as a preset or the keys say."""
    if model.path is None:
        return complete(model)
    folder = Path(model.path)
    if (folder / "config.json").is_file():
        return complete(merge(model, read_hf_config(folder, family=model.family)))
    try:
        found = complete(model)
    except ModelError as error:
        raise ModelError(
            "the size of the model is unknown: its folder is not on this machine, and there is no preset",
            path="model.path",
            value=model.path,
            rule="a folder with a config.json, or model.preset",
            repair="download the model, or name the preset of its architecture: model.preset=NAME",
        ) from error
    notes.append(f"{model.path} is not here: planned from the preset's architecture")
    return found


def _on_gpu(chosen: bool | None, card: Card | None) -> bool:
    return card is not None if chosen is None else chosen


def _num_ranks(distributed: DistributedConfig, card: Card | None, *, on_gpu: bool) -> int:
    return distributed.ranks_on((card.num_gpus or 0) if on_gpu and card is not None else 0)


def _read_grpo(config: GRPOConfig, base: ResolvedRun, card: Card | None, notes: list[str]) -> ResolvedRun:
    training = config.training.model_copy(update={"share_prefixes": config.rollout.share_prompts})
    on_gpu = _on_gpu(config.distributed.with_gpus, card)
    layout = check_layout(
        config.distributed, base.facts, training, num_ranks=_num_ranks(config.distributed, card, on_gpu=on_gpu)
    )
    seq_len, completion_tokens = context_lengths(config, base.facts)
    wants_reference = config.needs_reference
    judge = config.rewards.judge
    generator_on_gpu = _on_gpu(config.generator.with_gpus, card)
    if config.placement != "apart" and config.generator.with_gpus is None:
        generator_on_gpu = on_gpu  # it uses the trainer's
    asked = config.generator.engine_args.get("dtype") or config.generator.precision_on(gpu=generator_on_gpu)
    if config.reference.path is not None and wants_reference:
        notes.append("the reference model is planned with the policy's architecture")
    if config.rewards.judge is not None:
        notes.append("judges are not planned: they need GPUs, or host memory, of their own")
    notes += placement_notes(config, num_ranks=layout.num_ranks, on_gpu=on_gpu and generator_on_gpu)
    league = config.episode.league
    if league is not None and league.checkpoints:
        notes.append("generators of the league's checkpoints are not planned: each needs what one of the policy's does")
    resolved = replace(
        base,
        training=training,
        distributed=config.distributed,
        layout=layout,
        generator=config.generator,
        num_generators=config.generator.num_replicas,
        tensor_parallel=config.generator.tensor_parallel,
        generator_seq_len=seq_len,
        placement=config.placement,
        share=config.gpu_memory_share,
        num_references=config.reference.num_replicas if wants_reference else 0,
        critic=_critic(config, base.facts, card, notes) if config.algorithm.has_critic else None,
        reference_on_gpu=wants_reference and _on_gpu(config.reference.with_gpus, card),
        reward_model=read_reward_model(config.rewards, base.facts, notes),
        judge_on_gpu=judge is not None and _on_gpu(judge.generator.with_gpus, card),
        trainer_on_gpu=on_gpu,
        generator_on_gpu=generator_on_gpu,
        **_teacher(config.teacher, card, notes),
        num_versions=0 if config.placement == "shared" else config.store.num_versions,
        num_pinned=len(config.episode.bound_versions),
        num_resident=_num_resident(config, notes, on_gpu=generator_on_gpu),
        published_dtype=asked if asked in ("bfloat16", "float16") else None,
        is_spread=config.launcher.kind != "local" or (config.distributed.hosts or 1) > 1 or config.store.volumes > 0,
        num_relays=_num_relays(config),
        group_size=config.rollout.group_size,
        share_prompts=config.rollout.share_prompts,
        completion_tokens=completion_tokens,
        entropy=config.algorithm.loss.entropy_coefficient != 0,
        reads_logprobs=True,
        saves_beside=config.checkpointing.asynchronous,
        notes=tuple(notes),
        **_adapter(config.adapter, base.facts),
        quantized=_quantized(config.adapter, base.facts),
    )
    if league is None:
        return resolved
    most = max_league_versions(league, resolved.published_item * resolved.published_weights)
    return replace(resolved, num_members=most)


def _num_relays(config: GRPOConfig) -> int:
    """Return how many hosts may get the weights from another one, for all generators on them."""
    hosts = {
        "local": 1,
        "hosts": len(config.launcher.hosts),
        "slurm": config.launcher.slurm.nodes,
        "kubernetes": config.launcher.kubernetes.num_hosts,
    }
    if config.placement == "shared" or config.store.distribution == "direct":
        return 0
    return min(hosts[config.launcher.kind] - 1, config.generator.num_replicas)


def _critic(config: GRPOConfig, policy: ModelConfig, card: Card | None, notes: list[str]) -> ResolvedCritic:
    section, distributed = config.critic, config.critic_distributed
    model = section.model_from(policy)
    facts = complete(model) if section.path is None else _facts(model, notes)
    training = section.training.over(config.training)
    training = training.model_copy(update={"share_prefixes": config.rollout.share_prompts})
    on_gpu = _on_gpu(distributed.with_gpus, card)
    layout = check_layout(distributed, facts, training, num_ranks=_num_ranks(distributed, card, on_gpu=on_gpu))
    is_beside = section.placement == "beside"
    return ResolvedCritic(Sizes.of(facts), training, distributed, layout, on_gpu, is_beside)


def _adapter(config: AdapterConfig | None, facts: ModelConfig) -> dict[str, Any]:
    """Return what is planned of the adapter that is trained."""
    if config is None:
        return {}
    spec = resolve_adapter(config, facts)
    return {"adapter": spec, "adapter_parameters": num_adapter_parameters(adapter_map(facts, spec))}


def _quantized(config: AdapterConfig | None, facts: ModelConfig) -> QuantizedSizes | None:
    return None if config is None or config.base_dtype is None else QuantizedSizes.of(facts, config.base_dtype)


def _teacher(section: TeacherConfig, card: Card | None, notes: list[str]) -> dict[str, Any]:
    """Return what is planned of a teacher."""
    if section.endpoint is not None:
        notes.append("the teacher behind its endpoint is not planned")
    if section.path is None:
        return {}
    engine = section.generator
    found: dict[str, Any] = {"teacher_on_gpu": _on_gpu((section if engine is None else engine).with_gpus, card)}
    if not (Path(section.path) / "config.json").is_file():
        notes.append(f"the teacher {section.path} is not here, and not planned")
        return found
    facts = complete(read_hf_config(Path(section.path)))
    num = section.num_replicas if engine is None else engine.num_replicas
    return {**found, "num_teachers": num, "teacher_facts": facts, "teacher_generator": engine}


def _num_resident(config: GRPOConfig, notes: list[str], *, on_gpu: bool) -> int:
    """Return how many pinned versions each generator has loaded. Members of a league take turns in one place on a GPU;
    on a CPU they are read where the store has them."""
    num_bound = len(config.episode.bound_versions)
    if config.generator.capabilities.pinned_versions:
        num_drawn = 0 if config.episode.league is None else 1 if on_gpu else config.episode.league.max_members
        return config.generator.pinned_versions or num_bound + num_drawn
    if num_bound:
        notes.append("generators for the versions of agents are not planned: each needs what one of the policy's does")
    return 0


def context_lengths(config: GRPOConfig, facts: ModelConfig) -> tuple[int, int]:
    """Return the longest sequence and the longest completion in it: none is longer than a trainer takes.

    Raises `ConfigError` where the configuration asks for more.
    """
    training, generator = config.training, config.generator
    longest = min(training.max_seq_len, facts.max_seq_len or training.max_seq_len)
    if generator.max_seq_len is not None and generator.max_seq_len > longest:
        raise ConfigError(
            "generators could make sequences that are too long to learn from",
            path="generator.max_seq_len",
            value=generator.max_seq_len,
            rule=f"at most training.max_seq_len and the model's, which is {longest}",
            repair="lower it, or raise training.max_seq_len",
        )
    chosen = generator.max_seq_len or longest
    most = generator.sampling.max_tokens
    if most is not None and most >= chosen:
        raise ConfigError(
            "there is no room for a prompt before the longest completion",
            path="generator.sampling.max_tokens",
            value=most,
            rule=f"less than the longest sequence, which is {chosen}",
            repair="lower it, or raise training.max_seq_len",
        )
    return chosen, most or max(1, chosen // 2)


def _read_supervised(config: SupervisedConfig, base: ResolvedRun, card: Card | None, notes: list[str]) -> ResolvedRun:
    on_gpu = _on_gpu(config.distributed.with_gpus, card)
    layout = check_layout(
        config.distributed, base.facts, config.training, num_ranks=_num_ranks(config.distributed, card, on_gpu=on_gpu)
    )
    if config.training.gradient_accumulation_steps > 1:
        notes.append(ACCUMULATION_NOTE)
    run = replace(
        base,
        training=config.training,
        distributed=config.distributed,
        layout=layout,
        trainer_on_gpu=on_gpu,
        num_versions=0,
        saves_beside=config.checkpointing.asynchronous,
        notes=tuple(notes),
        **_adapter(config.adapter, base.facts),
        quantized=_quantized(config.adapter, base.facts),
    )
    return _with_preferences(config, run, card) if isinstance(config, PreferenceConfig) else run


def _with_preferences(config: PreferenceConfig, run: ResolvedRun, card: Card | None) -> ResolvedRun:
    """Add what preference optimisation has besides: two answers to each prompt, and a reference model."""
    notes = run.notes
    if config.reference.path is not None and config.reference_mode != "none":
        notes = (*notes, "the reference model is planned with the policy's architecture")
    if config.reference_mode == "precomputed":
        notes = (*notes, "the reference's logprobs are computed before training: no second model is in memory")
    return replace(
        run,
        num_references=int(config.has_reference_model),
        reference_on_gpu=config.has_reference_model and _on_gpu(config.reference.with_gpus, card),
        group_size=2,
        share_prompts=config.training.share_prefixes,
        completion_tokens=max(1, config.training.max_seq_len // 2),
        reads_logprobs=True,
        notes=notes,
    )


def _read_policy(config: PolicyConfig, base: ResolvedRun, card: Card | None, notes: list[str]) -> ResolvedRun:
    from forge.generator.engine import context_limit

    return replace(
        base,
        generator=config.generator,
        num_generators=config.generator.num_replicas,
        tensor_parallel=config.generator.tensor_parallel,
        generator_seq_len=context_limit(config.generator, base.facts),
        generator_on_gpu=_on_gpu(config.generator.with_gpus, card),
        share=config.generator.gpu_memory_share,
        num_versions=0,
        notes=tuple(notes),
    )
