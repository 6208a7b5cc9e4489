"""The canary of a version: a few tokens and the logprobs that the trainer's own model gives them.

A generator that computes others after it has loaded the version does not have the trainer's weights, whatever digests
of single tensors say: a tensor under a wrong name, a layer that kept a packed copy, a wrong rope. It is kept in the
store beside the version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forge.errors import StoreKeyError
from forge.store.objects import delete, get, put

NUM_TOKENS: Final = 32
_KEPT: Final = 8
"""Canaries of so many versions are kept: more than versions of weights are."""


@dataclass(frozen=True, slots=True)
class Canary:
    """`logprobs[t]` is what the trainer gives `token_ids[t]` after those before it; the first is 0."""

    version: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def canary_ids(vocab_size: int, *, most: int = NUM_TOKENS) -> tuple[int, ...]:
    """Return at most so many token ids: spread over the vocabulary, and the same in every process."""
    count = min(NUM_TOKENS, most)
    return tuple((place * place * 7919 + place * 104_729 + 17) % vocab_size for place in range(count))


async def put_canary(name: str, canary: Canary) -> None:
    """Keep the canary of a version of the weights `name`. Call it before the version is published."""
    await put(_key(name, canary.version), (canary.token_ids, canary.logprobs))
    await delete(_key(name, canary.version - _KEPT))


async def get_canary(name: str, version: int) -> Canary | None:
    """Return the canary of a version, or None if its trainer kept none."""
    try:
        token_ids, logprobs = await get(_key(name, version))
    except StoreKeyError:
        return None
    return Canary(version, tuple(token_ids), tuple(logprobs))


def largest_difference(canary: Canary, logprobs: Sequence[float]) -> float:
    """Return by how much a generator's logprobs differ from the trainer's; infinite where one is not a number.

    They may be fewer than the canary's, where the generator's context is short: no token's depends on later ones.
    """
    differences = [abs(own - theirs) for own, theirs in zip(logprobs, canary.logprobs[: len(logprobs)], strict=True)]
    largest = max(differences)
    return largest if all(difference == difference for difference in differences) else float("inf")


def _key(name: str, version: int) -> str:
    return f"canary/{name}/{version}"
