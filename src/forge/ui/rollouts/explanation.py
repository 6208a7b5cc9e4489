"""Explains what a step learned from a sample: where its advantage is from, and what the loss does to each token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from forge.config.algorithm import AlgorithmConfig
from forge.config.base import ConfigModel
from forge.observe.report.reading import setting_of
from forge.observe.report.turns import turns_of
from forge.rollout.advantage import advantages
from forge.ui.rollouts.gradient import (
    BOUND_NAMES,
    BatchSize,
    Floats,
    LossRule,
    SequenceGradient,
    SequenceTokens,
    left_out,
    sequence_gradient,
)
from forge.ui.rollouts.index import RolloutRows
from forge.ui.rollouts.lines import Fields, LossPart, loss_parts, numbers_of

_DIGITS: Final = 6


@dataclass(frozen=True, slots=True)
class LearningRules:
    """What a run's configuration says about learning; `algorithm` is None where it cannot be read. The policy does not
    learn in the first `warmup_steps` steps."""

    algorithm: AlgorithmConfig | None
    rule: LossRule | None
    records_all: bool
    warmup_steps: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> LearningRules:
        """Return the rules of a resolved configuration, which may be damaged."""
        section = config.get("algorithm")
        try:
            algorithm = AlgorithmConfig.model_validate(section) if isinstance(section, dict) else None
        except ValueError:  # pydantic's error for what does not fit, and ours
            algorithm = None
        if algorithm is None:
            return cls(None, None, records_all=False)
        length = algorithm.loss.length or _whole(setting_of(config, "generator.sampling.max_tokens"))
        rule = LossRule.of(
            algorithm,
            iterations=_whole(setting_of(config, "rollout.iterations")) or 1,
            length=length,
            mask_truncated=setting_of(config, "rollout.mask_truncated") is True,
        )
        warmup_steps = _whole(setting_of(config, "critic.warmup_steps")) if algorithm.has_critic else None
        return cls(algorithm, rule, setting_of(config, "record.rollouts") in (None, "all"), warmup_steps or 0)


def batch_size(rows: RolloutRows, step: int, rules: LearningRules, num_loss_tokens: float | None) -> BatchSize | None:
    """Return what the loss of a step is divided by: from its rollouts where all are recorded, else from its metrics."""
    rule = rules.rule
    if rule is None:
        return None
    if not rules.records_all:
        return None if num_loss_tokens is None else BatchSize(num_loss_tokens)
    found = rows.of_file(("step", step))
    counts = {name: int(rows.columns[name][found].sum()) for name in ("counted", "masked", "parts", "masked_parts")}
    is_masking = rule.mask_truncated
    return BatchSize(
        num_tokens=float(counts["counted"] - is_masking * counts["masked"]),
        num_sequences=counts["parts"],
        num_counted=counts["parts"] - is_masking * counts["masked_parts"],
    )


def explain(fields: Fields, rules: LearningRules, batch: BatchSize | None, *, limit: int) -> dict[str, Any]:
    """Return, for the first `limit` tokens of a line, what the loss does to them, and what is not known.

    `tokens` has for each of them the advantage, the ratio, the bound that acts on it, the correction, the two parts of
    its gradient, its weight, and the gradient itself; null where it is not in the loss.
    """
    missing = _missing(fields, rules)
    parts = loss_parts(fields, turns_of(fields))
    own = token_advantages(fields)
    names = ("advantage", "ratio", "bound", "correction", "pull", "penalty", "weight", "gradient")
    columns: dict[str, list[Any]] = {name: [None] * min(limit, len(fields["token_ids"])) for name in names}
    sequences = []
    for part in () if missing["none"] else parts:
        places = part.places()
        _put(columns["advantage"], places, own[places])
        if rules.rule is None or missing["unknown"]:
            continue
        found = _of_part(fields, part, rules.rule, batch, own)
        _fill(columns, places, found)
        sequences.append(_summary(part, found, rules.rule))
    return {
        **missing,
        "rule": _rule_text(rules),
        "hasWeight": any(each["weight"] is not None for each in sequences),
        "sequences": sequences,
        "tokens": columns,
    }


def token_advantages(fields: Fields) -> Floats:
    """Return the advantage of every token: its own where that was recorded, else that of its turn or its episode."""
    count = len(fields["token_ids"])
    own = numbers_of(fields.get("token_advantages"), count)
    if own is not None:
        return own
    found = np.full(count, _float(fields.get("advantage")))
    for turn in turns_of(fields):
        agents = fields.get("agents")
        agent = agents.get(turn.get("agent")) if isinstance(agents, dict) else None
        of_agent = agent.get("advantage") if isinstance(agent, dict) else None
        value = turn.get("advantage") if turn.get("advantage") is not None else of_agent
        if value is not None:
            found[turn["start"] : turn["end"]] = _float(value)
    return found


def explain_advantage(rewards: Sequence[float], reward: float, rules: LearningRules) -> dict[str, Any] | None:
    """Return how the reward of a sample became its advantage, where that is a matter of its group alone."""
    algorithm = rules.algorithm
    if algorithm is None or not rewards or not all(map(math.isfinite, (*rewards, reward))):
        return None
    section = algorithm.advantage
    is_of_group = section.baseline in ("group_mean", "none") and section.scale in ("group_std", "none")
    is_plain = section.function == "baseline" and section.epsilon_place == "std"
    is_plain = is_plain and not section.whiten and section.gamma == 1
    if not (is_of_group and is_plain) or algorithm.charges_tokens or algorithm.distillation.is_used:
        return None
    (values,) = advantages([list(rewards)], section)
    mean = math.fsum(rewards) / len(rewards)
    spread = math.sqrt(math.fsum((each - mean) ** 2 for each in rewards) / max(1, len(rewards) - section.std_ddof))
    return {
        "reward": reward,
        "baseline": mean if section.baseline == "group_mean" else None,
        "std": spread if section.scale == "group_std" else None,
        "epsilon": section.epsilon,
        "clip": section.clip,
        "value": next((value for each, value in zip(rewards, values, strict=True) if each == reward), None),
    }


def _missing(fields: Fields, rules: LearningRules) -> dict[str, Any]:
    """Return why there is no gradient (`none`), why it is not known (`unknown`), and what it leaves out (`notes`)."""
    outcome = fields.get("outcome", "trained")
    if outcome != "trained":
        why = "held-out prompts are not trained on" if outcome == "evaluation" else "its group was not trained on"
        reason = fields.get("reason")
        return {"none": why + (f": {str(reason)[:200]}" if reason else ""), "unknown": "", "notes": []}
    if fields["step"] <= rules.warmup_steps:
        return {"none": "the critic learned alone in this step (critic.warmup_steps)", "unknown": "", "notes": []}
    rule, algorithm = rules.rule, rules.algorithm
    if rule is None or algorithm is None:
        return {"none": "", "unknown": "The section algorithm of config.yaml could not be read.", "notes": []}
    if not rule.is_known:
        name = rule.loss.function if rule.loss.function != "policy" else rule.loss.kind
        text = f"The loss {str(name)[:100]} is not one of this library, so what it does to a token is not known here."
        return {"none": "", "unknown": text, "notes": []}
    count = len(fields["token_ids"])
    if rule.needs_trainer and numbers_of(fields.get("trainer_logprobs"), count) is None:
        text = "The trainer’s logprobs were not recorded (record.trainer_logprobs), and the gradient depends on them."
        return {"none": "", "unknown": text, "notes": []}
    return {"none": "", "unknown": "", "notes": list(_notes(fields, rule, count))}


def _notes(fields: Fields, rule: LossRule, count: int) -> Sequence[str]:
    notes = []
    if rule.iterations > 1:
        notes.append(
            f"This is of the first of {rule.iterations} optimizer steps on the batch; the ratios of later ones are not "
            "recorded."
        )
    if rule.kl is not None and numbers_of(fields.get("ref_logprobs"), count) is None:
        notes.append(
            "The reference’s logprobs were not recorded, so the penalty of the divergence from it is not in these "
            "numbers."
        )
    if rule.loss.entropy_coefficient > 0:
        notes.append(
            "The entropy bonus acts on whole distributions, which are not recorded; it is not in these numbers."
        )
    return notes


def _of_part(fields: Fields, part: LossPart, rule: LossRule, batch: BatchSize | None, own: Floats) -> SequenceGradient:
    count, places = len(fields["token_ids"]), part.places()

    def at(name: str) -> Floats | None:
        values = numbers_of(fields.get(name), count)
        return None if values is None else values[places]

    sampler = at("logprobs")
    tokens = SequenceTokens(
        advantages=own[places],
        sampler=np.full(len(places), np.nan) if sampler is None else sampler,
        trainer=at("trainer_logprobs"),
        reference=at("ref_logprobs"),
    )
    with np.errstate(invalid="ignore", over="ignore"):
        found = sequence_gradient(rule, tokens, batch or BatchSize(0.0))
    return left_out(found) if rule.mask_truncated and part.is_truncated else found


def _fill(columns: Mapping[str, list[Any]], places: Any, found: SequenceGradient) -> None:
    for name in ("ratio", "correction", "pull", "penalty"):
        _put(columns[name], places, getattr(found, name))
    _put(columns["weight"], places, np.full(len(places), np.nan if found.weight is None else found.weight))
    _put(columns["gradient"], places, found.total)
    shown = places < len(columns["bound"])
    for place, bound in zip(places[shown].tolist(), found.bound[shown].tolist(), strict=True):
        columns["bound"][place] = BOUND_NAMES[bound]


def _put(column: list[Any], places: Any, values: Floats) -> None:
    shown = places < len(column)
    for place, value in zip(places[shown].tolist(), values[shown].tolist(), strict=True):
        column[place] = float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _summary(part: LossPart, found: SequenceGradient, rule: LossRule) -> dict[str, Any]:
    total = found.total[np.isfinite(found.total)]
    counts = {name: int((found.bound == number).sum()) for number, name in BOUND_NAMES.items() if name}
    return {
        "agent": part.agent,
        "numTokens": part.num_tokens,
        "isLeftOut": rule.mask_truncated and part.is_truncated,
        "isMasked": found.is_masked,
        "weight": found.weight,
        "bounds": counts,
        "flat": int((total == 0).sum()),
        "size": float(np.abs(total).sum()),
        "sum": float(total.sum()),
    }


def _rule_text(rules: LearningRules) -> dict[str, Any] | None:
    """Return the settings that the page names in its sentences."""
    if rules.rule is None:
        return None
    loss, kl = rules.rule.loss, rules.rule.kl
    return {
        "kind": loss.kind,
        "low": round(1.0 - loss.clip_low, 6),
        "high": round(1.0 + loss.clip_high, 6) if math.isfinite(loss.clip_high) else None,
        "dual": loss.dual_clip,
        "proximal": loss.proximal,
        "average": loss.average,
        "correction": _plain(loss.correction),
        "kl": None if kl is None else {"coefficient": kl.coefficient, "estimator": kl.estimator},
    }


def _plain(section: ConfigModel) -> dict[str, Any]:
    return section.model_dump(mode="json")


def _whole(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _float(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number else math.nan  # type: ignore[arg-type]
