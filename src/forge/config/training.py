"""What a trainer needs to know: the optimizer's steps, the layout over ranks, and where checkpoints go."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from forge.config.adapter import AdapterConfig
from forge.config.base import SHORT_DTYPES, ConfigModel, Directory, FrozenDict, OptimizerName, PathText, broken_rule
from forge.config.schema import ModelConfig


class LossScalingConfig(ConfigModel):
    """Dynamic loss scaling, which float16 needs: the loss is multiplied by a power of two before the backward pass, so
    that small gradients do not become 0, and gradients are divided by it before the optimizer's step."""

    initial_scale: float = Field(
        default=65536.0, gt=0, description="Scale of the first step, a power of two. Lowered when gradients overflow."
    )
    growth_interval: int = Field(
        default=200, ge=1, description="Steps in a row without an overflow after which the scale is raised."
    )
    growth_factor: float = Field(default=2.0, gt=1, description="What a raise multiplies it by, a power of two.")
    backoff_factor: float = Field(
        default=0.5, gt=0, lt=1, description="What an overflow multiplies it by, a power of two."
    )
    min_scale: float = Field(
        default=1.0,
        gt=0,
        description="Lowest scale, a power of two. A gradient that overflows at it is treated as `on_nonfinite` says.",
    )
    max_scale: float = Field(default=2.0**24, gt=0, description="Highest scale, a power of two.")
    max_retries: int = Field(
        default=16,
        ge=0,
        description="How often a batch whose gradient overflows is computed again, at a lower scale each time, before "
        "its step is skipped. 0 skips the step at the first overflow.",
    )

    @model_validator(mode="after")
    def _check_scales(self) -> Self:
        for key in ("initial_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            value = getattr(self, key)
            if math.frexp(value)[0] != 0.5:
                rule = "a power of two: scaling by it is exact"
                raise broken_rule(rule, repair="write for example 65536, 2 or 0.5", key=key)
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            rule = f"from min_scale to max_scale, which is from {self.min_scale:g} to {self.max_scale:g}"
            raise broken_rule(rule, repair="change it, or the bounds", key="initial_scale")
        return self


class TrainingConfig(ConfigModel):
    """Optimizer steps, and how much memory they use."""

    batch_size: int = Field(
        default=8,
        ge=1,
        description="Rows of one batch, over all ranks. A row is one sample, or one pack of samples. Memory does not "
        "depend on it: see microbatch_tokens.",
    )
    gradient_accumulation_steps: int = Field(
        default=1,
        ge=1,
        description="Batches per optimizer step. Memory does not depend on it: see microbatch_tokens.",
    )
    num_epochs: int = Field(default=1, ge=1, description="Passes over the data.")
    max_steps: int | None = Field(
        default=None, ge=1, description="Optimizer steps after which to stop; null for the end of the last epoch."
    )
    max_seq_len: int = Field(default=2048, ge=2, description="Longest sample, and length of a packed row, in tokens.")
    microbatch_tokens: int | None = Field(
        default=None,
        ge=2,
        description="Tokens that one rank runs through the model at once; null for max_seq_len. Gradients do not "
        "depend on it, memory does: lower it, down to max_seq_len, when memory runs out.",
    )

    share_prefixes: bool = Field(
        default=False,
        description="Whether a prefix that consecutive samples share, such as the prompt of a group or the first turns "
        "of an episode's branches, goes through the model once. Gradients do not depend on it. Not with a pipeline.",
    )

    learning_rate: float = Field(default=1e-5, gt=0, description="Highest learning rate of the schedule.")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine",
        description="Shape of the learning rate after the warm-up. `wsd`: warm-up, stable, decay.",
    )
    warmup_steps: int | None = Field(
        default=None, ge=0, description="Steps over which the rate rises from 0; null to use warmup_ratio."
    )
    warmup_ratio: float = Field(
        default=0.03, ge=0, lt=1, description="The warm-up as a fraction of all steps, rounded up."
    )
    decay_ratio: float = Field(
        default=0.2, gt=0, le=1, description="For `wsd`: the final fraction of all steps, over which the rate decays."
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Final rate as a fraction of learning_rate; not for `constant`."
    )
    optimizer: OptimizerName = Field(
        default="adamw",
        description="`adamw`; `muon`, which orthogonalises the updates of hidden matrices and leaves the rest to "
        "AdamW; or `module:attribute` of a class or function that makes a torch.optim.Optimizer.",
    )
    optimizer_args: Mapping[str, Any] = Field(
        default_factory=FrozenDict,
        description="Keyword arguments of `muon` (momentum, nesterov, ns_steps, adjust_lr_fn, adamw_lr_ratio) or of an "
        "optimizer of your own.",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay. Norms and biases are left out.")
    beta1: float = Field(
        default=0.9, ge=0, lt=1, description="AdamW's decay of the mean of gradients; the first of `betas`."
    )
    beta2: float = Field(
        default=0.95, ge=0, lt=1, description="AdamW's decay of the mean of squared gradients; the second of `betas`."
    )
    adam_eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon; `eps` of an optimizer of your own.")
    optimizer_dtype: Annotated[Literal["float32", "bfloat16"], SHORT_DTYPES] = Field(
        default="float32",
        description="Precision of AdamW's two states. `bfloat16` halves their memory. Only with `optimizer: adamw`.",
    )
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, description="Norm to which a larger gradient is scaled; null for no clipping."
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop",
        description="What happens when loss or gradient is NaN or infinite: `stop` saves the state and ends the run, "
        "`skip` skips the step. Both name the samples. Gradients that overflow float16 are retried first: see "
        "loss_scaling.",
    )
    loss_scaling: LossScalingConfig = Field(
        default_factory=LossScalingConfig, description="Loss scaling; only with distributed.precision float16."
    )

    head_chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens whose logits are in memory at once; null for 1024 on a GPU and 256 on a CPU. Gradients do "
        "not depend on it, memory does.",
    )
    head_cache_gb: float = Field(
        default=6.0,
        ge=0,
        description="On a GPU, memory in which a row's logits may wait for the backward pass of a policy loss, in GiB. "
        "What finds no room there is computed twice. Not used with an entropy bonus or tensor parallel ranks.",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        description="What the backward pass recomputes: nothing, everything except expensive matrix products, or whole "
        "layers.",
    )
    activation_offload: bool = Field(
        default=False, description="Whether activations for the backward pass are kept in host memory."
    )
    attention: Literal["auto", "torch", "flash_attn_4"] = Field(
        default="auto",
        description="The attention kernel on a GPU in half precision. `auto`: FlashAttention 4 where it is installed "
        "and the GPU is a Hopper or a Blackwell, otherwise torch's. The CPU uses its own kernel.",
    )
    compile: bool = Field(default=False, description="Whether each layer is compiled with torch.compile.")

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.microbatch_tokens is not None and self.microbatch_tokens < self.max_seq_len:
            rule = f"at least max_seq_len, which is {self.max_seq_len}: a sample is never split"
            raise broken_rule(rule, repair="raise it, or lower max_seq_len", key="microbatch_tokens")
        if self.optimizer_dtype == "bfloat16" and self.beta2 > 0.99:
            rule = f"at most 0.99 with optimizer_dtype bfloat16, in which a state cannot move by {1 - self.beta2:.2g}"
            raise broken_rule(rule, repair="lower it, or keep the states in float32", key="beta2")
        if self.optimizer_dtype != "float32" and self.optimizer != "adamw":
            rule = f"float32 with the optimizer `{self.optimizer}`: only `adamw` keeps its states in another dtype"
            raise broken_rule(rule, repair="remove it, or set optimizer: adamw", key="optimizer_dtype")
        return self


class DistributedConfig(ConfigModel):
    """How a model is distributed over ranks. The number of ranks is the product of the degrees, without `expert`."""

    strategy: Literal["auto", "none", "replicate", "fsdp", "hsdp"] = Field(
        default="auto",
        description="How data-parallel ranks hold the weights. `auto` follows the degrees; the other values check "
        "them: `none` one rank, `replicate` whole copies, `fsdp` shards, `hsdp` copies of shards.",
    )
    precision: Annotated[Literal["float32", "bfloat16", "float16", "bfloat16_pure", "float64"], SHORT_DTYPES] = Field(
        default="float32",
        description="`bfloat16`: compute in bfloat16, with weights and gradient accumulation in float32. `float16`: "
        "the same in float16, with loss scaling (training.loss_scaling); generators then compute in float16 too. "
        "`bfloat16_pure`: everything in bfloat16. `float64`: for tests. `bf16`, `fp16`, `fp32` and `fp64` are accepted "
        "as short forms.",
    )
    replicate: int = Field(default=1, ge=1, description="Data-parallel ranks that hold whole copies.")
    shard: int = Field(
        default=-1,
        ge=-1,
        description="Data-parallel ranks that share one copy (FSDP); -1 for all remaining GPUs, or 1 on a CPU.",
    )
    tensor: int = Field(default=1, ge=1, description="Ranks that split the heads and widths of every layer.")
    pipeline: int = Field(default=1, ge=1, description="Ranks that split the layers.")
    expert: int = Field(
        default=1,
        ge=1,
        description="Ranks that split the experts of a mixture-of-experts model; they are part of the other degrees.",
    )
    sequence_parallel: bool = Field(
        default=True, description="Whether tensor-parallel ranks also split the tokens between layers."
    )
    pipeline_schedule: Literal["1F1B", "GPipe", "Interleaved1F1B"] = Field(
        default="1F1B", description="Order in which pipeline stages run forward and backward."
    )
    pipeline_microbatches: int | None = Field(
        default=None, ge=1, description="Rows in the pipeline at once; null for twice the stages."
    )
    num_threads: int | None = Field(
        default=None, ge=1, description="CPU threads of each rank; null for one, so that ranks do not compete."
    )
    with_gpus: bool | None = Field(
        default=None, description="Whether each rank gets a GPU; null for yes where there is one."
    )
    hosts: int | None = Field(default=None, ge=1, description="Hosts to spread the ranks over; null for one.")

    @model_validator(mode="after")
    def _check_degrees(self) -> Self:
        if self.shard == 0:
            raise broken_rule("-1 or at least 1", repair="write -1 for all remaining ranks", key="shard")
        data = self.replicate * abs(self.shard)
        wrong = {
            "none": (self.replicate != 1 or self.shard > 1, "replicate 1 and shard 1 or -1"),
            "replicate": (self.shard > 1, "shard 1 or -1"),
            "fsdp": (self.replicate > 1, "replicate 1"),
            "hsdp": (self.replicate < 2, "replicate of at least 2"),
        }.get(self.strategy, (False, ""))
        if wrong[0]:
            rule = f"`{self.strategy}` needs {wrong[1]}; replicate is {self.replicate} and shard is {self.shard}"
            raise broken_rule(rule, repair="write `auto`, or change the degrees", key="strategy")
        ranks = data * self.tensor * self.pipeline
        if self.shard != -1 and ranks % self.expert:
            rule = f"must divide the number of ranks, which is {ranks}"
            raise broken_rule(rule, repair="lower it, or add ranks", key="expert")
        if self.hosts is not None and self.shard != -1 and ranks % self.hosts:
            rule = f"must divide the number of ranks, which is {ranks}"
            raise broken_rule(rule, repair="choose another number of hosts", key="hosts")
        return self

    @property
    def num_ranks(self) -> int:
        """How many ranks the degrees ask for; a shard of -1 counts as 1."""
        return self.replicate * max(1, self.shard) * self.tensor * self.pipeline

    def ranks_on(self, num_gpus: int) -> int:
        """How many ranks there are where each host has so many GPUs, 0 for a CPU: a shard of -1 takes all of them."""
        if self.shard != -1:
            return self.num_ranks
        everywhere = num_gpus * (self.hosts or 1)
        return max(self.num_ranks, everywhere - everywhere % self.num_ranks)


def export_dtype(precision: str) -> str:
    """Return what weights are exported in: in half precision where the trainer computes in it."""
    chosen = precision.removesuffix("_pure")
    return chosen if chosen in ("bfloat16", "float16") else "float32"


class CheckpointConfig(ConfigModel):
    """When the state of training is saved, where, and what is kept."""

    output_dir: Directory | None = Field(
        default=None, description="Folder of the checkpoints; null for `checkpoints` in the run's folder."
    )
    save_interval: int | None = Field(
        default=500, ge=1, description="Optimizer steps between two checkpoints; null to save by time only."
    )
    save_interval_s: float | None = Field(
        default=900.0,
        gt=0,
        description="Seconds after which a checkpoint is saved at the end of a step, if none was saved meanwhile; "
        "null for no time limit. The last step is always saved.",
    )
    grace_s: float | None = Field(
        default=30.0,
        gt=0,
        description="Seconds that a scheduler leaves between SIGTERM (or SIGHUP) and SIGKILL. A training step that is "
        "still running after half of that time is abandoned, and the state before it is saved; null to always finish "
        "the step.",
    )
    keep: int = Field(default=2, ge=1, description="How many of the newest checkpoints are kept.")
    keep_best: bool = Field(
        default=True, description="Whether the checkpoint with the lowest validation loss is kept as well."
    )
    asynchronous: bool = Field(
        default=True, description="Whether training continues while a checkpoint is being written."
    )
    resume: Literal["never", "auto", "must"] | PathText = Field(
        default="never",
        description="`never` starts a new run and refuses a folder that holds checkpoints; `auto` resumes from the "
        "newest checkpoint if there is one; `must` requires one; any other value is the path of a checkpoint.",
    )
    export_hf: bool = Field(
        default=True, description="Whether the final weights are also written as a Hugging Face folder."
    )


def check_base_dtype(adapter: AdapterConfig | None, distributed: DistributedConfig, training: TrainingConfig) -> None:
    """Refuse layouts in which the weights below an adapter cannot be kept in few bits: every rank has them whole."""
    if adapter is None or adapter.base_dtype is None:
        return
    for key in ("tensor", "expert"):
        if getattr(distributed, key) > 1:
            rule = f"1 with adapter.base_dtype: {adapter.base_dtype}: weights in few bits are not split"
            repair = "use data-parallel ranks or distributed.pipeline, or remove adapter.base_dtype"
            raise broken_rule(rule, repair=repair, key=f"distributed.{key}")
    if training.compile:
        rule = f"false with adapter.base_dtype: {adapter.base_dtype}: dequantisation is not compiled"
        raise broken_rule(rule, repair="set it to false, or remove adapter.base_dtype", key="training.compile")


class TrainerConfig(ConfigModel):
    """Everything that a trainer is made from."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="Which model.")
    adapter: AdapterConfig | None = Field(default=None, description="LoRA adapter to train; null to train all weights.")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="The optimizer's steps.")
    distributed: DistributedConfig = Field(default_factory=DistributedConfig, description="The layout over ranks.")
    checkpoint_dir: Path | None = Field(default=None, description="Folder of the checkpoints; null to save none.")
    checkpointing: CheckpointConfig = Field(default_factory=CheckpointConfig, description="When and what to keep.")
    seed: int = Field(default=0, ge=0, description="Seed of everything random.")
    total_steps: int | None = Field(
        default=None, ge=1, description="Steps that the learning rate's schedule covers; null for training.max_steps."
    )
    frozen: bool = Field(
        default=False, description="Whether there is no optimizer: a reference model, which only scores."
    )

    @model_validator(mode="after")
    def _check_base(self) -> Self:
        check_base_dtype(self.adapter, self.distributed, self.training)
        return self
