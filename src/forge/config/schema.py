"""The sections that every program has. Applications derive from `ForgeConfig` and add their own.

Descriptions and limits are here and nowhere else: the errors quote them and the reference page is made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from forge.config.base import (
    SHORT_DTYPES,
    Address,
    ConfigModel,
    Directory,
    EnvName,
    FrozenDict,
    KubernetesName,
    LabelKey,
    LabelValue,
    MountPath,
    Name,
    PathText,
    SbatchLine,
    Tag,
    TimeLimit,
    broken_rule,
)


class RunConfig(ConfigModel):
    """What this run is called and where it writes."""

    name: Name = Field(default="run", description="Name of the run in logs, metrics and job names.")
    output_dir: Directory = Field(
        default=Path("runs"),
        description="Folder for everything that the run writes. A relative path starts at the working directory.",
    )
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="Seed from which every random choice is derived.")
    tags: tuple[Tag, ...] = Field(
        default=(), max_length=32, description="Words to find the run by in `forge ui`. They change nothing else."
    )
    max_log_mb: float = Field(
        default=64.0,
        ge=0,
        description="MiB of log files of each process, in the folder `logs` of the run; 0 for no log files.",
    )


class RopeScalingConfig(ConfigModel):
    """Llama 3's scaling of rotary embeddings to a longer context."""

    factor: float = Field(gt=0, description="Factor by which the context was extended.")
    low_freq_factor: float = Field(
        gt=0, description="Wavelengths above original_max_seq_len / this are scaled by the full factor."
    )
    high_freq_factor: float = Field(gt=0, description="Wavelengths below original_max_seq_len / this are not scaled.")
    original_max_seq_len: int = Field(ge=1, description="Context length before scaling, in tokens.")


class ModelConfig(ConfigModel):
    """Which model, and the facts of its architecture. A preset sets the facts; a key given by the user wins."""

    preset: str | None = Field(
        default=None,
        description="Name of a preset (`forge config presets` lists them). Keys that you set win over the preset's.",
    )
    name: str | None = Field(
        default=None,
        min_length=1,
        description="Name in logs. Without `preset`, a name that matches a preset or a preset's hf_repo selects that "
        "preset.",
    )
    path: PathText | None = Field(
        default=None,
        description="Folder with the model's Hugging Face files: config.json, weights, tokenizer. Its config.json "
        "wins over the preset. Null for random weights in the architecture that the keys below describe.",
    )
    hf_repo: str | None = Field(
        default=None, description="Hugging Face repository that the weights come from, such as Qwen/Qwen3-1.7B."
    )
    family: str | None = Field(
        default=None,
        min_length=1,
        description="Model family, which decides the model definition: one of `forge.models.families`, such as qwen3, "
        "or `module:attribute` of your own.",
    )
    num_layers: int | None = Field(default=None, ge=1, description="Transformer layers.")
    hidden_size: int | None = Field(default=None, ge=1, description="Width of the residual stream.")
    intermediate_size: int | None = Field(default=None, ge=1, description="Width inside a dense feed-forward layer.")
    num_heads: int | None = Field(default=None, ge=1, description="Query heads of a layer.")
    num_kv_heads: int | None = Field(
        default=None, ge=1, description="Key and value heads of a layer; num_heads is a multiple of it."
    )
    head_dim: int | None = Field(default=None, ge=1, description="Width of one head.")
    vocab_size: int | None = Field(default=None, ge=1, description="Rows of the embedding, padding rows included.")
    tie_embeddings: bool | None = Field(
        default=None, description="Whether the output layer shares the weights of the embedding."
    )
    max_seq_len: int | None = Field(
        default=None, ge=1, description="Longest sequence that the model supports, in tokens."
    )
    rope_theta: float | None = Field(default=None, gt=0, description="Base of the rotary embedding's frequencies.")
    rope_scaling: RopeScalingConfig | None = Field(
        default=None, description="Scaling of the rotary embedding; null for none."
    )
    norm_eps: float | None = Field(default=None, gt=0, description="Epsilon of the RMS norms.")
    num_experts: int | None = Field(
        default=None, ge=1, description="Experts of a mixture-of-experts layer; null for a dense model."
    )
    num_experts_per_token: int | None = Field(default=None, ge=1, description="Experts that each token is routed to.")
    expert_intermediate_size: int | None = Field(default=None, ge=1, description="Width inside one expert.")
    head: Literal["language", "scalar"] = Field(
        default="language",
        description="Output layer. `language`: the logits of the next token. `scalar`: one value per token, for reward "
        "models and critics; a folder without one (`score.weight`) gets a new one.",
    )
    head_precision: Annotated[Literal["float32"] | None, SHORT_DTYPES] = Field(
        default=None,
        description="`float32`: when the model computes in bfloat16, trainer and generators accumulate and keep "
        "logits in float32, which brings their logprobs closer together. Null: logits are rounded to bfloat16.",
    )

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        if self.num_heads is not None and self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            rule = f"must divide num_heads, which is {self.num_heads}"
            raise broken_rule(rule, repair="set both to what the model's config.json says", key="num_kv_heads")
        if self.num_experts_per_token is not None and self.num_experts_per_token > (self.num_experts or 0):
            rule = f"may be at most num_experts, which is {self.num_experts}"
            raise broken_rule(rule, repair="lower it, or set num_experts", key="num_experts_per_token")
        return self


class SlurmConfig(ConfigModel):
    """The SLURM job that holds the workers. Used when `launcher.kind` is `slurm`."""

    partition: str | None = Field(default=None, description="Partition; null for the cluster's default.")
    nodes: int = Field(default=1, ge=1, description="Nodes to ask for, one worker on each.")
    gpus_per_node: int = Field(default=0, ge=0, description="GPUs to ask for on each node.")
    time_limit: TimeLimit | None = Field(
        default=None, description="Longest run time, such as 02:00:00; null for the partition's default."
    )
    account: str | None = Field(default=None, description="Account to charge; null for the user's default.")
    qos: str | None = Field(default=None, description="Quality of service; null for the default.")
    exclusive: bool = Field(
        default=True,
        description="Whether the job has its nodes to itself, with all their cores and memory.",
    )
    extra_sbatch: tuple[SbatchLine, ...] = Field(
        default=(), description="Additional sbatch options, one per element, such as --constraint=a100."
    )
    port: int = Field(default=22222, ge=1, le=65535, description="Port on which the workers listen on their nodes.")
    tls: bool = Field(
        default=False,
        description="Whether the channel is tls://, with the certificates that HYPERACTOR_TLS_* name on every node.",
    )
    log_dir: Directory = Field(
        default=Path("runs/slurm"),
        description="Folder for the job's log. A relative path starts at the working directory.",
    )
    start_timeout_s: float = Field(
        default=3600.0,
        gt=0,
        description="Seconds that the job may wait in the queue and its workers may take to start.",
    )


class KubernetesConfig(ConfigModel):
    """The pods that hold the workers. Used when `launcher.kind` is `kubernetes`."""

    namespace: KubernetesName = Field(default="default", description="Namespace of everything that is created.")
    image: str | None = Field(
        default=None, min_length=1, description="Container image with this library installed. Needed for this launcher."
    )
    num_hosts: int = Field(default=1, ge=1, description="Pods to ask for, one worker in each.")
    gpus_per_host: int = Field(default=0, ge=0, description="GPUs to ask for in each pod.")
    service_account: KubernetesName | None = Field(
        default=None, description="Service account of the pods; null for the namespace's default."
    )
    labels: Mapping[LabelKey, LabelValue] = Field(default_factory=FrozenDict, description="Labels to put on every pod.")
    port: int = Field(default=22222, ge=1, le=65535, description="Port on which the workers listen inside the cluster.")
    claims: Mapping[KubernetesName, MountPath] = Field(
        default_factory=FrozenDict,
        description="Persistent volume claims to mount in every pod, and where, such as {runs: /runs}. "
        "Checkpoints of a trainer must be written to one that all pods share.",
    )
    tls_secret: KubernetesName | None = Field(
        default=None,
        description="Secret with tls.crt, tls.key and ca.crt for the channel between hosts; null for plain TCP.",
    )
    start_timeout_s: float = Field(
        default=900.0, ge=1, description="Seconds in which every pod must be ready, image pull included."
    )

    @model_validator(mode="after")
    def _check_claims(self) -> Self:
        if len(set(self.claims.values())) != len(self.claims):
            raise broken_rule("each claim needs a folder of its own", repair="mount one elsewhere", key="claims")
        return self


class LauncherConfig(ConfigModel):
    """Where worker processes come from."""

    kind: Literal["local", "hosts", "slurm", "kubernetes"] = Field(
        default="local",
        description=(
            "`local`: this machine. `hosts`: workers that already listen on `launcher.hosts`. "
            "`slurm`, `kubernetes`: a job that is submitted."
        ),
    )
    hosts: tuple[Address, ...] = Field(
        default=(), description="Addresses of workers, such as tcp://10.0.0.1:22222. Needed for `hosts`."
    )
    bind: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address on which the controller listens. Anything but loopback is reachable by others.",
    )
    insecure: bool = Field(
        default=False,
        description="Allow plain TCP that other machines can reach. Without it, everything off loopback needs TLS. "
        "Set it only on a network where you trust every machine and user.",
    )
    job_name: Name = Field(
        default="forge", description="Name of the SLURM job, or of the Kubernetes objects, that holds the workers."
    )
    heartbeat_s: float = Field(default=1.0, gt=0, description="Seconds between two heartbeats to a host.")
    heartbeat_timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="Seconds without an answer to a heartbeat after which a host counts as lost, and its replicas are "
        "restarted on others. Raise it where networks or file systems stall for longer.",
    )
    lease_s: float = Field(
        default=8.0,
        gt=0,
        description="Seconds without a heartbeat after which a host ends every process of the run, because its "
        "controller is gone. More than heartbeat_s + heartbeat_timeout_s.",
    )
    attach_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds in which a worker that listens must have answered. More than lease_s, for which a host "
        "may still be held for a controller that was killed.",
    )
    slurm: SlurmConfig = Field(default_factory=SlurmConfig, description="The SLURM job.")
    kubernetes: KubernetesConfig = Field(default_factory=KubernetesConfig, description="The Kubernetes pods.")

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.bind in ("0.0.0.0", "::", "[::]", "*"):
            rule = "must be an address that workers can connect to, not one that stands for all"
            raise broken_rule(rule, repair="name the controller's address on the private network", key="bind")
        if self.kind == "hosts" and not self.hosts:
            rule = "may not be empty when launcher.kind is `hosts`"
            raise broken_rule(rule, repair="start `forge worker` on each host and list the addresses", key="hosts")
        if len(set(self.hosts)) != len(self.hosts):
            raise broken_rule("may not name a worker twice", repair="remove the second one", key="hosts")
        silence_s = self.heartbeat_s + self.heartbeat_timeout_s
        if self.lease_s <= silence_s:
            rule = f"must be more than heartbeat_s + heartbeat_timeout_s, which is {silence_s:g}"
            repair = "raise it, or lower those: a host must not end the run's processes while it still counts as ready"
            raise broken_rule(rule, repair=repair, key="lease_s")
        if self.attach_timeout_s <= self.lease_s:
            rule = f"must be more than lease_s, which is {self.lease_s:g}"
            raise broken_rule(rule, repair="raise it, or lower lease_s", key="attach_timeout_s")
        if self.kind == "kubernetes" and self.kubernetes.image is None:
            rule = "is needed when launcher.kind is `kubernetes`"
            raise broken_rule(
                rule, repair="set launcher.kubernetes.image to an image that you built", key="kubernetes.image"
            )
        return self


class WorkerConfig(ConfigModel):
    """How the processes of a worker are started."""

    env: Mapping[EnvName, str] = Field(
        default_factory=FrozenDict,
        description="Environment variables of the processes. Values are text: quote numbers.",
    )
    setup_timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds that loading the model and the like may take; null for 600."
    )
    spawn_timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds that starting the processes may take; null for 120."
    )

    def options(self) -> dict[str, Any]:
        """Return the keywords for `Actor.options(...)`: those that are set."""
        chosen = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in chosen.items() if value is not None} | {"env": dict(self.env)}


class ReplicatedWorkerConfig(WorkerConfig):
    """How the processes of a worker are started, and replaced when one dies or hangs."""

    heartbeat_timeout_s: float | None = Field(
        default=None,
        gt=1,
        description="Seconds without a heartbeat answer after which a replica counts as dead; null for 30.",
    )
    max_restarts: int | None = Field(
        default=None,
        ge=0,
        description="Consecutive restarts after which a replica is dropped; null for 5, 0 for no restart.",
    )


class StoreConfig(ConfigModel):
    """Where published weights are kept."""

    volumes: int = Field(
        default=0,
        ge=0,
        description="Storage volumes to start, spread over the hosts; 0 keeps data with its publishers.",
    )
    copies: int = Field(default=1, ge=1, description="Number of volumes that keep each part of a version.")
    keep: int = Field(
        default=2,
        ge=1,
        description="Versions of the weights to keep memory for, including the one being written.",
    )
    distribution: Literal["auto", "direct"] = Field(
        default="auto",
        description="How weights get to other hosts. `auto`: once to each host, from one to the next. `direct`: to "
        "each process, from where they were published.",
    )

    @property
    def num_versions(self) -> int:
        """Versions of the weights that there is memory for: one is always left to fetch while the next is written."""
        return max(2, self.keep)

    @model_validator(mode="after")
    def _check_copies(self) -> Self:
        if self.copies > max(1, self.volumes):
            rule = f"at most as many as volumes, which is {self.volumes}"
            raise broken_rule(rule, repair="lower it, or raise volumes", key="copies")
        return self


class ForgeConfig(ConfigModel):
    """The whole configuration. Derive from it to add sections."""

    old_keys: ClassVar[Mapping[str, str | None]] = {"store": None, "services": None, "actors": None}
    model_head: ClassVar[Literal["language", "scalar"]] = "language"
    """What `model.head` must be in this kind of run."""

    run: RunConfig = Field(default_factory=RunConfig, description="What this run is called and where it writes.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="Which model.")
    launcher: LauncherConfig = Field(default_factory=LauncherConfig, description="Where worker processes come from.")

    @model_validator(mode="after")
    def _check_head(self) -> Self:
        if self.model.head != self.model_head:
            rule = f"`{self.model_head}` in this kind of run"
            raise broken_rule(rule, repair="remove the key", key="model.head")
        return self
