"""How many pages the cache of a runner has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from forge.config import ModelConfig
from forge.errors import ConfigError
from forge.generator.native.cache_size import (
    CacheNeed,
    ColocatedGeneratorConfig,
    StepWork,
    adapter_bytes,
    pages_in_turns,
    pages_on_cpu,
    pages_on_gpu,
    resolved_draft,
    step_work,
)
from forge.generator.native.pages import PAGE
from forge.models.inference import page_bytes
from forge.models.sizes import num_parameters
from forge.runtime.machine import memory

if TYPE_CHECKING:
    from forge.generator.native.runner import ModelRunner

_GIB: Final = 1 << 30


def choose_num_pages(runner: ModelRunner) -> int:
    """Return how many pages fit, of those that are wanted. The runner has its weights, and no cache yet."""
    config = runner.config
    draft = resolved_draft(config)
    facts = [runner.facts] if draft is None else [runner.facts, draft.architecture]
    each = sum(page_bytes(model, item_bytes=runner.cache_dtype.itemsize) for model in facts)
    beside = sum(_draft_bytes(runner, model) for model in facts[1:])
    least = runner.max_pages + 1
    need = CacheNeed(each, least, least + runner.max_pages * config.max_batch)
    if config.kv_cache_gb is not None:
        num = int(_checked_gb(runner, config.kv_cache_gb) * _GIB) // each
    elif runner.on_gpu:
        num = _pages_on_gpu(runner, need, beside=beside)
    else:
        num = pages_on_cpu(need, free_bytes=max(0, memory()["available"] - beside))
    if num < least:
        raise ConfigError(
            "the cache cannot hold one sequence of full length",
            path="generator.kv_cache_gb",
            value=config.kv_cache_gb,
            rule=f"at least {least * each / _GIB:.3g} GiB for sequences of {runner.max_seq_len} tokens; "
            f"there is room for {num * PAGE} tokens",
            repair="raise generator.kv_cache_gb, or lower generator.max_seq_len",
        )
    return num


def _draft_bytes(runner: ModelRunner, draft: ModelConfig) -> int:
    """Return what a draft model takes besides its cache."""
    item = int(runner.dtype.itemsize)
    return num_parameters(draft) * item + step_work(draft, runner.config, item=item, on_gpu=runner.on_gpu).graphs


def _pages_on_gpu(runner: ModelRunner, need: CacheNeed, *, beside: int) -> int:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(runner.device)
    config, share = runner.config, runner.config.gpu_memory_share
    adapters = adapter_bytes(config, runner.facts, item=runner.dtype.itemsize)
    free = max(0, free - beside - _pinned_bytes(runner) - adapters)
    if not isinstance(config, ColocatedGeneratorConfig) or share is not None:
        return pages_on_gpu(need, free_bytes=free, total_bytes=total, share=share)
    each = max(0, free - config.expected_bytes) // config.num_colocated
    return pages_in_turns(need, free_bytes=each, work=_step_work(runner))


def _pinned_bytes(runner: ModelRunner) -> int:
    """Return the memory that the cache leaves to pinned versions."""
    weights = sum(each.numel() for each in runner.updated.values()) * int(runner.dtype.itemsize)
    return int((runner.config.pinned_versions or 0) * (weights + _step_work(runner).graphs))


def _step_work(runner: ModelRunner) -> StepWork:
    kept = None if runner.adapter is None else runner.adapter.base_dtype
    return step_work(runner.facts, runner.config, item=runner.dtype.itemsize, on_gpu=runner.on_gpu, base_dtype=kept)


def _checked_gb(runner: ModelRunner, asked: float) -> float:
    free = (torch.cuda.mem_get_info(runner.device)[0] if runner.on_gpu else memory()["available"]) / _GIB
    if asked > free:
        raise ConfigError(
            "the cache is larger than the memory that is free",
            path="generator.kv_cache_gb",
            value=asked,
            rule=f"at most {free:.3g} GiB now, on {runner.device}",
            repair="lower it, or leave it out for what fits",
        )
    return asked
