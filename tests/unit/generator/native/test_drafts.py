"""Speculative decoding: what comes of drafts, right and wrong ones, is what comes without."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import generator_models as models
from forge.config import GenerationConfig, UpdateMode
from forge.errors import ConfigError
from forge.generator.native.drafts import PromptLookup
from forge.generator.native.engine import NativeEngine
from forge.generator.native.schedule import Piece
from forge.generator.native.sequences import DraftState, PendingRequest, SequenceState
from forge.models.inference import page_bytes
from forge.models.tiny import VOCAB_SIZE, make_tiny
from generator_models import FIRST, SECOND, Kind, prompt
from lookahead_runs import Do, Run

SPECULATION = {"num_tokens": 5}


class Oracle:
    """Guesses the tokens that were sampled without drafts, and a wrong one now and then, or `wrong` always."""

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], *, right: float, wrong: int | None = None
    ) -> None:
        self.answers, self.right, self.wrong = answers, right, wrong
        self.random = random.Random(0)

    runner = None

    def read(self, pieces: Iterable[Piece]) -> None:
        """Nothing: it knows."""

    def draft(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[list[int]]:
        found = []
        for sequence, length in zip(sequences, lengths, strict=True):
            known = self.answers[key(sequence)][sequence.num_sampled :][:length]
            other = self.random.randrange(VOCAB_SIZE) if self.wrong is None else self.wrong
            found.append([token if self.random.random() < self.right else other for token in known])
        return found


def key(sequence: SequenceState) -> tuple[int, ...]:
    assert sequence.pending is not None
    return (int(sequence.pending.request.id), sequence.index)


def answers(run: Run) -> dict[tuple[int, ...], Sequence[int]]:
    return {(number, each.index): each.token_ids for number, told in run.told.items() for each in told.answers[0]}


def with_oracle(
    known: Run, *, right: float = 0.8, wrong: int | None = None, kind: Kind = FIRST, **settings: Any
) -> Run:
    """A run whose drafts come from what another one sampled."""
    run = Run(kind, looks_ahead=None, speculation=SPECULATION, **settings)
    assert run.batching.drafts is not None
    run.batching.drafts.drafter = Oracle(answers(known), right=right, wrong=wrong)
    return run


def stops(number: int, count: int = 24) -> list[int]:
    return random.Random(number).sample(range(VOCAB_SIZE), count)


def asked(number: int, **changes: Any) -> Do:
    return lambda run: run.ask(number, **changes)


def mixed(count: int) -> list[tuple[int, Do]]:
    """Requests of all lengths, that end in all ways, with and without drafts."""
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 45, "stop_token_ids": stops(1)},
        {"temperature": 0.0, "max_tokens": 17},
        {"n": 3, "max_tokens": 40, "stop_token_ids": stops(2), "temperature": 0.7},
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"stop": ["a", "e"], "max_tokens": 50, "is_streamed": False},
        {"n": 2, "max_tokens": 25, "is_streamed": False, "ignore_eos": False},
        {"temperature": 0.0, "stop_token_ids": stops(3, 60), "max_tokens": 64},
        {"max_tokens": 9, "min_tokens": 4, "stop_token_ids": stops(4, 200)},
        {"max_tokens": 7, "repetition_penalty": 1.2},
        {"max_tokens": 7, "top_p": 0.8},
    ]
    asks = [asked(number, length=3 + 11 * number % 70, **kinds[number % len(kinds)]) for number in range(count)]
    return [(0, ask) for ask in asks]


@pytest.fixture(scope="module")
def plain() -> Run:
    run = Run(looks_ahead=False, max_batch=32)
    run.go_on(mixed(22))
    return run


def assert_same(run: Run, plain: Run) -> None:
    assert run.completions() == plain.completions()
    assert run.deltas() == plain.deltas()
    assert run.batching.counts.num_tokens == plain.batching.counts.num_tokens


@pytest.mark.parametrize("right", [1.0, 0.8, 0.0])
def test_completions_are_what_they_are_without(plain: Run, right: float) -> None:
    """Tokens, both logprobs, texts, ends and deltas, bit for bit."""
    run = with_oracle(plain, right=right, max_batch=32)
    run.go_on(mixed(22))
    assert_same(run, plain)
    stats = run.batching.stats(run.version, is_asleep=False, num_open=0).more
    assert stats["num_drafted"] > 100
    if right == 1.0:
        assert stats["num_accepted"] > 0.8 * stats["num_drafted"], "all but what is behind the end of a completion"
        assert run.batching.counts.num_steps < plain.batching.counts.num_steps / 2
    elif right:
        assert 0 < stats["num_accepted"] < stats["num_drafted"]
    else:
        assert stats["num_accepted"] < 0.1 * stats["num_drafted"]


def test_nothing_is_drafted_for_what_is_shaped(plain: Run) -> None:
    run = Run(looks_ahead=False, speculation=SPECULATION)
    run.go_on([(0, asked(number, **shape)) for number, shape in enumerate([{"repetition_penalty": 1.2}, {"top_k": 3}])])
    assert run.batching.drafts is not None
    assert run.batching.drafts.num_drafted == 0


@pytest.mark.parametrize("settings", [{"max_batch": 3}, {"max_batch": 8, "num_pages": 17, "prefill_chunk_tokens": 16}])
def test_with_too_few_slots_or_pages(settings: dict[str, Any]) -> None:
    if num_pages := settings.pop("num_pages", None):
        each = page_bytes(models.model(FIRST).architecture, item_bytes=4)
        settings["kv_cache_gb"] = (num_pages + 0.5) * each / 2**30
    plan = [*((0, asked(100 + number, length=4, max_tokens=90)) for number in range(4)), *mixed(14)]
    plain = Run(looks_ahead=False, **settings)
    plain.go_on(plan)
    run = with_oracle(plain, **settings)
    run.go_on(plan)
    assert_same(run, plain)
    assert run.batching.drafts is not None
    assert run.batching.drafts.num_right > 50
    if num_pages:
        assert run.batching.scheduler.num_preempted > 0


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_weights_change_between_steps(mode: UpdateMode) -> None:
    """A step is of one version, also one of several tokens. Without drafts, the same update comes after as many."""
    ask = asked(7, max_tokens=60)

    def update(run: Run) -> None:
        counts.append(run.batching.counts.num_tokens)
        run.update(SECOND if len(counts) % 2 else FIRST, mode)

    def updated_at(times: list[int]) -> Run:
        run = Run(looks_ahead=False)
        ask(run)
        for number, time in enumerate(times):
            while run.batching.counts.num_tokens < time:
                run.batching.step(run.version)
            run.update(SECOND if number % 2 == 0 else FIRST, mode)
        run.go_on([])
        return run

    known = updated_at([20, 37])
    counts: list[int] = []
    run = with_oracle(known, right=0.9)
    run.go_on([(0, ask), (9, update), (5, update)])
    assert counts[0] > 9, "more tokens than steps"
    assert run.completions() == updated_at(counts).completions()
    assert len({span.version for span in run.told[7].answers[0][0].versions}) == 3


def test_a_wrong_guess_may_be_any_token() -> None:
    """Also one without a finite embedding: what is computed behind a wrong guess reaches nothing."""
    kind = Kind(0, tied=False)
    plan = [(0, asked(number, temperature=0.0, max_tokens=24)) for number in range(4)]
    plain = Run(kind, looks_ahead=False)
    plain.go_on(plan)
    used = {token for tokens in answers(plain).values() for token in tokens}
    used |= {token for number in range(4) for token in prompt(20, number)}
    broken = next(token for token in range(VOCAB_SIZE) if token not in used)
    run = with_oracle(plain, right=0.7, wrong=broken, kind=kind)
    (embedding,) = (tensor for name, tensor in run.batching.runner.parameters.items() if "tok_embeddings" in name)
    with torch.no_grad():
        embedding[broken] = torch.nan
    run.go_on(plan)
    assert run.completions() == plain.completions()


def test_the_rest_continues_when_a_request_is_cancelled(plain: Run) -> None:
    run = with_oracle(plain, max_batch=32)
    plan = mixed(22)
    plan.append((6, lambda run: run.batching.cancel(run.told[2].pending)))
    run.go_on(plan)
    assert run.told[2].answers == []
    expected = plain.completions()
    assert {number: found for number, found in run.completions().items() if number != 2} == {
        number: found for number, found in expected.items() if number != 2
    }


def test_text_that_repeats_takes_fewer_steps() -> None:
    """Prompt lookup finds what the completion or its prompt has said before."""
    pattern = prompt(6, 3)
    plain, run = Run(looks_ahead=False), Run(looks_ahead=False, speculation=SPECULATION)
    for each in (plain, run):  # a model that repeats a token: all of its matrices as they were made
        with torch.no_grad():
            for tensor in each.batching.runner.parameters.values():
                if tensor.dim() > 1:
                    tensor.div_(20)
        each.go_on([(0, asked(number, length=4, temperature=0.0, max_tokens=60)) for number in range(3)])
    assert_same(run, plain)
    assert run.batching.counts.num_steps < plain.batching.counts.num_steps / 2, pattern


# ---- Prompt lookup --------------------------------------------------------------------------------------------------


def guess(ids: Sequence[int], length: int, *, num_prompt: int | None = None, size: int = 2) -> list[int]:
    pending = PendingRequest(None, deliver=lambda found: None)  # type: ignore[arg-type]
    sequence = SequenceState(list(ids), num_prompt or len(ids), 99, pending=pending, drafts=DraftState(length))
    (found,) = PromptLookup(size).draft([sequence], [length])
    return found


def test_what_followed_last_is_guessed() -> None:
    assert guess([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 2) == [4, 9]
    assert guess([1, 2, 3, 4, 5, 1, 2], 9) == [3, 4, 5, 1, 2, 3, 4, 5, 1], "what repeats is taken to repeat"
    assert guess([7, 7, 7], 4) == [7, 7, 7, 7]
    assert guess([1, 2, 3, 4], 4) == []
    assert guess([1, 2], 4) == [], "nothing follows the only occurrence"
    assert guess([1, 2, 3, 1, 2], 1, size=4) == []


@pytest.mark.parametrize("num_prompt", [1, 2, 4, 7, 8])
def test_prompt_and_completion_are_one_text(num_prompt: int) -> None:
    assert guess([5, 1, 2, 3, 4, 1, 2, 3], 3, num_prompt=num_prompt) == [4, 1, 2]


def test_the_index_follows_the_completion() -> None:
    pending = PendingRequest(None, deliver=lambda found: None)  # type: ignore[arg-type]
    lookup, tokens = PromptLookup(2), random.Random(0).choices(range(3), k=200)
    sequence = SequenceState(tokens[:20], 20, 999, pending=pending, drafts=DraftState(4))
    for token in tokens[20:]:
        (found,) = lookup.draft([sequence], [4])
        assert found == guess(sequence.ids, 4)
        sequence.ids.append(token)


# ---- A draft model --------------------------------------------------------------------------------------------------


def with_model(draft: Kind, **settings: Any) -> Run:
    section = {"num_tokens": 4, "model": str(models.folder(draft))}
    return Run(looks_ahead=None, speculation=section, **settings)


@pytest.mark.parametrize("draft", [FIRST, SECOND])
def test_completions_are_what_they_are_without_a_draft_model(plain: Run, draft: Kind) -> None:
    """A model that guesses for itself is always right: it has read what it would read, and uses the same numbers."""
    run = with_model(draft, max_batch=32)
    run.go_on(mixed(22))
    assert_same(run, plain)
    stats = run.batching.stats(run.version, is_asleep=False, num_open=0).more
    assert stats["num_drafted"] > 100
    share = stats["num_accepted"] / stats["num_drafted"]
    assert share > 0.8 if draft == FIRST else share < 0.5, share


def test_a_draft_model_sleeps_and_is_preempted_with_the_model() -> None:
    """Its keys and values are on the pages of the model, and gone with them."""
    each = 2 * page_bytes(models.model(FIRST).architecture, item_bytes=4)
    settings = {"max_batch": 8, "prefill_chunk_tokens": 16, "kv_cache_gb": 17.5 * each / 2**30}
    plan = [*((0, asked(100 + number, length=4, max_tokens=90)) for number in range(4)), *mixed(8)]
    plan += [(5, Run.sleep_and_wake), (9, Run.sleep_and_wake)]
    run = with_model(FIRST, **settings)
    run.go_on(plan)
    plain = Run(looks_ahead=False, max_batch=32)
    plain.go_on([each for each in plan if each[0] == 0])
    assert_same(run, plain)
    stats = run.batching.stats(run.version, is_asleep=False, num_open=0).more
    assert run.batching.scheduler.num_preempted > 0
    assert stats["num_accepted"] > 0.8 * stats["num_drafted"] > 80


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path / "other", num_layers=1)
    edit_json(tmp_path / "other" / "config.json", vocab_size=VOCAB_SIZE + 8)
    with pytest.raises(ConfigError, match="another number of tokens") as raised:
        Run(looks_ahead=None, speculation={"model": str(tmp_path / "other")})
    error = raised.value
    assert (error.path, error.value) == ("generator.speculation.model", str(tmp_path / "other"))
    assert str(VOCAB_SIZE) in str(error.rule)
    assert "same family" in str(error.repair)


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path / "other", num_layers=1)
    swap_tokens(tmp_path / "other" / "tokenizer.json")
    with pytest.raises(ConfigError, match="draft model and model have different tokenizers") as raised:
        Run(looks_ahead=None, speculation={"model": str(tmp_path / "other")})
    assert raised.value.path == "generator.speculation.model"


def test_a_draft_model_with_a_shorter_context_is_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path / "other", num_layers=1)
    edit_json(tmp_path / "other" / "config.json", max_position_embeddings=128)
    with pytest.raises(ConfigError, match="longest sequences") as raised:
        Run(looks_ahead=None, speculation={"model": str(tmp_path / "other")})
    assert "generator.max_seq_len=128" in str(raised.value.repair)


def test_a_draft_model_that_is_missing_is_named_before_the_start(tmp_path: Path) -> None:
    (error,) = NativeEngine.config_errors(GenerationConfig(speculation={"model": str(tmp_path / "none")}))
    assert (error.path, error.value) == ("generator.speculation.model", str(tmp_path / "none"))
    assert error.repair


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def swap_tokens(file: Path) -> None:
    """Let two tokens change places."""
    found = json.loads(file.read_text())
    vocab = found["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.__getitem__)[10:12]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(found))
