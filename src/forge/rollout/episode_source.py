"""Groups of episodes that a program makes: one coroutine per group, any number of them at once."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from forge.config import EpisodeConfig
from forge.envs.limits import Fault
from forge.errors import ActorFailure, CallTimeout, GroupFailed, RolloutError
from forge.observe import span
from forge.observe.fault_records import record_fault
from forge.rollout.agent_policies import Seat
from forge.rollout.agent_views import with_results
from forge.rollout.episode_worker import Added
from forge.rollout.journal_file import remove_journals
from forge.rollout.league import League
from forge.rollout.progress import RolloutProgress
from forge.rollout.references import References
from forge.rollout.rollouter import Prompts
from forge.types import AgentResult, Episode, Group, Score, Task

_log = logging.getLogger("forge.episodes")

T = TypeVar("T")
CompareFunction = Callable[[Task, Sequence[Episode]], Awaitable[list[Added]]]


class RunFunction(Protocol):
    """Runs one episode: `EpisodeWorker.run`, routed to a worker."""

    def __call__(
        self,
        task: Task,
        group: int,
        member: int,
        *,
        oldest_version: int = ...,
        evaluation: bool = ...,
        seats: Mapping[str, Seat] = ...,
        temperature: float | None = ...,
    ) -> Awaitable[Episode]: ...


class EpisodeSource(RolloutProgress):
    """Makes groups of episodes, and runs those again that a fault ended.

    Args:
        prompts: the tasks, by number.
        run: runs one episode.
        compare: what the group's reward adds to each episode; None without one.
        references: scores episodes with the reference model.
        config: the section `episode`.
        group_size: how many episodes a group has.
        journal_dir: where workers keep journals; None for none.
        league: draws the opponents of groups; None where agents are the same in all.
    """

    def __init__(
        self,
        prompts: Prompts,
        *,
        run: RunFunction,
        compare: CompareFunction | None,
        references: References,
        config: EpisodeConfig,
        group_size: int,
        journal_dir: Path | None = None,
        league: League | None = None,
    ) -> None:
        super().__init__()
        self.league = league
        self._prompts, self._run, self._compare, self._references = prompts, run, compare, references
        self._config, self._group_size, self._journal_dir = config, group_size, journal_dir
        self._faults: Counter[str] = Counter()
        self._evaluation_faults: Counter[str] = Counter()
        self._num_failed_in_a_row = 0
        self._temperature: float | None = None

    def sample_at(self, temperature: float) -> None:
        """Sample the groups that begin from now on at this temperature. Before the first call it is the one that the
        workers were made with."""
        self._temperature = temperature

    async def roll_out(self, number: int, *, oldest_version: int = 0) -> Group:
        """Run the episodes of a group at the same time, then compare them with each other and with the reference."""
        epoch, task = self._prompts.at(number)
        temperature = self._temperature
        chosen: dict[str, Any] = {"oldest_version": oldest_version}
        chosen |= {} if temperature is None else {"temperature": temperature}
        try:
            with span("rollout", group=number), self.generating():
                self.enter(number, f"runs {self._group_size} episodes")
                try:
                    episodes = await self._members(number, task, **chosen)
                except (Fault, ActorFailure, CallTimeout) as error:
                    raise self._failed(task, "an episode ended in a fault", error) from error
            self.count(len(episodes), sum(episode.num_tokens for episode in episodes))
            self.enter(number, "scoring")
            with span("score", group=number):
                added = await self._compared(number, task, episodes)
                episodes = await self._references.compared(episodes, number=number, temperature=temperature)
        finally:
            self.leave(number)
        self._num_failed_in_a_row = 0
        finished = tuple(map(self._references.charged, _with_rewards(episodes, added)))
        group = Group(number, epoch, finished, temperature)
        if self.league is not None:
            self.league.finished(group)
        return group

    async def run_member(
        self, number: int, member: int, task: Task, *, evaluation: bool = False, **options: Any
    ) -> Episode:
        """Run one episode, again after faults, `episode.max_retries` times. Then the last fault is raised."""
        what = f"{'held-out ' if evaluation else ''}episode {member} of group {number}"
        if evaluation:
            options["evaluation"] = True
        if self.league is not None:
            match = self.league.evaluation_match(number) if evaluation else self.league.match(number)
            options["seats"] = self.league.seats(match)
        attempt = partial(self._run, task, number, member, **options)
        return await self._without_faults(attempt, what, self._evaluation_faults if evaluation else self._faults)

    async def evaluate(self, number: int, task: Task, *, num_members: int) -> list[Episode]:
        """Run the episodes of a held-out task, and add what the group's reward gives. Faults are counted apart from
        those of rollouts; one that remains is raised."""
        try:
            async with asyncio.TaskGroup() as tasks:  # one that fails ends the others
                running = [
                    tasks.create_task(self.run_member(number, member, task, evaluation=True))
                    for member in range(num_members)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        episodes = [each.result() for each in running]
        if self._compare is None:
            return episodes
        what = f"the reward of held-out group {number}"
        compare = partial(self._compare, task, episodes)
        return _with_rewards(episodes, await self._without_faults(compare, what, self._evaluation_faults))

    async def _compared(self, number: int, task: Task, episodes: Sequence[Episode]) -> list[Added] | None:
        """Return what the group's reward adds to each episode. Faults of it do not end the episodes: only the
        comparison is made again."""
        compare = self._compare
        if compare is None:
            return None
        what = f"the reward of group {number}"
        try:
            return await self._without_faults(lambda: compare(task, episodes), what, self._faults)
        except (Fault, ActorFailure, CallTimeout) as error:
            raise self._failed(task, "the group's reward failed", error) from error

    async def _without_faults(self, attempt: Callable[[], Awaitable[T]], what: str, faults: Counter[str]) -> T:
        num_left = self._config.max_retries
        while True:
            try:
                return await attempt()
            except (Fault, ActorFailure, CallTimeout) as error:
                kind = error.kind if isinstance(error, Fault) else "worker"
                faults[kind] += 1
                _log.warning("%s ended in a fault (%s): %s", what, kind, error.message)
                record_fault("episode", error, where=what)
                if num_left == 0:
                    raise
                num_left -= 1

    async def _members(self, number: int, task: Task, **options: Any) -> list[Episode]:
        num_done = 0

        async def one(member: int) -> Episode:
            nonlocal num_done
            episode = await self.run_member(number, member, task, **options)
            num_done += 1
            self.update(number, f"runs {self._group_size - num_done} of {self._group_size} episodes")
            return episode

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(one(member)) for member in range(self._group_size)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in running]

    def _failed(self, task: Task, what: str, error: Fault | ActorFailure | CallTimeout) -> Exception:
        self._num_failed_in_a_row += 1
        most = self._config.max_failed_groups
        if self._num_failed_in_a_row < most:
            return GroupFailed(f"{what} {self._config.max_retries + 1} times: {error.message}", path=task.id)
        return RolloutError(
            f"{most} groups in a row failed by faults; the last one: {error.message}",
            path="episode.max_failed_groups",
            value=most,
            rule=f"fewer than {most} in a row; faults so far: {dict(self._faults)}",
            repair="repair what the message names (a program that raises, a tool server, a sandbox); then resume",
        )

    def take_metrics(self) -> dict[str, float]:
        """Return the faults since the last call, by kind."""
        found = {f"episode/faults/{kind}": float(count) for kind, count in sorted(self._faults.items())}
        found["episode/num_faults"] = float(self._faults.total())
        self._faults.clear()
        return found | ({} if self.league is None else self.league.metrics())

    def take_evaluation_faults(self) -> dict[str, int]:
        """Return the faults of held-out episodes since the last call, by kind."""
        found = dict(sorted(self._evaluation_faults.items()))
        self._evaluation_faults.clear()
        return found

    def forget(self, numbers: Sequence[int]) -> None:
        """Remove the journals of groups that were trained on or dropped."""
        if self._journal_dir is not None:
            remove_journals(self._journal_dir, numbers)


def _with_rewards(episodes: list[Episode], added: Sequence[Added] | None) -> list[Episode]:
    if added is None:
        return episodes
    return [_with_reward(each, value) for each, value in zip(episodes, added, strict=True)]


def _with_reward(episode: Episode, value: Added) -> Episode:
    if isinstance(value, Mapping):
        results = {name: _with_agent_reward(each, value.get(name)) for name, each in episode.agents.items()}
        return with_results(episode, results)
    return replace(episode, score=_with_added(episode.score, value))


def _with_agent_reward(result: AgentResult, value: float | None) -> AgentResult:
    return result if value is None else replace(result, score=_with_added(result.score or Score(0.0), value))


def _with_added(score: Score, value: float) -> Score:
    unshaped = None if score.unshaped is None else score.unshaped + value
    parts = {**score.parts, "group": score.parts.get("group", 0.0) + value}
    return replace(score, reward=score.reward + value, parts=parts, unshaped=unshaped)
