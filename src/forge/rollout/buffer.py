"""The buffer between rollouts and training. The rule of staleness lives here, and only here.

Batches are numbered from 0, and the weights that learn from batch b are version b. A group may be learned from in batch
b if the oldest weights that made a token of it are at least version b - k, where k is the staleness that is allowed.

Three rules together guarantee that, and waste nothing:

1. *Admission*. With `taken` batches given out and version v served, (k + 1 - (taken - v)) x batch_groups groups may be
   outstanding: being generated, being scored, or ready. With k = 0 that is one batch, begun when the new weights are
   served: synchronous training is the same code.
2. *Those that are due*: a batch holds, and waits for, every group that would be too old for the next one. By rule 1
   there are never more of them than a batch holds.
3. *The check*: a group that is too old all the same (a generator was behind) goes back to the queue, and is counted.

Groups are named by their number, which is their place in the order of prompts. Every number below `next_number` is
either settled (learned from, or given up for a reason: the ledger says which) or pending. `state` is what a checkpoint
keeps of it, so that after a kill every pending number is rolled out again and no settled one is.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from forge.config import RolloutConfig
from forge.errors import CheckpointError, RolloutError
from forge.types import Group

GivenUp = Literal["no_signal", "failed", "refused"]
"""Why a group is not learned from: equal rewards, a failed reward, a prompt that no generator can answer."""


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """What one step learns from.

    Attributes:
        index: the batch's number, which is the version of the weights that learn from it.
        groups: in the order of their numbers.
        given_up: numbers that were given up since the last batch, and why.
        num_stale: groups that had to go back to the queue since the last batch.
        unlearned_rewards: rewards of groups that were left out since the last batch, for lack of signal.
    """

    index: int
    groups: tuple[Group, ...]
    given_up: tuple[tuple[int, GivenUp], ...] = ()
    num_stale: int = 0
    unlearned_rewards: tuple[float, ...] = ()

    @property
    def rewards(self) -> tuple[float, ...]:
        """Of everything that was rolled out for this batch, learned from or not: how well the policy does."""
        return (*(reward for group in self.groups for reward in group.rewards), *self.unlearned_rewards)

    @property
    def staleness(self) -> tuple[int, ...]:
        """By how many versions each group is older than the weights that learn from it."""
        return tuple(self.index - group.version for group in self.groups)


@dataclass(slots=True)
class _Ready:
    started_at: int
    group: Group
    is_fruitless: bool = False


@dataclass(slots=True)
class BufferCounts:
    """What has happened since the start, for metrics and messages."""

    num_admitted: int = 0
    num_no_signal: int = 0
    num_failed: int = 0
    num_refused: int = 0
    num_stale: int = 0
    fruitless_in_a_row: int = 0


class ReplayBuffer:
    """Admits rollouts, collects finished groups, and gives out batches. All calls are made on one event loop.

    Example:
        >>> number = await buffer.admit()          # in the task that starts rollouts
        >>> buffer.put(group)                      # when one is finished
        >>> batch = await buffer.take()            # in the task that trains
        >>> buffer.settle()                        # when it has been learned from
        >>> buffer.serve(version)                  # when generators have the new weights

    Args:
        config: the section `rollout`.
        num_groups: how many groups there are in all; None for no end.
    """

    def __init__(self, config: RolloutConfig, *, num_groups: int | None = None) -> None:
        self._config, self._num_groups = config, num_groups
        self.next_number = 0
        self.num_taken = 0
        self.version = 0
        self.counts = BufferCounts()
        self._queue: list[int] = []
        self._in_flight: dict[int, int] = {}
        self._ready: dict[int, _Ready] = {}
        self._given_up: dict[int, GivenUp] = {}
        self._num_stale = 0
        self._unlearned_rewards: list[float] = []
        self._unsettled: TakenBatch | None = None
        self._news: asyncio.Future[None] | None = None

    # ---- Rollouts -----------------------------------------------------------------------------------------------

    async def admit(self) -> int | None:
        """Wait until a group may be begun, and return its number; None when there will be no more."""
        while not (self._is_over() and self._unsettled is None):
            if self._has_room() and (number := self._next()) is not None:
                self._in_flight[number] = self.version
                self.counts.num_admitted += 1
                return number
            await self._change()
        return None

    def put(self, group: Group) -> None:
        """Take a finished group. One without signal is dealt with as the configuration says; one that is too old tells
        nothing about the weights, and goes back to the queue."""
        started_at = self._in_flight.pop(group.number)
        if self.is_stale(group):
            self._queue_stale(group.number)
            return
        is_masked = self._config.mask_truncated and all(
            episode.completion.finish_reason == "length" for episode in group.episodes
        )
        is_fruitless = is_masked or has_no_signal(group)
        rule = "drop" if is_masked and self._config.no_signal == "keep" else self._config.no_signal
        if is_fruitless and rule == "replace":
            self._leave_out(group)
        else:
            self._ready[group.number] = _Ready(started_at, group, is_fruitless and rule == "drop")
        if is_fruitless:
            self.counts.num_no_signal += 1
            self._count_fruitless("no_signal")
        else:
            self.counts.fruitless_in_a_row = 0
        self._tell()

    def _leave_out(self, group: Group) -> None:
        self._given_up[group.number] = "no_signal"
        self._unlearned_rewards += group.rewards

    def is_stale(self, group: Group) -> bool:
        """Whether it is too old for the next batch, and so for all."""
        return group.version < self.num_taken - self._config.staleness

    def give_up(self, number: int, why: GivenUp) -> None:
        """Leave a group out for good."""
        del self._in_flight[number]
        self._given_up[number] = why
        if why == "failed":
            self.counts.num_failed += 1
        else:
            self.counts.num_refused += 1
        self._count_fruitless(why)
        self._tell()

    def put_back(self, number: int) -> None:
        """Return a group that is in flight to the queue, to be rolled out again."""
        del self._in_flight[number]
        heapq.heappush(self._queue, number)
        self._tell()

    def _has_room(self) -> bool:
        outstanding = len(self._in_flight) + len(self._ready)
        limit = (self._config.staleness + 1 - (self.num_taken - self.version)) * self._config.batch_groups
        most = self._config.max_in_flight
        return outstanding < limit and (most is None or len(self._in_flight) < most)

    def _next(self) -> int | None:
        if self._queue:
            return heapq.heappop(self._queue)
        if self._num_groups is not None and self.next_number >= self._num_groups:
            return None
        self.next_number += 1
        return self.next_number - 1

    def _count_fruitless(self, why: GivenUp) -> None:
        self.counts.fruitless_in_a_row += 1
        if self.counts.fruitless_in_a_row >= self._config.max_fruitless:
            raise self._fruitless(
                f"{self.counts.fruitless_in_a_row} groups in a row brought nothing to learn from, the last one: {why}",
                path="rollout.max_fruitless",
                rule=f"fewer than {self._config.max_fruitless} in a row",
            )

    def check_fruitful(self) -> None:
        """Raise if groups were rolled out, and none of the run's brought anything to learn from, before a resume or
        after it."""
        if self.counts.num_admitted and not self.num_taken:
            raise self._fruitless(
                "the prompts have come to their end, and none of their groups brought anything to learn from",
                path="prompts.sources",
                rule="at least one group whose rewards differ",
            )

    def _fruitless(self, message: str, *, path: str, rule: str) -> RolloutError:
        counts = self.counts
        return RolloutError(
            message,
            path=path,
            value=f"no signal {counts.num_no_signal}, failed rewards {counts.num_failed}, "
            f"refused prompts {counts.num_refused}, of {counts.num_admitted} groups",
            rule=rule,
            repair="look at the rollouts: if all rewards are 0 the task is too hard or the reward never matches; if "
            "all are full it is solved; a larger rollout.group_size or another temperature gives more variety",
        )

    # ---- Training -----------------------------------------------------------------------------------------------

    async def take(self) -> TakenBatch | None:
        """Wait for the next batch; None when every group has been dealt with.

        Settle the last batch first.
        """
        if self._unsettled is not None:
            raise RuntimeError("the last batch has not been settled")
        while True:
            self._return_stale()
            chosen = self._choose()
            if chosen is not None:
                batch = self._give_out(chosen)
                if batch.groups:
                    return batch
            elif self._is_over():
                self._tell()
                return None
            else:
                await self._change()

    def settle(self) -> None:
        """The batch that was taken has been learned from: its groups are done with."""
        self._unsettled = None
        self._tell()

    def serve(self, version: int) -> None:
        """Generators make tokens with this version from now on."""
        self.version = version
        self._tell()

    def _choose(self) -> list[_Ready] | None:
        """The groups of the next batch, or None if they are not all there yet."""
        oldest_next = self.num_taken + 1 - self._config.staleness
        if any(started_at < oldest_next for started_at in self._in_flight.values()):
            return None  # it is due: the batch waits for it
        ready = sorted(self._ready.values(), key=lambda each: (each.started_at, each.group.number))
        if len(ready) < self._config.batch_groups and (self._in_flight or self._has_more()):
            return None
        return ready[: self._config.batch_groups] or None

    def _has_more(self) -> bool:
        return bool(self._queue) or self._num_groups is None or self.next_number < self._num_groups

    def _give_out(self, chosen: list[_Ready]) -> TakenBatch:
        for each in chosen:
            del self._ready[each.group.number]
            if each.is_fruitless:
                self._leave_out(each.group)
        groups = sorted((each.group for each in chosen if not each.is_fruitless), key=lambda group: group.number)
        if not groups:  # nothing to learn from: no step, the numbers are settled with the next one
            self._tell()
            return TakenBatch(self.num_taken, ())
        given_up, self._given_up = tuple(sorted(self._given_up.items())), {}
        num_stale, self._num_stale = self._num_stale, 0
        unlearned, self._unlearned_rewards = tuple(self._unlearned_rewards), []
        self._unsettled = TakenBatch(self.num_taken, tuple(groups), given_up, num_stale, unlearned)
        self.num_taken += 1
        self._tell()
        return self._unsettled

    def _return_stale(self) -> None:
        for number in [number for number, each in self._ready.items() if self.is_stale(each.group)]:
            del self._ready[number]
            self._queue_stale(number)

    def _queue_stale(self, number: int) -> None:
        heapq.heappush(self._queue, number)
        self._num_stale += 1
        self.counts.num_stale += 1
        self._tell()

    def _is_over(self) -> bool:
        return not self._has_more() and not self._in_flight and not self._ready

    # ---- Waiting and checkpoints ----------------------------------------------------------------------------------

    async def _change(self) -> None:
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._news)

    def _tell(self) -> None:
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
        """Numbers that were begun or given up and are not settled."""
        taken = () if self._unsettled is None else tuple(group.number for group in self._unsettled.groups)
        aside = () if self._unsettled is None else tuple(number for number, _ in self._unsettled.given_up)
        return tuple(sorted((*self._queue, *self._in_flight, *self._ready, *self._given_up, *taken, *aside)))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps. A batch that was taken and not settled counts as not taken."""
        num_taken = self.num_taken - (self._unsettled is not None)
        return {"next_number": self.next_number, "pending": list(self.pending), "num_taken": num_taken}

    def load(self, state: dict[str, Any], *, settled: Iterable[int] = ()) -> None:
        """Go on from a checkpoint: every pending number is in the queue again. `settled` is checked against it."""
        pending = [int(number) for number in state["pending"]]
        both = sorted(set(pending) & set(settled))
        if both:
            raise CheckpointError(
                "the checkpoint and the ledger disagree: groups are pending in one and settled in the other",
                path="ledger.jsonl",
                value=both[:8],
                rule="a group is settled once",
                repair="resume from another checkpoint, or start anew",
            )
        self.next_number, self.num_taken = int(state["next_number"]), int(state["num_taken"])
        self.version = self.num_taken
        self._queue = sorted(pending)
        heapq.heapify(self._queue)


def has_no_signal(group: Group) -> bool:
    """Whether all rewards of a group are equal, so that its advantages say nothing."""
    rewards = group.rewards
    return max(rewards) - min(rewards) <= 1e-9 * max(1.0, abs(max(rewards)), abs(min(rewards)))
