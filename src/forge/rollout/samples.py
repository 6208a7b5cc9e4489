"""From episodes to what a trainer learns from: tokens as they were sampled, with a value for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from forge.types import Batch, Completion, Episode, Group, Sample

if TYPE_CHECKING:
    from torch import Tensor


def sampler_logprobs(completion: Completion) -> tuple[float, ...]:
    """Return the sampler's logprobs, before truncation where it has them: a trainer computes the same.

    With top_p, top_k, min_p or penalties the policy that is learned is the one without them.
    """
    return completion.logprobs if completion.full_logprobs is None else completion.full_logprobs


def sequence(episode: Episode, *, number: int) -> Sample:
    """Prompt and completion as tokens, for a reference model to score."""
    import torch

    completion = episode.completion
    token_ids = torch.tensor(completion.prompt_ids + completion.token_ids, dtype=torch.int64)
    weights = torch.zeros(len(token_ids))
    weights[len(completion.prompt_ids) :] = 1.0
    return Sample(token_ids, weights, identity=name_of(episode, number))


def make_batch(groups: Sequence[Group], *, mask_truncated: bool = False, with_reference: bool = False) -> Batch:
    """The episodes of several groups in order, with the fields that policy losses read.

    With `mask_truncated`, completions that were cut off by length count for nothing. Completions without a token are
    left out: there is nothing that they did.
    """
    samples = [
        _sample(episode, group.number, mask_truncated=mask_truncated, with_reference=with_reference)
        for group in groups
        for episode in group.episodes
        if len(episode.completion)
    ]
    return Batch.of(samples)


def _sample(episode: Episode, number: int, *, mask_truncated: bool, with_reference: bool) -> Sample:
    import torch

    completion = episode.completion
    plain = sequence(episode, number=number)
    start = len(completion.prompt_ids)

    def spread(values: Sequence[float] | float) -> Tensor:
        field = torch.zeros(len(plain))
        field[start:] = torch.tensor(values, dtype=torch.float32)
        return field

    own = episode.token_advantages
    fields = {
        "advantages": spread(episode.advantage if own is None else own),
        "old_logprobs": spread(sampler_logprobs(completion)),
    }
    if with_reference:
        assert episode.ref_logprobs is not None
        fields["ref_logprobs"] = spread(episode.ref_logprobs)
    weights = plain.loss_weights
    if is_masked(episode, mask_truncated=mask_truncated):
        weights = torch.zeros_like(weights)
    return replace(plain, loss_weights=weights, fields=fields)


def is_masked(episode: Episode, *, mask_truncated: bool) -> bool:
    """Whether a completion counts for nothing because it was cut off by length."""
    return mask_truncated and episode.completion.finish_reason == "length"


def with_field(batch: Batch, name: str, values: Sequence[Tensor]) -> Batch:
    """The batch with one more value for each token; one tensor for each sample."""
    import torch

    return replace(batch, fields={**batch.fields, name: torch.cat(list(values))})


def completion_logprobs(groups: Sequence[Group], logprobs: Sequence[Tensor]) -> Mapping[tuple[int, int], list[float]]:
    """Return the trainer's logprobs of tokens, by group number and index; `logprobs` has a tensor per sample."""
    found: dict[tuple[int, int], list[float]] = {}
    each = iter(logprobs)
    for group in groups:
        for episode in group.episodes:
            if len(episode.completion):
                key = (group.number, episode.completion.index)
                found[key] = next(each)[len(episode.completion.prompt_ids) :].tolist()
    return found


def name_of(episode: Episode, number: int) -> str:
    """What messages call an episode."""
    return f"group {number}, sample {episode.completion.index} ({episode.prompt.id})"
