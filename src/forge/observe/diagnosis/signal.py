"""Rules about groups that teach nothing, and completions that do not end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge.observe.diagnosis.evidence import Evidence
from forge.observe.diagnosis.findings import Finding
from forge.observe.diagnosis.text import excerpt, moved
from forge.observe.sink import REWARD_MEAN

_TRUNCATED = "rollout/truncated"
_ALL_ZERO = "rollout/no_signal/all_zero"
_NEARLY_ALL = 0.9
_MOST = 0.5
_MANY = 0.3
_FEWEST_STEPS = 20
"""Steps before it is said that a reward does not rise."""


def nothing_to_learn_from(run: Evidence) -> Finding | None:
    """Nearly all groups have only completions without any reward."""
    size = run.window
    scored = sum(run.num_groups[-size:]) + run.num_dropped_at_end
    zero = sum(run.column(_ALL_ZERO)[-size:]) + run.num_dropped_at_end
    episodes = [fields for _, fields in run.episodes("fruitless")]
    if (
        scored < 1
        or zero < _NEARLY_ALL * scored
        or any(float(each.get("reward") or 0.0) > 0 for each in episodes[-64:])
    ):
        return None
    evidence = [f"{zero:,.0f} of the last {scored:,.0f} groups have only completions with reward 0"]
    if run.num_dropped_at_end:
        evidence.append(f"ledger.jsonl: {run.num_dropped_at_end:,} groups were dropped since step {_last(run)}")
    cut = sum(each.get("finish_reason") == "length" for each in episodes) / max(1, len(episodes))
    if episodes:
        evidence.append(f"rollouts/fruitless_*.jsonl: {cut:.0%} of {len(episodes)} completions are cut off by length")
        evidence.append(_one_of(run))
    limit = run.setting("generator.sampling.max_tokens")
    if cut >= _MOST:
        return Finding(
            "cut off before the answer",
            "Completions end at the length limit, before anything could be rewarded.",
            tuple(evidence),
            f"`generator.sampling.max_tokens` is {limit}, which is less than an answer needs, or the policy does not "
            "end its answers.",
            (
                "raise `generator.sampling.max_tokens`, and `training.max_seq_len` with it",
                "if the texts go on after their answer: a few steps of fine-tuning on the format, or stop strings",
            ),
        )
    return Finding(
        "nothing to learn from",
        "Nearly all groups have only completions without any reward, so there is nothing to compare.",
        tuple(evidence),
        "The task is too hard for this model, or the reward does not match what the policy writes.",
        (
            "give one of these completions to `forge rewards try`: is the reward too strict about the form?",
            "easier prompts, a `curriculum`, or a few steps of fine-tuning on the format first",
            "a larger `rollout.group_size`, so that rare successes appear",
        ),
    )


def _last(run: Evidence) -> int:
    return run.steps[-1] if run.steps else 0


def _one_of(run: Evidence) -> str:
    where, fields = next(run.episodes("fruitless"))
    return f"{where}: answer {fields.get('answer')!r}: {excerpt(fields)}{_end(fields)}"


def _end(fields: Mapping[str, Any]) -> str:
    return ", cut off" if fields.get("finish_reason") == "length" else ""


def completions_cut_off(run: Evidence) -> Finding | None:
    """Many completions reach the length limit, and the reward does not rise."""
    reward, truncated = run.trend(REWARD_MEAN), run.trend(_TRUNCATED)
    if reward is None or truncated is None or truncated.last < _MANY:
        return None
    if reward.change > 0 and (reward.is_significant() or len(run.steps) < _FEWEST_STEPS):
        return None
    evidence = [moved(_TRUNCATED, truncated), moved(REWARD_MEAN, reward)]
    if (length := run.trend("rollout/length_mean")) is not None:
        evidence.append(f"{moved('rollout/length_mean', length)} tokens")
    return Finding(
        "completions cut off",
        "Many completions reach the length limit, and the reward does not rise.",
        tuple(evidence),
        "The limit is part of the task: what is cut off cannot be right, whatever it would have become.",
        (
            "raise `generator.sampling.max_tokens` if the texts are still sensible there",
            "`rewards.overlong` or `rollout.mask_truncated`, and `algorithm.preset: dr_grpo`, if they only get longer",
        ),
    )
