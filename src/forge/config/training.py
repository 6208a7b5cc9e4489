"""What a trainer needs to know: the optimizer's steps, the layout over ranks, and where checkpoints go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from forge.config.base import SHORT_DTYPES, ConfigModel, Directory, PathText, broken_rule
from forge.config.schema import ModelConfig


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
    weight_decay: float = Field(default=0.0, ge=0, description="Decay of AdamW. Norms and biases are left out.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the mean of gradients.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW's decay of the mean of squared gradients.")
    adam_eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    optimizer_dtype: Annotated[Literal["float32", "bfloat16"], SHORT_DTYPES] = Field(
        default="float32", description="Precision of AdamW's two states. `bfloat16` halves their memory."
    )
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, description="Norm to which a larger gradient is scaled; null for no clipping."
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop",
        description="What happens when loss or gradient is NaN or infinite: `stop` saves the state and ends the run, "
        "`skip` skips the step. Both name the samples.",
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
        return self


class DistributedConfig(ConfigModel):
    """How a model is distributed over ranks. The number of ranks is the product of the degrees, without `expert`."""

    strategy: Literal["auto", "none", "replicate", "fsdp", "hsdp"] = Field(
        default="auto",
        description="How data-parallel ranks hold the weights. `auto` follows the degrees; the other values check "
        "them: `none` one rank, `replicate` whole copies, `fsdp` shards, `hsdp` copies of shards.",
    )
    precision: Annotated[Literal["float32", "bfloat16", "bfloat16_pure", "float64"], SHORT_DTYPES] = Field(
        default="float32",
        description="`bfloat16`: compute in bfloat16, with weights and gradient accumulation in float32. "
        "`bfloat16_pure`: everything in bfloat16. `float64`: for tests. `bf16`, `fp32` and `fp64` are accepted as "
        "short forms.",
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


class TrainerConfig(ConfigModel):
    """Everything that a trainer is made from."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="Which model.")
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
