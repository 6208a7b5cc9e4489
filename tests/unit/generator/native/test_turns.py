"""The turns of a conversation: what an earlier turn computed is used again, and no bit of a logprob changes.

Step by step, without the engine's thread. Every test compares with an engine that shares nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import generator_models as models
from forge.config import Sampling, UpdateMode
from forge.generator.engine import Request
from forge.generator.native.batching import Batching
from forge.generator.native.pages import PAGE
from forge.generator.native.sequences import PendingRequest
from forge.models.inference import page_bytes
from forge.types import Completion, VersionSpan
from generator_models import FIRST, SECOND, prompt

Ids = tuple[int, ...]


@dataclass
class Turns:
    """An engine that is stepped until all that was asked for has ended."""

    batching: Batching
    version: int = 0

    @classmethod
    def of(cls, **changes: Any) -> Turns:
        return cls(
            Batching(
                models.config(FIRST, **changes),
                models.model(FIRST),
                tokenizer=None,
                max_seq_len=256,
                shared=None,
                send=lambda messages: [deliver(value) for deliver, value in messages],
            )
        )

    def begin(self, ids: Sequence[int], *, seed: int, max_tokens: int = 7) -> list[list[Completion]]:
        """Enter a request. Return the list in which its answer will be."""
        found: list[list[Completion]] = []
        sampling = Sampling(temperature=1.0, seed=seed, max_tokens=max_tokens, ignore_eos=True)
        self.batching.enter(PendingRequest(Request(str(seed), tuple(ids), sampling), deliver=found.append))
        return found

    def ask(self, *texts: Sequence[int], seed: int = 0, max_tokens: int = 7) -> list[Completion]:
        """Ask for one completion of each text, all at once."""
        found = [self.begin(ids, seed=seed + place, max_tokens=max_tokens) for place, ids in enumerate(texts)]
        while not all(found):
            self.batching.step(self.version)
            self.batching.flush()
        return [each[0][0] for each in found]

    def episode(self, first: Ids, observations: Sequence[Ids], *, seed: int = 0) -> list[Completion]:
        """Run a conversation: each turn's prompt is all that came before, and an observation."""
        (turn,) = self.ask(first, seed=seed)
        turns = [turn]
        for number, observed in enumerate(observations):
            (turn,) = self.ask((*turn.prompt_ids, *turn.token_ids, *observed), seed=seed + number + 1)
            turns.append(turn)
        return turns

    @property
    def num_prefill_tokens(self) -> int:
        return self.batching.scheduler.num_prefill_tokens

    @property
    def num_shared_tokens(self) -> int:
        return self.batching.scheduler.num_shared_tokens


def sampled(turns: Sequence[Completion]) -> list[tuple[Any, ...]]:
    """What must not depend on the cache, to the last bit."""
    return [(each.prompt_ids, each.token_ids, each.logprobs, each.full_logprobs, each.versions) for each in turns]


def test_a_turn_reads_only_what_is_new() -> None:
    """Whatever the place in a page at which turns start and end."""
    reusing, plain = Turns.of(), Turns.of(prefix_sharing=False)
    for size in (5, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 9):
        observations = [prompt(length, seed=size) for length in (1, 9, PAGE, 2 * PAGE + 3, 8)]
        before = reusing.num_prefill_tokens
        turns = reusing.episode(prompt(size), observations)
        assert sampled(turns) == sampled(plain.episode(prompt(size), observations))
        known = 0
        for turn in turns:
            rest = known % PAGE
            assert turn.num_shared == known - (rest if rest < 4 else 0)
            known = len(turn.prompt_ids) + len(turn) - 1  # the last token was sampled, and never read
        read = [len(turn.prompt_ids) - turn.num_shared for turn in turns]
        assert reusing.num_prefill_tokens - before == sum(read)
    assert plain.num_shared_tokens == 0


def test_chunks_and_other_requests_change_no_bit() -> None:
    reusing, plain = Turns.of(prefill_chunk_tokens=16), Turns.of(prefix_sharing=False)
    histories = [prompt(size) for size in (3, 20, 37, 64)]
    for number in range(5):
        turns, expected = (side.ask(*histories, seed=10 * number) for side in (reusing, plain))
        assert sampled(turns) == sampled(expected)
        assert number == 0 or all(turn.num_shared > 0 for turn in turns)
        histories = [(*turn.prompt_ids, *turn.token_ids, *prompt(5 + number)) for turn in turns]


def test_as_on_a_gpu() -> None:
    """A step is launched ahead for completions that may have ended, into the page that the next turn continues; and no
    page is copied."""
    reusing, plain = Turns.of(), Turns.of(prefix_sharing=False)
    reusing.batching.looks_ahead = True
    reusing.batching.scheduler.pool._copying = False
    histories = [prompt(size) for size in (6, 21, 40)]
    known = [0, 0, 0]
    for number in range(6):
        turns = reusing.ask(*histories, seed=10 * number, max_tokens=5 + number)
        assert sampled(turns) == sampled(plain.ask(*histories, seed=10 * number, max_tokens=5 + number))
        assert [turn.num_shared for turn in turns] == [num - (num % PAGE if num % PAGE < 4 else 0) for num in known]
        known = [len(turn.prompt_ids) + len(turn) - 1 for turn in turns]
        histories = [(*turn.prompt_ids, *turn.token_ids, *prompt(7, seed=number)) for turn in turns]
    assert reusing.batching.counts.num_ahead > 10
    branches = [(*histories[0][:-9], *prompt(3, seed=seed)) for seed in (1, 2)]
    assert sampled(reusing.ask(*branches, seed=90)) == sampled(plain.ask(*branches, seed=90))


@pytest.mark.parametrize("at", [3, PAGE - 1, PAGE, PAGE + 6, 2 * PAGE + 5])
def test_branches_share_their_history_up_to_where_they_fork(at: int) -> None:
    reusing, plain = Turns.of(), Turns.of(prefix_sharing=False)
    whole = prompt(3 * PAGE + 5)
    branches = [(*whole[:at], *prompt(11, seed=seed)) for seed in (1, 2, 3)]
    reusing.ask(whole)
    turns = [reusing.ask(branch, seed=5)[0] for branch in branches]
    assert sampled(turns) == sampled([plain.ask(branch, seed=5)[0] for branch in branches])
    assert [turn.num_shared for turn in turns] == [0 if at < 4 else at] * 3
    (again,) = reusing.ask(whole, seed=6)
    assert again.num_shared == len(whole) - 1, "the branches left the first text as it was"
    assert sampled([again]) == sampled(plain.ask(whole, seed=6))


def test_branches_that_fork_after_a_turn_continue_it_at_the_same_time() -> None:
    reusing, plain = Turns.of(), Turns.of(prefix_sharing=False)
    (turn,) = reusing.ask(prompt(21))
    history = (*turn.prompt_ids, *turn.token_ids)
    branches = [(*history, *prompt(3 + seed, seed=seed)) for seed in range(4)]
    before = reusing.num_prefill_tokens
    found = reusing.ask(*branches, seed=3)
    assert sampled(found) == sampled(plain.ask(*branches, seed=3))
    known = len(history) - 1
    assert [each.num_shared for each in found] == [known] * 4, "one continues the last page, the others copy it"
    assert reusing.num_prefill_tokens - before == sum(len(each.prompt_ids) - each.num_shared for each in found)


def test_members_of_a_group_read_their_prompt_once() -> None:
    """They are requests of their own, which come at the same time."""
    reusing, plain = Turns.of(prefill_chunk_tokens=32), Turns.of(prefix_sharing=False)
    task, other = prompt(5 * PAGE + 14), prompt(50, seed=1)
    texts = [task, task, other, task, task]
    found = reusing.ask(*texts, seed=7)
    assert sampled(found) == sampled(plain.ask(*texts, seed=7))
    assert [each.num_shared for each in found] == [0, len(task) - 1, 0, len(task) - 1, len(task) - 1]
    assert reusing.num_prefill_tokens == len(task) + len(other) + 3
    histories = [(*each.prompt_ids, *each.token_ids, *prompt(12, seed=2)) for each in found]
    assert sampled(reusing.ask(*histories, seed=20)) == sampled(plain.ask(*histories, seed=20))


def test_prompts_with_a_short_common_start_do_not_wait_for_each_other() -> None:
    reusing = Turns.of()
    start = prompt(PAGE)
    found = [reusing.begin((*start, *prompt(60, seed=seed)), seed=seed, max_tokens=1) for seed in range(3)]
    reusing.batching.step(0)
    reusing.batching.flush()
    assert all(found), "one step has read all three"


def tight(num_pages: int, **changes: Any) -> Turns:
    each = page_bytes(models.model(FIRST).architecture, item_bytes=4)
    return Turns.of(kv_cache_gb=(num_pages + 0.5) * each / 2**30, **changes)


def test_kept_pages_are_never_in_the_way() -> None:
    """With little memory: not a preemption more than without reuse, and the same bits."""
    reusing, plain = tight(17), tight(17, prefix_sharing=False)
    draw = random.Random(0)
    histories = [prompt(20 + place) for place in range(6)]
    for number in range(6):
        chosen = draw.sample(range(6), 3)
        texts = [histories[place] for place in chosen]
        turns = reusing.ask(*texts, seed=100 * number)
        assert sampled(turns) == sampled(plain.ask(*texts, seed=100 * number))
        for place, turn in zip(chosen, turns, strict=True):
            histories[place] = (*turn.prompt_ids, *turn.token_ids, *prompt(4, seed=number))
    assert reusing.batching.scheduler.num_preempted <= plain.batching.scheduler.num_preempted
    assert 0 < reusing.num_prefill_tokens < plain.num_prefill_tokens
    assert reusing.batching.scheduler.pool.num_held == 0


def test_the_conversation_that_was_used_longest_ago_is_dropped_first() -> None:
    reusing = tight(17)
    old, new = prompt(4 * PAGE), prompt(4 * PAGE, seed=1)
    reusing.ask(old, new)
    reusing.ask(new, seed=5)
    reusing.ask(prompt(8 * PAGE, seed=2), seed=6)
    (kept,) = reusing.ask(new, seed=7)
    (dropped,) = reusing.ask(old, seed=8)
    assert (kept.num_shared, dropped.num_shared) == (len(new) - 1, 0)


# ---- Weights -----------------------------------------------------------------------------------------------------


def updated(turns: Turns, mode: UpdateMode, kind: models.Kind = SECOND) -> None:
    turns.batching.runner.update_weights(models.weights(kind))
    turns.batching.weights_updated(mode)
    turns.version += 1


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort", "drain"])
def test_what_old_weights_computed_of_a_conversation_is_computed_again(mode: UpdateMode) -> None:
    """Between two turns nothing is in progress: in every mode the next turn is that of the new weights alone."""
    reusing, plain = Turns.of(), Turns.of(prefix_sharing=False)
    observations = [prompt(9), prompt(18)]
    found = []
    for side in (reusing, plain):
        turns = side.episode(prompt(30), observations)
        updated(side, mode)
        history = (*turns[-1].prompt_ids, *turns[-1].token_ids)
        turns += side.episode((*history, *prompt(6)), observations, seed=9)
        found.append(turns)
    assert sampled(found[0]) == sampled(found[1])
    after = found[0][3:]
    assert [turn.num_shared == 0 for turn in after] == [True, False, False]
    assert [turn.versions for turn in after] == [(VersionSpan(1, 0, 7),)] * 3


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_turn_in_progress_keeps_its_keys_or_not_as_the_mode_says(mode: UpdateMode) -> None:
    reusing, plain = Turns.of(), Turns.of(prefix_sharing=False)
    found = []
    for side in (reusing, plain):
        (first,) = side.ask(prompt(30))
        history = (*first.prompt_ids, *first.token_ids, *prompt(9))
        answer = side.begin(history, seed=3, max_tokens=24)
        for _ in range(4):
            side.batching.step(0)
        updated(side, mode)
        while not answer:
            side.batching.step(1)
            side.batching.flush()
        (turn,) = answer[0]
        (last,) = side.ask((*turn.prompt_ids, *turn.token_ids, *prompt(5)), seed=4)
        found.append([first, turn, last])
    assert sampled(found[0]) == sampled(found[1])
    _, turn, last = found[0]
    assert [(each.version, each.start) for each in turn.versions] == [(0, 0), (1, 4)]
    kept = models.logprobs((*turn.prompt_ids, *turn.token_ids[:4]), turn.token_ids[4:], SECOND)
    assert (turn.logprobs[4:] == pytest.approx(kept, abs=1e-4)) == (mode == "recompute")
    known = len(turn.prompt_ids) + len(turn) - 1
    assert last.num_shared == (known if mode == "recompute" else 0), "keys of two versions are never used again"
    assert last.versions == (VersionSpan(1, 0, 7),)


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
def test_a_page_that_old_weights_began_is_not_continued(mode: UpdateMode) -> None:
    """A completion within its first page, which has no page before it that would be unknown."""
    found = []
    for side in (Turns.of(), Turns.of(prefix_sharing=False)):
        answer = side.begin(prompt(6), seed=3, max_tokens=24)
        for _ in range(6):
            side.batching.step(0)
        updated(side, mode)
        while not answer:
            side.batching.step(1)
            side.batching.flush()
        (turn,) = answer[0]
        found.append([turn, *side.ask((*turn.prompt_ids, *turn.token_ids[:6], *prompt(2)), seed=4)])
    assert sampled(found[0]) == sampled(found[1])


def test_a_failed_step_leaves_nothing_to_share() -> None:
    reusing = Turns.of()
    (before,) = reusing.ask(prompt(40))
    reusing.begin((*prompt(40), *prompt(9)), seed=1, max_tokens=20)
    reusing.batching.step(0)
    reusing.batching.fail_all(RuntimeError("the step failed"))
    reusing.batching.flush()
    (after,) = reusing.ask(prompt(40))
    assert (after.num_shared, sampled([after])) == (0, sampled([before]))


def test_waking_finds_an_empty_cache() -> None:
    reusing = Turns.of()
    (before,) = reusing.ask(prompt(40))
    reusing.batching.release()
    reusing.batching.runner.restore()
    (after,) = reusing.ask(prompt(40))
    assert (after.num_shared, sampled([after])) == (0, sampled([before]))
