"""What a generator needs to know: which engine, how much memory, how tokens are sampled, how weights are updated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from forge.config.adapter import AdapterConfig
from forge.config.base import SHORT_DTYPES, ConfigModel, EngineName, FrozenDict, PathText, broken_rule
from forge.config.schema import ForgeConfig, ModelConfig, ReplicatedWorkerConfig
from forge.config.speculation import SpeculationConfig
from forge.errors import ConfigError
from forge.registry import ENGINES

if TYPE_CHECKING:
    from forge.generator.engine import EngineCapabilities

UpdateMode = Literal["drain", "keep", "recompute", "abort"]
Verify = Literal["cheap", "full", "off"]

BASE_ADAPTER: Final = "base"
"""The adapter's name that stands for the weights without any adapter, also in a run that trains one."""

LEAST_TEMPERATURE: Final = 1e-30
_LEAST_PENALTY: Final = 1e-30


class Sampling(ConfigModel):
    """Sampling parameters. A request may override the configuration's."""

    temperature: float = Field(default=1.0, ge=0, description="Divisor of the logits; 0 for greedy decoding.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Sample among the likeliest tokens whose probabilities reach this sum."
    )
    top_k: int = Field(default=0, ge=0, description="Sample among this many of the likeliest tokens; 0 for all.")
    min_p: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Exclude tokens less likely than this fraction of the likeliest token's probability.",
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        description="Divides positive logits, and multiplies negative ones, of tokens in prompt or completion.",
    )
    presence_penalty: float = Field(
        default=0.0,
        ge=-2,
        le=2,
        description="Subtracted from the logit of every token that the completion already contains.",
    )
    frequency_penalty: float = Field(
        default=0.0,
        ge=-2,
        le=2,
        description="Subtracted from a token's logit once for each occurrence in the completion.",
    )
    max_tokens: int | None = Field(
        default=None, ge=1, description="Longest completion; null for what the context has room for."
    )
    min_tokens: int = Field(default=0, ge=0, description="Minimum length: nothing ends a completion before it.")
    stop: tuple[str, ...] = Field(default=(), description="Strings that end a completion. The text ends before them.")
    stop_token_ids: tuple[int, ...] = Field(
        default=(), description="Tokens that end a completion, in addition to the model's own."
    )
    ignore_eos: bool = Field(default=False, description="Whether the model's own end tokens do not end a completion.")
    include_stop: bool = Field(default=False, description="Whether the text keeps the stop string.")
    seed: int | None = Field(
        default=None,
        ge=0,
        le=2**63 - 1,
        description="The same seed samples the same tokens, whatever else is in the batch; null for a new seed each "
        "time.",
    )
    n: int = Field(default=1, ge=1, description="Completions per prompt. They share its prefill.")
    structured: Mapping[str, Any] | None = Field(
        default=None,
        description="Constraint on the text: one of {json_schema: …}, {regex: …}, {choice: […]}, {grammar: …}. Only "
        "with `engine: vllm`.",
    )
    adapter: str | None = Field(
        default=None,
        min_length=1,
        description="Name of a loaded LoRA adapter; null for none, or for the adapter that is trained. `base`: none, "
        "also in a run that trains an adapter.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            rule = f"is 0, or at least {LEAST_TEMPERATURE:g}: logits divided by less are no numbers"
            raise broken_rule(rule, repair="set 0 for greedy decoding", key="temperature")
        if not _LEAST_PENALTY <= self.repetition_penalty <= 1 / _LEAST_PENALTY:
            rule = f"is at least {_LEAST_PENALTY:g} and at most {1 / _LEAST_PENALTY:g}: float32 holds no more"
            raise broken_rule(rule, repair="set 1 for none; 1.1 is already strong", key="repetition_penalty")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            rule = f"may be at most max_tokens, which is {self.max_tokens}"
            raise broken_rule(rule, repair="lower it, or raise max_tokens", key="min_tokens")
        if any(not stop for stop in self.stop):
            raise broken_rule("holds strings that are not empty", repair="remove the empty one", key="stop")
        if self.structured is not None and (
            len(self.structured) != 1 or not set(self.structured) <= {"json_schema", "regex", "choice", "grammar"}
        ):
            rule = "exactly one of json_schema, regex, choice and grammar"
            raise broken_rule(rule, repair="{json_schema: {type: object}}", key="structured")
        return self

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_truncated(self) -> bool:
        """Whether anything but the temperature shapes the distribution."""
        plain = self.repetition_penalty == 1.0 and self.presence_penalty == 0.0 and self.frequency_penalty == 0.0
        narrowed = self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0
        return not plain or (narrowed and not self.is_greedy) or self.min_tokens > 0 or self.structured is not None


class UpdateConfig(ConfigModel):
    """How weights are updated while completions are in progress."""

    mode: UpdateMode = Field(
        default="keep",
        description="What happens to completions in progress. `drain`: they finish first, on the old weights. `keep`: "
        "they continue with the KV cache that the old weights computed. `recompute`: they continue after the new "
        "weights have recomputed their KV cache. `abort`: they end at once with what they have, to be continued "
        "later.",
    )
    max_attempts: int = Field(default=3, ge=1, description="Maximum attempts of an update.")
    retry_wait_s: float = Field(
        default=0.5, ge=0, description="Seconds before the second attempt; doubled for each further one."
    )
    verify: Verify = Field(default="cheap", description="How a generator checks that it received what was published.")


class CanaryConfig(ConfigModel):
    """The check that generator and trainer compute with the same weights."""

    enabled: bool = Field(
        default=True,
        description="Whether, after an update, the logprobs of a few tokens are compared with the trainer's, where the "
        "trainer published them.",
    )
    bound: float | None = Field(
        default=None,
        gt=0,
        description="Largest difference of a logprob that passes; null for 1e-3 in float32 and 0.5 in half precision.",
    )


class GenerationConfig(ConfigModel):
    """Which engine generates tokens, and its settings."""

    engine: EngineName = Field(
        default="native",
        description="`native`: the trainer's own model definition, on the CPU or one GPU, nothing to install. `vllm`: "
        "vLLM in a separate process. `module:attribute`: an engine class of your own.",
    )
    weights: str = Field(
        default="policy", min_length=1, description="Name under which the trainer publishes weights in the store."
    )
    max_seq_len: int | None = Field(
        default=None, ge=2, description="Longest prompt and completion together; null for the model's, up to 4096."
    )
    max_batch: int = Field(default=64, ge=1, description="Completions in progress at once.")
    max_queue: int = Field(
        default=1024,
        ge=0,
        description="Completions that may wait in addition; beyond that, requests raise `Overloaded`.",
    )
    prefill_chunk_tokens: int | None = Field(
        default=None,
        ge=16,
        description="Prompt tokens that one step prefills, so that long prompts do not stall other requests; null for "
        "512 on the CPU and 8192 on a GPU.",
    )
    kv_cache_gb: float | None = Field(
        default=None,
        gt=0,
        description="Memory of the KV cache, in GiB. Null on the CPU: what max_batch completions of full length need, "
        "at most a quarter of the free memory. Null on a GPU: four times that, at most 80% of the free memory. Null "
        "on a GPU shared with a trainer: once that, at most gpu_memory_share of the GPU; with placement `turns` or "
        "`shared`, at most what the trainer leaves free between its steps.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        default="auto",
        description="Precision of the KV cache. `auto`: that of the model. `fp8` (e4m3, on GPUs of compute capability "
        "8.9 and newer): half the memory, and faster with long contexts, but logprobs are further from the trainer's.",
    )
    gpu_memory_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Fraction of a GPU's memory that an engine may use: with `native` for the KV cache, with `vllm` "
        "for everything (its gpu_memory_utilization). Null on a GPU of its own: 0.8. Null on the trainer's GPU, for "
        "all replicas together: 0.35 with placement `beside`, 0.5 with `turns` and vLLM, and no limit with `turns` or "
        "`shared` and the native engine, which frees its cache while the trainer works.",
    )
    prefix_sharing: bool = Field(
        default=True,
        description="Whether requests with a common prefix share its KV cache, as the turns of a conversation do. What "
        "finished requests leave is kept until its memory is needed, or the weights are updated.",
    )
    pinned_versions: int | None = Field(
        default=None,
        ge=1,
        description="How many pinned versions of the weights stay loaded beside the live ones; the least recently used "
        "makes room for another. On a GPU the KV cache leaves memory for them; on the CPU they are read in the "
        "store's shared memory. Null: as many as `episode.agents` names, and for `episode.league` 1 on a GPU "
        "and all members on the CPU; without both, 1 on a GPU, without memory set aside, and 4 on the CPU. Only with "
        "`engine: native`.",
    )
    precision: Annotated[Literal["float32", "bfloat16", "float16"] | None, SHORT_DTYPES] = Field(
        default=None,
        description="What the model computes in; null for float32 on the CPU and bfloat16 on a GPU, and for float16 in "
        "a run whose trainer computes in float16 (distributed.precision).",
    )
    cuda_graphs: bool = Field(default=True, description="Whether decode steps on a GPU are captured and replayed.")
    with_gpus: bool | None = Field(
        default=None, description="Whether to use a GPU; null to use one where there is one."
    )
    sampling: Sampling = Field(
        default_factory=Sampling, description="Sampling parameters for what a request does not set."
    )
    chat_template: str | None = Field(
        default=None, min_length=1, description="A file with a Jinja chat template; null for the tokenizer's own."
    )
    update: UpdateConfig = Field(default_factory=UpdateConfig, description="How weights are updated.")
    canary: CanaryConfig = Field(
        default_factory=CanaryConfig, description="The check that updated weights are the trainer's."
    )
    adapters: Mapping[str, PathText] = Field(
        default_factory=FrozenDict,
        description="LoRA adapters that requests can select by name (`sampling.adapter`, or `model` over HTTP): PEFT "
        "folders on the generator's host, loaded at the start and after a restart.",
    )
    max_adapters: int = Field(
        default=16, ge=1, description="Maximum number of adapters that are loaded, those of `adapters` included."
    )
    max_adapter_gb: float | None = Field(
        default=None,
        gt=0,
        description="Memory of all loaded adapters, in GiB; on a GPU the KV cache leaves it free. Null: no limit of "
        "its own, and the KV cache leaves what those of `adapters` need. Only with `engine: native`.",
    )
    speculation: SpeculationConfig | None = Field(
        default=None,
        description="Guesses of the next tokens, several of which one step checks; null for none. Completions have the "
        "same tokens and logprobs with and without. Only with `engine: native`.",
    )
    engine_args: Mapping[str, Any] = Field(
        default_factory=FrozenDict,
        description="Arguments of vLLM's engine by name, such as {gpu_memory_utilization: 0.8}. They override ours.",
    )

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        if BASE_ADAPTER in self.adapters or "" in self.adapters:
            rule = f"names that are not empty, and not `{BASE_ADAPTER}`: that stands for the weights without an adapter"
            raise broken_rule(rule, repair="choose another name", key="adapters")
        if len(self.adapters) > self.max_adapters:
            rule = f"at least the number of `adapters`, which is {len(self.adapters)}"
            raise broken_rule(rule, repair="raise it, or name fewer adapters", key="max_adapters")
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        try:
            bounds = (self.pinned_versions, self.max_adapter_gb)
            asks = bool(self.engine_args or self.adapters or self.speculation) or any(bounds) or ":" in self.engine
            declared = self.capabilities if asks else None
        except ConfigError as error:
            raise broken_rule(f"{error.message}: {error.rule}", repair=str(error.repair), key="engine") from error
        if declared is not None and self.engine_args and not declared.engine_args:
            rule = "needs an engine that takes arguments, such as `vllm`"
            raise broken_rule(rule, repair="set engine: vllm, or remove it", key="engine_args")
        if declared is not None and self.pinned_versions is not None and not declared.pinned_versions:
            rule = "needs an engine that serves several versions of the weights, such as `native`"
            raise broken_rule(rule, repair="set engine: native, or remove it", key="pinned_versions")
        if declared is not None and self.speculation is not None and not declared.speculation:
            rule = "needs an engine that checks drafts itself, such as `native`; vLLM takes engine_args"
            raise broken_rule(rule, repair="set engine: native, or engine_args.speculative_config", key="speculation")
        if declared is not None and self.adapters and not declared.adapters:
            rule = "needs an engine that serves adapters, such as `native`"
            raise broken_rule(rule, repair="set engine: native, or remove it", key="adapters")
        if declared is not None and self.max_adapter_gb is not None and declared.reserves_gpu_share:
            rule = "has no effect with an engine that reserves all of its memory when it starts, such as `vllm`"
            raise broken_rule(rule, repair="set engine: native, or remove it", key="max_adapter_gb")
        return self

    def precision_on(self, *, gpu: bool) -> Literal["float32", "bfloat16", "float16"]:
        """Return what the model computes in on a GPU, or on the CPU."""
        return self.precision or ("bfloat16" if gpu else "float32")

    @property
    def capabilities(self) -> EngineCapabilities:
        """What the engine's class declares that it can do."""
        found: EngineCapabilities = ENGINES.find(self.engine, path="generator.engine").capabilities
        return found


class GeneratorConfig(GenerationConfig):
    """Everything that a `Generator` is made from: the model, and the section `generator`."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="Which model.")
    adapter: AdapterConfig | None = Field(
        default=None, description="LoRA adapter whose versions a trainer publishes; null for versions of all weights."
    )

    @classmethod
    def of(
        cls, model: ModelConfig, section: GenerationConfig, *, adapter: AdapterConfig | None = None
    ) -> GeneratorConfig:
        """The model, the section of a configuration and the adapter that is trained, put together."""
        given = {name: getattr(section, name) for name in GenerationConfig.model_fields}
        return cls(model=model, adapter=adapter, **given)


class GeneratorServiceConfig(GenerationConfig):
    """Which engine generates tokens, its settings, and the number of generators."""

    num_replicas: int = Field(default=1, ge=1, description="Generators that share the requests.")
    tensor_parallel: int = Field(
        default=1, ge=1, description="GPUs (or processes) over which each generator is split. Only with `engine: vllm`."
    )
    num_threads: int | None = Field(default=None, ge=1, description="CPU threads of each replica; null for one.")


class AutoscaleConfig(ConfigModel):
    """When the controller starts and ends generators between steps."""

    min: int = Field(default=1, ge=1, description="Fewest generators.")
    max: int = Field(ge=1, description="Most generators.")
    grow_above: float = Field(
        default=0.3,
        gt=0,
        lt=1,
        description="One generator more if training waited for its batch for more than this part of a step's time.",
    )
    shrink_below: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="One generator less if it waited for less than this part, and generators were idle at times.",
    )
    patience: int = Field(
        default=3, ge=1, description="Steps in a row that must say the same, counted from the last change."
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max < self.min:
            raise broken_rule(f"at least min, which is {self.min}", repair="raise it, or lower min", key="max")
        if self.shrink_below >= self.grow_above:
            rule = f"below grow_above, which is {self.grow_above}: otherwise generators would come and go"
            raise broken_rule(rule, repair="lower it", key="shrink_below")
        return self


class PolicyGeneratorConfig(GeneratorServiceConfig):
    """Which engine generates tokens, its settings, and the number of generators, which may change during a run."""

    autoscale: AutoscaleConfig | None = Field(
        default=None, description="Rule that changes the number of generators between steps; null for none."
    )

    @model_validator(mode="after")
    def _check_autoscale(self) -> Self:
        rule = self.autoscale
        if rule is not None and not rule.min <= self.num_replicas <= rule.max:
            text = f"from {rule.min} to {rule.max}, as autoscale says"
            raise broken_rule(text, repair="change it, or the bounds of autoscale", key="num_replicas")
        return self


def check_fixed_weights(section: GeneratorServiceConfig, *, what: str) -> None:
    """Refuse keys of `generator` that are about updates, where weights never change."""
    for key in ("weights", "update", "canary"):
        if getattr(section, key) != type(section).model_fields[key].get_default(call_default_factory=True):
            rule = f"has no meaning here: the weights of {what} never change"
            raise broken_rule(rule, repair="remove it", key=f"generator.{key}")


class ServeConfig(ConfigModel):
    """The OpenAI-compatible endpoint."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 for a free one. It is printed.")
    api_key: str | None = Field(
        default=None,
        min_length=1,
        description="API key that requests must send; null for the environment variable FORGE_API_KEY, or none if "
        "that is unset. Required to listen on any address other than loopback.",
    )
    tls_cert: str | None = Field(
        default=None,
        min_length=1,
        description="PEM file with the server's certificate, and those between it and its CA; null for plain HTTP.",
    )
    tls_key: str | None = Field(default=None, min_length=1, description="PEM file with the certificate's private key.")
    insecure: bool = Field(
        default=False,
        description="Allow plain HTTP on an address other than loopback. Requests and the API key can then be read on "
        "the way.",
    )
    model_name: str | None = Field(
        default=None,
        min_length=1,
        description="Name under /v1/models and in answers; null for that of the model's folder or run.",
    )
    model_aliases: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="Further names under which requests may ask for the model."
    )
    record: str | None = Field(
        default=None,
        min_length=1,
        description="A .jsonl file to append every exchange to, with token ids, logprobs and weight versions; null "
        "for none.",
    )
    max_body_mb: float = Field(default=16.0, gt=0, description="Largest accepted request body.")
    max_requests: int | None = Field(
        default=None,
        ge=1,
        description="Requests that may be open, in progress or waiting; more get status 429. Null for as many as the "
        "generators' batches and queues hold.",
    )
    request_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="Longest time from a request's arrival to the end of its answer; null for no limit.",
    )
    drain_s: float = Field(
        default=30.0, ge=0, description="How long open requests may take to finish when the server is shut down."
    )
    access_log: str | None = Field(
        default=None,
        min_length=1,
        description="`stdout`, or a file to append a JSON line to for every request, without its text; null for none.",
    )
    admin_key: str | None = Field(
        default=None,
        min_length=1,
        description="Key for POST /admin/update; null for the environment variable FORGE_ADMIN_KEY. Without it, there "
        "is no such route.",
    )
    update_from: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of a model or run that weight updates are read from: of a run, the newest checkpoint. Null "
        "for the folder that is served.",
    )
    update_mode: UpdateMode = Field(
        default="drain",
        description="What a weight update does with completions in progress; see `generator.update.mode`. With `drain` "
        "and `abort`, every completion is sampled by one version of the weights.",
    )
    follow_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds between looks for newer weights in `update_from`, which are then served; null for updates "
        "on SIGHUP and POST /admin/update only.",
    )


class PolicyWorkersConfig(ConfigModel):
    """The processes of each worker. Their number and devices are in `generator`."""

    generator: ReplicatedWorkerConfig = Field(default_factory=ReplicatedWorkerConfig, description="The generators.")


class PolicyConfig(ForgeConfig):
    """What programs that only generate are configured with: `forge chat`, `forge serve`, apps/vllm."""

    old_keys: ClassVar[Mapping[str, str | None]] = {
        "num_replicas": "generator.num_replicas",
        "tensor_parallel": "generator.tensor_parallel",
    }

    generator: GeneratorServiceConfig = Field(default_factory=GeneratorServiceConfig, description="What makes tokens.")
    system_prompt: str | None = Field(default=None, description="System message of a conversation.")
    workers: PolicyWorkersConfig = Field(
        default_factory=PolicyWorkersConfig, description="The processes of each worker."
    )
    serve: ServeConfig = Field(default_factory=ServeConfig, description="The OpenAI-compatible endpoint.")
