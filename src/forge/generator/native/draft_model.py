"""A small model that guesses the next tokens of completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from forge.config.base import FrozenDict
from forge.errors import ConfigError
from forge.generator.native.cache_size import DRAFT_KEY, resolved_draft
from forge.generator.native.runner import ModelRunner
from forge.generator.native.sampler import Sampler
from forge.generator.native.schedule import Piece, Scheduler
from forge.generator.native.sequences import SequenceState
from forge.models.locate import ResolvedModel
from forge.models.tokenizer import ChatTokenizer
from forge.models.vocabulary import check_same_vocabulary

_NO_OTHERS: dict[str, Any] = {
    "adapter": None,
    "adapters": FrozenDict(),
    "max_adapter_gb": None,
    "pinned_versions": None,
    "speculation": None,
}


class DraftModel:
    """Guesses what a small model would sample, with the random numbers that the model itself will use.

    It reads what the model reads, and its keys and values are on the pages with the same numbers, in a cache of its
    own. So pages that are shared, copied or taken away are those of both. A page that it has not read makes its
    guesses worse, never a completion wrong.

    Args:
        target: the runner of the model whose completions are drafted.
        scheduler: whose table of pages holds for both.
        tokenizer: the model's.
    """

    def __init__(self, target: ModelRunner, scheduler: Scheduler, *, tokenizer: ChatTokenizer | None) -> None:
        config, own = target.config, resolved_draft(target.config)
        assert own is not None
        _check(own, target, tokenizer)
        alone = config.model_copy(update=_NO_OTHERS)
        self.runner = ModelRunner(alone, own, max_seq_len=target.max_seq_len, num_pages=target.num_pages)
        self.runner.ignores_adapters = True
        self._scheduler, self._vocab_size = scheduler, own.architecture.vocab_size or 0
        self._sampler = Sampler(self._vocab_size, self.runner.device)

    def read(self, pieces: Iterable[Piece]) -> None:
        """See `Drafter.read`."""
        wanted = [_since(piece) for piece in pieces if piece.sequence.score is None]
        if wanted:
            self._logits(wanted)
        for piece in wanted:
            if piece.sequence.drafts is not None:
                piece.sequence.drafts.num_read = None

    def draft(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[list[int]]:
        """See `Drafter.draft`."""
        known = [len(sequence.ids) for sequence in sequences]
        pieces = [_since(_last(sequence)) for sequence in sequences]
        left = list(range(len(sequences)))
        try:
            for num_ahead in range(max(lengths)):
                logits = self._logits(pieces)
                rows = [row for row in (sequences[place].row for place in left) if row is not None]
                sampled = self._sampler.sample(logits, rows, num_ahead=num_ahead)
                tokens, _, _ = sampled.fetch(skip=range(len(rows)))
                for place, token in zip(left, tokens, strict=True):
                    sequences[place].ids.append(token)
                left = [place for place in left if lengths[place] > num_ahead + 1]
                pieces = [_last(sequences[place]) for place in left]
            return [sequence.ids[length:] for sequence, length in zip(sequences, known, strict=True)]
        finally:
            for sequence, length in zip(sequences, known, strict=True):
                if sequence.drafts is not None:
                    sequence.drafts.num_read = len(sequence.ids) - 1
                del sequence.ids[length:]

    def _logits(self, pieces: Sequence[Piece]) -> Any:
        """Compute pieces, and return the logits behind each."""
        table = self._scheduler.table
        if all(piece.size == 1 for piece in pieces):
            return self.runner.decode_logits(pieces, table)
        ends, total = list[int](), 0
        for piece in pieces:
            total += piece.size
            ends.append(total - 1)
        return self.runner.logits(self.runner.hidden(pieces, table, ends))


def _last(sequence: SequenceState) -> Piece:
    """Return the last token of a sequence."""
    return Piece(sequence, len(sequence.ids) - 1, len(sequence.ids))


def _since(piece: Piece) -> Piece:
    """Return a piece that begins where the draft model stopped reading: a draft's last token is not read with it."""
    state = piece.sequence.drafts
    if state is None or state.num_read is None:
        return piece
    return replace(piece, start=min(piece.start, state.num_read))


def _check(own: ResolvedModel, target: ModelRunner, tokenizer: ChatTokenizer | None) -> None:
    facts = own.architecture
    if facts.vocab_size != target.facts.vocab_size:
        raise ConfigError(
            "the draft model has another number of tokens than the model",
            path=DRAFT_KEY,
            value=str(own.folder),
            rule=f"vocab_size {target.facts.vocab_size}, as the model has it; this one has {facts.vocab_size}",
            repair="choose a draft model of the same family, or remove the key for prompt lookup",
        )
    if facts.max_seq_len is not None and facts.max_seq_len < target.max_seq_len:
        raise ConfigError(
            "the draft model cannot read the longest sequences",
            path=DRAFT_KEY,
            value=str(own.folder),
            rule=f"a model that reads at least {target.max_seq_len} tokens; this one reads {facts.max_seq_len}",
            repair=f"choose another one, or set generator.max_seq_len={facts.max_seq_len}",
        )
    if tokenizer is not None and own.folder is not None:
        check_same_vocabulary(tokenizer, ChatTokenizer.load(own.folder), path=DRAFT_KEY, names=("model", "draft model"))
