"""Versions that a trainer has published: whether they can still be read, and how to take one back."""

from __future__ import annotations


async def readable_digest(name: str, version: int) -> str | None:
    """Return the digest of a version that is complete and whose memory is still there; None where there is none."""
    from forge.store import Weights

    infos = await Weights(name).versions()
    return next((info.digest for info in infos if info.number == version and not info.is_lost), None)


async def take_back(name: str, version: int) -> None:
    """Take a version back that is incomplete or lost, so that its number can be published again."""
    from forge.store import Weights

    await Weights(name).rewind(to=version - 1)
