"""What the words `preset` and `convention` of the section `algorithm` stand for.

A preset is a published algorithm. A convention is how another library computes where papers leave a choice, or where
the library took its own: what is added to a standard deviation, which deviation, whose logprobs the ratio is taken
against. Neither sets how strong a penalty is: algorithm.kl.coefficient is always the user's. Values are laid one over
another, later ones win: the schema's defaults, the preset, the convention, the user's own keys.

docs/concepts/algorithms.md says where each value comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
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
_DUAL: Values = {"loss": {"dual_clip": 3.0}}
_OTHERS: Values = {"advantage": {"baseline": "leave_one_out", "scale": "others_std"}}
_OVER_THE_BATCH: Values = {"advantage": {"std_ddof": 0}}

CONVENTIONS: Mapping[str, tuple[Values, Mapping[str, Values]]] = {
    "trl": (
        {
            "advantage": {"std_ddof": 1, "epsilon": 1e-4},
            "loss": {**_RECOMPUTED, "correction": {"kind": "mask", "level": "sequence", "low": 0.0, "high": 3.0}},
            "kl": {"weighted": True},
        },
        {},
    ),
    "verl": (
        {"advantage": {"std_ddof": 1, "epsilon": 1e-6}, "loss": _RECOMPUTED},
        {
            **dict.fromkeys(["grpo", "dapo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline"], _DUAL),
            "cispo": {"loss": {"clip_high": 0.2}},
            "rloo": {"loss": {"kind": "clip", "dual_clip": 3.0}},
        },
    ),
    "openrlhf": (
        {"advantage": {"std_ddof": 1, "epsilon": 1e-9}, "loss": _RECOMPUTED},
        {
            "dr_grpo": {"loss": {"average": "token_mean"}},
            "rloo": {"advantage": {"whiten": True, "std_ddof": 0}, "loss": {"kind": "clip"}},
            **dict.fromkeys(["reinforce_pp", "reinforce_pp_baseline"], _OVER_THE_BATCH),
        },
    ),
    "nemo": (
        {"advantage": {"std_ddof": 1, "epsilon": 1e-6}, "loss": _RECOMPUTED},
        dict.fromkeys(["grpo", "dapo", "gspo", "cispo"], _OTHERS),
    ),
}
"""For each convention, what it sets in any case, and what it sets for a preset."""


def beneath(own: Values) -> dict[str, Any]:
    """The user's keys of the section, with what its preset and its convention set laid beneath them.

    Names that are not known are left alone: the schema says what is wrong with them.
    """
    preset, convention = own.get("preset", "grpo"), own.get("convention")
    layers: list[Values] = [PRESETS[preset]] if isinstance(preset, str) and preset in PRESETS else []
    if layers and isinstance(convention, str) and convention in CONVENTIONS:
        always, particular = CONVENTIONS[convention]
        layers += [always, particular.get(preset, {})]
    merged: dict[str, Any] = {}
    for layer in [*layers, own]:
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
