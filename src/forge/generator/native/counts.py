"""What the native engine has done since it started, for `EngineStats`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.generator.engine import EngineStats

if TYPE_CHECKING:
    from forge.generator.native.schedule import Scheduler


@dataclass(slots=True)
class Counts:
    """Counts since the start."""

    num_done: int = 0
    num_aborted: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_ahead: int = 0
    num_score_tokens: int = 0

    def stats(self, scheduler: Scheduler, version: int, *, is_asleep: bool, num_open: int, device: str) -> EngineStats:
        """Return these counts and those of the scheduler. Thread-safe, as `Batching.stats` says."""
        running, pool = len(scheduler.running), scheduler.pool
        return EngineStats(
            version=version,
            num_running=running,
            num_waiting=max(0, num_open - running),
            num_done=self.num_done,
            num_aborted=self.num_aborted,
            num_prompt_tokens=self.num_prompt_tokens,
            num_shared_tokens=scheduler.num_shared_tokens,
            num_prefill_tokens=scheduler.num_prefill_tokens,
            num_tokens=self.num_tokens,
            num_preempted=scheduler.num_preempted,
            cache_used=pool.num_held / pool.num_pages,
            is_asleep=is_asleep,
            more={
                "num_steps": self.num_steps,
                "num_ahead": self.num_ahead,
                "num_score_tokens": self.num_score_tokens,
                "num_pages": pool.num_pages,
                "num_retained_pages": pool.num_retained,
                "device": device,
            },
        )
