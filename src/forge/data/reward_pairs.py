"""Preference pairs as a reward model reads them: whole conversations or texts, whose last token carries the score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from forge.config import DataConfig
from forge.data.preferences import COMPLETION, Answer, PreferenceEncoder
from forge.data.samples import Tokenizer
from forge.types import Sample


class ScoredTokenizer(Tokenizer, Protocol):
    """What reward models need of a tokenizer."""

    def encode_whole(self, text: str) -> list[int]:
        """The tokens of a text as `transformers` gives them by default."""
        ...


class RewardPairEncoder(PreferenceEncoder):
    """Makes the two samples of a pair, of which one token counts, the last.

    Its value is the score of the answer, as `…ForSequenceClassification` of `transformers` reads it. Conversations have
    the tokens of the chat template, and texts those that the tokenizer gives by default: what a reward model is asked
    for in reinforcement learning is encoded in the same way.
    """

    def __init__(self, tokenizer: ScoredTokenizer, *, data: DataConfig, max_seq_len: int, margin: bool) -> None:
        super().__init__(_WithoutEnd(tokenizer), data=data, max_seq_len=max_seq_len, margin=margin)

    def _num_shared(self, ids: Sequence[Sequence[int]]) -> int:
        """Leave each text its last token, which has the score: one may be the other's beginning."""
        return min(super()._num_shared(ids), *(len(each) - 1 for each in ids))

    def _sample(self, ids: list[int], mask: list[bool], answer: Answer, *, place: str, margin: float | None) -> Sample:
        import torch

        sample = super()._sample(ids, mask, answer, place=place, margin=margin)
        weights = torch.zeros(len(ids))
        weights[-1] = 1.0
        fields = {name: values for name, values in sample.fields.items() if name != COMPLETION}
        return replace(sample, loss_weights=weights, fields=fields)


class _WithoutEnd:
    """A tokenizer that puts no end-of-text token behind a text, unless `transformers` does so by default."""

    def __init__(self, tokenizer: ScoredTokenizer) -> None:
        self._tokenizer = tokenizer
        self.encode_text = tokenizer.encode_whole

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        return self._tokenizer.encode_chat(messages)
