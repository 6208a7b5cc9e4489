"""Rules about rewards: that they fail, pay for the wrong thing, or are learned by heart."""

from __future__ import annotations

import math

from forge.observe.diagnosis.evidence import Evidence, Trend
from forge.observe.diagnosis.findings import Finding
from forge.observe.diagnosis.text import excerpt, moved, solved_text
from forge.observe.sink import EVALUATION_PROMPTS, EVALUATION_REWARD, NUM_FAILED, REWARD_MEAN, REWARD_STD

_MANY_FAILED = 0.05
_SMALL_DROP = 0.05
_SIGMAS = 3.0
_FEW_EVALUATIONS = 3
_MANY_EPOCHS = 3


def failing_rewards(run: Evidence) -> Finding | None:
    """Rewards raise or time out on a part of the completions."""
    num_failed = sum(run.column(NUM_FAILED))
    size = run.setting("rollout.group_size")
    num_scored = sum(run.num_groups) * (size if isinstance(size, int) else 1)
    if not num_scored or num_failed < _MANY_FAILED * num_scored:
        return None
    evidence = [f"{NUM_FAILED}: {num_failed:,.0f} of {num_scored:,.0f} completions ({num_failed / num_scored:.1%})"]
    for kind in ("fruitless", "step"):
        for where, fields in run.episodes(kind):
            if fields.get("failures"):
                name, message = next(iter(fields["failures"].items()))
                evidence.append(f"{where}: reward {name!r}: {message}")
                return _failing(evidence)
    return _failing(evidence)


def _failing(evidence: list[str]) -> Finding:
    return Finding(
        "failing rewards",
        "Rewards fail for a part of the completions, which are not learned from as they should be.",
        tuple(evidence),
        "The reward's code raises, or takes longer than its time limit.",
        (
            "give a completion that fails to `forge rewards try KIND --answer A --text T`, and correct the reward",
            "raise `timeout_s` of the reward, if it is slow",
        ),
    )


def reward_hacking(run: Evidence) -> Finding | None:
    """The reward rises, on held-out prompts too, while fewer of these are solved."""
    reward, solved, held_out = run.trend(REWARD_MEAN), run.solved(), run.held_out(EVALUATION_REWARD)
    if reward is None or not _rises(reward) or len(solved) < _FEW_EVALUATIONS:
        return None
    best, highest = max((value, step) for step, value in solved[:-1])
    last = solved[-1][1]
    noise = _SIGMAS * _error_of_difference(best, last, _num_prompts(run))
    if best - last < max(_SMALL_DROP, noise) or last > solved[0][1] or held_out[-1][1] <= held_out[0][1]:
        return None
    decider = run.setting("evaluation.reward")
    evidence = [moved(REWARD_MEAN, reward), solved_text(run)]
    part = run.trend(f"reward/{decider}") if isinstance(decider, str) else None
    if part is not None:
        evidence.append(f"{moved(f'reward/{decider}', part)}, which decides what is solved")
    for name in ("rollout/length_mean", "rollout/truncated"):
        trend = run.trend(name)
        if trend is not None and trend.is_significant():
            evidence.append(moved(name, trend))
    evidence += _paid_for(run, decider)
    return Finding(
        "reward hacking",
        "The reward rises while fewer held-out prompts are solved.",
        tuple(evidence),
        "The reward pays for something else than a solution, and the policy has found it.",
        (
            "read the completions with the highest reward: what do they have in common that is not a solution?",
            "correct `rewards.functions` so that they earn nothing (`forge rewards try`), for example by matching the "
            "whole answer",
            "if the reward cannot be made exact, hold the policy to its beginning with `algorithm.kl.coefficient`, and "
            "stop while held-out prompts are still solved",
        ),
        step=next(step for step, value in solved if value < best and step > highest),
    )


def _paid_for(run: Evidence, decider: object) -> list[str]:
    """Return where a completion is that has the highest reward and solves nothing."""
    found = [
        (float(fields["reward"]), where, fields)
        for where, fields in run.episodes("step")
        if isinstance(decider, str) and not (fields.get("parts") or {}).get(decider, 1.0)
    ]
    if not found:
        return []
    reward, where, fields = max(found, key=lambda each: each[0])
    return [f"{where}: reward {reward:g}, {decider} 0, answer {fields.get('answer')!r}: {excerpt(fields)}"]


def memorised_prompts(run: Evidence) -> Finding | None:
    """The reward rises on prompts that come again and again, and not on held-out ones."""
    reward, held_out = run.trend(REWARD_MEAN), run.held_out(EVALUATION_REWARD)
    epochs = run.recent("rollout/epoch")
    if reward is None or not _rises(reward) or len(held_out) < _FEW_EVALUATIONS or not epochs >= _MANY_EPOCHS:
        return None
    error = max(run.column(REWARD_STD), default=0.0) / math.sqrt(_num_prompts(run))
    gap = reward.last - held_out[-1][1]
    if gap < 2 * _SIGMAS * error or gap < (reward.last - held_out[0][1]) / 2:
        return None
    shown = f"{EVALUATION_REWARD} {held_out[0][1]:.3g} -> {held_out[-1][1]:.3g} on prompts that are not trained on"
    return Finding(
        "memorised prompts",
        "The reward rises on the training prompts, and hardly on held-out ones.",
        (moved(REWARD_MEAN, reward), shown, f"rollout/epoch {epochs:.0f}: each prompt was asked about so often"),
        "There are too few prompts for so many steps: the policy learns their answers.",
        (
            "more, and more different, prompts (`prompts.sources`)",
            "end the run when the held-out reward no longer rises, and use that checkpoint",
        ),
    )


def _rises(trend: Trend) -> bool:
    return trend.change > 0 and trend.is_significant(sigmas=_SIGMAS)


def _num_prompts(run: Evidence) -> float:
    return max(1.0, run.evaluations[-1][1].get(EVALUATION_PROMPTS, 1.0))


def _error_of_difference(first: float, last: float, num_prompts: float) -> float:
    """Return the standard error of the difference of two fractions of so many prompts."""
    mean = min(1.0, max(0.0, (first + last) / 2))
    return math.sqrt(2 * mean * (1 - mean) / num_prompts)
