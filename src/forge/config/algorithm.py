"""The algorithm of a policy's learning: how rewards become advantages, and advantages a loss.

Two words choose many keys at once: `preset` (which published algorithm) and `convention` (how another library does it).
Both only lay values beneath the user's own keys: what is written out wins. `forge.config.algorithm_presets` has the
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from forge.config.algorithm_presets import beneath
from forge.config.base import AdvantageName, ConfigModel, FrozenDict, Limit, LossName, SurrogateName, broken_rule
from forge.config.distillation import DistillationConfig

Preset = Literal[
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "cispo",
    "sapo",
    "gigpo",
    "ppo",
    "rloo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
]
Convention = Literal["trl", "verl", "openrlhf", "nemo"]


class AdvantageConfig(ConfigModel):
    """How the rewards of a group become advantages: (reward - baseline) / scale."""

    function: AdvantageName = Field(
        default="baseline",
        description="What computes advantages: `baseline`, one for each episode, which the other keys describe; "
        "`turn`, one for each turn of an episode, with the arguments `gamma` (1) and `baseline` (true); `gigpo`, that "
        "of the episode and one for each turn compared with turns in the same state, with the arguments `gamma` "
        "(0.95), `omega` (1) and `state` (observation); `gae`, one for each token or turn from a critic's values, with "
        "the arguments `gamma` (1), `lam` (0.95), `over` (tokens) and `bootstrap` (environment), see the section "
        "`critic`; or `module:function` of your own.",
    )
    args: Mapping[str, Any] = Field(
        default_factory=FrozenDict, description="Keyword arguments of `turn`, `gigpo`, `gae` or a function of your own."
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
    gamma: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Discount per sampled token: after baseline and scale, the advantage of a token n tokens before "
        "the last is multiplied by gamma to the power n. 1 for no discount.",
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
        "and all later ones. `token`: after the baseline, from each token's advantage that token's own; with "
        "advantage.function `gae` from each token's reward.",
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


class SequenceMaskConfig(ConfigModel):
    """Which completions are left out because sampler and trainer disagree on them as a whole."""

    ratio: Literal["geometric_mean", "product"] = Field(
        default="geometric_mean",
        description="Ratio of a completion: the geometric mean of its tokens' ratios trainer / sampler, or their "
        "product.",
    )
    low: float = Field(default=0.0, ge=0, description="Smallest ratio of a completion that counts.")
    high: Limit = Field(
        default=float("inf"), gt=0, description="Largest ratio of a completion that counts. `inf` for no limit."
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.low > self.high:
            raise broken_rule(f"at most high, which is {self.high:g}", repair="lower it", key="low")
        return self


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
    sequence_mask: SequenceMaskConfig | None = Field(
        default=None,
        description="Excludes completions by the ratio of the whole, with any `kind`; with `truncate` that is "
        "sequence-masked TIS. Null for none.",
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
        "weighted by the clipped ratio, which has no gradient. `sapo`: a sigmoid of the ratio in place of clipping. "
        "`reinforce`: advantage times logprob. `module:attribute`: a surrogate of your own.",
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
    tau_positive: float = Field(
        default=1.0,
        gt=0,
        description="Temperature of `sapo` for positive advantages: the larger it is, the faster the gradient fades "
        "as the ratio leaves 1.",
    )
    tau_negative: float = Field(default=1.05, gt=0, description="Temperature of `sapo` for all other advantages.")
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


_ALLOWED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "gigpo": {
        "baseline": ("group_mean", "leave_one_out"),
        "scale": ("group_std", "others_std", "none"),
        "whiten": (False,),
    },
    "gae": {"baseline": ("group_mean", "none"), "scale": ("group_std", "none")},
}
"""For some advantage functions, the values that other keys of `advantage` may have. `gae` has no use for both."""


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
    distillation: DistillationConfig = Field(
        default_factory=DistillationConfig, description="What the policy learns from a teacher's logprobs."
    )

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a critic's values."""
        return self.advantage.function == "gae"

    @property
    def charges_tokens(self) -> bool:
        """Whether the divergence is taken from the advantages of single tokens."""
        return self.kl.coefficient > 0 and self.kl.place == "reward" and self.kl.credit != "completion"

    @model_validator(mode="after")
    def _check_own_function(self) -> Self:
        function = self.advantage.function
        is_charged = function == "baseline" or (function == "gae" and self.kl.credit == "token")
        if self.charges_tokens and not is_charged:
            either = "`completion` or `token`" if function == "gae" else "`completion`"
            rule = f"{either} with advantage.function `{function}`, which computes token advantages"
            raise broken_rule(rule, repair="set algorithm.kl.credit: completion", key="kl.credit")
        if self.advantage.gamma != 1 and function != "baseline":
            rule = f"1 with advantage.function `{function}`: only `baseline` discounts by tokens"
            unit = "tokens or turns" if function == "gae" else "turns"
            repair = f"remove it; algorithm.advantage.args.gamma discounts by {unit}"
            raise broken_rule(rule, repair=repair, key="advantage.gamma")
        return self

    @model_validator(mode="after")
    def _check_statistics(self) -> Self:
        """Refuse values of other keys that have no effect, or no meaning, with an advantage function."""
        section = self.advantage
        for key, values in _ALLOWED.get(section.function, {}).items():
            if getattr(section, key) not in values:
                names = " or ".join(str(value).lower() for value in values)
                rule = f"{names} with advantage.function `{section.function}`"
                repair = f"set algorithm.advantage.{key}: {str(values[0]).lower()}"
                raise broken_rule(rule, repair=repair, key=f"advantage.{key}")
        return self

    @model_validator(mode="after")
    def _check_whitening(self) -> Self:
        section = self.advantage
        if section.whiten and section.function == "gae" and section.whiten_over == "completions":
            rule = "`tokens` with advantage.function `gae`, which gives each token its own advantage"
            raise broken_rule(rule, repair="set algorithm.advantage.whiten_over: tokens", key="advantage.whiten_over")
        if section.whiten and section.whiten_over == "completions" and (self.charges_tokens or section.gamma != 1):
            key, other = ("kl.credit", "completion") if self.charges_tokens else ("advantage.gamma", 1)
            given = self.kl.credit if self.charges_tokens else section.gamma
            rule = f"`tokens` with {key} `{given}`, which gives each token its own advantage"
            repair = f"set algorithm.advantage.whiten_over: tokens, or algorithm.{key}: {other}"
            raise broken_rule(rule, repair=repair, key="advantage.whiten_over")
        return self

    @model_validator(mode="before")
    @classmethod
    def _lay_beneath(cls, own: Any) -> Any:
        return beneath(own) if isinstance(own, Mapping) else own
