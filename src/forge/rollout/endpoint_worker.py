"""`EndpointWorker`: runs episodes against another server's endpoint instead of the policy service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

from forge.envs.character_codec import CharacterCodec
from forge.envs.state import Policy
from forge.rollout.endpoint_policy import EndpointAddress, EndpointPolicy, make_client
from forge.rollout.episode_worker import EpisodeOptions, EpisodeWorker
from forge.runtime.endpoints import endpoint
from forge.types import Episode


class EndpointWorker(EpisodeWorker):
    """Runs episodes whose policy is an OpenAI-compatible endpoint.

    Its episodes have the text of the turns and no tokens: those of another server are not known. `num_sampled` of the
    stats is what the endpoint reports, and is absent where it reports nothing.

    Args:
        options: what all episodes share; tool calls have the format `hermes`, limits are in characters.
        address: the endpoint.
    """

    def __init__(self, options: EpisodeOptions, address: EndpointAddress) -> None:
        self._characters = CharacterCodec()
        super().__init__(options, self._characters, cast("Any", None))
        self._address = address
        self._client: Any = None

    @asynccontextmanager
    async def _open_policy(self) -> AsyncIterator[Policy]:
        address = self._address
        if self._client is None:
            self._client = make_client(address.url, api_key=address.api_key, timeout_s=address.timeout_s)
        yield EndpointPolicy(self._client, address.model, self._characters)

    def _kept(self, episode: Episode, policy: Policy) -> Episode:
        return _without_tokens(episode, cast("EndpointPolicy", policy))

    @endpoint(concurrent=True)
    async def close(self) -> None:
        """Cancel all episodes that are under way, and close the connections."""
        await super().close()
        if self._client is not None:
            await self._client.aclose()


def _without_tokens(episode: Episode, policy: EndpointPolicy) -> Episode:
    usage = [policy.usage.get(turn.seed) for turn in episode.turns]
    stats = {name: value for name, value in episode.stats.items() if name not in ("num_sampled", "num_observed")}
    if all(each is not None for each in usage):
        stats["num_sampled"] = float(sum(each.num_sampled for each in usage if each is not None))
    return replace(episode, turns=tuple(turn.without_tokens() for turn in episode.turns), stats=stats)
