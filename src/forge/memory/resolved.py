"""What a configuration leaves open, decided once: devices, ranks, precisions, context lengths and placement.

Planning, the start of workers, the publication of weights and the memory planner all use the same `ResolvedRun`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from forge.config import (
    DistributedConfig,
    ForgeConfig,
    GenerationConfig,
    GRPOConfig,
    ModelConfig,
    PolicyConfig,
    SFTConfig,
    TrainingConfig,
)
from forge.errors import ConfigError, ModelError
from forge.memory.card import Card
from forge.memory.records import MASTER_BYTES
from forge.models.architecture import complete, merge
from forge.models.hf_config import read_hf_config
from forge.models.sizes import Sizes
from forge.trainer.layout import Layout, check_layout

ACCUMULATION_NOTE = (
    "training.batch_size and training.gradient_accumulation_steps do not change the memory of a run: "
    "training.microbatch_tokens does, and after it training.max_seq_len and training.activation_checkpointing"
)
"""For whoever expects a smaller batch and more accumulation to take less memory, as in other libraries."""

Placement = Literal["apart", "beside", "turns", "shared"]


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
        trainer_on_gpu, generator_on_gpu, reference_on_gpu, judge_on_gpu: which workers use GPUs.
        num_versions: for how many versions of the weights the store has memory.
        published_dtype: what weights are published in: bfloat16 where that is what generators make of them, which
            halves the bytes that are kept and sent; None for what the trainer keeps them in.
        is_spread: whether processes are on several hosts, so that published weights go to host memory.
        group_size, share_prompts: how much attention repeats of what is shared.
        entropy: whether the loss needs the gradient of entropies.
        saves_beside: whether checkpoints are written while training continues, from a copy in host memory.
        notes: what had to be assumed.
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
    trainer_on_gpu: bool = False
    generator_on_gpu: bool = False
    reference_on_gpu: bool = False
    judge_on_gpu: bool = False
    num_versions: int = 0
    published_dtype: Literal["bfloat16"] | None = None
    is_spread: bool = False
    group_size: int = 1
    share_prompts: bool = False
    completion_tokens: int = 0
    entropy: bool = False
    saves_beside: bool = True
    notes: tuple[str, ...] = ()

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

        In `shared` on a GPU they do so too, though they are not asleep: nothing is under way while a batch is learned.
        """
        return self.placement == "turns" or (self.placement == "shared" and self.generator_on_gpu)

    @property
    def published_item(self) -> int:
        """The bytes of one published weight; 0 for a run that publishes none."""
        if self.distributed is None:
            return 0
        return 2 if self.published_dtype == "bfloat16" else MASTER_BYTES[self.distributed.precision]

    @property
    def uses_gpus(self) -> bool:
        return self.trainer_on_gpu or self.generator_on_gpu or self.reference_on_gpu


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
    if isinstance(config, SFTConfig):
        return _read_sft(config, ResolvedRun(name, facts, sizes), card, notes)
    if isinstance(config, PolicyConfig):
        return _read_policy(config, ResolvedRun(name, facts, sizes), card, notes)
    raise ConfigError(
        "this kind of configuration has no memory to plan",
        path="--kind",
        value=type(config).__name__,
        rule="a run of reinforcement learning, of fine-tuning, or of generators",
        repair="use forge.config:GRPOConfig, SFTConfig or PolicyConfig, or a class that derives from one",
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
    wants_reference = config.algorithm.kl.coefficient > 0
    judge = config.rewards.judge
    generator_on_gpu = _on_gpu(config.generator.with_gpus, card)
    if config.placement != "apart" and config.generator.with_gpus is None:
        generator_on_gpu = on_gpu  # it uses the trainer's
    asked = config.generator.engine_args.get("dtype") or config.generator.precision_on(gpu=generator_on_gpu)
    if config.reference.path is not None and wants_reference:
        notes.append("the reference model is planned with the policy's architecture")
    if config.rewards.judge is not None or config.rewards.reward_model is not None:
        notes.append("judges and reward models are not planned: they need GPUs, or host memory, of their own")
    return replace(
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
        reference_on_gpu=wants_reference and _on_gpu(config.reference.with_gpus, card),
        judge_on_gpu=judge is not None and _on_gpu(judge.generator.with_gpus, card),
        trainer_on_gpu=on_gpu,
        generator_on_gpu=generator_on_gpu,
        num_versions=0 if config.placement == "shared" else config.store.num_versions,
        published_dtype="bfloat16" if asked == "bfloat16" else None,
        is_spread=config.launcher.kind != "local" or (config.distributed.hosts or 1) > 1 or config.store.volumes > 0,
        group_size=config.rollout.group_size,
        share_prompts=config.rollout.share_prompts,
        completion_tokens=completion_tokens,
        entropy=config.algorithm.loss.entropy_coefficient != 0,
        saves_beside=config.checkpointing.asynchronous,
        notes=tuple(notes),
    )


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


def _read_sft(config: SFTConfig, base: ResolvedRun, card: Card | None, notes: list[str]) -> ResolvedRun:
    on_gpu = _on_gpu(config.distributed.with_gpus, card)
    layout = check_layout(
        config.distributed, base.facts, config.training, num_ranks=_num_ranks(config.distributed, card, on_gpu=on_gpu)
    )
    if config.training.gradient_accumulation_steps > 1:
        notes.append(ACCUMULATION_NOTE)
    return replace(
        base,
        training=config.training,
        distributed=config.distributed,
        layout=layout,
        trainer_on_gpu=on_gpu,
        num_versions=0,
        saves_beside=config.checkpointing.asynchronous,
        notes=tuple(notes),
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
