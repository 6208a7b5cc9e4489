"""What answers for the agents of an episode: the live policy, generators of their own, or another server's endpoint."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from forge.config.agents import AgentLimits
from forge.envs.character_codec import CharacterCodec
from forge.envs.limits import Fault
from forge.envs.state import AgentBinding, Policy
from forge.envs.tool_calls import ToolFormat
from forge.errors import ActorFailure, CallTimeout, EngineDead, Overloaded
from forge.rollout.endpoint_policy import EndpointAddress, EndpointPolicy, make_client
from forge.types import Completion

if TYPE_CHECKING:
    from forge.envs.history import ChatCodec
    from forge.generator.actor import Generator
    from forge.service import Service

_ROOM_S = 0.05
"""How long a request waits before it asks again for room in the queues of the generators."""


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """How one agent of a run's episodes is bound.

    Attributes:
        learns: whether its turns are trained on.
        label: what answers for it, in words: `live` for the policy that is trained.
        limits: what it alone may use.
        address: the endpoint that answers; None where generators do.
        version: the pinned version of the policy that answers; None for the live one.
        adapter: the adapter of the policy's generators that answers; None for the live policy.
    """

    learns: bool = True
    label: str = "live"
    limits: AgentLimits = field(default_factory=AgentLimits)
    address: EndpointAddress | None = None
    version: int | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Seat:
    """What answers for one agent in one episode, where that differs between episodes.

    Attributes:
        learns: whether its turns are trained on.
        label: what answers, in words: `live` for the policy that is trained.
        version: the version of the policy that answers; None for no fixed one.
        generators: the name of the generators that answer; None for the policy's.
    """

    learns: bool
    label: str
    version: int | None = None
    generators: str | None = None


@dataclass(frozen=True, slots=True)
class AgentGenerators:
    """Generators of one agent's own model, and how its conversations become tokens."""

    service: Service[Generator]
    codec: ChatCodec
    max_seq_len: int
    tool_format: ToolFormat


class ServicePolicy:
    """The generators as the policy of one episode: completions that an update of the weights cut short are continued.

    All branches of the episode go to the replica that has its history in the cache, also when they are sampled outside
    the episode's own task, as requests to its HTTP endpoint are.

    Args:
        service: the generators.
        max_seq_len: their context.
        session: the service session of the episode.
        version: the pinned version that answers; None for the live weights.
        adapter: the adapter that answers; None for the live one, if there is one.
    """

    def __init__(
        self,
        service: Service[Generator],
        *,
        max_seq_len: int,
        session: str,
        version: int | None = None,
        adapter: str | None = None,
    ) -> None:
        self._service, self._session, self._version, self._adapter = service, session, version, adapter
        self._generate = service.generate.options(session=session)
        self.max_seq_len = max_seq_len

    def at_version(self, version: int) -> ServicePolicy:
        """Return the same generators, in the same session, with a pinned version of the weights."""
        return ServicePolicy(self._service, max_seq_len=self.max_seq_len, session=self._session, version=version)

    def with_adapter(self, name: str) -> ServicePolicy:
        """Return the same generators, in the same session, with one of their adapters."""
        return ServicePolicy(self._service, max_seq_len=self.max_seq_len, session=self._session, adapter=name)

    async def sample(self, token_ids: Sequence[int], *, options: Mapping[str, Any], session: str) -> Completion:
        """See `forge.envs.state.Policy.sample`. Branches share the episode's session: they share their prefixes."""
        try:
            completion = await self._ask(token_ids, options)
            while completion.finish_reason == "abort":
                left = options["max_tokens"] - len(completion)
                if left <= 0:
                    return replace(completion, finish_reason="length")
                seed = continuation_seed(options["seed"], len(completion))
                changed = {**options, "seed": seed, "max_tokens": left, "min_tokens": 0}
                later = await self._ask((*completion.prompt_ids, *completion.token_ids), changed)
                completion = completion.continued(later)
        except (ActorFailure, EngineDead, CallTimeout) as error:
            raise Fault(f"a generator was lost: {error.message}", kind="generator") from error
        return completion

    async def _ask(self, token_ids: Sequence[int], options: Mapping[str, Any]) -> Completion:
        request: dict[str, Any] = {"token_ids": list(token_ids), "sampling": dict(options)}
        if self._version is not None:
            request["version"] = self._version
        if self._adapter is not None:
            request["sampling"]["adapter"] = self._adapter
        while True:
            try:
                (completion,) = await self._generate.route(**request)
            except Overloaded:  # other episodes are being answered; the turn's own time limit bounds the wait
                await asyncio.sleep(_ROOM_S)
                continue
            return completion


def continuation_seed(seed: int, position: int) -> int:
    """Return the seed with which a turn continues after so many tokens, when an update has cut it short."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class FixedPolicy:
    """A policy that is not trained. Its completions have no weight versions: those of a run are the live policy's."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.max_seq_len = policy, policy.max_seq_len

    async def sample(self, token_ids: Sequence[int], *, options: Mapping[str, Any], session: str) -> Completion:
        """See `forge.envs.state.Policy.sample`."""
        return replace(await self._policy.sample(token_ids, options=options, session=session), versions=())


class AgentPolicies:
    """Binds the agents of episodes, in one worker process.

    Args:
        agents: how they are bound, by name.
        generators: those of agents with a model of their own, by name.
    """

    def __init__(self, agents: Mapping[str, AgentOptions], generators: Mapping[str, AgentGenerators]) -> None:
        self._agents, self._generators = agents, generators
        self._clients: dict[str, Any] = {}

    @asynccontextmanager
    async def open(
        self, live: AgentBinding, seats: Mapping[str, Seat] = MappingProxyType({})
    ) -> AsyncIterator[dict[str, AgentBinding]]:
        """Bind the agents of one episode; `live` is the policy that is trained, `seats` is what differs in this one."""
        async with AsyncExitStack() as stack:
            yield {name: await self._bind(name, live, seats.get(name), stack) for name in self._agents}

    async def _bind(self, name: str, live: AgentBinding, seat: Seat | None, stack: AsyncExitStack) -> AgentBinding:
        options = self._agents[name]
        own = replace(live, learns=options.learns, label=options.label, limits=options.limits)
        version, generators = options.version, self._generators.get(name)
        if seat is not None:
            own = replace(own, learns=seat.learns, label=seat.label)
            version, generators = seat.version, self._generators[seat.generators] if seat.generators else None
        elif options.address is not None:
            codec = CharacterCodec()
            policy = FixedPolicy(EndpointPolicy(self._client(name, options.address), options.address.model, codec))
            return replace(own, policy=policy, codec=codec, tool_format="hermes", has_tokens=False)
        if generators is not None:
            session = await stack.enter_async_context(generators.service.session())
            answers = ServicePolicy(generators.service, max_seq_len=generators.max_seq_len, session=session)
            return replace(own, policy=FixedPolicy(answers), codec=generators.codec, tool_format=generators.tool_format)
        if version is not None:
            assert isinstance(live.policy, ServicePolicy)  # generators answer: endpoints have no versions
            return replace(own, policy=FixedPolicy(live.policy.at_version(version)))
        if seat is None and options.adapter is not None:
            assert isinstance(live.policy, ServicePolicy)
            return replace(own, policy=FixedPolicy(live.policy.with_adapter(options.adapter)))
        return own

    def _client(self, name: str, address: EndpointAddress) -> Any:
        if name not in self._clients:
            self._clients[name] = make_client(address.url, api_key=address.api_key, timeout_s=address.timeout_s)
        return self._clients[name]

    async def close(self) -> None:
        """Close the connections to endpoints."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()
