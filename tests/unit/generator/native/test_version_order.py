"""Versions of the weights that compute in turns: none waits for long, and slots go to those who came first."""

from __future__ import annotations

import itertools

from forge.generator.native.pages import PAGE, PagePool
from forge.generator.native.pinned import PinnedWeights
from forge.generator.native.schedule import Scheduler
from forge.generator.native.sequences import ScoreJob, SequenceState
from forge.generator.native.version_order import ROUND_STEPS, VersionOrder

OLD, OLDER = (PinnedWeights(version, f"digest {version}", {}, root) for version, root in ((1, 1), (0, 2)))
_tokens = itertools.count(1)


class Load:
    """A scheduler whose steps sample a new token for everyone."""

    def __init__(self, *, max_batch: int = 4, num_pages: int = 200) -> None:
        self.scheduler = Scheduler(PagePool(num_pages), max_batch=max_batch, chunk_tokens=64, max_pages=64)
        self.order = VersionOrder(self.scheduler)

    def add(self, weights: PinnedWeights | None, *, max_len: int = 400, ids: list[int] | None = None) -> SequenceState:
        prompt = [next(_tokens) for _ in range(5)] if ids is None else ids
        sequence = SequenceState(ids=list(prompt), num_prompt=len(prompt), max_len=max_len, weights=weights)
        self.scheduler.waiting.append(sequence)
        self.order.is_mixed = self.order.is_mixed or weights is not None
        return sequence

    def step(self) -> PinnedWeights | str | None:
        """Compute a step; whose it was."""
        for weights in self.order.candidates():
            pieces = self.scheduler.plan(weights=weights)
            if pieces:
                break
        else:
            return "nothing"
        self.order.computes(weights)
        self.scheduler.take_copies()
        for piece in pieces:
            sequence = piece.sequence
            assert sequence.weights is weights
            samples = piece.samples
            self.scheduler.computed(piece)
            if samples:
                sequence.ids.append(next(_tokens))
                if len(sequence.ids) >= sequence.max_len:
                    self.scheduler.end(sequence)
        return weights

    def steps(self, num: int) -> list[PinnedWeights | str | None]:
        return [self.step() for _ in range(num)]


def test_versions_have_rounds_of_equal_length() -> None:
    load = Load()
    for weights in (None, OLD, OLDER):
        load.add(weights)
    found = load.steps(6 * ROUND_STEPS)
    rounds = [(weights, len(list(steps))) for weights, steps in itertools.groupby(found)]
    assert rounds == [(weights, ROUND_STEPS) for weights in (None, OLD, OLDER)] * 2


def test_a_version_that_comes_late_waits_for_one_round_at_most() -> None:
    load = Load()
    load.add(None)
    assert set(load.steps(100)) == {None}
    load.add(OLD, max_len=7)
    assert OLD in load.steps(ROUND_STEPS + 1)
    assert load.steps(2)[-1] in (OLD, None)
    load.steps(ROUND_STEPS)
    assert not load.order.is_mixed  # it has ended: the live weights do not look for others any more
    assert set(load.steps(50)) == {None}


def test_the_live_weights_wait_for_one_round_of_a_pinned_version_at_most() -> None:
    load = Load()
    load.add(OLD)
    load.steps(50)
    load.add(None)
    assert None in load.steps(ROUND_STEPS + 1)


def test_slots_go_to_those_who_came_first() -> None:
    """With one slot, long completions of the live weights that come later do not keep it from a pinned version."""
    load = Load(max_batch=1)
    first = load.add(None, max_len=40)
    second, third = load.add(OLD, max_len=40), load.add(None, max_len=40)
    ends: list[SequenceState] = []
    for _ in range(200):
        load.step()
        ends += [each for each in (first, second, third) if len(each.ids) >= each.max_len and each not in ends]
    assert ends == [first, second, third]
    assert load.scheduler.is_idle


def test_an_urgent_sequence_ends_the_round_of_a_pinned_version() -> None:
    load = Load()
    load.add(OLD)
    load.steps(3)
    job = ScoreJob((1, 2, 3), 1.0, deliver=lambda _: None, is_urgent=True)
    load.scheduler.urgent.append(SequenceState(ids=[1, 2], num_prompt=2, max_len=2, score=job))
    assert load.step() is None


def test_versions_share_pages_and_no_prefixes() -> None:
    load = Load(max_batch=3)
    ids = list(range(1000, 1000 + 3 * PAGE + 1))
    load.add(OLD, ids=ids, max_len=len(ids) + 1)
    load.steps(2)
    again, other, live = (load.add(weights, ids=ids, max_len=len(ids) + 1) for weights in (OLD, OLDER, None))
    load.steps(6)
    assert (again.num_shared, other.num_shared, live.num_shared) == (3 * PAGE, 0, 0)
    pool = load.scheduler.pool
    pool.forget_live()
    assert pool.find(ids, most=len(ids) - 1).pages == []
    assert len(pool.find(ids, most=len(ids) - 1, root=OLDER.root).pages) == 3


def test_all_versions_end_where_pages_are_short() -> None:
    load = Load(max_batch=4, num_pages=12)
    added = [load.add(weights, max_len=5 * PAGE) for weights in (None, OLD, OLDER, None, OLD, None, OLDER)]
    for _ in range(3000):
        if load.step() == "nothing":
            break
    assert all(len(each.ids) == each.max_len for each in added)
    assert load.scheduler.is_idle
    assert load.scheduler.pool.num_held == 0
