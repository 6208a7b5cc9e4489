"""The scheduler: what the next step computes, and which sequence is preempted when memory is short."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forge.generator.native.pages import PAGE, OutOfPages, PagePool, Prefix
from forge.generator.native.sequences import SequenceState

if TYPE_CHECKING:
    from forge.generator.native.pinned import PinnedWeights


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens [start, end) of a sequence, to be computed in the next step, with a draft of those that follow."""

    sequence: SequenceState
    start: int
    end: int
    draft: tuple[int, ...] = ()

    @property
    def reach(self) -> int:
        """The place behind its last token, which may be one of the draft."""
        return self.end + len(self.draft)

    @property
    def size(self) -> int:
        """How many tokens are computed."""
        return self.reach - self.start

    @property
    def token_ids(self) -> list[int]:
        """The tokens that are computed."""
        return [*self.sequence.ids[self.start : self.end], *self.draft]

    @property
    def samples(self) -> bool:
        """Whether it reaches the last known token, so that the next one is sampled."""
        return self.end == len(self.sequence.ids) and self.sequence.score is None


def by_adapter(pieces: list[Piece]) -> list[Piece]:
    """Return pieces with those of each adapter next to each other: a step computes adapters by segments of its rows."""
    return sorted(pieces, key=lambda piece: piece.sequence.adapter_number)


class Scheduler:
    """The waiting and the running sequences.

    The oldest are served first. A sequence without a page for its next token preempts the one that started last, which
    is recomputed later: it keeps its tokens, and since sampling depends on its own seed and position alone, nothing
    about it changes but the time it takes.

    Urgent sequences overtake everything, with a slot of their own and the pages of the sequence that started last:
    weights must be proven however long the queue is.

    A sequence waits, and others overtake it, while another one computes at least half of what it needs: members of a
    group that start together read their prompt once.

    A step computes sequences of one version of the weights. Those of all versions share slots and pages, and start in
    the order in which they came, whichever version computes; they share no prefixes. Adapters on the live weights
    compute in the same steps as these, and share no prefixes either.

    Attributes:
        copies: pages that must be copied, from the first to the second of each pair, before the planned step is
            computed. `take_copies` returns and clears them.
        num_shared_tokens: tokens that were found in the cache or computed for a sibling.
        num_prefill_tokens: tokens of prompts that were computed, and tokens that were computed again.
    """

    def __init__(self, pool: PagePool, *, max_batch: int, chunk_tokens: int, max_pages: int) -> None:
        self.pool = pool
        self.max_batch, self.chunk_tokens = max_batch, chunk_tokens
        self.waiting: deque[SequenceState] = deque()
        self.urgent: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.table = np.zeros((max_batch + 1, max_pages), dtype=np.int32)
        self.num_preempted = 0
        self.num_shared_tokens = self.num_prefill_tokens = 0
        self.copies: list[tuple[int, int]] = []
        self._slots = list(range(max_batch, -1, -1))

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self.urgent)

    @property
    def has_started(self) -> bool:
        """Whether any sequence of the live weights is running, or was and waits for memory."""
        waiting = (sequence for sequence in self.waiting if sequence.began is not None)
        return any(sequence.is_live for each in (self.running, waiting) for sequence in each)

    @property
    def num_reserved(self) -> int:
        """Running completions, including siblings that start when their prompt has been read."""
        return sum(1 + len(sequence.siblings) for sequence in self.running if not sequence.is_urgent)

    def sequences(self) -> Iterator[SequenceState]:
        """Yield all sequences, including siblings."""
        for sequence in (*self.running, *self.urgent, *self.waiting):
            yield sequence
            yield from sequence.siblings

    def plan(self, *, admit: bool = True, weights: PinnedWeights | None = None) -> list[Piece]:
        """Return the pieces of the next step, with pages for all their tokens. Empty only if there is nothing to do
        with these weights: no sequence of theirs can run, or, with `admit=False`, none of the live weights that has
        started is left."""
        budget, before = self.chunk_tokens, self.num_preempted
        pieces: list[Piece] = []
        if weights is None:
            self._start_urgent()
        for sequence in list(self.running):
            if sequence.weights is not weights:
                continue
            start = sequence.num_computed
            left = len(sequence.ids) - start
            num = 1 if left == 1 else min(left, budget)
            if sequence.slot < 0 or num == 0:
                continue
            if start + num > len(sequence.pages) * PAGE and not self._make_room(sequence, start + num):
                continue
            budget -= num if left > 1 else 0
            pieces.append(Piece(sequence, start, start + num))
        has_memory = self.num_preempted == before
        held_up: list[SequenceState] = []
        while has_memory and budget > 0 and len(held_up) < self.max_batch:
            candidate = self._next(admit, but=held_up)
            if candidate is None or not self._has_slots(candidate):
                break
            if self._should_wait(candidate):
                held_up.append(candidate)
                continue
            if not self._admit(candidate):
                break
            self.waiting.remove(candidate)
            if candidate.weights is not weights:
                self._grow(candidate, len(candidate.ids))  # it is computed when its version has its round
                continue
            num = min(len(candidate.ids) - candidate.num_computed, budget)
            self._grow(candidate, candidate.num_computed + num)
            budget -= num
            pieces.append(Piece(candidate, candidate.num_computed, candidate.num_computed + num))
        return by_adapter([piece for piece in pieces if piece.sequence.slot >= 0])

    def plan_ahead(
        self, decoding: Sequence[SequenceState], *, admit: bool = True, weights: PinnedWeights | None = None
    ) -> list[Piece]:
        """Return the step after one in which `decoding` sample a token each that is not known yet.

        Empty unless the step is certain to be the next token of every sequence of these weights and nothing else: all
        that run are decoding, none that waits could start, and there are pages without preemption. Sequences that reach
        their full length with the unknown token are left out; whether another ends with it cannot be known.
        """
        own = [sequence for sequence in self.running if sequence.weights is weights]
        if self.urgent or sum(sequence.slot >= 0 for sequence in decoding) != len(own):
            return []
        pieces = [
            Piece(sequence, len(sequence.ids), len(sequence.ids) + 1)
            for sequence in own
            if len(sequence.ids) + 1 < sequence.max_len
        ]
        growing = [piece for piece in pieces if piece.end > len(piece.sequence.pages) * PAGE]
        if len(growing) > self.pool.num_free or self._could_start(self._next(admit)):
            return []
        for piece in growing:
            self._grow(piece.sequence, piece.end)
        return by_adapter(pieces)

    def take_room(self, sequence: SequenceState, num: int) -> int:
        """Take pages for tokens behind the last one of a running sequence, as far as pages are free. Return for how
        many there is room now. One page is left free, so that drafts alone never cause a preemption."""
        length = len(sequence.ids) + num
        most = (len(sequence.pages) + max(0, self.pool.num_free - 1)) * PAGE
        length = min(length, most)
        self._grow(sequence, length)
        return max(0, length - len(sequence.ids))

    def take_copies(self) -> list[tuple[int, int]]:
        """Return which pages must be copied to which before the planned step."""
        copies, self.copies = self.copies, []
        return copies

    def _could_start(self, sequence: SequenceState | None) -> bool:
        prefix = None if sequence is None else self._find_room(sequence)
        if prefix is None:
            return False
        self.pool.release(prefix.pages)
        return True

    def _start_urgent(self) -> None:
        """Start the next urgent sequence in its own slot: before the oldest, so that it is preempted last."""
        if self.urgent and not any(sequence.is_urgent for sequence in self.running):
            sequence = self.urgent.popleft()
            sequence.began = sequence.began or time.perf_counter()
            self._place(sequence)
            self.running.insert(0, self.running.pop())

    def _next(self, admit: bool, *, but: Sequence[SequenceState] = ()) -> SequenceState | None:
        """Return the sequence to start next: the first that waits, or with `admit=False` the first that had started or
        is of a pinned version."""
        return next((each for each in self.waiting if (admit or _may_start(each)) and not (but and each in but)), None)

    def _should_wait(self, sequence: SequenceState) -> bool:
        """Return whether a running sequence is about to compute at least half of what this one would have to."""
        readers = [each for each in self.running if each.is_being_read and each.is_pure and each.score is None]
        readers = [each for each in readers if each.weights is sequence.weights and each.root == sequence.root]
        if not readers or sequence.score is not None or not self.pool.is_sharing:
            return False
        prefix = self.pool.find(sequence.ids, most=len(sequence.ids) - 1, root=sequence.root)
        self.pool.release(prefix.pages)
        found = len(prefix.pages) * PAGE
        end = found + -(-(len(sequence.ids) - prefix.num_tokens) // (2 * PAGE)) * PAGE
        if end >= len(sequence.ids):
            return False
        wanted = sequence.ids[:end]
        return any(each.num_computed < end <= len(each.ids) and each.ids[:end] == wanted for each in readers)

    def _make_room(self, sequence: SequenceState, length: int) -> bool:
        """Take pages for a sequence up to a length, and preempt those that started last if need be."""
        while -(-length // PAGE) - len(sequence.pages) > self.pool.num_free:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        self._grow(sequence, length)
        return True

    def _grow(self, sequence: SequenceState, length: int) -> None:
        held = len(sequence.pages)
        num = -(-length // PAGE) - held
        if num > 0:
            sequence.pages += self.pool.take(num)
            self.table[sequence.slot, held : held + num] = sequence.pages[held:]

    def _admit(self, sequence: SequenceState) -> bool:
        """Start a sequence if there are slots for it and all its siblings, and memory for its known tokens."""
        prefix = self._find_room(sequence)
        if prefix is None:
            return False
        sequence.pages, sequence.mark, sequence.num_sealed = list(prefix.pages), prefix.mark, len(prefix.pages)
        sequence.num_computed = prefix.num_tokens
        if prefix.num_partial:
            page, is_copy = self.pool.claim(prefix)
            sequence.pages.append(page)
            if is_copy:
                self.copies.append((prefix.source, page))
        self.num_shared_tokens += prefix.num_tokens
        if sequence.began is None:
            sequence.began = time.perf_counter()
            sequence.num_shared = prefix.num_tokens
        self._place(sequence)
        return True

    def _has_slots(self, sequence: SequenceState) -> bool:
        return self.num_reserved + 1 + len(sequence.siblings) <= self.max_batch

    def _find_room(self, sequence: SequenceState) -> Prefix | None:
        """Return the computed prefix of a sequence, with its pages held; None if the sequence cannot start."""
        if not self._has_slots(sequence):
            return None
        prefix = Prefix([], sequence.root)
        if sequence.score is None and sequence.is_pure:
            prefix = self.pool.find(sequence.ids, most=len(sequence.ids) - 1, root=sequence.root)
        spare = 1 if self.running else 0
        if -(-len(sequence.ids) // PAGE) - len(prefix.pages) + spare > self.pool.num_free:
            self.pool.release(prefix.pages)
            return None
        return prefix

    def _place(self, sequence: SequenceState, *, at: int | None = None) -> None:
        sequence.slot = self._slots.pop()
        self.table[sequence.slot, : len(sequence.pages)] = sequence.pages
        self.running.insert(len(self.running) if at is None else at, sequence)

    def computed(self, piece: Piece) -> None:
        """Note a piece as computed: its full pages can be shared from now on, and the last page of a whole prompt."""
        sequence = piece.sequence
        sequence.num_computed = piece.end
        if sequence.score is not None:
            return
        if sequence.num_sampled == 0 or piece.end - piece.start > 1:
            self.num_prefill_tokens += piece.end - piece.start
        if not sequence.is_pure:
            return
        while (sequence.num_sealed + 1) * PAGE <= sequence.num_computed:
            start = sequence.num_sealed * PAGE
            page, tokens = sequence.pages[sequence.num_sealed], sequence.ids[start : start + PAGE]
            sequence.mark = self.pool.seal(page, tokens, after=sequence.mark)
            sequence.num_sealed += 1
        if sequence.num_computed == sequence.num_prompt:
            self._seal_last(sequence)

    def _seal_last(self, sequence: SequenceState) -> None:
        """Let others continue the last page of a sequence, as far as it is computed."""
        start = sequence.num_sealed * PAGE
        if sequence.score is None and sequence.is_pure and sequence.num_computed > start:
            tokens = sequence.ids[start : sequence.num_computed]
            self.pool.seal(sequence.pages[sequence.num_sealed], tokens, after=sequence.mark)

    def fork(self, sequence: SequenceState) -> list[tuple[int, int]]:
        """Start the siblings of a sequence where it is. Return which pages must be copied to which: those not yet full.

        They are put next to it: a GPU reads the common pages of neighbours once for all of them.
        Siblings without a page wait, and start like any other sequence.
        """
        copies: list[tuple[int, int]] = []
        siblings, sequence.siblings = sequence.siblings, []
        num_full, rest = divmod(sequence.num_computed, PAGE)
        beside = self.running.index(sequence) + 1
        for number, sibling in enumerate(siblings):
            try:
                own = self.pool.take(1) if rest else []
            except OutOfPages:
                self.waiting.extendleft(reversed(siblings[number:]))
                break
            self.pool.hold(sequence.pages[:num_full])
            sibling.pages = sequence.pages[:num_full] + own
            copies += [(sequence.pages[num_full], page) for page in own]
            sibling.num_computed, sibling.mark, sibling.num_sealed = (
                sequence.num_computed,
                sequence.mark,
                sequence.num_sealed,
            )
            sibling.is_pure, sibling.began = sequence.is_pure, sequence.began
            sibling.num_shared = sequence.num_computed
            self.num_shared_tokens += sequence.num_computed
            self._place(sibling, at=beside + number)
        return copies

    def end(self, sequence: SequenceState) -> None:
        """Remove a sequence that has ended, whether it had started or not."""
        if sequence.slot >= 0:
            self._withdraw(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.urgent:
            self.urgent.remove(sequence)

    def preempt(self, sequence: SequenceState) -> None:
        """Take a sequence's pages; it is the first to restart."""
        self._withdraw(sequence)
        sequence.is_pure = True
        (self.urgent if sequence.is_urgent else self.waiting).appendleft(sequence)
        self.num_preempted += 1

    def preempt_all(self) -> None:
        """Take every sequence's pages; they restart in the same order."""
        self.restart(list(self.running))

    def restart(self, sequences: Sequence[SequenceState]) -> None:
        """Take the pages of these, not counted as preemption; they restart in this order."""
        before = self.num_preempted
        for sequence in reversed(sequences):
            self.preempt(sequence)
        self.num_preempted = before

    def _withdraw(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self._seal_last(sequence)
        self.pool.release(sequence.pages)
        self._slots.append(sequence.slot)
        sequence.slot, sequence.pages = -1, []
        sequence.num_computed, sequence.mark, sequence.num_sealed = 0, sequence.root, 0
        if sequence.score is not None:
            sequence.score.restart()


def _may_start(sequence: SequenceState) -> bool:
    """Return whether a sequence may start while the live weights wait to be updated."""
    return sequence.began is not None or not sequence.is_live
