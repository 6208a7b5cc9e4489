"""The sampler against a plain reference in float64, and what it promises about rows, seeds and bad logits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forge.config import Sampling
from forge.errors import ModelError, NonFiniteError
from forge.generator.native.sampler import Sampled, Sampler, SampleRow, pick
from forge.generator.native.shaping import (
    cut_by_counting,
    cut_by_row,
    nucleus_by_halving,
    nucleus_by_sorting,
)
from forge.losses.head import chunked_logprobs

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 0.7},
    "hot": {"temperature": 1.9},
    "greedy": {"temperature": 0.0},
    "greedy with penalty": {"temperature": 0.0, "repetition_penalty": 1.3, "top_p": 0.5},
    "top-k": {"top_k": 7},
    "top-k of one": {"top_k": 1},
    "top-k beyond": {"top_k": 5000},
    "top-p": {"top_p": 0.8},
    "small top-p": {"top_p": 0.01},
    "min-p": {"min_p": 0.1, "temperature": 1.5},
    "all cuts": {"min_p": 0.02, "top_k": 20, "top_p": 0.7, "temperature": 1.2},
    "repetition": {"repetition_penalty": 1.7},
    "frequency": {"frequency_penalty": 0.9, "temperature": 0.8},
    "presence": {"presence_penalty": -1.5},
    "everything": {
        "repetition_penalty": 0.8,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.5,
        "temperature": 0.9,
        "min_p": 0.01,
        "top_k": 50,
        "top_p": 0.9,
        "min_tokens": 6,
    },
}


def make_row(kind: str = "plain", *, seed: int = 0, **more: Any) -> SampleRow:
    return SampleRow(
        sampling=Sampling(**{**KINDS[kind], **more}),
        seed=seed,
        prompt_ids=(1, 2, 2, 9),
        token_ids=[2, 5, 5, 5],
        stop_ids=(3, 4),
    )


def make_logits(num_rows: int, vocab_size: int, *, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def reference(logits: Tensor, row: SampleRow) -> np.ndarray:
    """The probabilities that a row draws from, step by step, in float64."""
    sampling, counts = row.sampling, Counter(row.token_ids)
    x = logits.double().numpy().copy()
    if len(row.token_ids) < sampling.min_tokens:
        x[list(row.stop_ids)] = -np.inf
    for token in {*row.prompt_ids, *row.token_ids}:
        x[token] = x[token] / sampling.repetition_penalty if x[token] > 0 else x[token] * sampling.repetition_penalty
    for token, count in counts.items():
        x[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    if sampling.is_greedy:
        return softmax(x)
    probs = softmax(x / sampling.temperature)
    probs[probs < sampling.min_p * probs.max()] = 0.0
    order = np.argsort(-probs, kind="stable")
    if sampling.top_k:
        probs[order[sampling.top_k :]] = 0.0
    probs /= probs.sum()
    if sampling.top_p < 1.0:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= sampling.top_p]] = 0.0
    return probs / probs.sum()


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def drawn_from(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[float], list[float]]:
    return Sampler(logits.shape[1], "cpu").sample(logits, rows).fetch()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [300, 1024])
def test_tokens_and_logprobs_are_those_of_the_reference(kind: str, vocab_size: int) -> None:
    logits = make_logits(6, vocab_size).repeat_interleave(20, dim=0)
    rows = [make_row(kind, seed=seed) for seed in range(len(logits))]
    tokens, logprobs, full = drawn_from(logits, rows)
    for index, row in enumerate(rows):
        probs = reference(logits[index], row)
        assert probs[tokens[index]] > 0
        assert logprobs[index] == pytest.approx(math.log(probs[tokens[index]]), abs=3e-6)
        scale = row.sampling.temperature or 1.0
        whole = softmax(logits[index].double().numpy() / scale)
        assert full[index] == pytest.approx(math.log(whole[tokens[index]]), abs=3e-6)
        if row.sampling.is_greedy:
            assert tokens[index] == int(probs.argmax())


@pytest.mark.parametrize("kind", ["plain", "warm", "top-p", "everything"])
def test_tokens_are_drawn_as_often_as_they_are_likely(kind: str) -> None:
    num_rows, vocab_size = 4_000, 40
    logits = make_logits(1, vocab_size, seed=3, spread=1.0).expand(num_rows, vocab_size).contiguous()
    like = make_row(kind)
    rows = [SampleRow(like.sampling, seed, like.prompt_ids, like.token_ids, like.stop_ids) for seed in range(num_rows)]
    counts = np.bincount(drawn_from(logits, rows)[0], minlength=vocab_size)
    expected = reference(logits[0], rows[0]) * num_rows
    assert counts[expected == 0].sum() == 0
    likely = expected > 5
    square = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    freedom = int(likely.sum()) - 1
    assert square < freedom + 4 * math.sqrt(2 * freedom)


def test_draws_of_one_seed_are_independent_from_token_to_token() -> None:
    logits = torch.zeros(10, 8)
    sampler, rows = Sampler(8, "cpu"), [make_row(seed=seed) for seed in range(10)]
    for _ in range(200):
        for row, token in zip(rows, sampler.sample(logits, rows).fetch()[0], strict=True):
            row.token_ids.append(token)
    drawn = np.array([row.token_ids[4:] for row in rows])
    pairs = np.bincount((drawn[:, :-1] * 8 + drawn[:, 1:]).ravel(), minlength=64)
    expected = 1990 / 64
    assert ((pairs - expected) ** 2 / expected).sum() < 63 + 4 * math.sqrt(126)


def test_the_same_seed_draws_the_same_in_any_company_bit_for_bit() -> None:
    logits = make_logits(64, 1000, seed=5)
    kinds = list(KINDS)
    rows = [make_row(kinds[index % len(kinds)], seed=1000 + index) for index in range(64)]
    together = Sampler(1000, "cpu").sample(logits, rows)
    sampler = Sampler(1000, "cpu")
    for num_rows in range(1, 65):
        for start in {0, (7 * num_rows) % (65 - num_rows)}:
            part = slice(start, start + num_rows)
            assert_same(sampler.sample(logits[part], rows[part]), together, list(range(start, start + num_rows)))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()
    assert_same(sampler.sample(logits[order], [rows[place] for place in order]), together, order)


def test_greedy_rows_are_greedy_among_others() -> None:
    logits = make_logits(40, 300, spread=0.1)
    rows = [make_row(["greedy", "plain", "top-k", "greedy with penalty"][seed % 4], seed=seed) for seed in range(40)]
    tokens = drawn_from(logits, rows)[0]
    likeliest = [int(reference(line, row).argmax()) for line, row in zip(logits, rows, strict=True)]
    assert [tokens[i] == likeliest[i] for i in range(0, 40, 4)] == [True] * 10
    assert [tokens[i] == likeliest[i] for i in range(3, 40, 4)] == [True] * 10
    assert sum(tokens[i] == likeliest[i] for i in range(1, 40, 4)) < 5


def assert_same(found: Sampled, whole: Sampled, places: list[int]) -> None:
    assert torch.equal(found.token_ids, whole.token_ids[places])
    assert torch.equal(found.logprobs, whole.logprobs[places])
    assert torch.equal(found.full_logprobs, whole.full_logprobs[places])


def test_other_seeds_and_other_places_draw_otherwise() -> None:
    logits = make_logits(1, 1000, spread=0.5).expand(50, -1).contiguous()
    assert len(set(drawn_from(logits, [make_row(seed=seed) for seed in range(50)])[0])) > 40
    rows = [make_row(seed=1) for _ in range(50)]
    for length, row in enumerate(rows):
        row.token_ids = [0] * length
    assert len(set(drawn_from(logits, rows)[0])) > 40


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3, 2.0])
def test_full_logprobs_have_the_trainers_bits(temperature: float) -> None:
    source = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(48, 64, generator=source), torch.randn(3000, 64, generator=source)
    rows = [make_row(seed=seed, temperature=temperature) for seed in range(48)]
    drawn = Sampler(3000, "cpu").sample(torch.nn.functional.linear(hidden, weight), rows)
    trained, _ = chunked_logprobs(hidden, weight, drawn.token_ids, temperature=temperature)
    assert torch.equal(drawn.full_logprobs, trained)
    assert torch.equal(drawn.logprobs, drawn.full_logprobs)


def test_penalties_follow_completions_that_come_grow_and_go() -> None:
    sampler, logits = Sampler(64, "cpu"), make_logits(6, 64, seed=8)
    kinds = ["repetition", "plain", "frequency", "everything", "presence", "greedy with penalty"]
    rows = [make_row(kind, seed=index) for index, kind in enumerate(kinds)]
    company = [[0, 1], [0, 1], [0, 1, 2, 3], [3, 2, 4], [3, 2, 4], [1], [1, 5, 0], [0, 5, 3, 2, 4, 1], [2]]
    for step, places in enumerate(company * 2):
        chosen = [rows[place] for place in places]
        logits = make_logits(len(chosen), 64, seed=step)
        tokens, logprobs, _ = sampler.sample(logits, chosen).fetch()
        for index, row in enumerate(chosen):
            probs = reference(logits[index], row)
            assert logprobs[index] == pytest.approx(math.log(probs[tokens[index]]), abs=3e-6)
            row.token_ids.append(tokens[index])


def test_what_ends_a_completion_is_not_drawn_before_min_tokens() -> None:
    logits = torch.zeros(2, 200)
    logits[:, 3] = 50.0  # an end token, nearly certain
    for temperature in (1.0, 0.0):
        sampler = Sampler(200, "cpu")
        rows = [make_row(min_tokens=7, temperature=temperature), make_row(seed=1, temperature=temperature)]
        for length in range(4, 9):
            tokens, logprobs, full = sampler.sample(logits, rows).fetch()
            assert (tokens[0] in (3, 4)) == (length >= 7)
            assert tokens[1] == 3
            if length < 7:
                assert logprobs[0] == pytest.approx(-math.log(198), abs=1e-5)
                assert full[0] == pytest.approx(-50.0, abs=1e-4)
            for row, token in zip(rows, tokens, strict=True):
                row.token_ids.append(token)


def test_of_equal_logits_the_first_are_kept() -> None:
    logits = torch.zeros(2000, 8)
    rows = [make_row(seed=seed, top_k=3) for seed in range(1000)] + [
        make_row(seed=seed, top_p=0.5) for seed in range(1000)
    ]
    tokens, logprobs, _ = drawn_from(logits, rows)
    assert set(tokens[:1000]) == {0, 1, 2}
    assert set(tokens[1000:]) == {0, 1, 2, 3}
    assert logprobs[0] == pytest.approx(-math.log(3))
    assert logprobs[1000] == pytest.approx(-math.log(4))
    logits[:, 6] = 1.0
    tokens, logprobs, _ = drawn_from(logits, rows)
    assert set(tokens[:1000]) == {0, 1, 6}
    assert set(tokens[1000:]) == {0, 1, 2, 6}
    assert drawn_from(torch.ones(1, 300), [make_row("greedy")])[0] == [0]


def test_thresholds_without_sorting_are_those_with_it() -> None:
    coarse = (make_logits(40, 4000, seed=1) * 4).round() / 4  # with many that are equal
    flat = [make_logits(40, 4000, spread=0.5), torch.zeros(2, 4000)]
    logits = torch.cat([make_logits(40, 4000), coarse, *flat, make_logits(2, 4000, spread=60.0)])
    logits[5, 100:] = -math.inf
    probs = logits.softmax(-1)
    p = torch.linspace(0.01, 1.0, len(probs), dtype=torch.float64)
    sorted_, halved = nucleus_by_sorting(probs, p), nucleus_by_halving(probs, p)
    by_row, by_counting = logits.clone(), logits.clone()
    cut_by_row(by_row, probs, *sorted_)
    cut_by_counting(by_counting, probs, *halved)
    assert torch.equal(by_row, by_counting)
    for row, wanted in zip(range(len(probs)), p.tolist(), strict=True):
        kept = probs[row].double()[by_row[row] > -math.inf] / probs[row].double().sum()
        assert float(kept.sum()) >= wanted - 1e-9
        assert wanted == 1.0 or float(kept.sum() - kept.min()) < wanted + 1e-9
    assert torch.equal(by_row[-1], logits[-1])


def whole_blocks(probs: Tensor) -> Tensor:
    return torch.nn.functional.pad(probs, (0, -probs.shape[1] % 128))


def test_a_large_vocabulary_is_inverted_exactly() -> None:
    probs = make_logits(1, 151_936, spread=3.0).softmax(-1)
    sums = probs[0].double().cumsum(0)
    places = torch.rand(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * sums[-1]
    tokens = torch.searchsorted(sums, places, right=True)
    tokens = tokens[probs[0][tokens] > 1e-6][:60]  # sums of 128 float32 numbers round by about 1e-7
    middles = (sums[tokens] - probs[0].double()[tokens] / 2) / sums[-1]
    assert pick(probs.expand(60, -1).contiguous(), middles).tolist() == tokens.tolist()


def test_tokens_of_tiny_probability_are_reached_and_those_of_none_are_not() -> None:
    probs = torch.zeros(1, 1000)
    probs[0, 100], probs[0, 500], probs[0, 990] = 1.0, 1e-9, 1e-12
    probs = whole_blocks(probs)
    for uniform, token in [
        (0.0, 100),
        (0.999_999_998, 100),
        (1 - 0.5e-9, 500),
        (1 - 0.5e-12, 990),
        (1 - 2**-53, 990),
    ]:
        assert pick(probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]
    uniforms = torch.rand(3000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sparse = torch.zeros(1024)
    sparse[::7] = 1.0
    sparse = (sparse * torch.rand(1024, generator=torch.Generator().manual_seed(2))).softmax(0) * sparse
    assert (pick(sparse.expand(3000, -1).contiguous(), uniforms) % 7 == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["plain", "greedy", "all cuts", "everything"])
def test_logits_that_are_no_numbers_raise_and_name_their_rows(bad: float, kind: str) -> None:
    logits = make_logits(4, 300)
    logits[2, 17] = bad
    rows = [make_row(kind, seed=seed) for seed in range(4)]
    drawn = Sampler(300, "cpu").sample(logits, rows)
    assert (drawn.token_ids >= 0).all()
    assert (drawn.token_ids < 300).all()
    with pytest.raises(NonFiniteError, match="1 of 4") as caught:
        drawn.fetch()
    assert caught.value.value == (2,)
    assert caught.value.path == "logits"
    assert "precision" in str(caught.value.repair)
    tokens, logprobs, _ = drawn.fetch(skip=(2,))
    wanted = Sampler(300, "cpu").sample(logits[:2], rows[:2]).fetch()
    assert (tokens[:2], logprobs[:2]) == wanted[:2]


def test_a_row_in_which_every_token_is_ruled_out_raises() -> None:
    row = make_row(min_tokens=9)
    row.stop_ids = range(300)
    with pytest.raises(NonFiniteError, match="ruled out"):
        drawn_from(make_logits(1, 300), [row])


def test_single_tokens_may_be_ruled_out_by_the_model() -> None:
    logits = make_logits(200, 300)
    logits[:, ::2] = -math.inf
    tokens, _, _ = drawn_from(logits, [make_row(kind, seed=3) for kind in ("plain", "all cuts") for _ in range(100)])
    assert all(token % 2 for token in tokens)


def test_logits_stay_as_they_are() -> None:
    logits = make_logits(len(KINDS), 300)
    before = logits.clone()
    drawn_from(logits, [make_row(kind) for kind in KINDS])
    assert torch.equal(logits, before)


def test_no_rows_are_no_tokens() -> None:
    assert drawn_from(torch.zeros(0, 300), []) == ([], [], [])


@pytest.mark.parametrize("logits", [torch.zeros(2, 299), torch.zeros(1, 300), torch.zeros(2, 300).double()])
def test_logits_of_other_rows_are_refused(logits: Tensor) -> None:
    with pytest.raises(ModelError, match="the logits do not match") as caught:
        Sampler(300, "cpu").sample(logits, [make_row(), make_row()])
    assert caught.value.path == "logits_SV"
    assert "(2, 300)" in str(caught.value.rule)
    assert caught.value.repair
