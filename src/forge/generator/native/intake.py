"""A request's completions, as the engine's sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge.config import Sampling
from forge.generator.native.randomness import completion_seed, fresh_seed
from forge.generator.native.sampler import SampleRow
from forge.generator.native.sequences import PendingRequest, SequenceState
from forge.generator.text import TextTracker

if TYPE_CHECKING:
    from forge.models.tokenizer import ChatTokenizer


def sequences_of(pending: PendingRequest, tokenizer: ChatTokenizer | None, *, max_seq_len: int) -> list[SequenceState]:
    """Return one sequence for each completion that a request asks for. Without a seed they get a new one."""
    request = pending.request
    sampling, prompt = request.sampling, request.prompt_ids
    own = () if sampling.ignore_eos or tokenizer is None else tokenizer.stop_token_ids
    stops = (*sampling.stop_token_ids, *own)
    seed = sampling.seed if sampling.seed is not None else fresh_seed()
    room = max_seq_len - len(prompt)
    return [
        SequenceState(
            ids=list(prompt),
            num_prompt=len(prompt),
            max_len=len(prompt) + (room if sampling.max_tokens is None else min(room, sampling.max_tokens)),
            pending=pending,
            index=index,
            weights=pending.weights,
            row=SampleRow(
                sampling=sampling,
                seed=completion_seed(seed, index),
                prompt_ids=prompt,
                token_ids=[],
                stop_ids=stops,
            ),
            tracker=_tracker(tokenizer, sampling, always=pending.deliver_delta is not None),
            stop_ids=frozenset(stops),
        )
        for index in range(sampling.n)
    ]


def _tracker(tokenizer: ChatTokenizer | None, sampling: Sampling, *, always: bool) -> TextTracker | None:
    """Return a tracker for requests that stream or have stop strings; decoding token by token costs time."""
    if tokenizer is None or not (always or sampling.stop):
        return None
    return TextTracker(tokenizer, sampling)
