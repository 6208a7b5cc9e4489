"""What the engine has done, as vLLM reports it with every step."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields
from typing import Any


@dataclass(slots=True)
class Counts:
    """Sums since the engine started, and the last step's state."""

    num_running: int = 0
    cache_used: float = 0.0
    num_done: int = 0
    num_aborted: int = 0
    num_prompt_tokens: int = 0
    num_shared_tokens: int = 0
    num_tokens: int = 0
    num_preempted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def reset(self) -> None:
        """Begin again from nothing."""
        for field in fields(self):
            setattr(self, field.name, field.default)

    def add(self, scheduler: Any, iteration: Any) -> None:
        """Take in what vLLM says of one step; either may be missing."""
        if scheduler is not None:
            self.num_running = int(scheduler.num_running_reqs)
            self.cache_used = float(scheduler.kv_cache_usage)
            drafts = scheduler.spec_decoding_stats
            if drafts is not None:
                self.num_drafted += int(drafts.num_draft_tokens)
                self.num_accepted += int(drafts.num_accepted_tokens)
        if iteration is not None:
            self.num_tokens += int(iteration.num_generation_tokens)
            self.num_prompt_tokens += int(iteration.prompt_token_stats.total)
            self.num_shared_tokens += int(iteration.prompt_token_stats.cached_tokens)
            self.num_preempted += int(iteration.num_preempted_reqs)
            for finished in iteration.finished_requests:
                if str(finished.finish_reason) == "abort":
                    self.num_aborted += 1
                else:
                    self.num_done += 1


def counter(counts: Counts, stepped: asyncio.Event) -> Any:
    """What vLLM makes a logger of statistics from: one that adds to `counts` and sets `stepped`, after every step whose
    outputs have been handed out."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counting(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            counts.add(scheduler_stats, iteration_stats)
            stepped.set()

        def log_engine_initialized(self) -> None: ...

    return Counting
