"""The scheduler under random load: whatever comes, goes, or is cancelled, every page comes back and everybody ends.

A stand-in for the model draws the tokens, so that thousands of steps take no time; pages and scheduler are the real
ones.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from forge.config import Sampling
from forge.generator.engine import Request
from forge.generator.native.pages import PAGE, PagePool
from forge.generator.native.sampler import SampleRow
from forge.generator.native.schedule import Piece, Scheduler
from forge.generator.native.sequences import PendingRequest, ScoreJob, SequenceState

MAX_BATCH, CHUNK, MAX_LEN = 6, 24, 8 * PAGE


class Load:
    """A scheduler, and the part of the engine around it that takes tokens."""

    def __init__(
        self, *, num_pages: int, sharing: bool = True, copying: bool = True, chunk_tokens: int = CHUNK
    ) -> None:
        self.pool = PagePool(num_pages, sharing=sharing, copying=copying)
        self.scheduler = Scheduler(self.pool, max_batch=MAX_BATCH, chunk_tokens=chunk_tokens, max_pages=MAX_LEN // PAGE)
        self.ended: list[SequenceState] = []
        self.contents: dict[tuple[int, int], int] = {}
        """What is written in each place of each page."""

    def enter(self, ids: list[int], *, max_tokens: int, n: int = 1) -> list[SequenceState]:
        sampling = Sampling(n=n, max_tokens=max_tokens)
        pending = PendingRequest(Request("", tuple(ids), sampling), deliver=lambda found: None)
        group = [
            SequenceState(
                ids=list(ids),
                num_prompt=len(ids),
                max_len=min(MAX_LEN, len(ids) + max_tokens),
                pending=pending,
                index=index,
                row=SampleRow(sampling=sampling, seed=0, prompt_ids=ids, token_ids=[]),
            )
            for index in range(n)
        ]
        group[0].siblings = group[1:]
        self.scheduler.waiting.append(group[0])
        return group

    def enter_score(self, ids: list[int], *, is_urgent: bool = False) -> SequenceState:
        job = ScoreJob(tuple(ids), 1.0, deliver=lambda found: None, is_urgent=is_urgent)
        sequence = SequenceState(ids=ids[:-1], num_prompt=len(ids) - 1, max_len=len(ids) - 1, score=job)
        (self.scheduler.urgent if is_urgent else self.scheduler.waiting).append(sequence)
        return sequence

    def step(self, *, admit: bool = True) -> list[Piece]:
        """Compute what is planned, and check that the plan can be computed."""
        scheduler = self.scheduler
        pieces = scheduler.plan(admit=admit)
        assert sum(piece.end - piece.start for piece in pieces if piece.end - piece.start > 1) <= scheduler.chunk_tokens
        assert scheduler.num_reserved <= MAX_BATCH
        slots = [sequence.slot for sequence in scheduler.running]
        assert len(set(slots)) == len(slots)
        self._copy(scheduler.take_copies())
        for piece in pieces:
            self._write(piece)
        for piece in pieces:
            self._compute(piece)
        self._check_pages()
        return pieces

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy all at once, as the model's runner does: a page may be read and written in the same call."""
        old = dict(self.contents)
        for source, target in pairs:
            for place in range(PAGE):
                self.contents[target, place] = old.get((source, place), -1)

    def _write(self, piece: Piece) -> None:
        sequence = piece.sequence
        assert piece.start == sequence.num_computed
        assert len(sequence.pages) * PAGE >= piece.end
        assert list(self.scheduler.table[sequence.slot, : len(sequence.pages)]) == sequence.pages
        for place in range(piece.start, piece.end):
            self.contents[sequence.pages[place // PAGE], place % PAGE] = sequence.ids[place]
        read = [self.contents.get((sequence.pages[place // PAGE], place % PAGE)) for place in range(piece.end)]
        assert read == sequence.ids[: piece.end], "it reads what another text left there"

    def _compute(self, piece: Piece) -> None:
        sequence, scheduler = piece.sequence, self.scheduler
        scheduler.computed(piece)
        if sequence.score is not None:
            if sequence.num_computed == len(sequence.ids):
                self.end(sequence)
            return
        if not piece.samples:
            return
        siblings = sequence.siblings
        if siblings:
            self._copy(scheduler.fork(sequence))
        for each in (sequence, *(sibling for sibling in siblings if sibling.slot >= 0)):
            each.ids.append(hash((each.index, tuple(each.ids))) % 50)
            if len(each.ids) >= each.max_len:
                self.end(each)

    def end(self, sequence: SequenceState) -> None:
        self.scheduler.end(sequence)
        self.ended.append(sequence)

    def cancel(self, group: list[SequenceState]) -> None:
        for sequence in list(self.scheduler.sequences()):
            if any(sequence is member for member in group):
                self.scheduler.end(sequence)

    def _check_pages(self) -> None:
        """Every page that is held is in the lists of exactly so many sequences."""
        held = Counter(page for sequence in self.scheduler.running for page in sequence.pages)
        assert len(held) == self.pool.num_held
        assert all(self.pool._holders[page] == count for page, count in held.items())
        assert all(not sequence.pages for sequence in (*self.scheduler.waiting, *self.scheduler.urgent))

    def finish(self, most: int = 5000) -> None:
        for _ in range(most):
            if self.scheduler.is_idle:
                break
            assert self.step(), "there is work, and nothing is planned"
        assert self.scheduler.is_idle
        assert self.pool.num_free == self.pool.num_pages


def some_ids(draw: random.Random) -> list[int]:
    """Texts that often begin alike."""
    beginning = [draw.randrange(3)] * draw.randrange(0, 4 * PAGE)
    return (beginning + [draw.randrange(50) for _ in range(draw.randrange(1, 2 * PAGE))])[: MAX_LEN - 1]


@pytest.mark.parametrize("num_pages", [9, 14, 60])
@pytest.mark.parametrize(("sharing", "copying"), [(True, True), (True, False), (False, False)])
def test_everybody_ends_and_every_page_comes_back(num_pages: int, sharing: bool, copying: bool) -> None:
    for seed in range(6):
        draw = random.Random(seed)
        load = Load(num_pages=num_pages, sharing=sharing, copying=copying, chunk_tokens=draw.choice([16, 24, 100]))
        groups: list[list[SequenceState]] = []
        gone: list[SequenceState] = []
        for _ in range(150):
            chance = draw.random()
            if chance < 0.15:
                groups.append(load.enter(some_ids(draw), max_tokens=draw.randrange(1, 40), n=draw.choice([1, 1, 2, 6])))
            elif chance < 0.2:
                groups.append([load.enter_score([*some_ids(draw), 1], is_urgent=draw.random() < 0.3)])
            elif chance < 0.25 and groups:
                cancelled = groups.pop(draw.randrange(len(groups)))
                gone += cancelled
                load.cancel(cancelled)
            elif chance < 0.27:
                load.scheduler.preempt_all()
                load.pool.forget()
            load.step(admit=draw.random() < 0.95)
        load.finish()
        expected = [sequence for group in groups for sequence in group]
        assert all(any(each is sequence for each in load.ended) for sequence in expected)
        assert len(load.ended) == len({id(sequence) for sequence in load.ended})
        assert all(len(sequence.ids) == sequence.max_len for sequence in load.ended)
        if num_pages == 9:
            assert load.scheduler.num_preempted > 0


def test_tokens_do_not_depend_on_memory() -> None:
    found = []
    for num_pages in (9, 100):
        draw = random.Random(3)
        load = Load(num_pages=num_pages)
        groups = [load.enter(some_ids(draw), max_tokens=40, n=draw.choice([1, 3])) for _ in range(12)]
        load.finish()
        found.append([sequence.ids for group in groups for sequence in group])
        assert (load.scheduler.num_preempted > 0) == (num_pages == 9)
    assert found[0] == found[1]


def test_the_oldest_begin_and_end_first() -> None:
    load = Load(num_pages=60)
    groups = [load.enter([place] * 20, max_tokens=10) for place in range(3 * MAX_BATCH)]
    load.finish()
    assert [sequence.ids[0] for sequence in load.ended] == [sequence.ids[0] for (sequence,) in groups]


def test_memory_is_taken_from_the_youngest() -> None:
    load = Load(num_pages=9, chunk_tokens=100)
    oldest, middle, youngest = (load.enter([place] * 20, max_tokens=100)[0] for place in range(3))
    while load.scheduler.num_preempted == 0:
        load.step()
    assert [sequence.slot >= 0 for sequence in (oldest, middle, youngest)] == [True, True, False]
    assert load.scheduler.waiting[0] is youngest
    load.finish()
    assert load.ended[0] is oldest


def test_a_long_prompt_stalls_nobody() -> None:
    load = Load(num_pages=60)
    (talking,) = load.enter([1] * 5, max_tokens=60)
    load.step()
    (reading,) = load.enter([2] * (MAX_LEN - 10), max_tokens=2)
    while reading.num_computed < reading.num_prompt:
        before = len(talking.ids)
        load.step()
        assert len(talking.ids) == before + 1
    assert len(talking.ids) == 6 + -(-reading.num_prompt // CHUNK)
    load.finish()


def test_what_is_urgent_waits_for_nobody() -> None:
    load = Load(num_pages=9, chunk_tokens=100)
    groups = [load.enter([place] * 20, max_tokens=100) for place in range(20)]
    while load.scheduler.num_preempted == 0:
        load.step()
    first, second = (load.enter_score([place] * 60, is_urgent=True) for place in (40, 41))
    load.step(admit=False)
    load.step(admit=False)
    assert load.ended == [first, second], "one after the other, before those that are under way"
    cancelled = load.enter_score([42] * 60, is_urgent=True)
    load.cancel([cancelled])
    load.finish()
    assert len(load.ended) == 2 + len(groups)


def test_a_drain_lets_nobody_begin_and_everybody_under_way_end() -> None:
    load = Load(num_pages=9, chunk_tokens=100)
    begun = [load.enter([place] * 20, max_tokens=100)[0] for place in range(3)]
    while load.scheduler.num_preempted == 0:
        load.step()
    (late,) = load.enter([7] * 3, max_tokens=3)
    while load.step(admit=False):
        assert late.slot < 0
    assert sorted(map(id, load.ended)) == sorted(map(id, begun))
    assert list(load.scheduler.waiting) == [late]
    load.finish()


def test_the_group_of_a_prompt_shares_its_full_pages() -> None:
    load = Load(num_pages=60, chunk_tokens=100)
    group = load.enter([5] * (2 * PAGE + 3), max_tokens=4, n=4)
    load.step()
    assert load.pool.num_held == 2 + 4
    assert [sequence.num_shared for sequence in group] == [0] + [2 * PAGE + 3] * 3
    load.finish()
    assert load.scheduler.num_shared_tokens == 3 * (2 * PAGE + 3)


def test_a_group_begins_only_when_there_is_a_place_for_all_of_it() -> None:
    load = Load(num_pages=60, chunk_tokens=100)
    load.enter([1] * 3, max_tokens=20)
    load.step()
    whole = load.enter([2] * 3, max_tokens=5, n=MAX_BATCH)
    after = load.enter([3] * 3, max_tokens=1)
    for _ in range(5):
        load.step()
    assert [sequence.slot for sequence in (*whole, *after)] == [-1] * (MAX_BATCH + 1)
    load.finish()
    assert load.ended[-1] is after[0], "nobody overtakes"
