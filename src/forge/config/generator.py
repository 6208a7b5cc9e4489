"""What a generator needs to know: which engine, how much memory, how tokens are drawn, how new weights come in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from forge.config.base import ConfigModel, FrozenDict, broken_rule
from forge.config.rules import SHORT_DTYPES
from forge.config.schema import ForgeConfig, ModelConfig

UpdateMode = Literal["drain", "keep", "recompute", "abort"]

LEAST_TEMPERATURE: Final = 1e-30
_LEAST_PENALTY: Final = 1e-30


class Sampling(ConfigModel):
    """How the tokens of a completion are drawn. Requests give one; the configuration's is used where they do not."""

    temperature: float = Field(
        default=1.0, ge=0, description="What logits are divided by; 0 takes the likeliest token."
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Draw among the likeliest tokens whose probabilities reach this sum."
    )
    top_k: int = Field(default=0, ge=0, description="Draw among so many of the likeliest tokens; 0 for all.")
    min_p: float = Field(
        default=0.0, ge=0, le=1, description="Leave out tokens less likely than this part of the likeliest one's."
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        description="Divides positive logits, and multiplies negative ones, of tokens in prompt or completion.",
    )
    presence_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="Taken from the logit of every token that the completion has already."
    )
    frequency_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="Taken from a token's logit once for each time the completion has it."
    )
    max_tokens: int | None = Field(
        default=None, ge=1, description="Longest completion; null for what the context has room for."
    )
    min_tokens: int = Field(default=0, ge=0, description="Tokens before which nothing ends a completion.")
    stop: tuple[str, ...] = Field(default=(), description="Strings that end a completion. The text ends before them.")
    stop_token_ids: tuple[int, ...] = Field(
        default=(), description="Tokens that end a completion, besides those of the model."
    )
    ignore_eos: bool = Field(default=False, description="Whether the model's own end tokens are ordinary ones.")
    include_stop: bool = Field(default=False, description="Whether the text keeps the string that ended it.")
    seed: int | None = Field(
        default=None,
        ge=0,
        le=2**63 - 1,
        description="The same seed draws the same tokens, whatever else is generated; null for another each time.",
    )
    n: int = Field(default=1, ge=1, description="Completions of one prompt. They share the work on the prompt.")
    structured: Mapping[str, Any] | None = Field(
        default=None,
        description="What the text must follow: one of {json_schema: …}, {regex: …}, {choice: […]}, {grammar: …}. "
        "Only with `engine: vllm`.",
    )
    adapter: str | None = Field(
        default=None, min_length=1, description="A LoRA adapter that was loaded before. Only with `engine: vllm`."
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            rule = f"is 0, or at least {LEAST_TEMPERATURE:g}: logits divided by less are no numbers"
            raise broken_rule(rule, repair="set 0, which takes the likeliest token", key="temperature")
        if not _LEAST_PENALTY <= self.repetition_penalty <= 1 / _LEAST_PENALTY:
            rule = f"is at least {_LEAST_PENALTY:g} and at most {1 / _LEAST_PENALTY:g}: float32 holds no more"
            raise broken_rule(rule, repair="set 1 for none; 1.1 is much already", key="repetition_penalty")
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
    """How new weights come in while completions are under way."""

    mode: UpdateMode = Field(
        default="keep",
        description="What happens to completions under way. `drain`: they end first, on the old weights. `keep`: they "
        "go on, and what they have read stays as the old weights read it. `recompute`: they go on, and it is read "
        "again with the new weights. `abort`: they end at once, as they are, to be continued later.",
    )
    max_attempts: int = Field(default=3, ge=1, description="How often an update that fails is tried in all.")
    retry_wait_s: float = Field(default=0.5, ge=0, description="The wait before the second attempt; it doubles.")


class CanaryConfig(ConfigModel):
    """The proof that generator and trainer compute with the same weights."""

    enabled: bool = Field(
        default=True,
        description="Whether, after an update, the logprobs of a few tokens are compared with the trainer's, where the "
        "trainer published them.",
    )
    bound: float | None = Field(
        default=None,
        gt=0,
        description="The largest difference of a logprob that is let pass; null for 1e-3 in float32 and 0.5 in half "
        "precision.",
    )


class GenerationConfig(ConfigModel):
    """Which engine makes tokens, and with what."""

    engine: Literal["native", "vllm"] = Field(
        default="native",
        description="`native`: the trainer's own model definition, on the CPU or one GPU, nothing to install. `vllm`: "
        "vLLM in a process of its own.",
    )
    weights: str = Field(
        default="policy", min_length=1, description="Name under which the trainer publishes weights in the store."
    )
    max_seq_len: int | None = Field(
        default=None, ge=2, description="Longest prompt and completion together; null for the model's, up to 4096."
    )
    max_batch: int = Field(default=64, ge=1, description="Completions that are under way at once.")
    max_queue: int = Field(
        default=1024, ge=0, description="Completions that may wait besides; beyond it requests raise `Overloaded`."
    )
    prefill_chunk_tokens: int | None = Field(
        default=None,
        ge=16,
        description="Tokens of prompts that one step reads, so that long prompts stall nobody; null for 512 on the CPU "
        "and 8192 on a GPU.",
    )
    kv_cache_gb: float | None = Field(
        default=None,
        gt=0,
        description="Memory for keys and values, in GiB. Null: on the CPU what max_batch completions of full length "
        "need, at most a quarter of the free memory; on a GPU four times that, at most 80% of what is free; on a GPU "
        "that a trainer uses too, once that, at most gpu_memory_share of it; with placement `turns` and `shared`, at "
        "most what the trainer leaves between its steps.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        default="auto",
        description="The precision of cached keys and values. `auto`: that of the model. `fp8` (e4m3, on GPUs of "
        "compute capability 8.9 and newer): half the memory, and faster with long contexts, but logprobs are further "
        "from the trainer's.",
    )
    gpu_memory_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="The part of a GPU's memory that an engine may take: with `native` the cache for keys and values, "
        "with `vllm` everything that it holds (its gpu_memory_utilization). Null where it has the GPU to itself: 0.8. "
        "Null on a trainer's GPU: 0.35 with placement `beside`, and 0.5 with `turns` and vLLM, for all "
        "replicas together; none with `turns` and `shared` and the embedded engine, whose cache is away while the "
        "trainer works.",
    )
    prefix_sharing: bool = Field(
        default=True, description="Whether requests that begin alike share what was computed for the beginning."
    )
    precision: Annotated[Literal["float32", "bfloat16"] | None, SHORT_DTYPES] = Field(
        default=None, description="What the model computes in; null for float32 on the CPU and bfloat16 on a GPU."
    )
    cuda_graphs: bool = Field(default=True, description="Whether decode steps on a GPU are captured and replayed.")
    with_gpus: bool | None = Field(default=None, description="Whether to use a GPU; null for where there is one.")
    sampling: Sampling = Field(default_factory=Sampling, description="How tokens are drawn where a request is silent.")
    chat_template: str | None = Field(
        default=None, min_length=1, description="A file with a Jinja chat template; null for the tokenizer's own."
    )
    update: UpdateConfig = Field(default_factory=UpdateConfig, description="How new weights come in.")
    canary: CanaryConfig = Field(default_factory=CanaryConfig, description="The proof that weights arrived.")
    engine_args: Mapping[str, Any] = Field(
        default_factory=FrozenDict,
        description="Arguments of vLLM's engine by name, such as {gpu_memory_utilization: 0.8}. They win over ours.",
    )

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.engine == "native" and self.engine_args:
            raise broken_rule("only for `engine: vllm`", repair="set engine: vllm, or remove it", key="engine_args")
        return self


class GeneratorConfig(GenerationConfig):
    """Everything that a `Generator` is made from: the model, and the section `generator`."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="Which model.")

    @classmethod
    def of(cls, model: ModelConfig, section: GenerationConfig) -> GeneratorConfig:
        """The model and the section of a configuration, put together."""
        return cls(model=model, **{name: getattr(section, name) for name in GenerationConfig.model_fields})


class GeneratorServiceConfig(GenerationConfig):
    """The section `generator`: which engine makes tokens, with what, and how many generators there are."""

    num_replicas: int = Field(default=1, ge=1, description="Generators that share the requests.")
    tensor_parallel: int = Field(
        default=1, ge=1, description="GPUs (or processes) over which each is split. Only with `engine: vllm`."
    )
    num_threads: int | None = Field(default=None, ge=1, description="CPU threads of each; null for one.")


class ServeConfig(ConfigModel):
    """The section `serve`: the OpenAI-compatible endpoint."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 for a free one. It is printed.")
    api_key: str | None = Field(
        default=None,
        min_length=1,
        description="Key that requests must bear; null for the environment variable FORGE_API_KEY, or none at all. "
        "Needed to listen on other addresses than loopback.",
    )
    model_name: str | None = Field(
        default=None, min_length=1, description="Name under /v1/models; null for the model's."
    )
    record: str | None = Field(
        default=None,
        min_length=1,
        description="A .jsonl file to which every exchange is added, with token ids, logprobs and versions; null for "
        "none.",
    )
    max_body_mb: float = Field(default=16.0, gt=0, description="Largest request that is read.")


class PolicyConfig(ForgeConfig):
    """What programs that only generate are configured with: `forge chat`, `forge serve`, apps/vllm."""

    old_keys: ClassVar[Mapping[str, str | None]] = {
        "num_replicas": "generator.num_replicas",
        "tensor_parallel": "generator.tensor_parallel",
    }

    generator: GeneratorServiceConfig = Field(default_factory=GeneratorServiceConfig, description="What makes tokens.")
    system_prompt: str | None = Field(default=None, description="System message of a conversation.")
    serve: ServeConfig = Field(default_factory=ServeConfig, description="The OpenAI-compatible endpoint.")
