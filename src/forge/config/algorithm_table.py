"""The table of `forge algorithms`: what each computes, where it was published, and what other libraries call it.

The keys that a preset sets are in `forge.config.algorithm_presets`, and are printed from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

PEERS: Final = ("TRL", "verl", "OpenRLHF")
_CLIP: Final = "-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)"
_GROUP: Final = "(R - mean of the group) / (std of the group + epsilon)"


@dataclass(frozen=True, slots=True)
class AlgorithmFacts:
    """One algorithm.

    Attributes:
        title: its name in words.
        key: the configuration that selects it.
        advantage: how rewards become advantages; empty for losses that read preferences.
        loss: the loss of a token, or of a pair. `r` is the ratio of policy to proximal policy, `sg` stops the gradient.
        reference: where it was published.
        peers: its name in other libraries; one that is left out does not have it, or not under a name of its own.
    """

    title: str
    key: str
    advantage: str
    loss: str
    reference: str
    peers: Mapping[str, str] = field(default_factory=dict)


def _preset(
    name: str, title: str, advantage: str, loss: str, reference: str, **peers: str
) -> tuple[str, AlgorithmFacts]:
    return name, AlgorithmFacts(title, f"algorithm.preset: {name}", advantage, loss, reference, peers)


def _preference(name: str, title: str, loss: str, reference: str, **peers: str) -> tuple[str, AlgorithmFacts]:
    return name, AlgorithmFacts(title, f"preference.kind: {name}", "", loss, reference, peers)


ALGORITHMS: Final[Mapping[str, AlgorithmFacts]] = dict(
    [
        _preset(
            "grpo",
            "group relative policy optimization",
            _GROUP,
            f"{_CLIP}, mean over tokens",
            "DeepSeekMath, arXiv 2402.03300 (2024)",
            TRL="GRPOTrainer, loss_type dapo",
            verl="adv_estimator grpo",
            OpenRLHF="advantage_estimator group_norm",
        ),
        _preset(
            "dapo",
            "decoupled clip and dynamic sampling policy optimization",
            _GROUP,
            f"{_CLIP} with clip_high 0.28, mean over tokens",
            "DAPO, arXiv 2503.14476 (2025)",
            TRL="loss_type dapo with epsilon_high 0.28",
            verl="adv_estimator grpo with clip_ratio_high 0.28",
        ),
        _preset(
            "dr_grpo",
            "GRPO done right",
            "R - mean of the group",
            f"{_CLIP}, sum over tokens divided by a constant",
            "Understanding R1-Zero-like training, arXiv 2503.20783 (2025)",
            TRL="loss_type dr_grpo with scale_rewards none",
            verl="adv_estimator grpo with norm_adv_by_std_in_grpo false",
            OpenRLHF="advantage_estimator dr_grpo",
        ),
        _preset(
            "gspo",
            "group sequence policy optimization",
            _GROUP,
            f"{_CLIP} with r = exp(mean over the sequence of log r), mean over sequences",
            "GSPO, arXiv 2507.18071 (2025)",
            TRL="importance_sampling_level sequence",
            verl="policy_loss.loss_mode gspo",
            OpenRLHF="policy loss gspo",
        ),
        _preset(
            "cispo",
            "clipped importance sampling policy optimization",
            _GROUP,
            "-sg(min(r, 1 + clip_high)) A logprob, mean over tokens",
            "MiniMax-M1, arXiv 2506.13585 (2025)",
            TRL="loss_type cispo",
            verl="policy_loss.loss_mode cispo",
        ),
        _preset(
            "sapo",
            "soft adaptive policy optimization",
            _GROUP,
            "-(4 / tau) sigmoid(tau (r - 1)) A, mean over sequences",
            "SAPO, arXiv 2511.20347 (2025)",
            TRL="loss_type sapo",
            verl="policy_loss.loss_mode sapo",
        ),
        _preset(
            "gigpo",
            "group in group policy optimization",
            f"{_GROUP}, plus omega times the same of a turn's return among turns in the same state",
            f"{_CLIP}, mean over tokens",
            "GiGPO, arXiv 2505.10978 (2025)",
        ),
        _preset(
            "ppo",
            "proximal policy optimization with a critic",
            "generalized advantage estimate from the critic's values, whitened over the batch's tokens",
            f"{_CLIP}, mean over tokens; of the critic max((V - R)², (clip(V, V_old ± value_clip) - R)²) / 2",
            "PPO, arXiv 1707.06347 (2017); GAE, arXiv 1506.02438 (2015)",
            TRL="PPOTrainer",
            verl="adv_estimator gae",
            OpenRLHF="advantage_estimator gae",
        ),
        _preset(
            "rloo",
            "REINFORCE leave one out",
            "R - mean of the others of the group",
            "-A logprob, mean over tokens",
            "Back to basics, arXiv 2402.14740 (2024)",
            TRL="RLOOTrainer",
            verl="adv_estimator rloo",
            OpenRLHF="advantage_estimator rloo",
        ),
        _preset(
            "reinforce",
            "REINFORCE",
            "R",
            "-A logprob, mean over tokens",
            "Williams, Machine Learning 8 (1992)",
        ),
        _preset(
            "reinforce_pp",
            "REINFORCE++",
            "R, whitened over the batch",
            f"{_CLIP}, mean over tokens",
            "REINFORCE++, arXiv 2501.03262 (2025)",
            verl="adv_estimator reinforce_plus_plus",
            OpenRLHF="advantage_estimator reinforce",
        ),
        _preset(
            "reinforce_pp_baseline",
            "REINFORCE++ with a group baseline",
            "R - mean of the group, whitened over the batch",
            f"{_CLIP}, mean over tokens",
            "REINFORCE++, arXiv 2501.03262 (2025)",
            verl="adv_estimator reinforce_plus_plus_baseline",
            OpenRLHF="advantage_estimator reinforce_baseline",
        ),
        _preference(
            "dpo",
            "direct preference optimization",
            "-log sigmoid(beta (log p/p_ref of the chosen - log p/p_ref of the rejected answer))",
            "DPO, arXiv 2305.18290 (2023)",
            TRL="DPOTrainer",
            OpenRLHF="train_dpo",
        ),
        _preference(
            "ipo",
            "identity preference optimization",
            "(difference of the mean log p/p_ref of chosen and rejected answer - 1 / (2 beta))²",
            "A general theoretical paradigm, arXiv 2310.12036 (2023)",
            TRL="DPOTrainer, loss_type ipo",
            OpenRLHF="train_dpo --ipo",
        ),
        _preference(
            "kto",
            "Kahneman-Tversky optimization",
            "1 - sigmoid(±(beta log p/p_ref - KL)), + for desirable and - for undesirable answers",
            "KTO, arXiv 2402.01306 (2024)",
            TRL="KTOTrainer",
        ),
        _preference(
            "orpo",
            "odds ratio preference optimization",
            "negative log-likelihood of the chosen answer - beta log sigmoid(log odds ratio)",
            "ORPO, arXiv 2403.07691 (2024)",
            TRL="ORPOTrainer",
        ),
        _preference(
            "simpo",
            "simple preference optimization",
            "-log sigmoid(beta (mean logprob of the chosen - mean logprob of the rejected answer) - gamma)",
            "SimPO, arXiv 2405.14734 (2024)",
            TRL="CPOTrainer, loss_type simpo",
        ),
    ]
)
"""Every algorithm by its name."""
