"""Speculative decoding: guesses of a completion's next tokens, which one step checks together.

A step computes the last token of a completion with a draft behind it, and samples at each of these places with the
random number of that place, as it would step by step. While the sampled token is the guessed one, the next place is
already computed; the first that is not ends the completion's tokens of this step, and what was computed behind it is
overwritten. So a completion has the tokens, logprobs and versions that it has without drafts, and a right guess saves a
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from forge.generator.native.schedule import Piece, Scheduler
from forge.generator.native.sequences import DraftState, Ngrams, SequenceState
from forge.generator.native.shaping import is_shaped

if TYPE_CHECKING:
    from forge.generator.native.runner import ModelRunner
    from forge.models.tokenizer import ChatTokenizer


class Drafter(Protocol):
    """Guesses tokens."""

    def draft(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[list[int]]:
        """Return a draft for each sequence, of at most the length that is given for it; empty for none."""

    def read(self, pieces: Iterable[Piece]) -> None:
        """Read what the model reads in this step without drafts."""

    @property
    def runner(self) -> ModelRunner | None:
        """What has weights and a cache on the device."""


class Drafts:
    """Attaches drafts to the decode steps of sequences.

    A sequence has drafts while nothing but a temperature shapes the distribution of its tokens: penalties depend on the
    tokens before. Drafts grow while they are right and shrink when they are wrong, so that text that cannot be guessed
    costs little.

    Args:
        drafter: guesses tokens.
        most: longest draft.
        budget: tokens of all drafts of a step. With as many as there are sequences, a step samples at twice as many
            places at most.
        vocab_size: of the model.
    """

    def __init__(self, drafter: Drafter, *, most: int, budget: int, vocab_size: int) -> None:
        self.drafter = drafter
        self.num_drafted = self.num_right = 0
        self._most, self._budget, self._vocab_size = most, budget, vocab_size

    def attach(self, pieces: Sequence[Piece], scheduler: Scheduler) -> list[Piece]:
        """Return decode steps of one token each, with drafts where there are any. Drafts get pages that are free."""
        left = self._budget
        places, lengths = list[int](), list[int]()
        for place, piece in enumerate(pieces):
            length = min(self._length(piece.sequence), left)
            if length > 0 and (length := scheduler.take_room(piece.sequence, length)) > 0:
                left -= length
                places.append(place)
                lengths.append(length)
        found = list(pieces)
        if places:
            drafts = self.drafter.draft([pieces[place].sequence for place in places], lengths)
            for place, draft in zip(places, drafts, strict=True):
                found[place] = replace(pieces[place], draft=tuple(draft))
                self.num_drafted += len(draft)
        return found

    def _length(self, sequence: SequenceState) -> int:
        """Return the longest draft that is of use: with the token that follows it, it may fill the completion."""
        row = sequence.row
        if row is None or sequence.siblings or is_shaped(row, self._vocab_size):
            return 0
        if sequence.drafts is None:
            sequence.drafts = DraftState(self._most)
        return min(sequence.drafts.limit, sequence.max_len - len(sequence.ids) - 1)

    def stats(self) -> dict[str, int]:
        """Return how many tokens were guessed, and how many of them were right."""
        return {"num_drafted": self.num_drafted, "num_accepted": self.num_right}

    def note(self, piece: Piece) -> None:
        """Note how much of a draft was right, when the tokens of its step have been added."""
        state = piece.sequence.drafts
        assert state is not None
        num_right = max(0, len(piece.sequence.ids) - piece.end - 1)
        self.num_right += num_right
        state.limit = min(self._most, 2 * state.limit) if num_right == len(piece.draft) else num_right + 1


def is_right(piece: Piece, num_tokens: int) -> bool:
    """Return whether so many tokens of a draft were right: what was computed behind them is then of use.

    The tokens that the step sampled before have been added to the sequence, unless one of them was not the guessed one.
    """
    ids = piece.sequence.ids
    return len(ids) == piece.end + num_tokens and ids[-1] == piece.draft[num_tokens - 1]


def make_drafts(runner: ModelRunner, scheduler: Scheduler, tokenizer: ChatTokenizer | None) -> Drafts | None:
    """Return what `generator.speculation` asks for, for the model of a runner."""
    section = runner.config.speculation
    if section is None:
        return None
    if section.model is None:
        drafter: Drafter = PromptLookup(section.ngram)
    else:
        from forge.generator.native.draft_model import DraftModel

        drafter = DraftModel(runner, scheduler, tokenizer=tokenizer)
    budget, vocab_size = scheduler.max_batch, runner.facts.vocab_size or 0
    return Drafts(drafter, most=section.num_tokens, budget=budget, vocab_size=vocab_size)


class PromptLookup:
    """Guesses that what followed the last n tokens, where they occurred last, follows again."""

    def __init__(self, size: int) -> None:
        self._size = size

    runner = None

    def read(self, pieces: Iterable[Piece]) -> None:
        """See `Drafter.read`."""

    def draft(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[list[int]]:
        """See `Drafter.draft`."""
        return [self._one(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)]

    def _one(self, sequence: SequenceState, length: int) -> list[int]:
        ids, pending, state = sequence.ids, sequence.pending, sequence.drafts
        if len(ids) <= self._size or pending is None or state is None:
            return []
        if pending.ngrams is None:  # completions of a prompt share those of the prompt
            pending.ngrams = {}
            self._index(ids, pending.ngrams, start=0, end=sequence.num_prompt)
        self._index(ids, state.ngrams, start=max(state.num_indexed, sequence.num_prompt), end=len(ids))
        state.num_indexed = len(ids)
        last = tuple(ids[-self._size :])
        start = state.ngrams.get(last, pending.ngrams.get(last))
        if start is None:
            return []
        found: list[int] = []
        for place in range(start, start + length):  # beyond the last token, what repeats is taken to go on
            found.append(ids[place] if place < len(ids) else found[place - len(ids)])
        return found

    def _index(self, ids: Sequence[int], ngrams: Ngrams, *, start: int, end: int) -> None:
        """Note the n-grams that are followed by the tokens [start, end)."""
        for place in range(max(start, self._size), end):
            ngrams[tuple(ids[place - self._size : place])] = place
