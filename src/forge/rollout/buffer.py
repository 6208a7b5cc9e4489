"""The buffer between rollouts and training. The rule of staleness lives here, and only here.

Batches are numbered from 0, and the weights that learn from batch b are version b. A group may be learned from in batch
b if the oldest weights that made a token of it are at least version b - k, where k is the staleness that is allowed.

Three rules together guarantee that, and waste nothing:

1. *Admission*. With `taken` batches given out and version v served, (k + 1 - (taken - v)) x batch_groups groups may be
   outstanding: being generated, being scored, or ready. With k = 0 that is one batch, begun when the new weights are
   served: synchronous training is the same code.
2. *Those that are due*: a batch holds, and waits for, every group that would be too old for the next one. By rule 1
   there are never more of them than a batch holds.
3. *The check*: a group that is too old all the same (a generator was behind) is requeued, and counted.

`change` sets another staleness or batch size while a run runs. After that there may be more groups than rule 1 admits:
no more begin until there are fewer. Batches hold the oldest; what a smaller bound makes too old is requeued by rule 3.

Groups are named by their number, which is their place in the order of prompts. Every number below `next_number` is
either committed (learned from, or dropped for a reason: the ledger says which) or pending. `state` is what a checkpoint
keeps of it, so that after a kill every pending number is rolled out again and no committed one is.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from forge.config import RolloutConfig
from forge.config.algorithm import AlgorithmConfig
from forge.errors import CheckpointError
from forge.observe.gauges import add_gauges
from forge.rollout.agent_credit import AgentCredit
from forge.rollout.credit import AdvantageFunction
from forge.rollout.signal import DropReason, NoSignalGroup, NoSignalTally, Reason, SignalTest
from forge.rollout.taken_batch import Scored, TakenBatch
from forge.types import Group

_log = logging.getLogger("forge.rollout")

REPORT_EVERY: Final = 50
"""After how many groups in a row without anything to learn from the log says so, and why."""


@dataclass(slots=True)
class _Ready:
    started_at: int
    group: Group
    lacks_signal: bool = False
    is_dropped: bool = False


@dataclass(slots=True)
class BufferCounts:
    """What has happened since the start, for metrics and messages."""

    num_admitted: int = 0
    num_no_signal: int = 0
    num_stale: int = 0


class ReplayBuffer:
    """Admits rollouts, collects finished groups, and gives out batches. All calls are made on one event loop.

    Example:
        >>> number = await buffer.admit()          # in the task that starts rollouts
        >>> buffer.put(group)                      # when one is finished
        >>> batch = await buffer.take()            # in the task that trains
        >>> buffer.commit()                        # when it has been learned from
        >>> buffer.serve(version)                  # when generators have the new weights

    Args:
        config: the section `rollout`.
        num_groups: how many groups there are in all; None for no end.
        algorithm: how rewards become advantages, which says what a group without signal is.
        advantage: computes advantages; None for what the algorithm names.
        agents: how episodes with several agents are credited.
        on_no_signal: gets every group that teaches nothing, and returns the file that it was written to, if it was.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        num_groups: int | None = None,
        algorithm: AlgorithmConfig | None = None,
        advantage: AdvantageFunction | None = None,
        agents: AgentCredit | None = None,
        on_no_signal: Callable[[NoSignalGroup], Path | None] = lambda no_signal: None,
    ) -> None:
        self._config, self._num_groups, self._on_no_signal = config, num_groups, on_no_signal
        self._signal = SignalTest(
            algorithm or AlgorithmConfig(),
            mask_truncated=config.mask_truncated,
            before_shaping=config.no_signal == "replace" and config.signal_reward is None,
            reward=config.signal_reward,
            advantage=advantage,
            agents=agents,
        )
        self._max_in_flight = config.max_in_flight
        self.tally = NoSignalTally()
        self.next_number = 0
        self.num_taken = 0
        self.version = 0
        self.counts = BufferCounts()
        self._queue: list[int] = []
        self._in_flight: dict[int, int] = {}
        self._ready: dict[int, _Ready] = {}
        self._drops: dict[int, DropReason] = {}
        self._num_stale = 0
        self._tested_at = 0
        self._reasons: Counter[Reason] = Counter()
        self._dropped: list[Scored] = []
        self._uncommitted: TakenBatch | None = None
        self._news: asyncio.Future[None] | None = None
        add_gauges(self, ReplayBuffer._gauges)

    def _gauges(self) -> dict[str, float]:
        return {
            "buffer/ready": self.num_ready,
            "buffer/in_flight": len(self._in_flight),
            "buffer/requeued": len(self._queue),
            "version/served": self.version,
        }

    # ---- Rollouts -----------------------------------------------------------------------------------------------

    async def admit(self) -> int | None:
        """Wait until a group may be begun, and return its number; None when there will be no more."""
        while not (self._is_over() and self._uncommitted is None):
            if self._has_room() and (number := self._next()) is not None:
                self._in_flight[number] = self.version
                self.counts.num_admitted += 1
                return number
            await self._change()
        return None

    def put(self, group: Group) -> None:
        """Take a finished group. One without signal is dealt with as the configuration says; one that is too old
        is requeued."""
        started_at = self._in_flight.pop(group.number)
        if self.is_stale(group):
            self._queue_stale(group.number)
            return
        counts, differs = self._signal.counts(group), self._signal.differs(group)
        is_open = counts and differs and self._signal.is_of_batch  # its batch will tell
        lacks_signal = not is_open and not (differs and self._signal.passes([group]))
        is_dropped = lacks_signal and (self._config.no_signal != "keep" or not counts)
        if is_dropped and self._config.no_signal == "replace":
            self._drop_no_signal(group)
        else:
            self._ready[group.number] = _Ready(started_at, group, lacks_signal, is_dropped)
        if lacks_signal:
            self._reasons[self._signal.reason(group)] += 1
            self._count_no_signal(group, is_kept=not is_dropped)
        elif not is_open:
            self.tally.restart()
        self._notify()

    def _drop_no_signal(self, group: Group) -> None:
        self._drops[group.number] = self._signal.outcome(group)
        self._dropped += [Scored.of(episode) for episode in group.episodes]

    def is_stale(self, group: Group) -> bool:
        """Whether it is too old for the next batch, and so for all. Without a token, nothing of it is old."""
        return group.num_tokens > 0 and group.version < self.oldest_version

    @property
    def oldest_version(self) -> int:
        """The oldest weights whose tokens the next batch may hold."""
        return self.num_taken - self._config.staleness

    def drop(self, number: int, why: Literal["failed", "refused"], *, group: Group | None = None) -> None:
        """Drop a group; `group` is what was sampled of it."""
        del self._in_flight[number]
        self._drops[number] = why
        self._reasons[why] += 1
        self._count_no_signal_group(NoSignalGroup(number, why, why, group))
        self._notify()

    def requeue(self, number: int) -> None:
        """Return a group that is in flight to the queue, to be rolled out again."""
        del self._in_flight[number]
        heapq.heappush(self._queue, number)
        self._notify()

    @property
    def batch_groups(self) -> int:
        """How many groups a batch has."""
        return self._config.batch_groups

    @property
    def staleness(self) -> int:
        """By how many versions a group may be older than the weights that learn from it."""
        return self._config.staleness

    def change(self, *, staleness: int, batch_groups: int) -> None:
        """Set the bound and the size of the batches that are taken from now on, between two of them.

        Groups that are too old for the new bound are requeued, now or when they are finished.
        """
        self._config = self._config.model_copy(update={"staleness": staleness, "batch_groups": batch_groups})
        self._requeue_stale()
        self._notify()

    def limit_in_flight(self, most: int | None) -> None:
        """Let at most so many groups be in flight from now on; None for as many as the staleness allows."""
        self._max_in_flight = most
        self._notify()

    def _has_room(self) -> bool:
        outstanding = len(self._in_flight) + len(self._ready)
        limit = (self._config.staleness + 1 - (self.num_taken - self.version)) * self._config.batch_groups
        most = self._max_in_flight
        return outstanding < limit and (most is None or len(self._in_flight) < most)

    def _next(self) -> int | None:
        if self._queue:
            return heapq.heappop(self._queue)
        if self._num_groups is not None and self.next_number >= self._num_groups:
            return None
        self.next_number += 1
        return self.next_number - 1

    def _count_no_signal(self, group: Group, *, is_kept: bool) -> None:
        self.counts.num_no_signal += 1
        reason = self._signal.reason(group)
        outcome = self._signal.outcome(group)
        self._count_no_signal_group(NoSignalGroup(group.number, outcome, reason, group, is_kept=is_kept))

    def _count_no_signal_group(self, no_signal: NoSignalGroup) -> None:
        self.tally.add(no_signal, recorded_in=self._on_no_signal(no_signal))
        count, most = self.tally.num_groups, self._config.max_no_signal_groups
        if count >= most:
            raise self.tally.error(
                f"{count} groups in a row brought nothing to learn from",
                path="rollout.max_no_signal_groups",
                rule=f"fewer than {most} in a row",
            )
        if count % REPORT_EVERY == 0:
            _log.warning(
                "%d groups in a row brought nothing to learn from; the run ends at %d: %s",
                *(count, most, self.tally.summary()),
            )

    def check_any_signal(self) -> None:
        """Raise if groups were rolled out, and none of the run's brought anything to learn from, before a resume or
        after it."""
        if self.counts.num_admitted and not self.num_taken:
            raise self.tally.error(
                "the prompts are exhausted, and none of their groups had a signal",
                path="prompts.sources",
                rule="at least one group with signal",
            )

    # ---- Training -----------------------------------------------------------------------------------------------

    async def take(self) -> TakenBatch | None:
        """Wait for the next batch; None when every group has been dealt with.

        Commit the last batch first.
        """
        if self._uncommitted is not None:
            raise RuntimeError("the last batch has not been committed")
        while True:
            self._return_stale()
            chosen = self._choose()
            if chosen is not None:
                batch = self._give_out(chosen)
                if batch.groups:
                    return batch
            elif self._is_over():
                self._notify()
                return None
            else:
                await self._change()

    def commit(self) -> None:
        """Mark the batch that was taken as learned from."""
        self._uncommitted = None
        self._notify()

    def serve(self, version: int) -> None:
        """Generators make tokens with this version from now on."""
        self.version = version
        self._notify()

    def _choose(self) -> list[_Ready] | None:
        """The groups of the next batch, or None if they are not all there yet."""
        if len(self._ready) < self._config.batch_groups and (self._in_flight or self._has_more()):
            return None
        oldest = self.oldest_version
        if any(started_at == oldest for started_at in self._in_flight.values()):
            return None  # it is due: the batch waits for it
        ready = sorted(self._ready.values(), key=lambda each: (each.started_at, each.group.number))
        return ready[: self._config.batch_groups] or None

    def _has_more(self) -> bool:
        return bool(self._queue) or self._num_groups is None or self.next_number < self._num_groups

    def _give_out(self, chosen: list[_Ready]) -> TakenBatch:
        found_out = self._test_batch(chosen)
        for each in chosen:
            del self._ready[each.group.number]
            if each.is_dropped:
                self._drop_no_signal(each.group)
        taken = self._made_of([each for each in chosen if not each.is_dropped])
        self._notify()
        for each in found_out:
            self._count_no_signal(each.group, is_kept=not each.is_dropped)
        return taken

    def _test_batch(self, chosen: list[_Ready]) -> list[_Ready]:
        """The groups of which only now, all together, it is known that they lack signal."""
        together = [each for each in chosen if not each.is_dropped] if self._signal.is_of_batch else []
        if not together:
            return []
        if self._signal.passes([each.group for each in together]):
            self.tally.restart()
            return []
        for each in together:
            each.lacks_signal, each.is_dropped = True, self._config.no_signal != "keep"
            self._reasons[self._signal.reason(each.group)] += 1
        return together

    def _made_of(self, kept: list[_Ready]) -> TakenBatch:
        if not kept:  # nothing to learn from: no step, the numbers are committed with the next one
            return TakenBatch(self.num_taken, ())
        drops, self._drops = tuple(sorted(self._drops.items())), {}
        num_stale, self._num_stale = self._num_stale, 0
        dropped, self._dropped = tuple(self._dropped), []
        reasons, self._reasons = self._reasons, Counter()
        self._uncommitted = TakenBatch(
            self.num_taken,
            tuple(sorted((each.group for each in kept), key=lambda group: group.number)),
            drops=drops,
            num_stale=num_stale,
            num_no_signal=sum(why == "no_signal" for _, why in drops) + sum(each.lacks_signal for each in kept),
            dropped=dropped,
            reasons=reasons,
        )
        self.num_taken += 1
        return self._uncommitted

    def _return_stale(self) -> None:
        """Requeue the groups that the last batch made too old. Those that came since were tested by `put`."""
        if self._tested_at != self.num_taken:
            self._tested_at = self.num_taken
            self._requeue_stale()

    def _requeue_stale(self) -> None:
        for number in [number for number, each in self._ready.items() if self.is_stale(each.group)]:
            del self._ready[number]
            self._queue_stale(number)

    def _queue_stale(self, number: int) -> None:
        heapq.heappush(self._queue, number)
        self._num_stale += 1
        self.counts.num_stale += 1
        self._notify()

    def _is_over(self) -> bool:
        return not self._has_more() and not self._in_flight and not self._ready

    # ---- Waiting and checkpoints ----------------------------------------------------------------------------------

    async def _change(self) -> None:
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._news)

    def _notify(self) -> None:
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def in_flight(self) -> dict[int, int]:
        """The groups that are being rolled out, each with the version that was served when it was begun."""
        return dict(self._in_flight)

    @property
    def pending(self) -> tuple[int, ...]:
        """Numbers that were started or dropped and are not committed."""
        taken = () if self._uncommitted is None else tuple(group.number for group in self._uncommitted.groups)
        aside = () if self._uncommitted is None else tuple(number for number, _ in self._uncommitted.drops)
        return tuple(sorted((*self._queue, *self._in_flight, *self._ready, *self._drops, *taken, *aside)))

    @property
    def uncommitted_drops(self) -> tuple[tuple[int, DropReason], ...]:
        """The groups among those pending that were found to teach nothing, and why: those of no step yet."""
        found = dict(self._drops) | dict(() if self._uncommitted is None else self._uncommitted.drops)
        ready = {number: each.group for number, each in self._ready.items() if each.is_dropped}
        found |= {number: self._signal.outcome(group) for number, group in ready.items()}
        return tuple(sorted(found.items()))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps. A batch that was taken and not committed counts as not taken."""
        num_taken = self.num_taken - (self._uncommitted is not None)
        return {"next_number": self.next_number, "pending": list(self.pending), "num_taken": num_taken}

    def load(self, state: dict[str, Any], *, committed: Iterable[int] = ()) -> None:
        """Resume from a checkpoint: every pending number is in the queue again. `committed` is checked against it."""
        pending = [int(number) for number in state["pending"]]
        both = sorted(set(pending) & set(committed))
        if both:
            raise CheckpointError(
                "the checkpoint and the ledger disagree: groups are pending in one and committed in the other",
                path="ledger.jsonl",
                value=both[:8],
                rule="a group is committed once",
                repair="resume from another checkpoint, or start a new run",
            )
        self.next_number, self.num_taken = int(state["next_number"]), int(state["num_taken"])
        self.version = self.num_taken
        self._queue = sorted(pending)
        heapq.heapify(self._queue)
