"""From episodes to what a trainer learns from: tokens as they were sampled, with a value for each.

An episode gives one sample for each row: each path from a root of its turns to a leaf. A single-turn episode has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from forge.config import AlgorithmConfig
from forge.envs.trace import Row, rows_of
from forge.errors import DataError
from forge.rollout.advantage import token_kl
from forge.rollout.agent_views import parts_of
from forge.types import Batch, Episode, Group, Sample

if TYPE_CHECKING:
    from torch import Tensor


def episode_rows(episode: Episode) -> list[Row]:
    """Return the rows of an episode: none where nothing was sampled, or nothing of it was delivered.

    Where it has several agents, those of the first that learns come first: the order of its samples in a batch.
    """
    rows, order = rows_of(episode.turns), [name for name, result in episode.agents.items() if result.learns]
    return [row for name in order for row in rows if row.turns[-1].agent == name] if episode.agents else rows


def plain_samples(episode: Episode, *, number: int) -> list[Sample]:
    """Return the rows of an episode as tokens, for a reference model to score. Sampled tokens have weight 1, once."""
    parts = parts_of(episode)
    return [
        replace(_plain(row, identity=name_of(episode, number)), sequence=episode.member * len(parts) + place)
        for place, part in enumerate(parts)
        for row in episode_rows(part)
    ]


def _plain(row: Row, *, identity: str) -> Sample:
    import torch

    token_ids = torch.tensor(row.token_ids, dtype=torch.int64)
    weights = torch.zeros(len(token_ids))
    for start, end, _, is_counted in row.sampled_spans():
        if is_counted:
            weights[start:end] = 1.0
    return Sample(token_ids, weights, identity=identity)


def make_batch(groups: Sequence[Group], *, mask_truncated: bool = False, with_reference: bool = False) -> Batch:
    """The episodes of several groups in order, with the fields that policy losses read.

    With `mask_truncated`, episodes that were cut off count for nothing. Episodes without a token are left out: there is
    nothing that they did. Where episodes have several agents, the part of each counts as an episode.
    """
    samples: list[Sample] = []
    for group in groups:
        for part in (part for episode in group.episodes for part in parts_of(episode)):
            found = _samples(part, group.number, mask_truncated=mask_truncated, with_reference=with_reference)
            sequence = len(samples) if len(found) > 1 else None  # the rows of an episode are one sequence
            samples += [replace(sample, sequence=sequence, temperature=group.temperature) for sample in found]
    return Batch.of(samples)


def _samples(episode: Episode, number: int, *, mask_truncated: bool, with_reference: bool) -> list[Sample]:
    own = episode.token_advantages
    values: dict[str, Sequence[float]] = {
        "advantages": (episode.advantage,) * episode.num_tokens if own is None else own,
        "old_logprobs": episode.logprobs,
    }
    if with_reference:
        assert episode.ref_logprobs is not None
        values["ref_logprobs"] = episode.ref_logprobs
    found = samples_with(episode, number, values)
    if is_masked(episode, mask_truncated=mask_truncated):
        return [replace(each, loss_weights=each.loss_weights * 0) for each in found]
    return found


def samples_with(episode: Episode, number: int, values: Mapping[str, Sequence[float]]) -> list[Sample]:
    """Return the rows of an episode with fields. `values` has T numbers for each, one for each sampled token; tokens
    that do not count get 0."""
    import torch

    flat = {name: torch.tensor(each, dtype=torch.float32) for name, each in values.items()}
    places = _places(episode)
    found = []
    for row in episode_rows(episode):
        plain = _plain(row, identity=name_of(episode, number))
        fields = {name: torch.zeros(len(plain)) for name in flat}
        for start, end, turn, is_counted in row.sampled_spans():
            if is_counted:
                place = places[turn.index]
                for name, field in fields.items():
                    field[start:end] = flat[name][place : place + len(turn)]
        found.append(replace(plain, fields=fields))
    return found


def _places(episode: Episode) -> dict[int, int]:
    """Return where each turn's tokens begin among the T sampled tokens of the episode."""
    places, place = {}, 0
    for turn in episode.turns:
        places[turn.index] = place
        place += len(turn)
    return places


def token_costs(episode: Episode, algorithm: AlgorithmConfig, *, number: int) -> list[float]:
    """Return what each token's divergence from the reference costs; 0 where it is not charged to tokens."""
    if not algorithm.charges_tokens:
        return [0.0] * episode.num_tokens
    kl = algorithm.kl
    if episode.ref_logprobs is None:
        raise DataError(
            "an episode has no logprobs of the reference model",
            path=name_of(episode, number),
            value=None,
            rule="needed with algorithm.kl.place `reward`",
            repair="roll groups out with a reference model",
        )
    return [
        kl.coefficient * each for each in token_kl(episode.logprobs, episode.ref_logprobs, kl.estimator, clamp=kl.clamp)
    ]


def is_masked(episode: Episode, *, mask_truncated: bool) -> bool:
    """Whether an episode counts for nothing because it was cut off."""
    return mask_truncated and episode.is_truncated


def with_field(batch: Batch, name: str, values: Sequence[Tensor]) -> Batch:
    """The batch with one more value for each token; one tensor for each sample."""
    import torch

    return replace(batch, fields={**batch.fields, name: torch.cat(list(values))})


def sampled_values(
    episode: Episode, rows: Sequence[Tensor], *, others: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Return values of an episode's T sampled tokens from those of its rows; where a token counts in none, that of
    `others`, or 0."""
    found = [0.0] * episode.num_tokens if others is None else list(others)
    places = _places(episode)
    for row, values in zip(episode_rows(episode), rows, strict=True):
        for start, end, turn, is_counted in row.sampled_spans():
            if is_counted:
                place = places[turn.index]
                found[place : place + len(turn)] = values[start:end].tolist()
    return tuple(found)


def logprobs_by_episode(groups: Sequence[Group], logprobs: Sequence[Tensor]) -> Mapping[tuple[int, int], list[float]]:
    """Return the trainer's logprobs of sampled tokens, by group number and member; `logprobs` has a tensor per sample
    of the groups' batch."""
    found: dict[tuple[int, int], list[float]] = {}
    each = iter(logprobs)
    for group in groups:
        for episode in group.episodes:
            rows = [next(each) for _ in episode_rows(episode)]
            if rows:
                found[group.number, episode.member] = list(sampled_values(episode, rows))
    return found


def name_of(episode: Episode, number: int) -> str:
    """What messages call an episode."""
    return f"group {number}, sample {episode.member} ({episode.task.id})"
