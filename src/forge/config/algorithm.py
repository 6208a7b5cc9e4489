"""The algorithm of a policy's learning: how rewards become advantages, and advantages a loss.

Two words choose many keys at once: `preset` (which published algorithm) and `convention` (how another library does it).
Both only lay values beneath the user's own keys: what is written out wins. `forge.config.algorithm` has the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from forge.config.base import AdvantageName, ConfigModel, FrozenDict, Limit, LossName, SurrogateName, broken_rule

Values = Mapping[str, Any]

_WHITENED: Values = {"scale": "none", "whiten": True}
_NO_LOWER_BOUND = 1.0

PRESETS: Mapping[str, Values] = {
    "grpo": {},
    "dapo": {"loss": {"clip_high": 0.28}},
    "dr_grpo": {"advantage": {"scale": "none"}, "loss": {"average": "constant"}},
    "gspo": {"loss": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "average": "sequence_mean"}},
    "cispo": {"loss": {"kind": "cispo", "clip_low": _NO_LOWER_BOUND, "clip_high": 4.0}},
    "rloo": {
        "advantage": {"baseline": "leave_one_out", "scale": "none"},
        "loss": {"kind": "reinforce"},
        "kl": {"estimator": "k1", "place": "reward"},
    },
    "reinforce": {"advantage": {"baseline": "none", "scale": "none"}, "loss": {"kind": "reinforce"}},
    "reinforce_pp": {
        "advantage": {"baseline": "none", **_WHITENED},
        "kl": {"estimator": "k1", "place": "reward"},
    },
    "reinforce_pp_baseline": {"advantage": _WHITENED, "kl": {"estimator": "k2"}},
}

_RECOMPUTED: Values = {"proximal": "trainer"}
_DUAL_CLIP: Values = {"dual_clip": 3.0}
_DUAL: Values = {"loss": _DUAL_CLIP}
_OTHERS: Values = {"advantage": {"baseline": "leave_one_out", "scale": "others_std"}}
_OVER_TOKENS: Values = {"std_ddof": 1, "whiten_over": "tokens"}
_WITH_FLOOR: Values = {"advantage": {"std_ddof": 0, "epsilon": 1e-8, "epsilon_place": "floor"}}
_WITH_VARIANCE: Values = {"epsilon": 1e-8, "epsilon_place": "variance"}
_REINFORCE_PP = ("reinforce_pp", "reinforce_pp_baseline")
_CLAMPED: Values = {"kl": {"clamp": 10.0}}

CONVENTIONS: Mapping[str, tuple[Values, Mapping[str, Values]]] = {
    "trl": (
        {
            "advantage": {"std_ddof": 1, "epsilon": 1e-4},
            "loss": {
                **_RECOMPUTED,
                "count_masked": True,
                "correction": {"kind": "mask", "level": "sequence", "low": 0.0, "high": 3.0},
            },
            "kl": {"weighted": True},
        },
        {},
    ),
    "verl": (
        {"advantage": {**_OVER_TOKENS, "epsilon": 1e-6}, "loss": {**_RECOMPUTED, "count_masked": True}},
        {
            **dict.fromkeys(["grpo", "dapo", "dr_grpo"], _DUAL),
            "cispo": {"loss": {"clip_high": 0.2}},
            "rloo": {"loss": {"kind": "clip", **_DUAL_CLIP}},
            "reinforce_pp": {"advantage": _WITH_VARIANCE, **_DUAL, "kl": {"credit": "return_to_go"}},
            "reinforce_pp_baseline": {"advantage": _WITH_VARIANCE, **_DUAL},
        },
    ),
    "openrlhf": (
        {
            "advantage": {**_OVER_TOKENS, "epsilon": 1e-9},
            "loss": _RECOMPUTED,
            "kl": {"credit": "return_to_go"},
        },
        {
            "dr_grpo": {"loss": {"average": "token_mean"}},
            "rloo": {"loss": {"kind": "clip"}},
            **dict.fromkeys(_REINFORCE_PP, _WITH_FLOOR),
        },
    ),
    "nemo": (
        {
            "advantage": {**_OVER_TOKENS, "epsilon": 1e-6},
            "loss": _RECOMPUTED,
            "kl": {"credit": "token", "score_gradient": True},
        },
        {
            **dict.fromkeys(["grpo", "dapo", "gspo"], _OTHERS),
            "cispo": {**_OTHERS, "loss": {"clip_high": 5.0}},
            "rloo": {"kl": {"estimator": "k3", "place": "loss"}},
            **dict.fromkeys(_REINFORCE_PP, _WITH_FLOOR),
        },
    ),
}
"""For each convention, what it sets in any case, and what it sets for a preset."""

ESTIMATORS: Mapping[str, Mapping[str, Values]] = {
    "verl": {"k3": _CLAMPED},
    "openrlhf": dict.fromkeys(["k1", "k2", "k3"], _CLAMPED),
    "nemo": dict.fromkeys(["k1", "k2", "k3"], _CLAMPED),
}
"""For each convention, what it sets for an estimate of the divergence."""


def beneath(own: Values) -> dict[str, Any]:
    """The user's keys of the section, with what its preset and its convention set laid beneath them.

    Names that are not known are left alone: the schema says what is wrong with them.
    """
    preset, convention = own.get("preset", "grpo"), own.get("convention")
    layers: list[Values] = [PRESETS[preset]] if isinstance(preset, str) and preset in PRESETS else []
    if layers and isinstance(convention, str) and convention in CONVENTIONS:
        always, particular = CONVENTIONS[convention]
        layers += [always, particular.get(preset, {})]
        layers.append(ESTIMATORS.get(convention, {}).get(_estimator([*layers, own]), {}))
    return _laid([*layers, own])


def _estimator(layers: Sequence[Values]) -> str:
    """Which estimate of the divergence comes out of the layers; `k3` is the schema's own."""
    kl = _laid(layers).get("kl")
    given = kl.model_dump() if isinstance(kl, BaseModel) else kl
    return str(given.get("estimator", "k3")) if isinstance(given, Mapping) else "k3"


def _laid(layers: Sequence[Values]) -> dict[str, Any]:
    """All layers as one, each over those before it."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = _merged(merged, layer)
    return merged


def _merged(low: Values, high: Values) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        if isinstance(value, BaseModel) and isinstance(below, Mapping):
            value = value.model_dump(exclude_unset=True)  # a section given as an object: what was set in it
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[key] = _merged(below, value)
        else:
            merged[key] = value
    return merged


Preset = Literal[
    "grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline"
]
Convention = Literal["trl", "verl", "openrlhf", "nemo"]


class AdvantageConfig(ConfigModel):
    """How the rewards of a group become advantages: (reward - baseline) / scale."""

    function: AdvantageName = Field(
        default="baseline",
        description="What computes advantages: `baseline`, one for each episode, which the other keys describe; "
        "`turn`, one for each turn of an episode, with the arguments `gamma` (1) and `baseline` (true); or "
        "`module:function` of your own.",
    )
    args: Mapping[str, Any] = Field(
        default_factory=FrozenDict, description="Keyword arguments of `turn`, or of a function of your own."
    )
    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"] = Field(
        default="group_mean",
        description="Baseline subtracted from a reward: the mean of its group, of the other rewards of its group, of "
        "the whole batch, or nothing.",
    )
    scale: Literal["group_std", "others_std", "batch_std", "none"] = Field(
        default="group_std",
        description="Divisor of the difference: the standard deviation of the group's rewards, of the other rewards "
        "of the group, of the whole batch, or nothing. A standard deviation of 0 does not divide.",
    )
    std_ddof: Literal[0, 1] = Field(
        default=1,
        description="Degrees of freedom subtracted from n in the standard deviation: 1 for the sample's, 0 for the "
        "population's.",
    )
    epsilon: float = Field(
        default=1e-4,
        gt=0,
        description="Protection against division by a small standard deviation: see `epsilon_place`.",
    )
    epsilon_place: Literal["std", "variance", "floor"] = Field(
        default="std",
        description="`std`: epsilon is added to the standard deviation. `variance`: it is added to the variance. "
        "`floor`: it is the smallest variance.",
    )
    whiten: bool = Field(
        default=False, description="Whether the batch's advantages are normalized to mean 0 and standard deviation 1."
    )
    whiten_over: Literal["completions", "tokens"] = Field(
        default="completions",
        description="Unit of the mean and standard deviation of `whiten`: completions, or tokens that count in the "
        "loss.",
    )
    clip: float | None = Field(
        default=None, gt=0, description="Largest absolute advantage; larger ones are clipped. Null for no limit."
    )


class KLConfig(ConfigModel):
    """The penalty that keeps the policy close to the reference model."""

    coefficient: float = Field(
        default=0.0, ge=0, description="Weight of the divergence. With 0 no reference model is loaded."
    )
    estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="How the divergence is estimated.")
    place: Literal["loss", "reward"] = Field(
        default="loss",
        description="Whether it is added to the loss, or subtracted from the reward according to `credit`.",
    )
    credit: Literal["completion", "return_to_go", "token"] = Field(
        default="completion",
        description="Where `place: reward` subtracts it. `completion`: the sum over a completion from its reward, "
        "before the baseline. `return_to_go`: after the baseline, from each token's advantage the sum over that token "
        "and all later ones. `token`: after the baseline, from each token's advantage that token's own.",
    )
    clamp: float | None = Field(
        default=None,
        gt=0,
        description="Largest absolute estimate of a token; beyond it there is no gradient. Null for no limit.",
    )
    weighted: bool = Field(
        default=False,
        description="Whether it is multiplied by the policy's ratio in the loss, gradient included, so that the "
        "gradient is also right for tokens sampled by older weights.",
    )
    score_gradient: bool = Field(
        default=False,
        description="Whether the gradient in the loss includes the score term (the estimate times the gradient of the "
        "logprob), since the policy itself samples the tokens. The value does not change; `weighted` already "
        "includes this term.",
    )


class CorrectionConfig(ConfigModel):
    """Correction of the difference between the sampler's probabilities and the trainer's."""

    kind: Literal["none", "truncate", "mask"] = Field(
        default="none",
        description="`truncate`: the loss is weighted by the ratio trainer / sampler, clipped to [low, high] (TIS). "
        "`mask`: the loss is weighted by the ratio, and is 0 where the ratio is outside [low, high] (MIS, IcePop).",
    )
    level: Literal["token", "sequence"] = Field(
        default="token", description="Whether the ratio is per token or per completion."
    )
    low: float = Field(
        default=0.0,
        ge=0,
        description="Smallest ratio: `truncate` raises smaller ones to it, `mask` excludes them.",
    )
    high: Limit = Field(
        default=2.0,
        gt=0,
        description="Largest ratio: `truncate` lowers larger ones to it, `mask` excludes them. `inf` for no limit.",
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.low > self.high:
            raise broken_rule(f"at most high, which is {self.high:g}", repair="lower it", key="low")
        return self


class PolicyLossConfig(ConfigModel):
    """The loss per token, and how it is averaged over a batch."""

    function: LossName = Field(
        default="policy",
        description="Which loss: `policy`, which the other keys describe, or `module:attribute` of your own.",
    )
    kind: SurrogateName = Field(
        default="clip",
        description="`clip`: PPO's clipped ratio. `gspo`: the same with one ratio per completion. `cispo`: the logprob "
        "weighted by the clipped ratio, which has no gradient. `reinforce`: advantage times logprob. "
        "`module:attribute`: a surrogate of your own.",
    )
    args: Mapping[str, Any] = Field(
        default_factory=FrozenDict, description="Keyword arguments of a loss or surrogate of your own."
    )
    clip_low: float = Field(
        default=0.2, ge=0, le=1, description="How far below 1 the ratio is clipped; 1 for no limit."
    )
    clip_high: Limit = Field(default=0.2, ge=0, description="How far above 1 the ratio is clipped; `inf` for no limit.")
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description="Upper bound of the loss of `clip` and `gspo` for negative advantages, as a multiple of the "
        "advantage; null for no limit.",
    )
    average: Literal["token_mean", "sequence_mean", "constant"] = Field(
        default="token_mean", description="How token losses are averaged."
    )
    length: int | None = Field(
        default=None, ge=1, description="Length of `average: constant`; null for generator.sampling.max_tokens."
    )
    count_masked: bool = Field(
        default=False,
        description="Whether `average: sequence_mean` divides by all completions, including those without a token "
        "that counts (rollout.mask_truncated).",
    )
    proximal: Literal["sampler", "trainer"] = Field(
        default="sampler",
        description="Logprobs in the denominator of the ratio: the sampler's, or the trainer's own before the first "
        "update on a batch.",
    )
    correction: CorrectionConfig = Field(
        default_factory=CorrectionConfig, description="Correction between sampler and trainer."
    )
    entropy_coefficient: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus, per nat.")

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.length is not None and self.average != "constant":
            rule = f"null with average `{self.average}`: only `constant` divides by a fixed length"
            raise broken_rule(rule, repair="remove it, or set algorithm.loss.average: constant", key="length")
        return self


class AlgorithmConfig(ConfigModel):
    """The reinforcement learning algorithm."""

    preset: Preset = Field(default="grpo", description="Published algorithm that sets the defaults of the other keys.")
    convention: Convention | None = Field(
        default=None, description="Library whose choices to follow where libraries differ; null for ours."
    )
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig, description="How rewards become advantages.")
    loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig, description="How advantages become a loss.")
    kl: KLConfig = Field(
        default_factory=KLConfig, description="The penalty that keeps the policy close to the reference model."
    )

    @property
    def charges_tokens(self) -> bool:
        """Whether the divergence is taken from the advantages of single tokens."""
        return self.kl.coefficient > 0 and self.kl.place == "reward" and self.kl.credit != "completion"

    @model_validator(mode="after")
    def _check_own_function(self) -> Self:
        if self.charges_tokens and self.advantage.function != "baseline":
            rule = f"`completion` with advantage.function `{self.advantage.function}`, which computes token advantages"
            raise broken_rule(rule, repair="set algorithm.kl.credit: completion", key="kl.credit")
        return self

    @model_validator(mode="after")
    def _check_whitening(self) -> Self:
        if self.charges_tokens and self.advantage.whiten and self.advantage.whiten_over == "completions":
            rule = f"`tokens` with kl.credit `{self.kl.credit}`, which gives each token its own advantage"
            repair = "set algorithm.advantage.whiten_over: tokens, or algorithm.kl.credit: completion"
            raise broken_rule(rule, repair=repair, key="advantage.whiten_over")
        return self

    @model_validator(mode="before")
    @classmethod
    def _lay_beneath(cls, own: Any) -> Any:
        return beneath(own) if isinstance(own, Mapping) else own
