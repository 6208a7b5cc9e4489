"""The sections that every program has. Applications derive from `ForgeConfig` and add their own.

Descriptions and limits are here and nowhere else: the errors quote them and the reference page is made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from forge.config.base import ConfigModel, FrozenDict, broken_rule
from forge.config.rules import (
    SHORT_DTYPES,
    Address,
    Directory,
    EnvName,
    KubernetesName,
    Name,
    PathText,
    SbatchLine,
    TimeLimit,
)


class RunConfig(ConfigModel):
    """What this run is called and where it writes."""

    name: Name = Field(default="run", description="Name of the run in logs, metrics and job names.")
    output_dir: Directory = Field(
        default=Path("runs"),
        description="Folder for everything that the run writes. A relative path starts at the working directory.",
    )
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="Seed from which every random choice is derived.")


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
    labels: Mapping[str, str] = Field(default_factory=FrozenDict, description="Labels to put on every pod.")
    port: int = Field(default=22222, ge=1, le=65535, description="Port on which the workers listen inside the cluster.")
    tls_secret: KubernetesName | None = Field(
        default=None,
        description="Secret with tls.crt, tls.key and ca.crt for the channel between hosts; null for plain TCP.",
    )
    start_timeout_s: float = Field(
        default=900.0, ge=1, description="Seconds in which every pod must be ready, image pull included."
    )


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
    job_name: Name = Field(
        default="forge", description="Name of the SLURM job, or of the Kubernetes objects, that holds the workers."
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
        if self.kind == "kubernetes" and self.kubernetes.image is None:
            rule = "is needed when launcher.kind is `kubernetes`"
            raise broken_rule(
                rule, repair="set launcher.kubernetes.image to an image that you built", key="kubernetes.image"
            )
        return self


class ActorConfig(ConfigModel):
    """One actor: a mesh of processes that run the same class."""

    procs: int = Field(default=1, ge=1, description="Processes on each host.")
    hosts: int | None = Field(default=None, ge=1, description="Hosts to spread over; null to share the available ones.")
    with_gpus: bool = Field(default=False, description="Whether each process gets its own GPU.")
    mesh_name: Name | None = Field(
        default=None, description="Name in logs, metrics and errors; null to take the class's."
    )
    env: Mapping[EnvName, str] = Field(
        default_factory=FrozenDict,
        description="Environment variables of the processes. Values are text: quote numbers.",
    )
    num_threads: int | None = Field(
        default=None, ge=1, description="CPU threads of each process; null for one, so that processes do not compete."
    )
    setup_timeout_s: float = Field(default=600.0, gt=0, description="Seconds that an actor's setup may take.")
    spawn_timeout_s: float = Field(default=120.0, gt=0, description="Seconds that starting the processes may take.")

    def options(self) -> dict[str, Any]:
        """The keywords for `Actor.options(...)`."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


class ServiceConfig(ActorConfig):
    """One service: replicas of an actor behind a router that replaces failed replicas."""

    num_replicas: int = Field(default=1, ge=1, description="Replicas, each with its own mesh of processes.")
    routing: Literal["round_robin", "least_loaded"] = Field(
        default="round_robin", description="How a replica is chosen for a call outside a session."
    )
    max_concurrency: int | None = Field(
        default=None,
        ge=1,
        description="Calls that one calling process may have in flight at a replica; null for no limit.",
    )
    max_queue: int | None = Field(
        default=None,
        ge=0,
        description="Calls that may wait for a replica before callers are refused; null for no limit.",
    )
    call_timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds after which a call is cancelled; null for never."
    )
    heartbeat_s: float = Field(default=1.0, gt=0, description="Seconds between two heartbeats to a replica.")
    heartbeat_timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds without a heartbeat answer after which a replica counts as dead."
    )
    max_restarts: int = Field(
        default=5, ge=0, description="Consecutive restarts after which a replica is dropped; 0 for no restart."
    )
    restart_backoff_s: float = Field(
        default=0.1, ge=0, description="Seconds before the second consecutive restart; doubled for each further one."
    )
    max_backoff_s: float = Field(default=30.0, gt=0, description="Longest wait before a restart, in seconds.")
    stable_s: float = Field(
        default=2.0,
        ge=0,
        description="Seconds of uptime after which a replica counts as stable and its restart count is reset.",
    )
    max_retries: int = Field(
        default=10,
        ge=0,
        description="How often a call of an endpoint with retry=True is sent again after its replica was lost.",
    )

    @model_validator(mode="after")
    def _check_heartbeat(self) -> Self:
        if self.heartbeat_timeout_s <= self.heartbeat_s:
            rule = f"must be longer than heartbeat_s, which is {self.heartbeat_s:g}"
            raise broken_rule(rule, repair="raise it, or lower heartbeat_s", key="heartbeat_timeout_s")
        return self


class StoreConfig(ConfigModel):
    """Where published weights are kept, and how they are checked."""

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
    verify: Literal["cheap", "full", "off"] = Field(
        default="cheap", description="How readers check that they received what was published."
    )

    @model_validator(mode="after")
    def _check_copies(self) -> Self:
        if self.volumes and self.copies > self.volumes:
            rule = f"at most as many as volumes, which is {self.volumes}"
            raise broken_rule(rule, repair="lower it, or raise volumes", key="copies")
        return self


class ForgeConfig(ConfigModel):
    """The whole configuration. Derive from it to add sections."""

    run: RunConfig = Field(default_factory=RunConfig, description="What this run is called and where it writes.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="Which model.")
    launcher: LauncherConfig = Field(default_factory=LauncherConfig, description="Where worker processes come from.")
    store: StoreConfig = Field(default_factory=StoreConfig, description="How weights are kept and checked.")
    services: Mapping[Name, ServiceConfig] = Field(default_factory=FrozenDict, description="Services by name.")
    actors: Mapping[Name, ActorConfig] = Field(default_factory=FrozenDict, description="Actors by name.")
