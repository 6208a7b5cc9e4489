"""The protocol of generation engines, its records, and the limits that all engines share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, Protocol

from forge.config import GenerationConfig, ModelConfig, Sampling, UpdateMode
from forge.errors import ConfigError, ForgeError, Overloaded
from forge.observe.gauges import of_process
from forge.registry import ENGINES
from forge.types import Completion, Delta


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine class can do beyond the protocol, so that no caller has to know engines by name.

    Attributes:
        shared_weights: computes with the parameters of a trainer in the same process (`placement: shared`): it takes
            `shared=` and has `paused`, `release_cache` and `restore_cache`.
        tensor_parallel: splits a model over several processes: it takes `tensor_parallel=` and `devices=`.
        adapters: serves LoRA adapters that requests select by name: it has `load_adapter(name, path)`, which may
            return the digest of what it loaded, and `unload_adapter(name)`.
        live_adapter: with `GeneratorConfig.adapter` a version of the weights is one of the adapter.
        structured_output: follows `Sampling.structured`.
        engine_args: takes `generator.engine_args`.
        prompt_logprobs: knows the likeliest token at each place of a prompt: it has `score_prompts`.
        top_logprobs: gives the likeliest tokens at each place of a sequence: it has `score_top`.
        pinned_versions: serves pinned versions beside the live weights: it follows `Request.version` and has
            `unload_version`.
        scores_tempered: `score` takes other temperatures than 1.
        speculation: follows `generator.speculation`.
        reserves_gpu_share: takes `generator.gpu_memory_share` of the whole GPU when it starts. Other engines apply the
            share to their cache only, and can size it to what a trainer on the same GPU leaves free.
    """

    shared_weights: bool = False
    tensor_parallel: bool = False
    adapters: bool = False
    live_adapter: bool = False
    structured_output: bool = False
    engine_args: bool = False
    prompt_logprobs: bool = False
    top_logprobs: bool = False
    pinned_versions: bool = False
    scores_tempered: bool = False
    speculation: bool = False
    reserves_gpu_share: bool = False


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The logprobs of a sequence's L tokens, each given those before it, at temperature 1.

    Attributes:
        logprobs: of the tokens themselves; the first one's is 0.
        best_ids: the likeliest token at each place; the first is the sequence's own.
        best_logprobs: its logprob.
    """

    logprobs: tuple[float, ...]
    best_ids: tuple[int, ...]
    best_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TopScores:
    """The k likeliest tokens at each place of a sequence of L tokens, given those before it, at temperature 1.

    Attributes:
        ids: L tuples of k tokens, the likeliest first. The first place has none that could be known: k times 0.
        logprobs: their logprobs; k times 0 at the first place.
    """

    ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], *, k: int) -> TopScores:
        """Make it from the places after the first."""
        return cls(((0,) * k, *map(tuple, ids)), ((0.0,) * k, *map(tuple, logprobs)))


def engine_class(name: str) -> Any:
    """Return the engine class that `generator.engine` names: a built-in name, or `module:attribute`."""
    return ENGINES.find(name, path="generator.engine")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as tokens, and how to sample its completions. Both are already checked.

    `version` is the pinned version that samples them; None for the live weights.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    version: int | None = None


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The outcome of a weight update.

    Attributes:
        version: the version of the weights in use now.
        mode: what was done with completions in progress.
        seconds: how long the whole update took; stall_s: for how long it held up generation.
        num_attempts: how often it was tried.
        num_aborted: completions that it cut short.
        canary: the largest difference of a logprob from the trainer's; None where it was not compared.
        received_bytes: bytes that came from other hosts for it. Replicas on one host share what comes.
    """

    version: int
    mode: UpdateMode
    seconds: float
    stall_s: float
    num_attempts: int = 1
    num_aborted: int = 0
    canary: float | None = None
    received_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine does now, and what it has done since it started.

    Attributes:
        version: the version of the weights in use.
        num_running, num_waiting: completions in progress, and in the queue.
        num_done, num_aborted: completions that finished, and completions that were cut short.
        num_prompt_tokens, num_tokens: tokens of prompts, and sampled tokens.
        num_shared_tokens, num_prefill_tokens: tokens whose keys and values were found in the cache (or computed for
            another completion of the request), and tokens that were read instead; also those read again after a
            preemption or an update of the weights.
        num_preempted: how often a completion lost its memory to another and was recomputed.
        cache_used: the part of the cache that is in use, from 0 to 1.
        is_asleep: whether its memory was released with `sleep`.
        is_stopped: whether requests are refused, because updated weights were not proven to be the trainer's.
        more: what only one engine knows.
    """

    version: int
    num_running: int = 0
    num_waiting: int = 0
    num_done: int = 0
    num_aborted: int = 0
    num_prompt_tokens: int = 0
    num_shared_tokens: int = 0
    num_prefill_tokens: int = 0
    num_tokens: int = 0
    num_preempted: int = 0
    cache_used: float = 0.0
    is_asleep: bool = False
    is_stopped: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


class GenerationEngine(Protocol):
    """An engine on one event loop. Methods may be called concurrently.

    `Generator` creates it with `Engine(config, model=..., tokenizer=..., on_death=...)`, and with the arguments that
    its capabilities name.
    """

    capabilities: ClassVar[EngineCapabilities]

    @staticmethod
    def config_errors(config: GenerationConfig) -> Sequence[ConfigError]:
        """Return what keeps an engine with this configuration from starting, as far as it shows without starting it."""
        ...

    @property
    def max_seq_len(self) -> int:
        """The longest prompt and completion together."""
        ...

    @property
    def version(self) -> int:
        """The version of the weights in use."""
        ...

    async def start(self) -> None:
        """Load the model; afterwards requests are served. Slow work happens on other threads."""
        ...

    async def generate(self, request: Request) -> list[Completion]:
        """Return the n completions, in order. Cancelling the call cancels them. `Overloaded` when the queue is full."""
        ...

    def stream(self, request: Request) -> AsyncIterator[Delta]:
        """Yield the n completions as they grow. Closing the iterator cancels them."""
        ...

    async def update_weights(self, version: int | Literal["latest"], mode: UpdateMode) -> UpdateReport:
        """Load a version from the store, whole. If that raises, the old version keeps serving."""
        ...

    async def score(
        self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0, urgent: bool = False
    ) -> list[list[float]]:
        """Return the logprob of every token of each sequence given those before it; the first one's is 0.

        With `urgent`, before all other requests, where the engine can.
        """
        ...

    async def differing(self, version: int) -> Mapping[str, tuple[int, int]] | None:
        """Return the tensors that are not as published: by name, the published digest and that of the weights in use.

        None where the engine cannot tell.
        """
        ...

    async def sleep(self) -> None:
        """Release the device's memory. Requests wait until `wake`."""
        ...

    async def wake(self) -> None:
        """Restore the memory, with the newest weights that were served."""
        ...

    def stats(self) -> EngineStats:
        """Return what the engine does and has done."""
        ...

    async def close(self) -> None:
        """End everything that the engine started. Completions in progress finish as aborted."""
        ...


def engine_gauges(engine: GenerationEngine) -> dict[str, float]:
    """Return which version an engine serves, and how much it has to do, as gauges of this process."""
    found = engine.stats()
    open_now = {"running": found.num_running, "waiting": found.num_waiting, "cache": found.cache_used}
    return of_process({"version": found.version, **open_now})


# ---- Limits ----------------------------------------------------------------------------------------------------------


DEFAULT_CONTEXT: Final = 4096


def context_limit(config: GenerationConfig, model: ModelConfig) -> int:
    """Return the longest prompt and completion together, in tokens, for a model whose facts are complete."""
    supported = model.max_seq_len
    if config.max_seq_len is None:
        return min(supported or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if supported is not None and config.max_seq_len > supported:
        raise ConfigError(
            "the generator's context is longer than the model supports",
            path="generator.max_seq_len",
            value=config.max_seq_len,
            rule=f"at most {supported}, the model's max_seq_len",
            repair=f"set generator.max_seq_len={supported}, or correct model.max_seq_len",
        )
    return config.max_seq_len


def check_split(config: GenerationConfig, degree: int, *, path: str, error: type[ForgeError] = ConfigError) -> None:
    """Refuse to split a generator over several processes, where its engine runs in one."""
    if degree > 1 and not config.capabilities.tensor_parallel:
        raise error(
            f"the engine `{config.engine}` runs in one process",
            path=path,
            value=degree,
            rule=f"1 with `engine: {config.engine}`",
            repair="set engine: vllm, or more replicas instead (num_replicas)",
        )


def most_open(config: GenerationConfig) -> int:
    """Return how many completions one generator may have in progress or waiting."""
    return config.max_batch + config.max_queue


class OpenCompletions:
    """Counts the completions in progress or waiting. An engine has one, on its event loop."""

    def __init__(self, config: GenerationConfig) -> None:
        self._config = config
        self.num = 0

    @contextmanager
    def opened(self, num: int) -> Iterator[None]:
        """Count a request's completions while it is open. Raise `Overloaded` if there would be too many now, and
        `ConfigError` if the request alone asks for too many."""
        limit = most_open(self._config)
        if num > limit:
            raise ConfigError(
                "a request needs more completions than the generator can ever hold",
                path="sampling.n",
                value=num,
                rule=f"at most {limit}: max_batch {self._config.max_batch} and max_queue {self._config.max_queue}",
                repair="ask for fewer, or raise generator.max_queue",
            )
        if self.num + num > limit:
            raise Overloaded(
                "the generator's queue is full",
                path="generator.max_queue",
                value=f"{self.num} open, {num} more asked for",
                rule=f"at most {limit} open: max_batch {self._config.max_batch} and max_queue {self._config.max_queue}",
                repair="ask for fewer at once, raise generator.max_queue, or add replicas",
            )
        self.num += num
        try:
            yield
        finally:
            self.num -= num
