"""What losses of other projects gave for a few tokens: their arguments, our keys, and the numbers."""

from __future__ import annotations

from typing import Any, Final

import torch

from forge.losses import Loss, TokenView
from forge.types import Batch, Sample
from policy_views import doubles

Case = tuple[dict[str, Any], dict[str, Any], list[float]]
"""Arguments of theirs, keys of `algorithm` of ours, and the loss with its derivative by the logprob of each token."""

# What TRL 1.16.0 computed in float64 for two completions of three and two tokens; `old` are the trainer's logprobs
# before the first step, `sampler` those of vLLM. The arguments are those of GRPOConfig, with max_completion_length 4.

TRL_TOKENS: Final = {
    "logprobs": [-0.7, -1.2, -0.4, -2.0, -0.3, -0.9],
    "old": [-1.1, -1.0, -0.5, -1.6, -0.5, -0.8],
    "sampler": [-1.0, -1.3, -0.4, -1.7, -0.4, -1.0],
    "reference": [-0.9, -1.0, -0.6, -1.5, -0.5, -1.0],
}
_PLAIN: Final = {"correction": {"kind": "none"}}
_KL: Final = {"coefficient": 0.1}
_VLLM: Final = {"use_vllm": True}
_DAPO: Final = [-0.05511566059, 0, -0.1309969205, -0.1768273469, 0, 0.2687086068, 0]

TRL_LOSSES: Final[list[Case]] = [
    # `loss_type="dapo"`, the default, with vLLM: sequence_mask, 3.0
    (_VLLM, {}, [-0.1076826377, 0, -0.1447739869, -0.1954244413, 0, 0.2687086068, 0]),
    (
        {**_VLLM, "beta": 0.1},
        {"kl": _KL},
        [-0.1039079292, 0.005967298791, -0.1480489099, -0.1910037576, -0.00670320046, 0.2735942178, 0],
    ),
    # the same without vLLM
    ({}, {"loss": _PLAIN}, _DAPO),
    (
        {"beta": 0.1},
        {"loss": _PLAIN, "kl": _KL},
        [-0.05134095214, 0.005967298791, -0.1342718435, -0.1724066632, -0.00670320046, 0.2735942178, 0],
    ),
    (
        {"beta": 0.1, "use_bias_correction_kl": False},
        {"loss": _PLAIN, "kl": {**_KL, "weighted": False}},
        [-0.05058933483, 0.003625384938, -0.1354249757, -0.173201962, -0.01297442541, 0.2723339917, 0],
    ),
    (
        {"delta": 1.21},
        {"loss": {**_PLAIN, "dual_clip": 1.21}},
        [-0.05762426738, 0, -0.1309969205, -0.1768273469, 0, 0, 0],
    ),
    (
        {"epsilon_high": 0.28},
        {"preset": "dapo", "loss": _PLAIN},
        [-0.06791566059, 0, -0.1309969205, -0.1768273469, 0, 0.2687086068, 0],
    ),
    (
        {"loss_type": "grpo"},
        {"loss": {**_PLAIN, "average": "sequence_mean"}},
        [0.1393655357, 0, -0.1091641004, -0.1473561224, 0, 0.3358857585, 0],
    ),
    (
        {"loss_type": "dr_grpo", "scale_rewards": False},
        {"preset": "dr_grpo", "loss": _PLAIN},
        [-0.03444728787, 0, -0.08187307531, -0.1105170918, 0, 0.1679428792, 0],
    ),
    (
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"preset": "gspo", "loss": _PLAIN},
        [0.149675, 0, 0, 0, 0, 0, 0],
    ),
    (
        {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"preset": "gspo", "loss": {**_PLAIN, "clip_low": 0.2, "clip_high": 0.2}},
        [0.05559221269, -0.1473561224, -0.1473561224, -0.1473561224, 0.24883029, 0.24883029, 0],
    ),
    # `epsilon_high` of CISPO is the bound itself in TRL, and what is above 1 here
    (
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"preset": "cispo", "loss": _PLAIN},
        [0.01945820719, -0.2386919516, -0.1309969205, -0.1768273469, 0.1474704101, 0.2687086068, 0],
    ),
    (
        {"loss_type": "cispo", "epsilon_high": 1.2},
        {"preset": "cispo", "loss": {**_PLAIN, "clip_high": 0.2}},
        [-0.01181357691, -0.192, -0.1309969205, -0.1768273469, 0.1474704101, 0.264, 0],
    ),
    (
        {**_VLLM, "vllm_importance_sampling_clip_max": 1.05},
        {"loss": {"correction": {"high": 1.05}}},
        [0.4447086068, 0, 0, 0, 0, 0.2687086068, 0],
    ),
    (
        {
            **_VLLM,
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_min": 0.92,
            "vllm_importance_sampling_clip_max": 1.2,
        },
        {"loss": {"correction": {"level": "token", "low": 0.92, "high": 1.2}}},
        [0.1945100816, 0, 0, 0, 0, 0, 0],
    ),
    (
        {
            **_VLLM,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 1.1,
        },
        {"loss": {"correction": {"kind": "truncate", "level": "token", "high": 1.1}}},
        [-0.04108779483, 0, -0.1440966125, -0.16, 0, 0.243137602, 0],
    ),
]


def like_trl(loss: Loss) -> list[float]:
    """The loss of those tokens, and its derivative with respect to the logprob of each."""
    weights = doubles([1, 1, 1, 1, 1, 0])
    logprobs = doubles(TRL_TOKENS["logprobs"]).requires_grad_()
    fields = {
        "advantages": doubles([0.8] * 3 + [-1.1] * 3),
        "old_logprobs": doubles(TRL_TOKENS["sampler"]),
        "proximal_logprobs": doubles(TRL_TOKENS["old"]),
        "ref_logprobs": doubles(TRL_TOKENS["reference"]),
    }
    ids = torch.arange(3)
    batch = Batch.of([Sample(ids, weights[:3].float()), Sample(ids, weights[3:].float())])
    total = loss(TokenView(logprobs, weights, (3, 3), fields=fields)).total / loss.normalizer(batch)
    (gradient,) = torch.autograd.grad(total, logprobs)
    return [float(total.detach()), *gradient.tolist()]
