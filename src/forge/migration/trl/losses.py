"""The loss and the advantages of TRL's GRPOTrainer and RLOOTrainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forge.migration.records import Converted, PeerConfig
from forge.migration.rules import always, changed, joint, lacking, lacks, maps

_AVERAGES: Final[Mapping[str, dict[str, Any]]] = {
    "grpo": {"algorithm.loss.average": "sequence_mean"},
    "bnpo": {"algorithm.loss.average": "token_mean"},
    "dapo": {"algorithm.loss.average": "token_mean"},
    "dr_grpo": {"algorithm.loss.average": "constant"},
    "cispo": {"algorithm.loss.average": "token_mean"},
    "sapo": {"algorithm.loss.average": "sequence_mean"},
}
"""What each loss_type averages over."""

_SCALES: Final[Mapping[Any, str]] = {
    True: "group_std",
    "group": "group_std",
    "batch": "batch_std",
    False: "none",
    "none": "none",
}
_CONVENTION_NOTE: Final = "the convention sets what TRL does besides: `forge config show` prints it"
_OWN_SURROGATE: Final = "algorithm.loss.kind takes module:attribute of a surrogate of your own; it becomes clip"


def _preset(kind: str, loss_type: str, scale: str) -> str:
    """The preset whose name says most about the loss; the keys that are written out win over it."""
    if kind != "clip":
        return kind
    return "dr_grpo" if loss_type == "dr_grpo" and scale == "none" else "grpo"


def _surrogate(config: PeerConfig) -> Converted:
    """Convert the loss of a token, and how it is averaged."""
    loss_type, level = config["loss_type"], config["importance_sampling_level"]
    scale = _SCALES.get(config["scale_rewards"], "group_std")
    low, delta = float(config["epsilon"]), config["delta"]
    high = low if config["epsilon_high"] is None else float(config["epsilon_high"])
    values: dict[str, Any] = {"algorithm.preset": "grpo", "algorithm.convention": "trl"}
    known = loss_type in _AVERAGES and (level == "token" or loss_type not in ("cispo", "sapo"))
    if not known:
        values |= {"algorithm.loss.clip_low": low, "algorithm.loss.clip_high": high}
        what = f"loss_type {loss_type} with importance_sampling_level {level}"
        return lacking(f"{what} is not built in: {_OWN_SURROGATE}", values)
    kind = loss_type if loss_type in ("cispo", "sapo") else "gspo" if level == "sequence" else "clip"
    values |= {"algorithm.preset": _preset(kind, loss_type, scale), "algorithm.loss.kind": kind, **_AVERAGES[loss_type]}
    if kind == "cispo":
        return _cispo(values, high)
    if kind == "sapo":
        taus = {"positive": config["sapo_temperature_pos"], "negative": config["sapo_temperature_neg"]}
        values |= {f"algorithm.loss.tau_{name}": float(tau) for name, tau in taus.items()}
        return Converted(values, note=_CONVENTION_NOTE)
    values |= {"algorithm.loss.clip_low": low, "algorithm.loss.clip_high": high}
    if delta is not None:
        values["algorithm.loss.dual_clip"] = float(delta)
    if loss_type == "bnpo":
        return changed(values, "bnpo averages over the tokens of one process's micro-batch, here of the whole step")
    if loss_type == "dr_grpo" and not isinstance(config["max_completion_length"], int):
        return lacking("dr_grpo divides by max_completion_length, which is null: set algorithm.loss.length", values)
    return Converted(values, note=_CONVENTION_NOTE)


def _cispo(values: dict[str, Any], bound: float) -> Converted:
    """TRL's epsilon_high is the largest weight, ours its distance above 1."""
    if bound < 1:
        note = f"epsilon_high is the largest weight in TRL: {bound:g} would shrink every one; it becomes 5"
        return lacking(note, values | {"algorithm.loss.clip_low": 1.0, "algorithm.loss.clip_high": 4.0})
    values |= {"algorithm.loss.clip_low": 1.0, "algorithm.loss.clip_high": bound - 1}
    return changed(values, "epsilon_high is the largest weight in TRL; clip_high is how far it lies above 1")


def _correction(config: PeerConfig) -> Converted:
    """Convert the correction between vLLM and the trainer. Without vLLM, TRL has none."""
    prefix = "algorithm.loss.correction."
    mode = config["vllm_importance_sampling_mode"]
    if not config["use_vllm"] or not config["vllm_importance_sampling_correction"]:
        why = "without vLLM" if not config["use_vllm"] else "vllm_importance_sampling_correction is false"
        return Converted({f"{prefix}kind": "none"}, note=f"TRL corrects nothing: {why}")
    level, _, kind = str(mode).partition("_")
    if level not in ("token", "sequence") or kind not in ("mask", "truncate"):
        return lacking("correction.kind is none, truncate or mask; level is token or sequence")
    high = config["vllm_importance_sampling_cap"] or config["vllm_importance_sampling_clip_max"]
    values = {
        f"{prefix}kind": kind,
        f"{prefix}level": level,
        f"{prefix}low": float(config["vllm_importance_sampling_clip_min"] or 0.0),
        f"{prefix}high": "inf" if high is None else float(high),
    }
    return Converted(values)


def _divergence(config: PeerConfig) -> Converted:
    """Convert the penalty of GRPO: k3 in the loss."""
    values: dict[str, Any] = {
        "algorithm.kl.coefficient": float(config["beta"] or 0.0),
        "algorithm.kl.weighted": bool(config["use_bias_correction_kl"]),
    }
    if values["algorithm.kl.coefficient"]:
        values |= {"algorithm.kl.estimator": "k3", "algorithm.kl.place": "loss"}
    return Converted(values)


def _scaling(config: PeerConfig) -> Converted:
    scale = _SCALES.get(config["scale_rewards"])
    if scale is None:
        return lacking("algorithm.advantage.scale is group_std, others_std, batch_std or none")
    values = {"algorithm.advantage.scale": scale}
    if config["multi_objective_aggregation"] == "normalize_then_sum":
        note = "rewards are added up before they are normalised; algorithm.advantage.function takes one of your own"
        return lacking(note, values)
    return Converted(values)


def _entropy(config: PeerConfig) -> Converted:
    values = {"algorithm.loss.entropy_coefficient": float(config["entropy_coef"] or 0.0)}
    if config["use_adaptive_entropy"]:
        return lacking("the coefficient does not adapt: it stays at entropy_coef", values)
    if values["algorithm.loss.entropy_coefficient"]:
        return changed(values, "the bonus is averaged like the loss; TRL's is a mean over tokens for every loss")
    return Converted(values)


def _entropy_mask(config: PeerConfig) -> Converted | None:
    if config["top_entropy_quantile"] == 1.0:
        return None
    return lacking("all tokens of a completion are in the loss: algorithm.loss.function takes a loss of your own")


def _old_policy_mask(config: PeerConfig) -> Converted | None:
    if config["off_policy_mask_threshold"] is None:
        return None
    note = "algorithm.loss.correction.sequence_mask leaves out completions by their ratio, whatever their advantage"
    return lacking(note)


def _rloo(config: PeerConfig) -> Converted:
    """Convert RLOO's loss: the sum over a completion's tokens, averaged over completions."""
    values: dict[str, Any] = {
        "algorithm.preset": "rloo",
        "algorithm.convention": "trl",
        "algorithm.loss.average": "constant",
        "algorithm.loss.length": 1,
        "algorithm.loss.correction.kind": "none",
    }
    note = (
        "REINFORCE, the gradient of TRL's clipped ratio of whole completions where that ratio is 1: epsilon is unused"
    )
    return changed(values, note)


LOSS_RULES = [
    joint(
        "loss_type importance_sampling_level epsilon epsilon_high delta sapo_temperature_pos sapo_temperature_neg",
        "algorithm.preset algorithm.convention algorithm.loss.kind algorithm.loss.average algorithm.loss.clip_low "
        "algorithm.loss.clip_high algorithm.loss.dual_clip algorithm.loss.tau_positive algorithm.loss.tau_negative",
        _surrogate,
    ),
    lacks("vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", _OWN_SURROGATE),
    joint("scale_rewards multi_objective_aggregation", "algorithm.advantage.scale", _scaling),
    joint(
        "beta use_bias_correction_kl",
        "algorithm.kl.coefficient algorithm.kl.estimator algorithm.kl.place algorithm.kl.weighted",
        _divergence,
    ),
    joint(
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min vllm_importance_sampling_cap",
        "algorithm.loss.correction.kind algorithm.loss.correction.level algorithm.loss.correction.low "
        "algorithm.loss.correction.high",
        _correction,
    ),
    joint("off_policy_mask_threshold", "", _old_policy_mask),
    joint("top_entropy_quantile", "", _entropy_mask),
    joint(
        "entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
        "algorithm.loss.entropy_coefficient",
        _entropy,
    ),
]

RLOO_RULES = [
    joint(
        "epsilon epsilon_high",
        "algorithm.preset algorithm.convention algorithm.loss.average algorithm.loss.length "
        "algorithm.loss.correction.kind",
        _rloo,
    ),
    maps("beta", "algorithm.kl.coefficient", lambda value: float(value or 0.0)),
    maps("normalize_advantages", "algorithm.advantage.whiten"),
    lacks("reward_clip_range", "algorithm.advantage.clip bounds advantages; a reward of your own bounds its value"),
    always({"algorithm.kl.credit": "completion"}, "the divergence of a completion is subtracted from its reward"),
]
