"""Batches of episodes that branch: several samples per sequence, whose common prefixes contain sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forge.types import Batch, Sample

FIELDS = ("advantages", "old_logprobs", "ref_logprobs")


@dataclass(frozen=True)
class Turn:
    """Tokens that were read and then sampled, with values for each, after those of its parent."""

    parent: int | None
    token_ids: Tensor
    weights: Tensor
    fields: dict[str, Tensor]


class Maker:
    """Makes turns of random tokens. Weights add up without rounding; where one is 0, fields are NaN."""

    def __init__(self, seed: int, *, vocab: int) -> None:
        self.chance = torch.Generator().manual_seed(seed)
        self.vocab = vocab

    def below(self, end: int) -> int:
        return int(torch.randint(end, (1,), generator=self.chance))

    def tokens(self, count: int) -> Tensor:
        return torch.randint(self.vocab, (count,), generator=self.chance)

    def turn(self, parent: int | None, read: Tensor, num_sampled: int) -> Turn:
        ids = torch.cat([read, self.tokens(num_sampled)])
        weights = torch.zeros(len(ids))
        weights[len(read) :] = torch.randint(4, 13, (num_sampled,), generator=self.chance) / 8
        fields = {"advantages": torch.randn(len(ids), generator=self.chance)}
        for name in FIELDS[1:]:
            fields[name] = torch.randn(len(ids), generator=self.chance) * 0.3 - 4.0
        for values in fields.values():
            values[weights == 0] = float("nan")
        return Turn(parent, ids, weights, fields)

    def episode(self, prompt: Tensor, *, num_turns: int, num_roots: int = 1) -> list[Turn]:
        """A prompt's first turn, and others that extend a random one before them or start at a new root."""
        turns = [self.turn(None, prompt, 1 + self.below(6))]
        for index in range(1, num_turns):
            if index < num_roots:
                turns.append(self.turn(None, torch.cat([prompt[:3], self.tokens(4)]), 1 + self.below(6)))
            else:
                turns.append(self.turn(self.below(index), self.tokens(self.below(4)), 1 + self.below(6)))
        return turns


def samples_of(turns: Sequence[Turn], sequence: int | None) -> list[Sample]:
    """One sample per leaf; a turn that several have counts in the first."""
    parents, counted, samples = {turn.parent for turn in turns}, set[int](), []
    for leaf in (index for index in range(len(turns)) if index not in parents):
        path, index = list[int](), leaf
        while index is not None:
            path.insert(0, index)
            index = turns[index].parent
        weights = [torch.zeros(len(turns[at].token_ids)) if at in counted else turns[at].weights for at in path]
        counted.update(path)
        samples.append(
            Sample(
                torch.cat([turns[at].token_ids for at in path]),
                torch.cat(weights),
                {name: torch.cat([turns[at].fields[name] for at in path]) for name in FIELDS},
                identity=f"episode {sequence}, leaf {leaf}",
                sequence=sequence,
            )
        )
    return samples


def episodes(seed: int, *, vocab: int, groups: Sequence[Sequence[int]], num_roots: int = 1) -> Batch:
    """Groups of episodes with so many turns each. All prompts begin with the same system prompt."""
    maker = Maker(seed, vocab=vocab)
    system, samples = maker.tokens(5), list[Sample]()
    number = 0
    for group in groups:
        prompt = torch.cat([system, maker.tokens(4 + maker.below(9))])
        for num_turns in group:
            samples += samples_of(maker.episode(prompt, num_turns=num_turns, num_roots=num_roots), number)
            number += 1
    return Batch.of(samples)


def in_order(batch: Batch, order: Sequence[int]) -> Batch:
    samples = list(batch.samples())
    return Batch.of([samples[index] for index in order])


def each_alone(batch: Batch) -> Batch:
    """The same samples, each a sequence of its own."""
    return replace(batch, sequences=())
