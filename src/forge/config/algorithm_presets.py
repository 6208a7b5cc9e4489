"""The values that presets of `algorithm` and conventions of other libraries lay beneath the user's own keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

Values = Mapping[str, Any]

_WHITENED: Values = {"scale": "none", "whiten": True}
_NO_LOWER_BOUND = 1.0

PRESETS: Mapping[str, Values] = {
    "grpo": {},
    "dapo": {"loss": {"clip_high": 0.28}},
    "dr_grpo": {"advantage": {"scale": "none"}, "loss": {"average": "constant"}},
    "gspo": {"loss": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "average": "sequence_mean"}},
    "cispo": {"loss": {"kind": "cispo", "clip_low": _NO_LOWER_BOUND, "clip_high": 4.0}},
    "sapo": {"loss": {"kind": "sapo", "average": "sequence_mean"}},
    "gigpo": {"advantage": {"function": "gigpo"}},
    "ppo": {
        "advantage": {"function": "gae", "whiten": True, "whiten_over": "tokens"},
        "kl": {"estimator": "k1", "place": "reward", "credit": "token"},
    },
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
            **dict.fromkeys(["grpo", "dapo", "dr_grpo", "ppo"], _DUAL),
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
            "ppo": {"kl": {"credit": "token"}},
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
