"""`EpisodeWorker`: runs episodes, hundreds at once in a process, against the policy service."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forge.config.episodes import EpisodeLimits
from forge.envs.agent_checks import check_reward
from forge.envs.episode import CLOSE_LIMIT_S, EpisodeProgram, run_episode
from forge.envs.journal import Entry, Journal
from forge.envs.limits import Fault, ReplayMismatch
from forge.envs.state import EpisodeKey, EpisodeState, Policy
from forge.envs.tool_calls import ToolFormat
from forge.errors import ActorFailure, CallTimeout, EngineDead, ForgeError, Overloaded, PromptError, RewardError
from forge.observe import span
from forge.rollout.journal_file import JournalFile
from forge.runtime.endpoints import endpoint
from forge.service.actor import ForgeActor
from forge.types import Completion, Episode, Task

if TYPE_CHECKING:
    from forge.envs.history import ChatCodec
    from forge.generator.actor import Generator
    from forge.service import Service

_log = logging.getLogger("forge.episodes")

GroupReward = Callable[[Task, Sequence[Episode]], Sequence[float] | Awaitable[Sequence[float]]]
"""Returns one number for each episode of a group, which is added to what it earned."""

EVALUATION_SEED = -1
"""Takes the place of the run's seed in evaluations: no rollout has the same seeds."""

_MAX_TRACEBACK = 4000
_ROOM_S = 0.05
"""How long a request waits before it asks again for room in the queues of the generators."""


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


class ServicePolicy:
    """The generators as the policy of one episode: completions that an update of the weights cut short are continued.

    All branches of the episode go to the replica that has its history in the cache, also when they are sampled outside
    the episode's own task, as requests to its HTTP endpoint are.

    Args:
        service: the generators.
        max_seq_len: their context.
        session: the service session of the episode.
    """

    def __init__(self, service: Service[Generator], *, max_seq_len: int, session: str) -> None:
        self._generate = service.generate.options(session=session)
        self.max_seq_len = max_seq_len

    async def sample(self, token_ids: Sequence[int], *, options: Mapping[str, Any], session: str) -> Completion:
        """See `forge.envs.state.Policy.sample`. Branches share the episode's session: they share their prefixes."""
        try:
            completion = await self._ask(token_ids, options)
            while completion.finish_reason == "abort":
                left = options["max_tokens"] - len(completion)
                if left <= 0:
                    return replace(completion, finish_reason="length")
                seed = _seed_of(options["seed"], len(completion))
                changed = {**options, "seed": seed, "max_tokens": left, "min_tokens": 0}
                later = await self._ask((*completion.prompt_ids, *completion.token_ids), changed)
                completion = completion.continued(later)
        except (ActorFailure, EngineDead, CallTimeout) as error:
            raise Fault(f"a generator was lost: {error.message}", kind="generator") from error
        return completion

    async def _ask(self, token_ids: Sequence[int], options: Mapping[str, Any]) -> Completion:
        while True:
            try:
                (completion,) = await self._generate.route(token_ids=list(token_ids), sampling=dict(options))
            except Overloaded:  # other episodes are being answered; the turn's own time limit bounds the wait
                await asyncio.sleep(_ROOM_S)
                continue
            return completion


class EpisodeWorker(ForgeActor):
    """Runs episodes. As a service, several processes share them.

    Args:
        options: what all episodes share.
        codec: the policy's tokenizer.
        policy: the generators.
    """

    def __init__(self, options: EpisodeOptions, codec: ChatCodec, policy: Service[Generator]) -> None:
        self._options, self._codec = options, codec
        self._service = policy
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
    ) -> Episode:
        """Run one episode to its end. `Fault` says that it must be run again.

        A journal from before is replayed where the program is deterministic and no turn of it was sampled by weights
        older than `oldest_version`; otherwise the episode starts over.
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
                    try:
                        return await self._run(
                            task, key, policy, file, entries, evaluation=evaluation, num_restarts=int(file.was_stale)
                        )
                    except ReplayMismatch as mismatch:
                        _log.warning("episode %s starts over: %s", key, mismatch)
                        file.clear()
                        return await self._run(task, key, policy, file, [], evaluation=evaluation, num_restarts=1)
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
        num_restarts: int = 0,
    ) -> Episode:
        options = self._options
        state = EpisodeState(
            task=task,
            key=key,
            limits=options.evaluation_limits if evaluation else options.limits,
            policy=policy,
            codec=self._codec,
            tool_format=options.tool_format,
            sampling=options.evaluation_sampling if evaluation else options.sampling,
            journal=Journal(entries, write=file.write),
            is_evaluation=evaluation,
        )
        try:
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
        )
        return self._kept(whole, policy)

    def _kept(self, episode: Episode, policy: Policy) -> Episode:
        """Return what is kept of an episode."""
        return episode

    @endpoint(concurrent=True)
    async def compare(self, task: Task, episodes: Sequence[Episode]) -> list[float]:
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
        return [check_reward(value, "group") for value in values]

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


def _seed_of(seed: int, position: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
