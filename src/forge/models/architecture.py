"""The keys of `ModelConfig` that describe an architecture: where they come from, and whether all are set.

A key may be set by a preset, by the user, and by the model's own `config.json`. The weights have the shapes that the
last one says, so it wins over a preset, and a contradiction by the user is an error.
"""

from __future__ import annotations

from typing import Any, Final

from forge.config import ModelConfig, preset_names
from forge.config.layers import read_preset
from forge.errors import ModelError
from forge.models.families import family_of

_DENSE: Final = (
    "family",
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "tie_embeddings",
    "max_seq_len",
    "rope_theta",
    "norm_eps",
)
_EXPERTS: Final = ("num_experts", "num_experts_per_token", "expert_intermediate_size")
ARCHITECTURE_KEYS: Final = (*_DENSE, "rope_scaling", *_EXPERTS)
"""The keys of `ModelConfig` that describe an architecture."""


def merge(model: ModelConfig, found_config: ModelConfig) -> ModelConfig:
    """Return the user's section with the architecture of the folder in it.

    The folder wins over what a preset says. A key that the user set to something else than both is refused, since one
    of the two must be a mistake.
    """
    if found_config.head == "scalar" and model.head != "scalar":
        raise ModelError(
            "The model is a classifier, which gives values and no text.",
            path="model.path",
            value=model.path,
            rule="the folder of a language model, since model.head is `language`",
            repair="give the folder of a language model; a reward model goes into rewards.reward_model.path",
        )
    preset = preset_architecture(model)
    for key in ARCHITECTURE_KEYS:
        asked, found = getattr(model, key), getattr(found_config, key)
        if asked is None or asked == found or asked == preset.get(key):
            continue
        raise ModelError(
            f"model.{key} contradicts the model's own config.json.",
            path=f"model.{key}",
            value=asked,
            rule=f"the config.json in {model.path or 'the folder'} says {found!r}, and the weights are of that shape",
            repair="limit training.max_seq_len instead, and remove this key"
            if key == "max_seq_len"
            else f"remove model.{key}, or give another model.path",
        )
    return model.model_copy(update={key: getattr(found_config, key) for key in ARCHITECTURE_KEYS})


def complete(model: ModelConfig) -> ModelConfig:
    """Return the section with its preset's values where the user set none.

    Raises `ModelError` that names the keys of the architecture that are still missing.
    """
    preset = preset_architecture(model)
    said = model.model_fields_set
    model = model.model_copy(update={key: value for key, value in preset.items() if key not in said})
    has_experts = model.family is not None and family_of(model).has_experts
    needed = (*_DENSE, *_EXPERTS) if has_experts else _DENSE
    missing = [f"model.{key}" for key in needed if getattr(model, key) is None]
    if missing:
        raise ModelError(
            "The model is not described completely.",
            path=", ".join(missing) if len(missing) < len(needed) else "model",
            value=None,
            rule=f"a model of family {model.family} needs all of {', '.join(needed)}"
            if model.family
            else "model.path, model.preset, or every key of the architecture",
            repair=f"set model.path to a folder with config.json, or model.preset to {' or '.join(preset_names())}",
        )
    surplus = [key for key in _EXPERTS if getattr(model, key) is not None]
    if surplus and not has_experts:
        raise ModelError(
            "A dense model has no experts.",
            path=f"model.{surplus[0]}",
            value=getattr(model, surplus[0]),
            rule=f"null for the family {model.family}",
            repair=f"remove {', '.join(f'model.{key}' for key in surplus)}, or choose a family with experts",
        )
    if model.head_dim is not None and model.head_dim % 2:
        raise ModelError(
            "Rotary embeddings need an even head dimension.",
            path="model.head_dim",
            value=model.head_dim,
            rule="must be even",
            repair="set it to what the model's config.json says",
        )
    return model


def preset_architecture(model: ModelConfig) -> dict[str, Any]:
    """Return what the preset of a section says about the architecture; empty where there is none."""
    name = preset_of(model)
    if name is None:
        return {}
    said = read_preset(name).data["model"]
    checked = ModelConfig.model_validate({key: said[key] for key in said if key in ARCHITECTURE_KEYS})
    return {key: getattr(checked, key) for key in ARCHITECTURE_KEYS}


def preset_of(model: ModelConfig) -> str | None:
    """Return the preset that a section means: `preset`, or `name` where that is a preset or a preset's repository."""
    if model.preset in preset_names():
        return model.preset
    if model.preset is not None or model.name is None:
        return None
    for preset in preset_names():
        if model.name in (preset, read_preset(preset).data["model"].get("hf_repo")):
            return preset
    return None
