"""The table of verl's `algorithm`, `critic`, and of what the actor minimises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forge.migration.records import Converted, PeerConfig
from forge.migration.rules import at_least_zero, changed, joint, lacking, lacks, positive
from forge.migration.verl.schedules import schedule_of

ACTOR: Final = "actor_rollout_ref.actor"
_PRESETS: Final[Mapping[str, str]] = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_KINDS: Final[Mapping[str, str]] = {
    "vanilla": "clip",
    "gspo": "gspo",
    "cispo": "cispo",
    "sapo": "sapo",
    "gpg": "reinforce",
}
_AVERAGES: Final[Mapping[str, str]] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
    "seq-mean-token-sum": "constant",
}
_ESTIMATORS: Final[Mapping[str, str]] = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
_OWN_ADVANTAGE: Final = "algorithm.advantage.function takes module:function of your own"
_OWN_LOSS: Final = "algorithm.loss.kind takes module:attribute of a surrogate of your own; it becomes clip"


def has_critic(config: PeerConfig) -> bool:
    """Whether advantages come from a critic."""
    return bool(config["algorithm.adv_estimator"] == "gae")


def _estimator(config: PeerConfig) -> Converted:
    name = config["algorithm.adv_estimator"]
    values: dict[str, Any] = {"algorithm.convention": "verl"}
    if name not in _PRESETS:
        note = f"adv_estimator {name} is not built in: {_OWN_ADVANTAGE}; it becomes grpo"
        return lacking(note, values | {"algorithm.preset": "grpo"})
    preset = _PRESETS[name]
    values["algorithm.preset"] = preset
    gamma, lam = float(config["algorithm.gamma"]), float(config["algorithm.lam"])
    if preset == "ppo":
        values["algorithm.advantage.args"] = {"gamma": gamma, "lam": lam}
    elif preset == "reinforce_pp" and gamma != 1.0:
        values["algorithm.advantage.gamma"] = gamma
    if preset == "grpo" and not config["algorithm.norm_adv_by_std_in_grpo"]:
        values["algorithm.advantage.scale"] = "none"
    note = "the convention sets what verl does besides: `forge config show` prints epsilon, dual clipping and the like"
    return Converted(values, note=note)


def _surrogate(config: PeerConfig) -> Converted:
    mode, loss = config[f"{ACTOR}.policy_loss.loss_mode"], "algorithm.loss"
    low = config[f"{ACTOR}.clip_ratio_low"]
    high = config[f"{ACTOR}.clip_ratio_high"]
    symmetric = config[f"{ACTOR}.clip_ratio"]
    low, high = (symmetric if each is None else each for each in (low, high))
    bounds = {f"{loss}.clip_low": min(1.0, float(low)), f"{loss}.clip_high": float(high)}
    if mode not in _KINDS:
        return lacking(f"loss_mode {mode} is not built in: {_OWN_LOSS}", bounds)
    kind = _KINDS[mode]
    values: dict[str, Any] = {f"{loss}.kind": kind}
    if kind == "sapo":
        values |= {
            f"{loss}.tau_positive": float(config[f"{ACTOR}.tau_pos"]),
            f"{loss}.tau_negative": float(config[f"{ACTOR}.tau_neg"]),
        }
    elif kind != "reinforce":
        values |= bounds
    if kind == "clip":
        values[f"{loss}.dual_clip"] = float(config[f"{ACTOR}.clip_ratio_c"])
    is_alone = config.is_given(f"{ACTOR}.clip_ratio") and not config.is_given(
        f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"
    )
    if is_alone:
        note = "verl 0.9.1 reads clip_ratio_low and clip_ratio_high, which are 0.2; clip_ratio only where they are null"
        return changed(values, note)
    return Converted(values)


def _average(config: PeerConfig) -> Converted:
    mode, scale = config[f"{ACTOR}.loss_agg_mode"], config[f"{ACTOR}.loss_scale_factor"]
    if mode not in _AVERAGES:
        note = f"algorithm.loss.average is token_mean, sequence_mean or constant, not {mode}; it becomes token_mean"
        return lacking(note, {"algorithm.loss.average": "token_mean"})
    values: dict[str, Any] = {"algorithm.loss.average": _AVERAGES[mode]}
    if mode == "seq-mean-token-sum":
        values["algorithm.loss.length"] = 1
    elif mode == "seq-mean-token-sum-norm" and isinstance(scale, int | float):
        values["algorithm.loss.length"] = max(1, int(scale))
    return Converted(values)


def _divergence(config: PeerConfig) -> Converted:
    """Convert the penalty in the loss or in the reward."""
    in_loss, in_reward = config[f"{ACTOR}.use_kl_loss"], config["algorithm.use_kl_in_reward"]
    if not in_loss and not in_reward:
        return Converted({"algorithm.kl.coefficient": 0.0})
    name = config[f"{ACTOR}.kl_loss_type"] if in_loss else config["algorithm.kl_penalty"]
    coefficient = config[f"{ACTOR}.kl_loss_coef"] if in_loss else config["algorithm.kl_ctrl.kl_coef"]
    values: dict[str, Any] = {
        "algorithm.kl.coefficient": float(coefficient),
        "algorithm.kl.place": "loss" if in_loss else "reward",
        "algorithm.kl.estimator": _ESTIMATORS.get(str(name).rstrip("+"), "k3"),
    }
    notes = []
    if in_loss and in_reward:
        notes.append("the divergence is in the loss or in the reward, not in both: it is in the loss")
    if str(name) not in _ESTIMATORS:
        what = "the gradient of k2" if str(name).endswith("+") else f"the estimate {name}"
        notes.append(f"{what} is not built in; kl.estimator: k2 has that gradient")
    if in_reward and not in_loss and config["algorithm.kl_ctrl.type"] != "fixed":
        notes.append("the coefficient does not adapt: it stays at kl_coef")
    return lacking("; ".join(notes), values) if notes else Converted(values)


def _filtering(config: PeerConfig) -> Converted:
    """Convert what happens to groups without signal."""
    if not config["algorithm.filter_groups.enable"]:
        note = "verl keeps groups whose rewards are equal; their tokens count in averages"
        return changed({"rollout.no_signal": "keep"}, note)
    values: dict[str, Any] = {"rollout.no_signal": "replace"}
    metric, most = config["algorithm.filter_groups.metric"], config["algorithm.filter_groups.max_num_gen_batches"]
    notes = []
    if metric not in ("reward", "seq_reward", "seq_final_reward", "score"):
        notes.append(f"rollout.signal_reward names the reward that must differ, as metric {metric} does")
    if isinstance(most, int) and most > 0:
        notes.append("rollout.max_no_signal_groups bounds groups in a row, not batches")
    return changed(values, "; ".join(notes)) if notes else Converted(values)


def _correction(config: PeerConfig) -> Converted:
    """Convert rollout correction: weights of the ratio trainer / sampler, and rejection of completions."""
    prefix, theirs = "algorithm.loss.correction", "algorithm.rollout_correction"
    values: dict[str, Any] = {"algorithm.loss.proximal": "sampler" if config[f"{theirs}.bypass_mode"] else "trainer"}
    level, notes = config[f"{theirs}.rollout_is"], []
    if level in ("token", "sequence"):
        low, high = _thresholds(config[f"{theirs}.rollout_is_threshold"])
        kind = "truncate" if low is None else "mask"
        values |= {f"{prefix}.kind": kind, f"{prefix}.level": level, f"{prefix}.high": high}
        values |= {} if low is None else {f"{prefix}.low": low}
        if config[f"{theirs}.bypass_mode"]:
            values[f"{prefix}.kind"] = "none"
            notes.append("in bypass mode the ratio of the loss already contains the correction")
    if config[f"{theirs}.rollout_rs"] is not None:
        notes.append("rollout_rs becomes algorithm.loss.correction.sequence_mask, whose bounds are of 1 / w: set them")
    if config[f"{theirs}.rollout_is_batch_normalize"]:
        notes.append("weights are not normalised over the batch")
    if config[f"{theirs}.bypass_mode"] and config[f"{theirs}.loss_type"] != "ppo_clip":
        notes.append("loss_type reinforce: set algorithm.loss.kind: reinforce")
    return lacking("; ".join(notes), values) if notes else Converted(values)


def _thresholds(value: Any) -> tuple[float | None, float]:
    """The bounds of a threshold: `2.0` is an upper one, `0.5_5.0` are both."""
    text = str(value)
    low, underscore, high = text.partition("_")
    try:
        return (float(low), float(high)) if underscore else (None, float(text))
    except ValueError:
        return None, 2.0


def _entropy(config: PeerConfig) -> Converted:
    return Converted({"algorithm.loss.entropy_coefficient": float(config[f"{ACTOR}.entropy_coeff"] or 0.0)})


# ---- The critic


def _critic_rates(config: PeerConfig) -> Converted | None:
    if not has_critic(config):
        return None
    values: dict[str, Any] = {
        "critic.training.learning_rate": float(config["critic.optim.lr"]),
        "critic.training.weight_decay": float(config["critic.optim.weight_decay"]),
        "critic.training.schedule": schedule_of(config["critic.optim.lr_scheduler_type"]),
        "critic.warmup_steps": at_least_zero(config["trainer.critic_warmup"]),
        "critic.value_clip": positive(config["critic.cliprange_value"]),
    }
    if config["critic.ppo_epochs"] != config[f"{ACTOR}.ppo_epochs"]:
        values["critic.iterations"] = config["critic.ppo_epochs"]
    if positive(config["critic.optim.clip_grad"]):
        values["critic.training.max_grad_norm"] = float(config["critic.optim.clip_grad"])
    note = "the critic shares the trainer's GPUs and learns from the same batches; its warm-up is that of the policy"
    return changed(values, note)


def _critic_model(config: PeerConfig) -> Converted | None:
    if not has_critic(config):
        return None
    path = config["critic.model.path"]
    if not config.is_given("critic.model.path") or path == config["actor_rollout_ref.model.path"]:
        return Converted({"critic.path": None})
    return Converted(todo={"critic.path": f"the folder of {path}; null starts from the policy's weights"})


ALGORITHM_RULES = [
    joint(
        "algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo algorithm.gamma algorithm.lam",
        "algorithm.preset algorithm.convention algorithm.advantage.scale algorithm.advantage.args "
        "algorithm.advantage.gamma",
        _estimator,
    ),
    joint(
        f"{ACTOR}.policy_loss.loss_mode {ACTOR}.clip_ratio {ACTOR}.clip_ratio_low {ACTOR}.clip_ratio_high "
        f"{ACTOR}.clip_ratio_c {ACTOR}.tau_pos {ACTOR}.tau_neg",
        "algorithm.loss.kind algorithm.loss.clip_low algorithm.loss.clip_high algorithm.loss.dual_clip "
        "algorithm.loss.tau_positive algorithm.loss.tau_negative",
        _surrogate,
    ),
    lacks(
        f"{ACTOR}.policy_loss.clip_cov_ratio {ACTOR}.policy_loss.clip_cov_lb {ACTOR}.policy_loss.clip_cov_ub "
        f"{ACTOR}.policy_loss.kl_cov_ratio {ACTOR}.policy_loss.ppo_kl_coef {ACTOR}.policy_loss.dro_beta",
        _OWN_LOSS,
    ),
    joint(f"{ACTOR}.loss_agg_mode {ACTOR}.loss_scale_factor", "algorithm.loss.average algorithm.loss.length", _average),
    joint(
        f"{ACTOR}.use_kl_loss {ACTOR}.kl_loss_coef {ACTOR}.kl_loss_type algorithm.use_kl_in_reward "
        "algorithm.kl_penalty algorithm.kl_ctrl.type algorithm.kl_ctrl.kl_coef",
        "algorithm.kl.coefficient algorithm.kl.place algorithm.kl.estimator",
        _divergence,
    ),
    lacks("algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl", "the coefficient does not adapt"),
    joint(
        "algorithm.filter_groups.enable algorithm.filter_groups.metric algorithm.filter_groups.max_num_gen_batches",
        "rollout.no_signal",
        _filtering,
    ),
    lacks("algorithm.filter_groups.max_inflight_gen_batches", "rollout.max_in_flight bounds groups in flight"),
    joint(
        "algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_is_threshold "
        "algorithm.rollout_correction.rollout_rs algorithm.rollout_correction.rollout_rs_threshold "
        "algorithm.rollout_correction.bypass_mode algorithm.rollout_correction.loss_type "
        "algorithm.rollout_correction.rollout_is_batch_normalize",
        "algorithm.loss.proximal algorithm.loss.correction.kind algorithm.loss.correction.level "
        "algorithm.loss.correction.low algorithm.loss.correction.high",
        _correction,
    ),
    lacks("algorithm.use_pf_ppo algorithm.pf_ppo.*", "samples are not weighed again by their scores"),
    joint(f"{ACTOR}.entropy_coeff", "algorithm.loss.entropy_coefficient", _entropy),
    lacks(f"{ACTOR}.calculate_entropy", "train/entropy is always recorded"),
    lacks(f"{ACTOR}.calculate_sum_pi_squared", "the optimal token baseline is not built in"),
]

CRITIC_RULES = [
    joint(
        "critic.optim.lr critic.optim.weight_decay critic.optim.lr_scheduler_type critic.optim.clip_grad "
        "critic.cliprange_value critic.ppo_epochs trainer.critic_warmup",
        "critic.training.learning_rate critic.training.weight_decay critic.training.schedule critic.warmup_steps "
        "critic.value_clip critic.iterations critic.training.max_grad_norm",
        _critic_rates,
    ),
    joint("critic.model.path", "critic.path", _critic_model),
    lacks("critic.enable", "a critic belongs to algorithm.preset: ppo, and to no other"),
    lacks(
        "critic.*",
        "the critic has the trainer's layout, batches and micro-batches: critic.training, critic.distributed",
    ),
]
