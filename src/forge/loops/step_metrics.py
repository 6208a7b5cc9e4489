"""The metrics of a step: what was rolled out, what was learned, and where the time went."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from forge.generator.engine import UpdateReport
from forge.observe.clock import monotonic_s
from forge.observe.sink import Value
from forge.rollout.buffer import ReplayBuffer
from forge.rollout.distillation import divergence_metrics
from forge.rollout.taken_batch import TakenBatch
from forge.types import Episode, StepResult

if TYPE_CHECKING:
    from forge.loops.rollouts import RolloutSource

PARTS = ("waiting", "generating", "training", "syncing", "other")


class StepClock:
    """Where a step's time goes. Parts do not overlap; the rest is `other`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start the clock of a step."""
        self._began = time.perf_counter()
        self._parts = dict.fromkeys(PARTS, 0.0)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block's time for a part."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._parts[name] += time.perf_counter() - began

    def move(self, source: str, target: str, seconds: float) -> None:
        """Move seconds from one part to another; at most all of it."""
        seconds = min(seconds, self._parts[source])
        self._parts[source] -= seconds
        self._parts[target] += seconds

    def values(self) -> dict[str, float]:
        """Return seconds by part and in total."""
        total = time.perf_counter() - self._began
        claimed = sum(seconds for name, seconds in self._parts.items() if name != "other")
        parts = {**self._parts, "other": max(0.0, total - claimed)}
        return {f"time/{name}": seconds for name, seconds in parts.items()} | {"time/step": total}


class StepMetrics:
    """Collects the metrics of steps."""

    def __init__(
        self, source: RolloutSource, buffer: ReplayBuffer, *, clock: Callable[[], float] = monotonic_s
    ) -> None:
        self._source, self._buffer, self._clock = source, buffer, clock
        self._last_at = clock()
        self._num_failed = 0
        self._num_samples = self._num_tokens = 0
        self._sync: dict[str, float] = {}

    def begin(self) -> None:
        """Start counting the throughput of the first step."""
        self._last_at = self._clock()

    def count_failures(self, failed: Sequence[Episode]) -> None:
        """Count completions of which a reward failed."""
        self._num_failed += len(failed)

    def note_sync(self, reports: Sequence[UpdateReport]) -> None:
        """Note what the generators report about their new weights."""
        if reports:
            canaries = [report.canary for report in reports if report.canary is not None]
            self._sync = {
                "sync/seconds": max(report.seconds for report in reports),
                "sync/stall_s": max(report.stall_s for report in reports),
                "sync/received_mib": sum(report.received_bytes for report in reports) / 2**20,
                **({"sync/canary": max(canaries)} if canaries else {}),
            }

    def of_step(self, taken: TakenBatch, result: StepResult, *, clock: StepClock) -> dict[str, Value]:
        """Return all metrics of one step."""
        times = clock.values()
        values: dict[str, Value] = {**_of_rollouts(taken), **_of_training(result), **times, **self._sync}
        values["rollout/num_failed"], self._num_failed = self._num_failed, 0
        num_samples, num_tokens = self._source.num_samples, self._source.num_tokens
        now = self._clock()
        seconds = max(now - self._last_at, 1e-9)  # rollouts continue between two steps
        values["rollout/samples_per_s"] = (num_samples - self._num_samples) / seconds
        values["rollout/tokens_per_s"] = (num_tokens - self._num_tokens) / seconds
        self._num_samples, self._num_tokens, self._last_at = num_samples, num_tokens, now
        values["rollout/num_ready"] = self._buffer.num_ready
        values |= self._source.take_metrics()
        if self._source.curriculum is not None:
            values |= self._source.curriculum.metrics()
        return values


def _of_rollouts(taken: TakenBatch) -> dict[str, Value]:
    """Return metrics of rollouts: of all completions that were scored, and of the groups that are trained on."""
    scored, staleness = taken.scored, taken.staleness
    rewards, lengths = taken.rewards, [each.num_tokens for each in scored]
    values: dict[str, Value] = {
        "rollout/reward_mean": math.fsum(rewards) / len(rewards),
        "rollout/reward_std": statistics.pstdev(rewards),
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/length_max": max(lengths),
        "rollout/truncated": sum(each.is_truncated for each in scored) / len(scored),
        "rollout/num_groups": len(taken.groups),
        "rollout/num_no_signal": taken.num_no_signal,
        "rollout/num_empty": taken.num_empty,
        "rollout/num_given_up": len(taken.drops),
        "rollout/num_stale": taken.num_stale,
        "rollout/staleness_mean": sum(staleness) / len(staleness),
        "rollout/staleness_max": max(staleness),
        "rollout/epoch": max(group.epoch for group in taken.groups),
    }
    values |= {f"rollout/no_signal/{reason}": count for reason, count in sorted(taken.reasons.items())}
    values |= _of_episodes([episode for group in taken.groups for episode in group.episodes])
    values |= divergence_metrics(taken.groups)
    for name in sorted({name for each in scored for name in each.parts}):
        parts = [each.parts.get(name, 0.0) for each in scored]
        values[f"reward/{name}"] = math.fsum(parts) / len(parts)
    return values


def _of_episodes(episodes: Sequence[Episode]) -> dict[str, Value]:
    """Return the means of what episodes of a program used, and how they ended; nothing for prompts and rewards."""
    made = [episode for episode in episodes if episode.stats]
    if not made:
        return {}
    names = sorted({name for episode in made for name in episode.stats})
    values: dict[str, Value] = {
        f"episode/{name}": math.fsum(episode.stats.get(name, 0.0) for episode in made) / len(made) for name in names
    }
    for outcome in sorted({episode.outcome for episode in made}):
        values[f"episode/outcome/{outcome}"] = sum(episode.outcome == outcome for episode in made) / len(made)
    for agent in made[0].agents:
        values |= {f"episode/agents/{agent}/{name}": value for name, value in _of_agent(made, agent).items()}
    return values


def _of_agent(episodes: Sequence[Episode], agent: str) -> dict[str, Value]:
    """Return the means of one agent's turns and tokens, and its reward where it has one."""
    turns = [turn for episode in episodes for turn in episode.turns if turn.agent == agent]
    scores = [result.score.reward for episode in episodes if (result := episode.agents[agent]).score is not None]
    values: dict[str, Value] = {
        "num_turns": len(turns) / len(episodes),
        "num_sampled": sum(map(len, turns)) / len(episodes),
        "truncated": sum(turn.finish_reason == "length" for turn in turns) / max(1, len(turns)),
    }
    return values | ({"reward": math.fsum(scores) / len(scores)} if scores else {})


def _of_training(result: StepResult) -> dict[str, Value]:
    values: dict[str, Value] = {
        "train/loss": result.loss,
        "train/grad_norm": result.grad_norm,
        "train/learning_rate": result.learning_rate,
        "train/num_tokens": result.num_tokens,
        "train/num_loss_tokens": result.num_loss_tokens,
        "train/seconds": result.seconds,
        "train/tokens_per_s": result.num_tokens / max(result.seconds, 1e-9),
    }
    if result.skipped:
        values["train/skipped"] = 1
    return values | {f"train/{name}": value for name, value in result.metrics.items()}
