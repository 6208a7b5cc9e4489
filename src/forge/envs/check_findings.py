"""Verdicts about an environment, from the episodes of its check. All of it is pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from forge.envs.check_leaks import counted
from forge.envs.check_records import AgentSummary, Check, CheckedEpisode

_SHOWN: Final = 3
_CLOSE: Final = 1e-9


def make_checks(
    agents: Sequence[AgentSummary],
    *,
    is_deterministic: bool,
    leaks: Sequence[tuple[str, str]],
    max_reward: float | None = None,
) -> tuple[Check, ...]:
    """Return all verdicts.

    Args:
        agents: who played, with their episodes.
        is_deterministic: whether the program declares it.
        leaks: kind and label of what was left open by episodes after the first.
        max_reward: the reward of a perfect episode; None for the highest that any agent got on the task.
    """
    episodes = [episode for agent in agents for episode in agent.episodes]
    by_name = {agent.name: agent for agent in agents}
    return (
        _runs(episodes),
        _rewards(episodes),
        _determinism(episodes, is_deterministic=is_deterministic),
        _leaks(episodes, leaks),
        _signal(episodes),
        _nothing(by_name["nothing"], episodes),
        _oracle(by_name.get("oracle"), episodes, max_reward),
        _limits(agents),
    )


def _runs(episodes: Sequence[CheckedEpisode]) -> Check:
    failed = [each for each in episodes if each.error_kind in ("raised", "fault")]
    if not failed:
        return Check("runs", "pass", f"no episode raised or ended in a fault ({len(episodes)} episodes)")
    return Check("runs", "fail", f"{_of(failed, episodes)} raised or ended in a fault", _grouped(failed))


def _rewards(episodes: Sequence[CheckedEpisode]) -> Check:
    failed = [each for each in episodes if each.error_kind == "reward"]
    if not failed:
        return Check("rewards", "pass", "every episode that ended got a finite reward")
    return Check("rewards", "fail", f"{_of(failed, episodes)} got no valid reward", _grouped(failed))


def _determinism(episodes: Sequence[CheckedEpisode], *, is_deterministic: bool) -> Check:
    differing = [each for each in episodes if each.difference is not None]
    if not differing:
        return Check("determinism", "pass", "the same seed gives the same messages, rewards and outcome")
    detail = tuple(f"{each.agent} on {each.task_id}: {each.difference}" for each in differing[:_SHOWN])
    message = f"{_of(differing, episodes)} differ when they are run again with the same seed"
    if is_deterministic:
        return Check("determinism", "fail", f"{message}, but the program is declared deterministic", detail)
    return Check("determinism", "warn", f"{message}; use agent.rng for random choices", detail)


def _leaks(episodes: Sequence[CheckedEpisode], leaks: Sequence[tuple[str, str]]) -> Check:
    pending = [each for each in episodes if each.pending]
    kinds = sorted({kind for kind, _ in leaks})
    detail = [f"{kind}: {counted(label for found, label in leaks if found == kind)}" for kind in kinds]
    if pending:
        names = counted(name for each in pending for name in each.pending)
        detail.insert(0, f"task: {names}; after {pending[0].agent} on {pending[0].task_id}")
    if not detail:
        return Check("leaks", "pass", "no task, process, file, thread or sandbox was left behind")
    # One thing may be a cache that was filled late; more are left behind again and again.
    num_pending = sum(len(each.pending) for each in pending)
    is_sure = num_pending > 1 or "sandbox" in kinds or any(_num(leaks, kind) > 1 for kind in kinds)
    return Check("leaks", "fail" if is_sure else "warn", "episodes leave something behind", tuple(detail))


def _num(leaks: Sequence[tuple[str, str]], kind: str) -> int:
    return sum(found == kind for found, _ in leaks)


def _signal(episodes: Sequence[CheckedEpisode]) -> Check:
    rewards = [each.reward for each in episodes if each.reward is not None]
    if not rewards:
        return Check("signal", "skip", "no episode was rewarded")
    low, high = min(rewards), max(rewards)
    if high - low <= _CLOSE:
        return Check("signal", "warn", f"every episode got the reward {low:g}: no agent did better or worse")
    return Check("signal", "pass", f"rewards range from {low:g} to {high:g}")


def _nothing(agent: AgentSummary, episodes: Sequence[CheckedEpisode]) -> Check:
    if not agent.rewards:
        return Check("nothing", "skip", "doing nothing never got as far as a reward")
    rewarded = [each for each in agent.episodes if each.reward is not None and each.reward > _CLOSE]
    if rewarded:
        most = max(each.reward or 0.0 for each in rewarded)
        message = f"doing nothing is rewarded: up to {most:g} on {len(rewarded)} of {len(agent.episodes)} tasks"
        return Check("nothing", "warn", message, (_tasks(rewarded),))
    others = [each.reward for each in episodes if each.agent != "nothing" and each.reward is not None]
    best = max(agent.rewards)
    if others and best > max(others) + _CLOSE:
        message = f"doing nothing pays best: {best:g}, while no other agent got more than {max(others):g}"
        return Check("nothing", "warn", message)
    return Check("nothing", "pass", f"doing nothing is not rewarded (at most {best:g})")


def _oracle(oracle: AgentSummary | None, episodes: Sequence[CheckedEpisode], max_reward: float | None) -> Check:
    if oracle is None:
        return Check("oracle", "skip", "there is no oracle: give --oracle, or the program an attribute `oracle`")
    best = _best(episodes)
    goal = best if max_reward is None else dict.fromkeys(best, max_reward)
    below = [each for each in oracle.episodes if each.reward is None or each.reward < goal[each.number] - _CLOSE]
    missing = [each for each in oracle.episodes if each.num_missing]
    detail = [
        f"{each.task_id}: " + ("no reward" if each.reward is None else f"{each.reward:g} of {goal[each.number]:g}")
        for each in below[:_SHOWN]
    ]
    if missing:
        detail.append(f"the oracle had too few answers on {_tasks(missing)}")
    if below:
        known = "the maximum" if max_reward is not None else "the highest reward that an agent got"
        message = f"the oracle misses {known} on {len(below)} of {len(oracle.episodes)} tasks"
        return Check("oracle", "fail", message, tuple(detail))
    idle = {each.number: each.reward for each in episodes if each.agent == "nothing" and each.reward is not None}
    no_better = [
        each for each in oracle.episodes if (each.reward or 0.0) <= idle.get(each.number, float("-inf")) + _CLOSE
    ]
    if no_better:
        message = f"the oracle earns no more than doing nothing on {len(no_better)} of {len(oracle.episodes)} tasks"
        return Check("oracle", "fail", message, (_tasks(no_better), *detail))
    low, high = min(oracle.rewards), max(oracle.rewards)
    span = f"{low:g}" if high - low <= _CLOSE else f"{low:g} to {high:g}"
    message = f"the oracle gets the highest reward on every task ({span})"
    return Check("oracle", "warn" if missing else "pass", message, tuple(detail))


def _best(episodes: Sequence[CheckedEpisode]) -> dict[int, float]:
    """Return the highest reward of each task."""
    best = {each.number: float("-inf") for each in episodes}
    for each in episodes:
        if each.reward is not None:
            best[each.number] = max(best[each.number], each.reward)
    return best


def _limits(agents: Sequence[AgentSummary]) -> Check:
    lines = []
    for agent in agents:
        found = {name: count for name, count in agent.outcomes.items() if name.endswith(("_limit", "_full"))}
        if found:
            num_limited = sum(each.is_limited for each in agent.episodes)
            words = ", ".join(f"{name} {count}" for name, count in sorted(found.items()))
            lines.append(f"{agent.name}: {words}" + (f"; {num_limited} got only limit_reward" if num_limited else ""))
    if not lines:
        return Check("limits", "pass", "no episode hit a limit")
    is_oracle = any(line.startswith("oracle") for line in lines)
    message = "the oracle hits limits" if is_oracle else "limits ended episodes of agents that cannot solve the task"
    return Check("limits", "warn" if is_oracle else "pass", message, tuple(lines))


def _of(some: Sequence[CheckedEpisode], episodes: Sequence[CheckedEpisode]) -> str:
    return f"{len(some)} of {len(episodes)} episodes"


def _tasks(episodes: Iterable[CheckedEpisode]) -> str:
    names = list(dict.fromkeys(each.task_id for each in episodes))
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _grouped(failed: Sequence[CheckedEpisode]) -> tuple[str, ...]:
    """Return one entry for each different error, with who got it and its text."""
    kinds: dict[str, list[CheckedEpisode]] = {}
    for each in failed:
        kinds.setdefault(each.error.rstrip().rpartition("\n")[2] or each.error, []).append(each)
    return tuple(
        f"{', '.join(dict.fromkeys(each.agent for each in group))} on {_tasks(group)}:\n{group[0].error.rstrip()}"
        for group in list(kinds.values())[:_SHOWN]
    )
