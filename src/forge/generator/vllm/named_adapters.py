"""Room for the adapters of `generator.adapters` in vLLM, which is made when its engine starts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from forge.config import GeneratorConfig
from forge.config.adapter import DEFAULT_RANK

_MAX_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of `max_lora_rank`, from 8 on, that vLLM 0.32.0 accepts."""
_DEFAULT_RANK: Final = 16


def with_named_adapters(config: GeneratorConfig) -> GeneratorConfig:
    """Return the configuration with vLLM's arguments for the adapters that it names. The user's own take precedence.

    One slot stays empty: on the CPU, vLLM 0.32.0 adds what is in the last one to requests without an adapter, where
    others of the batch have one.
    """
    if not config.adapters:
        return config
    num_used = len(config.adapters) + (config.adapter is not None)
    rank = max([*_ranks(config.adapters.values()), *_live_rank(config)], default=_DEFAULT_RANK)
    arguments: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": num_used + 1,
        "max_cpu_loras": max(config.max_adapters, num_used) + 1,
        "max_lora_rank": next((each for each in _MAX_RANKS if each >= rank), _MAX_RANKS[-1]),
    }
    return config.model_copy(update={"engine_args": {**arguments, **config.engine_args}})


def _live_rank(config: GeneratorConfig) -> list[int]:
    """Return the rank of the adapter that is trained, if there is one."""
    if config.adapter is None:
        return []
    if config.adapter.rank is not None:
        return [config.adapter.rank]
    return [DEFAULT_RANK] if config.adapter.path is None else _ranks([config.adapter.path])


def _ranks(folders: Iterable[str]) -> list[int]:
    """Return the ranks of adapters. One that cannot be read is reported when it is loaded."""
    found = []
    for folder in folders:
        try:
            rank = json.loads((Path(folder) / "adapter_config.json").read_text())["r"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if isinstance(rank, int):
            found.append(rank)
    return found
