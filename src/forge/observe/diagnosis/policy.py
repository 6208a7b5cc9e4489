"""Rules about the policy: that it breaks, collapses, learns from data that are too old, or is computed in two ways."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from forge.observe.diagnosis.evidence import FIRST, Evidence, noise
from forge.observe.diagnosis.findings import Finding
from forge.observe.diagnosis.text import excerpt, moved, solved_text
from forge.observe.sink import ENTROPY, GRAD_NORM, LEARNING_RATE, REWARD_MEAN, REWARD_STD, SKIPPED, STALENESS

_APPROX_KL = "train/approx_kl"
_OUTSIDE = "train/mismatch_outside"
_FEWEST_STEPS = 8
_PAIR = 2
"""Steps over which a sudden change is averaged."""
_SIGMAS = 3.5
_OLD = 3.0
_FAR = 0.07
"""Nats per token. Runs that learn stay at a few hundredths, those of larger models far below."""
_ENTROPY_JUMP = 3.0
_NORM_JUMP = 5.0
_UNRECOVERED = 0.85
_COLLAPSED = 0.2
_STUCK = 0.25
_MISMATCH = 0.02


def nonfinite_numbers(run: Evidence) -> Finding | None:
    """Loss, gradient or another metric of training was NaN or infinite."""
    found = {name: step for name, step in run.nonfinite.items() if name.startswith("train/")}
    num_skipped = sum(run.column(SKIPPED))
    if not found and not num_skipped:
        return None
    evidence = [
        f"{name} is not finite at step {step}" for name, step in sorted(found.items(), key=lambda each: each[1])
    ]
    evidence += [f"{SKIPPED}: {num_skipped:.0f} of {len(run.steps)} steps were skipped"] if num_skipped else []
    return Finding(
        "non-finite numbers",
        "Loss or gradient were NaN or infinite.",
        tuple(evidence),
        "The learning rate is too high, or the precision too low for this model.",
        (
            "a lower `training.learning_rate`; `training.max_grad_norm`",
            "`distributed.precision: float32` or `bfloat16` instead of float16, to see whether it is the precision",
        ),
        step=min(found.values(), default=None),
    )


def stale_data(run: Evidence) -> Finding | None:
    """The weights that sampled the data are so old that the policy has moved far away from them."""
    late = len(run.steps) // 3
    staleness, far = run.column(STALENESS)[late:], run.column(_APPROX_KL)[late:]
    if len(run.steps) < _FEWEST_STEPS or not far or not staleness or statistics.median(staleness) < _OLD:
        return None
    if statistics.median(far) < _FAR:
        return None
    clipped = sum(statistics.fmean(run.column(f"train/{name}") or (0.0,)) for name in ("clip_low", "clip_high"))
    bound = run.setting("rollout.staleness")
    evidence = [
        f"{STALENESS} {statistics.median(staleness):.3g} (median; rollout.staleness is {bound})",
        f"{_APPROX_KL} {statistics.median(far):.2g} nats per token (median), {max(far):.2g} at most: the distance from "
        "the weights that sampled",
        f"train/clip_low + train/clip_high: {clipped:.1%} of the tokens are clipped",
    ]
    if ratio := run.column("train/ratio_max"):
        evidence.append(f"train/ratio_max {max(ratio):.3g}")
    return Finding(
        "stale data",
        "The run learns from completions of a policy that it has left behind.",
        tuple(evidence),
        "Rollouts run too many steps ahead for this learning rate: what was good for the old policy says little about "
        "the new one.",
        (
            "`rollout.staleness: 1` or `2`: generation still overlaps with training",
            "a lower `training.learning_rate`, with which the policy moves less in the same number of steps",
        ),
        step=next(step for step, value in zip(run.steps, run.column(_APPROX_KL), strict=True) if value >= _FAR),
    )


def learning_rate_too_high(run: Evidence) -> Finding | None:
    """One step breaks the policy: entropy jumps or the reward falls, with a large gradient, and it does not recover."""
    norms, entropies = run.column(GRAD_NORM), run.column(ENTROPY)
    if len(run.steps) < _FEWEST_STEPS or not norms:
        return None
    staleness = run.column(STALENESS)
    is_off_policy = bool(staleness) and statistics.median(staleness) >= _OLD
    usual = statistics.median(norms[:FIRST])
    broken = _first(_jump(entropies), _fall(run))
    if broken is None or broken > len(run.steps) - run.window or is_off_policy:  # or too late to tell
        return None
    at = max(range(max(0, broken - FIRST), broken + FIRST), key=lambda place: norms[place])
    if norms[at] < _NORM_JUMP * usual or _has_recovered(run):
        return None
    evidence = [f"{GRAD_NORM} {usual:.3g} at first, {norms[at]:.3g} at step {run.steps[at]}"]
    around = slice(max(0, broken - 1), broken + 2)
    for name in (ENTROPY, REWARD_MEAN):
        if values := run.column(name):
            shown = ", ".join(f"{value:.3g}" for value in values[around])
            evidence.append(f"{name} {values[0]:.3g} at step {run.steps[0]}; {shown} around step {run.steps[broken]}")
    best, recent = _best(run.column(REWARD_MEAN), run.window), run.recent(REWARD_MEAN)
    evidence.append(f"{REWARD_MEAN} {recent:.3g} over the last steps, {best:.3g} at best")
    if rates := run.column(LEARNING_RATE):
        evidence.append(f"{LEARNING_RATE} {max(rates):.3g}")
    return Finding(
        "learning rate too high",
        "A step breaks the policy, and what it could do before is lost.",
        tuple(evidence),
        "The steps of the optimizer are too large.",
        (
            "a `training.learning_rate` that is 3 to 10 times lower",
            "`training.warmup_steps`, if it breaks in the first steps; a lower `training.max_grad_norm`",
            "larger batches (`rollout.batch_groups`), whose gradients have less noise",
        ),
        step=run.steps[broken],
    )


def _jump(entropies: Sequence[float]) -> int | None:
    """Return the first place where entropy is several times that of the first steps."""
    if len(entropies) < _FEWEST_STEPS:
        return None
    usual = statistics.median(entropies[:FIRST])
    limit = max(_ENTROPY_JUMP * usual, usual + 0.1)
    return next((place for place, value in enumerate(entropies) if value > limit), None)


def _fall(run: Evidence) -> int | None:
    """Return the first place where the reward is below half of what it was before, by more than noise."""
    rewards, groups = run.column(REWARD_MEAN), run.num_groups
    spreads = run.column(REWARD_STD) or (0.0,) * len(rewards)
    floor = min(0.0, *rewards)
    best, best_error, jumps = -math.inf, 0.0, noise(rewards[: FIRST - 1])
    for place in range(FIRST, len(rewards) - _PAIR + 1):
        before, after = slice(place - _PAIR, place), slice(place, place + _PAIR)
        jumps = with_jump(jumps, rewards[place - 2 : place], num_jumps=place - 1)
        mean = statistics.fmean(rewards[before])
        if mean > best:
            best, best_error = mean, _error(spreads[before], groups[before])
        now, error = statistics.fmean(rewards[after]), math.hypot(best_error, _error(spreads[after], groups[after]))
        error = max(error, jumps)  # that of two pairs is as large as that of one step
        if best - now > _SIGMAS * error and now - floor < (best - floor) / 2:
            return place
    return None


def with_jump(noise_before: float, pair: Sequence[float], *, num_jumps: int) -> float:
    """Return `noise` of values to which one was added: the last two of them, and how many jumps they all make."""
    jump = pair[1] - pair[0]
    return math.sqrt((noise_before * noise_before * (num_jumps - 1) + jump * jump / 2) / num_jumps)


def _error(spreads: Sequence[float], groups: Sequence[float]) -> float:
    """Return the standard error of a mean reward. Completions of a group count as one: they share a prompt."""
    return math.sqrt(statistics.fmean(each * each for each in spreads) / max(1.0, sum(groups)))


def _first(*places: int | None) -> int | None:
    return min((place for place in places if place is not None), default=None)


def _best(values: Sequence[float], size: int) -> float:
    """Return the highest mean over so many steps."""
    return max(statistics.fmean(values[place : place + size]) for place in range(len(values) - size + 1))


def _has_recovered(run: Evidence) -> bool:
    """Whether the reward has risen over the run, and is about as high as it ever was."""
    rewards, trend = run.column(REWARD_MEAN), run.trend(REWARD_MEAN)
    floor = min(0.0, *rewards)
    has_learned = trend is None or (trend.change > 0 and trend.is_significant())
    return has_learned and run.recent(REWARD_MEAN) - floor >= _UNRECOVERED * (_best(rewards, run.window) - floor)


def entropy_collapse(run: Evidence) -> Finding | None:
    """The completions of a prompt are all alike, and for many prompts all wrong."""
    entropies = run.column(ENTROPY)
    if len(entropies) < _FEWEST_STEPS:
        return None
    first, last = statistics.fmean(entropies[:FIRST]), run.recent(ENTROPY)
    wrong = sum(run.column("rollout/no_signal/all_zero")[-run.window :]) / max(1.0, sum(run.num_groups[-run.window :]))
    if first <= 0 or last > _COLLAPSED * first or wrong < _STUCK:
        return None
    evidence = [
        f"{ENTROPY} {first:.3g} -> {last:.3g} nats per token",
        f"rollout/no_signal/all_zero: {wrong:.0%} of the groups of the last steps have no right completion",
    ]
    if (reward := run.trend(REWARD_MEAN)) is not None:
        evidence.append(moved(REWARD_MEAN, reward))
    evidence += [solved_text(run)] if run.solved() else []
    evidence += _all_alike(run)
    below = next(step for step, value in zip(run.steps, entropies, strict=True) if value <= _COLLAPSED * first)
    return Finding(
        "entropy collapse",
        "The policy has stopped trying: the completions of a prompt are all alike, and for many prompts all wrong.",
        tuple(evidence),
        "Whatever was rewarded first was made certain before anything else was tried. A group whose completions are "
        "equal teaches nothing, so the policy cannot leave that state.",
        (
            "start again: a policy without entropy does not recover",
            "a small `algorithm.loss.entropy_coefficient`, or `algorithm.preset: dapo`, which clips less where "
            "probabilities rise",
            "a baseline (`algorithm.advantage.baseline: group_mean`), larger `rollout.batch_groups`, a lower "
            "`training.learning_rate`, `generator.sampling.temperature: 1.0`",
        ),
        step=below,
    )


def _all_alike(run: Evidence) -> list[str]:
    """Return where a group is that has one and the same wrong completion several times."""
    groups: dict[tuple[str, int], list[str]] = {}
    shown: dict[tuple[str, int], str] = {}
    for where, fields in run.episodes("fruitless"):
        key = (where.partition(":")[0], int(fields.get("group", -1)))
        groups.setdefault(key, []).append(str(fields.get("text")))
        shown.setdefault(key, f"{where}: group {key[1]}, answer {fields.get('answer')!r}")
    for key, texts in groups.items():
        if len(texts) > 1 and len(set(texts)) == 1:
            return [f"{shown[key]}: {len(texts)} times {excerpt({'text': texts[0]})}"]
    return []


def sampler_mismatch(run: Evidence) -> Finding | None:
    """Trainer and sampler compute different probabilities with the same weights."""
    staleness, outside = run.column("rollout/staleness_max"), run.column(_OUTSIDE)
    is_on_policy = not any(staleness) and run.setting("rollout.iterations") in (None, 1)
    if len(run.steps) < _FEWEST_STEPS or not outside or not is_on_policy:
        return None
    share = statistics.median(outside)
    if share < _MISMATCH:
        return None
    evidence = [
        f"{_OUTSIDE}: for {share:.1%} of the tokens (median) the trainer's probability differs by more than 10% from "
        "the sampler's, with the same weights"
    ]
    names = [name for name in ("train/mismatch", "train/sampler_ratio_max") if run.column(name)]
    evidence += [f"{name} {statistics.median(run.column(name)):.3g} (median)" for name in names]
    return Finding(
        "sampler mismatch",
        "Trainer and generator compute different probabilities with the same weights.",
        tuple(evidence),
        "Another precision or another kernel in one of the two, or sampling settings that the trainer cannot repeat.",
        (
            "`generator.sampling` without top_p, top_k and penalties",
            "`model.head_precision: float32`; the same precision in `generator.precision` and `distributed.precision`",
            "a correction: `algorithm.loss.correction: {kind: truncate, high: 2.0}`",
        ),
    )
