"""How long a sequence may be."""

from __future__ import annotations

from typing import Final

from forge.config import GenerationConfig, ModelConfig
from forge.errors import ConfigError

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
