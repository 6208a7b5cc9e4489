"""How long a sequence may be, and how many completions may be open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from forge.config import GenerationConfig, ModelConfig
from forge.errors import ConfigError, ForgeError, Overloaded

MOST_UNLESS_ASKED: Final = 4096


def context_limit(config: GenerationConfig, model: ModelConfig) -> int:
    """The longest prompt and completion together, in tokens, for a model whose facts are complete."""
    supported = model.max_seq_len
    if config.max_seq_len is None:
        return min(supported or MOST_UNLESS_ASKED, MOST_UNLESS_ASKED)
    if supported is not None and config.max_seq_len > supported:
        raise ConfigError(
            "the generator's context is longer than what the model was made for",
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
    """Return how many completions one generator may have under way or waiting."""
    return config.max_batch + config.max_queue


class OpenCompletions:
    """The completions that are under way or wait. An engine has one, on its event loop."""

    def __init__(self, config: GenerationConfig) -> None:
        self._config = config
        self.num = 0

    @contextmanager
    def opened(self, num: int) -> Iterator[None]:
        """Count a request's completions while it is open; `Overloaded` where there would be too many at the moment,
        `ConfigError` where there are too many at any time."""
        limit = most_open(self._config)
        if num > limit:
            raise ConfigError(
                "a request asks for more completions than the generator can ever have open",
                path="sampling.n",
                value=num,
                rule=f"at most {limit}: max_batch {self._config.max_batch} and max_queue {self._config.max_queue}",
                repair="ask for fewer, or raise generator.max_queue",
            )
        if self.num + num > limit:
            raise Overloaded(
                "the generator has as many completions waiting as it may",
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
