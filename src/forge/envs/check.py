"""Checks of an environment without a model: does it run, repeat itself, clean up, and reward the right things?

report = await check_env(program, tasks, oracle=solutions)
assert report.is_ok, report.checks
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from forge.envs.character_codec import CharacterCodec, character_limits
from forge.envs.check_agents import (
    AgentPolicy,
    AnswerFunction,
    Oracle,
    OracleAnswers,
    act_randomly,
    do_nothing,
    takes_messages,
)
from forge.envs.check_findings import make_checks
from forge.envs.check_leaks import GRACE_S, OpenResources, cancel_since, pending_since, resources_after
from forge.envs.check_records import AgentName, AgentSummary, CheckedEpisode, EnvReport
from forge.envs.episode import EpisodeProgram, EpisodeRun, run_episode
from forge.envs.journal import Journal
from forge.envs.limits import EpisodeLimits, Fault
from forge.envs.state import EpisodeKey, EpisodeState
from forge.errors import OptionError, RewardError
from forge.types import Task

_SHOWN: Final = 120
_MAX_TRACEBACK: Final = 4000


async def check_env(
    program: EpisodeProgram,
    tasks: Sequence[Task],
    *,
    oracle: Oracle | None = None,
    limits: EpisodeLimits | None = None,
    seed: int = 0,
    max_reward: float | None = None,
    grace_s: float = GRACE_S,
) -> EnvReport:
    """Run agents that need no model on every task, each episode twice, one after the other, and report what happened.

    Args:
        program: the episode to check.
        tasks: what is tried.
        oracle: a function (task) -> list of answers, or (task, messages) -> the next answer.
        limits: what one episode may use. Limits of tokens do not apply, because there is no tokenizer.
        seed: what random choices derive from.
        max_reward: the reward of a perfect episode; None for the highest that any agent got.
        grace_s: how long things may take to go after an episode has ended.
    """
    if not tasks:
        raise OptionError(
            "there is no task to check",
            path="tasks",
            value=(),
            rule="at least one task",
            repair="give at least one",
        )
    players: dict[AgentName, Callable[[Task], AnswerFunction]] = {
        "nothing": lambda task: do_nothing,
        "random": lambda task: act_randomly,
    }
    if oracle is not None:
        takes_messages(oracle)  # refuses what cannot be called
        players["oracle"] = lambda task: OracleAnswers(oracle, task)
    bounds = character_limits(limits or EpisodeLimits())
    agents: list[AgentSummary] = []
    leaks: list[tuple[str, str]] = []
    running = asyncio.all_tasks()
    try:
        for number, (name, make) in enumerate(players.items()):
            found = []
            before: OpenResources | None = None
            for group, task in enumerate(tasks):
                key = EpisodeKey(seed, group, number)
                first = await _run(program, task, key, make(task), name, bounds, grace_s)
                if before is None:  # what the first episode leaves open may be a cache that later ones use
                    before = OpenResources.now()
                second = await _run(program, task, key, make(task), name, bounds, grace_s)
                pending = first.pending + second.pending
                found.append(replace(first, difference=difference(first, second), pending=pending))
            assert before is not None
            leaks += (await resources_after(before, grace_s=grace_s)).since(before)
            agents.append(AgentSummary(name, tuple(found)))
    finally:
        await cancel_since(running, grace_s=grace_s)
        servers = sys.modules.get("forge.envs.external.processes")  # where nothing imported it, there are none
        if servers is not None:
            await servers.close_servers()
    checks = make_checks(agents, is_deterministic=program.deterministic, leaks=leaks, max_reward=max_reward)
    return EnvReport(program.name, len(tasks), tuple(agents), checks)


async def _run(
    program: EpisodeProgram,
    task: Task,
    key: EpisodeKey,
    answer: AnswerFunction,
    agent: AgentName,
    limits: EpisodeLimits,
    grace_s: float,
) -> CheckedEpisode:
    """Run one episode. Whatever it raises is part of what was found."""
    codec = CharacterCodec()
    state = EpisodeState(
        task=task,
        key=key,
        limits=limits,
        policy=AgentPolicy(answer, codec),
        codec=codec,
        tool_format="hermes",
        sampling={},
        journal=Journal(),
    )
    loop = asyncio.get_running_loop()
    before, began = asyncio.all_tasks(), loop.time()
    run: EpisodeRun | None = None
    kind: Literal["raised", "fault", "reward"] | None = None
    error = ""
    try:
        run = await run_episode(program, state)
    except RewardError as failure:
        kind, error = "reward", str(failure)
    except Fault as fault:
        kind, error = "fault", f"fault ({fault.kind}): {fault}"
    except Exception:  # noqa: BLE001 - whatever a program raises is reported
        kind, error = "raised", traceback.format_exc()[-_MAX_TRACEBACK:]
    seconds = loop.time() - began
    pending = await pending_since(before, grace_s=grace_s)
    counts = state.counts
    return CheckedEpisode(
        agent,
        key.group,
        task.id,
        transcript(state, run, kind),
        outcome=None if run is None else run.outcome,
        reward=None if run is None else run.score.reward,
        parts={} if run is None else run.score.parts,
        num_turns=counts.num_turns,
        num_tool_calls=counts.num_tool_calls,
        tool_errors=dict(counts.tool_errors),
        seconds=seconds,
        error_kind=kind,
        error=error,
        pending=tuple(pending),
        num_missing=answer.num_missing if isinstance(answer, OracleAnswers) else 0,
    )


def transcript(state: EpisodeState, run: EpisodeRun | None, error_kind: str | None) -> tuple[str, ...]:
    """Return everything that an episode with the same seed has to repeat, line by line."""
    turns = state.turns if run is None else run.turns
    turn_rewards: Mapping[int, float] = state.turn_rewards if run is None else run.turn_rewards
    lines = []
    for turn in turns:
        branch = f" of branch {'.'.join(map(str, turn.path))}" if turn.path else ""
        label = f"turn {turn.index}{branch}"
        lines += [f"{label}, {each.get('role')} message: {_plain(each.get('content'))}" for each in turn.messages]
        lines.append(f"{label}, answer: {turn.text}")
        if turn.index in turn_rewards:
            lines.append(f"{label}, reward: {turn_rewards[turn.index]!r}")
    rewards = state.rewards if run is None else run.score.parts
    lines += [f"reward {name!r}: {value!r}" for name, value in sorted(rewards.items())]
    lines.append(f"outcome: {error_kind or state.outcome}")
    return tuple(lines)


def difference(first: CheckedEpisode, second: CheckedEpisode) -> str | None:
    """Return the first difference of two runs of an episode; None if there is none."""
    if first.transcript == second.transcript:
        return None
    pairs = zip(first.transcript, second.transcript, strict=False)
    one, other = next((a, b) for a, b in pairs if a != b)  # there is one: each ends with its outcome
    label, _, value = one.partition(": ")
    if other.startswith(f"{label}: "):
        return f"{label}: {_short(value)}, then {_short(other[len(label) + 2 :])}"
    return f"{_short(one)}, then {_short(other)}"


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, default=str)


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
