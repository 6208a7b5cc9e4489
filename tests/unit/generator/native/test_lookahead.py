"""Steps that are launched before the tokens of the one before are taken in: what comes of it is what comes without."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import generator_models as models
from forge.config import Sampling, UpdateMode
from forge.generator.engine import Request
from forge.generator.native.batching import Batching
from forge.generator.native.decode_graphs import DecodeGraphs
from forge.generator.native.sequences import PendingRequest
from forge.models.inference import page_bytes
from forge.models.tiny import VOCAB_SIZE
from generator_models import FIRST, SECOND, Kind, prompt
from lookahead_runs import Do, Run, Told, assert_same_figures, both


def stops(number: int, count: int = 24) -> list[int]:
    """Tokens that end a completion at a place that is as good as random."""
    return random.Random(number).sample(range(VOCAB_SIZE), count)


def asked(number: int, **changes: Any) -> Do:
    return lambda run: run.ask(number, **changes)


def mixed(count: int) -> list[Do]:
    """Requests of all lengths, that end in all ways."""
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 45, "stop_token_ids": stops(1)},
        {"temperature": 0.0, "max_tokens": 17},
        {"n": 3, "max_tokens": 40, "stop_token_ids": stops(2), "temperature": 0.7},
        {"max_tokens": 1},
        {"stop": ["a", "e"], "max_tokens": 50, "is_streamed": False},
        {"n": 2, "max_tokens": 25, "is_streamed": False, "ignore_eos": False},
        {"temperature": 0.0, "stop_token_ids": stops(3, 60), "max_tokens": 64},
    ]
    return [asked(number, length=3 + 11 * number % 70, **kinds[number % len(kinds)]) for number in range(count)]


def without_embedding(token: int) -> Do:
    """Whoever has this token in its context has no finite logits from then on."""

    def breaks(run: Run) -> None:
        (embedding,) = (tensor for name, tensor in run.batching.runner.parameters.items() if "tok_embeddings" in name)
        with torch.no_grad():
            embedding[token] = torch.nan

    return breaks


def test_every_completion_is_what_it_is_without() -> None:
    plan = [(0, do) for do in mixed(14)]
    ahead, plain = both(plan, max_batch=32)
    assert_same_figures(ahead, plain)
    reasons = [each.finish_reason for told in ahead.told.values() for each in told.answers[0]]
    assert {"stop", "length"} <= set(reasons)
    assert ahead.batching.counts.num_ahead > plain.batching.counts.num_steps // 2


def test_nothing_is_launched_for_a_length_that_is_known() -> None:
    """Equal lengths: the last step of all is known to be the last."""
    ahead, plain = both([(0, asked(number, max_tokens=9)) for number in range(3)])
    assert_same_figures(ahead, plain)
    assert ahead.batching.counts.num_ahead == 7  # not the prompt's, nor the first that only draws


def test_requests_scores_and_cancellations_come_between_steps() -> None:
    def cancel(number: int) -> Do:
        return lambda run: run.batching.cancel(run.told[number].pending)

    requests = mixed(12)
    plan: list[tuple[int, Do]] = [(0, do) for do in requests[:5]]
    plan += [(4, requests[5]), (3, lambda run: run.score(1)), (2, requests[6]), (0, cancel(0)), (4, requests[7])]
    plan += [(3, lambda run: run.score(2, is_urgent=True)), (2, requests[8]), (3, cancel(8)), (3, requests[9])]
    plan += [(6, lambda run: run.ask(50, n=4, max_tokens=20)), (3, cancel(50)), (3, requests[10])]
    ahead, plain = both(plan, max_batch=32)
    assert_same_figures(ahead, plain)
    assert ahead.told[50].answers == []
    assert all(len(found) == 1 for found in ahead.scores.values())


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort", "drain"])
def test_weights_change_between_steps(mode: UpdateMode) -> None:
    kinds = [SECOND, FIRST, SECOND]
    requests = mixed(9)
    plan: list[tuple[int, Do]] = [(0, do) for do in requests[:6]]
    for number, kind in enumerate(kinds):
        plan += [(6, lambda run, kind=kind: run.update(kind, mode)), (0, requests[6 + number])]
    ahead, plain = both(plan, max_batch=32)
    assert_same_figures(ahead, plain)
    assert ahead.num_cut == plain.num_cut
    versions = {span.version for told in ahead.told.values() for each in told.answers[0] for span in each.versions}
    assert versions == {-1, 0, 1, 2}


def test_sleep_wake_and_the_end_of_all_between_steps() -> None:
    plan: list[tuple[int, Do]] = [(0, do) for do in mixed(6)]
    plan += [(5, Run.sleep_and_wake), (9, Run.sleep_and_wake), (6, lambda run: run.batching.abort_all())]
    plan += [(0, asked(60, max_tokens=12))]
    ahead, plain = both(plan, max_batch=32)
    assert_same_figures(ahead, plain)
    assert "abort" in {each.finish_reason for told in ahead.told.values() for each in told.answers[0]}


@pytest.mark.parametrize("settings", [{"max_batch": 3}, {"max_batch": 8, "num_pages": 17, "prefill_chunk_tokens": 16}])
def test_who_waits_gets_the_same_tokens(settings: dict[str, Any]) -> None:
    """Too few places or pages: whoever waits may begin a step later, with the same outcome."""
    if num_pages := settings.pop("num_pages", None):
        each = page_bytes(models.model(FIRST).architecture, item_bytes=4)
        settings["kv_cache_gb"] = (num_pages + 0.5) * each / 2**30
    long = [asked(100 + number, length=4, max_tokens=90) for number in range(4)]
    ahead, plain = both([(0, do) for do in (*long, *mixed(14))], **settings)
    if num_pages:
        assert min(ahead.batching.scheduler.num_preempted, plain.batching.scheduler.num_preempted) > 0
    assert ahead.batching.counts.num_tokens == plain.batching.counts.num_tokens


def test_what_is_shaped_is_drawn_step_by_step() -> None:
    """While a completion with penalties, truncation or a least length is under way nothing is launched ahead."""
    plan: list[tuple[int, Do]] = [(0, asked(number, max_tokens=40)) for number in range(3)]
    plan += [(4, asked(10, max_tokens=8, top_p=0.8)), (11, asked(11, max_tokens=9, repetition_penalty=1.2))]
    plan += [(12, asked(12, max_tokens=12, min_tokens=6, stop_token_ids=stops(4, 200)))]
    ahead, plain = both(plan)
    assert_same_figures(ahead, plain)
    assert 5 < ahead.batching.counts.num_ahead < 25


def test_a_row_that_is_broken_fails_alone() -> None:
    """The token that one completion draws at a place has no finite embedding: the next draw of that one fails."""
    kind = Kind(0, tied=False)
    asks: list[tuple[int, Do]] = [(0, asked(number, temperature=0.0, max_tokens=24)) for number in range(4)]
    asks.append((0, asked(9, length=9, temperature=0.0, n=2, max_tokens=24)))
    known = Run(kind, looks_ahead=False)
    known.go_on(asks)
    drawn = {number: told.answers[0][0].token_ids for number, told in known.told.items()}
    others = {token for number, tokens in drawn.items() if number != 9 for token in tokens}
    others |= {token for number in (0, 1, 2, 3) for token in prompt(20, number)} | set(prompt(9, 9))
    place, broken = next((place, token) for place, token in enumerate(drawn[9]) if place > 4 and token not in others)

    ahead, plain = both([(0, without_embedding(broken)), *asks], kind)
    assert_same_figures(ahead, plain)
    found = ahead.completions()
    assert found.pop(9) == "NonFiniteError"
    assert {number: each[0][1] for number, each in found.items()} == {number: drawn[number] for number in range(4)}
    assert max(len(delta.token_ids) for delta in ahead.told[9].deltas) == 1
    assert len(ahead.told[9].deltas) == 2 * (place + 1)


def test_what_is_thrown_away_may_be_broken() -> None:
    """A completion ends with a token that has no finite embedding: nobody hears of what would follow it."""
    kind, sampling = Kind(0, tied=False), {"n": 2, "max_tokens": 24}
    known = Run(kind, looks_ahead=False)
    known.ask(3, **sampling)
    known.go_on([])
    first, second = (each.token_ids for each in known.told[3].answers[0])
    others = {*prompt(20, 3), *second, first[0]}
    place, end = next((place, token) for place, token in enumerate(first) if place > 2 and token not in others)
    plan = [(0, without_embedding(end)), (0, asked(3, stop_token_ids=[end], **sampling))]
    ahead, plain = both(plan, kind)
    assert_same_figures(ahead, plain)
    assert [each.token_ids for each in ahead.told[3].answers[0]] == [first[: place + 1], second]


class Replayed:
    """Stands in for a recorded step where there is no GPU: it computes the step from the same buffers."""

    def __init__(self, compute: Callable[[], torch.Tensor], logits: torch.Tensor) -> None:
        self._compute, self._logits = compute, logits

    def replay(self) -> None:
        self._logits.copy_(self._compute())


class Unrecorded(DecodeGraphs):
    """The buffers of recorded steps, on a CPU, which does not know rows that only fill up."""

    def _record(self) -> None:
        self._sizes = list(range(1, self.max_batch + 1))
        for size in self._sizes:
            logits = torch.zeros(size, VOCAB_SIZE)
            self._graphs[size] = (Replayed(functools.partial(self._step, size), logits), logits)


def test_recorded_steps_take_their_tokens_from_the_last_draw() -> None:
    class Recorded(Batching):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.runner._graphs = Unrecorded(self.runner, max_batch=self.config.max_batch)

    plan, plain = [(0, do) for do in mixed(8)], Run(looks_ahead=False, max_batch=32)
    plain.go_on(plan)
    ahead = Run(looks_ahead=None, make=Recorded, max_batch=32)
    ahead.go_on(plan)
    assert ahead.batching.counts.num_ahead > 20
    tokens = [[each.token_ids for told in run.told.values() for each in told.answers[0]] for run in (ahead, plain)]
    assert tokens[0] == tokens[1]


def test_pages_that_were_filled_ahead_are_shared() -> None:
    def onward(run: Run) -> None:
        (before,) = run.told[1].answers[0]
        sampling = Sampling(seed=2, max_tokens=20, ignore_eos=True)
        told = Told(
            PendingRequest(
                Request("onward", before.prompt_ids + before.token_ids, sampling), deliver=lambda found: None
            )
        )
        told.pending.deliver = told.answers.append
        run.told[2] = told
        run.batching.enter(told.pending)

    plan = [(0, asked(1, length=10, max_tokens=70)), (100, Run.deliver), (0, onward)]
    ahead, plain = both(plan)
    assert_same_figures(ahead, plain)
    assert [each.told[2].answers[0][0].num_shared for each in (ahead, plain)] == [79] * 2, "all but the last token"


def test_a_step_that_fails_takes_in_what_was_drawn_before() -> None:
    """The step after cannot be launched: completions that end with the one before end as they are."""

    class Failing(Batching):
        def _launch_ahead(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("it cannot be launched")

    run = Run(looks_ahead=True, make=Failing)
    run.ask(0, max_tokens=2)
    run.ask(1, max_tokens=20)
    run.batching.step(0)
    with pytest.raises(RuntimeError, match="cannot be launched") as caught:
        run.batching.step(0)
    run.batching.fail_all(caught.value)
    run.batching.flush()
    assert len(run.told[0].answers[0][0].token_ids) == 2
    assert [len(run.told[1].deltas), run.completions()[1]] == [2, "RuntimeError"]


def test_an_error_forgets_what_was_launched() -> None:
    run = Run(looks_ahead=True)
    run.ask(0)
    for _ in range(4):
        run.batching.step(0)
    assert run.batching.is_ahead
    run.batching.fail_all(RuntimeError("it failed"))
    run.batching.flush()
    assert not run.batching.is_ahead
    assert run.completions() == {0: "RuntimeError"}
    run.ask(1, max_tokens=5)
    run.go_on([])
    assert len(run.told[1].answers[0][0].token_ids) == 5


def test_on_a_cpu_nothing_is_launched_ahead_unless_asked_for() -> None:
    run = Run(looks_ahead=True)
    del run.batching.looks_ahead
    run.ask(0)
    run.go_on([])
    assert (run.batching.looks_ahead, run.batching.counts.num_ahead) == (None, 0)
