"""Which steps can be planned ahead, and what is drawn in them."""

from __future__ import annotations

import numpy as np
import torch

from forge.config import Sampling
from forge.generator.engine import Request
from forge.generator.native.pages import PAGE, PagePool
from forge.generator.native.sampler import Sampler, SampleRow
from forge.generator.native.schedule import Scheduler
from forge.generator.native.sequences import PendingRequest, ScoreJob, SequenceState


def running(length: int, *, max_len: int = 100, n: int = 1) -> SequenceState:
    sampling = Sampling(n=n)
    ids = list(range(length))
    pending = PendingRequest(Request("", tuple(ids), sampling), deliver=lambda found: None)
    row = SampleRow(sampling=sampling, seed=0, prompt_ids=ids, token_ids=[])
    return SequenceState(ids=ids, num_prompt=length, max_len=max_len, pending=pending, row=row)


def scheduler(*lengths: int, num_pages: int = 8, max_batch: int = 3) -> Scheduler:
    """With sequences under way, each about to draw the token after so many."""
    made = Scheduler(PagePool(num_pages), max_batch=max_batch, chunk_tokens=64, max_pages=8)
    made.waiting.extend(running(length) for length in lengths)
    for piece in made.plan():
        made.computed(piece)
    assert len(made.running) == len(lengths)
    return made


def test_the_next_place_is_planned_with_a_page_for_it() -> None:
    made = scheduler(5, PAGE)
    pieces = made.plan_ahead(made.running)
    assert [(piece.start, piece.end) for piece in pieces] == [(5, 6), (PAGE, PAGE + 1)]
    assert [len(sequence.pages) for sequence in made.running] == [1, 2]


def test_who_ends_for_certain_is_left_out() -> None:
    made = scheduler(5, 6)
    made.running[0].max_len = 6
    assert [piece.sequence for piece in made.plan_ahead(made.running)] == [made.running[1]]
    made.running[1].max_len = 7
    assert made.plan_ahead(made.running) == []


def test_nothing_is_planned_ahead_where_more_could_happen() -> None:
    made = scheduler(5, 6)
    decoding = list(made.running)
    assert made.plan_ahead(decoding[:1]) == [], "another is being read"
    made.waiting.append(running(4))
    assert made.plan_ahead(decoding) == [], "one that waits could begin"
    assert made.pool.num_held == 2
    assert len(made.plan_ahead(decoding, admit=False)) == 2
    made.waiting[0].siblings = [running(4)]
    assert len(made.plan_ahead(decoding)) == 2, "there is no place for it and its sibling"
    made.waiting.clear()
    job = ScoreJob((1, 2, 3), 1.0, deliver=lambda found: None, is_urgent=True)
    made.urgent.append(SequenceState(ids=[1, 2], num_prompt=2, max_len=2, score=job))
    assert made.plan_ahead(decoding) == [], "what is urgent comes next"


def test_nobody_is_put_aside_for_a_page_that_is_planned_ahead() -> None:
    made = scheduler(PAGE, PAGE, num_pages=3)
    assert made.plan_ahead(made.running) == []
    assert [len(sequence.pages) for sequence in made.running] == [1, 1]
    assert made.num_preempted == 0


def test_a_draw_ahead_uses_the_numbers_of_its_place() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0))
    rows = [SampleRow(Sampling(temperature=0.5 + seed / 4), seed, (1, 2), [3] * seed) for seed in range(6)]
    sampler = Sampler(500, "cpu")
    now, ahead = sampler.sample(logits, rows).fetch(), sampler.sample(logits, rows, num_ahead=1).fetch()
    for row in rows:
        row.token_ids.append(7)
    assert ahead == sampler.sample(logits, rows).fetch()
    assert not np.array_equal(now[0], ahead[0])
