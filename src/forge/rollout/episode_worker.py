"""`EpisodeWorker`: runs episodes, hundreds at once in a process, against the policy service."""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from forge.config.episodes import EpisodeLimits
from forge.envs.agent_checks import check_reward
from forge.envs.episode import CLOSE_LIMIT_S, EpisodeProgram, run_episode
from forge.envs.journal import Entry, Journal
from forge.envs.limits import Fault, ReplayMismatch
from forge.envs.state import AgentBinding, EpisodeKey, EpisodeState, Policy
from forge.envs.tool_calls import ToolFormat
from forge.errors import ForgeError, PromptError, RewardError
from forge.observe import span
from forge.rollout.agent_policies import AgentGenerators, AgentOptions, AgentPolicies, Seat, ServicePolicy
from forge.rollout.journal_file import JournalFile
from forge.runtime.endpoints import endpoint
from forge.service.actor import ForgeActor
from forge.types import Episode, Task

if TYPE_CHECKING:
    from forge.envs.history import ChatCodec
    from forge.generator.actor import Generator
    from forge.service import Service

_log = logging.getLogger("forge.episodes")

Added = float | Mapping[str, float]
"""What a group's reward adds to an episode: a number, or numbers by agent where the program declares agents."""

GroupReward = Callable[[Task, Sequence[Episode]], Sequence[Added] | Awaitable[Sequence[Added]]]
"""Returns what is added for each episode of a group."""

EVALUATION_SEED = -1
"""Takes the place of the run's seed in evaluations: no rollout has the same seeds."""

_MAX_TRACEBACK = 4000


@dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """What all episodes of a run share.

    Attributes:
        program: the episode.
        group_reward: compares the episodes of a group; None for no comparison.
        limits: what one episode may use; `evaluation_limits` in evaluations.
        sampling: options of every completion; `evaluation_sampling` in evaluations.
        max_seq_len: the policy's context.
        tool_format: how the policy writes tool calls.
        run_seed: what all seeds derive from.
        agents: how the program's agents are bound, by name; those that are not named are the live policy.
        journal_dir: where journals of deterministic episodes are kept until their group is done with; None for none.
    """

    program: EpisodeProgram
    limits: EpisodeLimits
    evaluation_limits: EpisodeLimits
    sampling: Mapping[str, Any]
    evaluation_sampling: Mapping[str, Any]
    max_seq_len: int
    tool_format: ToolFormat
    run_seed: int
    group_reward: GroupReward | None = None
    journal_dir: str | None = None
    agents: Mapping[str, AgentOptions] = field(default_factory=dict)


class EpisodeWorker(ForgeActor):
    """Runs episodes. As a service, several processes share them.

    Args:
        options: what all episodes share.
        codec: the policy's tokenizer.
        policy: the generators.
        generators: those of agents with a model of their own, by name.
    """

    def __init__(
        self,
        options: EpisodeOptions,
        codec: ChatCodec,
        policy: Service[Generator],
        generators: Mapping[str, AgentGenerators] = MappingProxyType({}),
    ) -> None:
        self._options, self._codec = options, codec
        self._service = policy
        self._agents = AgentPolicies(options.agents, generators)
        self._running: set[asyncio.Task[Any]] = set()

    @endpoint(concurrent=True)
    async def run(
        self,
        task: Task,
        group: int,
        member: int,
        *,
        oldest_version: int = 0,
        evaluation: bool = False,
        seats: Mapping[str, Seat] = MappingProxyType({}),
        temperature: float | None = None,
    ) -> Episode:
        """Run one episode to its end. `Fault` says that it must be run again.

        `seats` says what answers for agents, and which of them learn, where that differs between episodes;
        `temperature` at which turns are sampled, where that is not the one of the options. A journal from before is
        replayed where the program is deterministic and no turn of it was sampled by weights older than
        `oldest_version`, nor at another temperature; otherwise the episode starts over.
        """
        options = self._options
        key = EpisodeKey(EVALUATION_SEED if evaluation else options.run_seed, group, member)
        keeps_journal = options.program.deterministic and not evaluation
        file = JournalFile.of(options.journal_dir if keeps_journal else None, key)
        current = asyncio.current_task()
        assert current is not None
        self._running.add(current)
        try:
            entries = file.read(oldest_version=oldest_version)
            with span("episode", group=group, member=member):
                async with self._open_policy() as policy:
                    sampling = options.evaluation_sampling if evaluation else options.sampling
                    sampling = sampling if temperature is None else {**sampling, "temperature": temperature}
                    run = partial(
                        self._run, task, key, policy, file, seats=seats, evaluation=evaluation, sampling=sampling
                    )
                    try:
                        return await run(entries, num_restarts=int(file.was_stale))
                    except ReplayMismatch as mismatch:
                        _log.warning("episode %s starts over: %s", key, mismatch)
                        file.clear()
                        return await run([], num_restarts=1)
        finally:
            self._running.discard(current)

    @asynccontextmanager
    async def _open_policy(self) -> AsyncIterator[Policy]:
        """Open what answers in one episode."""
        async with self._service.session() as session:
            yield ServicePolicy(self._service, max_seq_len=self._options.max_seq_len, session=session)

    async def _run(
        self,
        task: Task,
        key: EpisodeKey,
        policy: Policy,
        file: JournalFile,
        entries: Sequence[Entry],
        *,
        evaluation: bool,
        seats: Mapping[str, Seat],
        sampling: Mapping[str, Any],
        num_restarts: int = 0,
    ) -> Episode:
        options = self._options
        live = AgentBinding(policy, self._codec, options.tool_format, sampling)
        try:
            async with self._agents.open(live, seats) as bindings:
                state = EpisodeState(
                    task=task,
                    key=key,
                    limits=options.evaluation_limits if evaluation else options.limits,
                    policy=policy,
                    codec=self._codec,
                    tool_format=options.tool_format,
                    sampling=sampling,
                    bindings=bindings,
                    journal=Journal(entries, write=file.write),
                    is_evaluation=evaluation,
                )
                made = await run_episode(options.program, state)
        except (ForgeError, ReplayMismatch) as error:
            if isinstance(error, PromptError):
                raise Fault(f"the policy refused a prompt: {error}", kind="prompt", path=str(key)) from error
            raise
        except (Exception, SystemExit) as error:
            text = traceback.format_exc()[-_MAX_TRACEBACK:]
            message = f"the program raised {type(error).__name__}: {error}\n{text}"
            raise Fault(message, kind="raised", path=f"{options.program.name}, episode {key}") from error
        finally:
            file.close()
        stats = made.counts.as_stats() | {"seconds": made.seconds, "num_replayed": float(made.num_replayed)}
        whole = Episode(
            task,
            made.turns,
            made.score,
            member=key.member,
            turn_rewards=made.turn_rewards,
            outcome=made.outcome,
            stats=stats | {"num_replay_mismatches": float(num_restarts)},
            agents=made.agents,
        )
        return self._kept(whole, policy)

    def _kept(self, episode: Episode, policy: Policy) -> Episode:
        """Return what is kept of an episode."""
        return episode

    @endpoint(concurrent=True)
    async def compare(self, task: Task, episodes: Sequence[Episode]) -> list[Added]:
        """Return what the group's reward adds to each episode; 0 for each without one."""
        function = self._options.group_reward
        if function is None:
            return [0.0] * len(episodes)
        try:
            found = function(task, episodes)
            values = list(await found if inspect.isawaitable(found) else found)
        except ForgeError:
            raise
        except Exception as error:
            text = traceback.format_exc()[-_MAX_TRACEBACK:]
            message = f"the group reward raised {type(error).__name__}: {error}\n{text}"
            raise Fault(message, kind="group_reward", path="episode.group_reward") from error
        if len(values) != len(episodes):
            raise RewardError(
                "the group reward did not return a number for each episode",
                path="episode.group_reward",
                value=len(values),
                rule=f"{len(episodes)} numbers",
                repair="return one for each episode, in their order",
            )
        return [_check_added(value, self._options.program) for value in values]

    @endpoint(concurrent=True)
    async def num_running(self) -> int:
        """Return how many episodes are under way in this process."""
        return len(self._running)

    @endpoint(concurrent=True)
    async def close(self) -> None:
        """Cancel all episodes that are under way, and wait until they have ended, for a limited time."""
        running = [task for task in self._running if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        if running:
            _, stuck = await asyncio.wait(running, timeout=CLOSE_LIMIT_S)
            if stuck:
                _log.warning("%d episodes did not end within %g s after they were cancelled", len(stuck), CLOSE_LIMIT_S)
        await self._agents.close()


def _check_added(value: object, program: EpisodeProgram) -> Added:
    """Return what a group reward gives an episode: a number, or numbers by agent where the program declares agents."""
    if not program.agents:
        return check_reward(value, "group")
    if not isinstance(value, Mapping) or set(value) - set(program.agents):
        raise RewardError(
            "the group reward did not return numbers by agent",
            path="episode.group_reward",
            value=value,
            rule=f"for each episode a mapping with names among {', '.join(program.agents)}",
            repair=f"return {{{program.agents[0]!r}: 1.0}} for each episode",
        )
    return {name: check_reward(each, "group") for name, each in value.items()}
