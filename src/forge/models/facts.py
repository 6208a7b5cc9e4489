"""The facts of an architecture: where they come from, and whether all are there.

A fact may be said by a preset, by the user, and by the model's own `config.json`. The weights have the shapes that the
last one says, so it wins over a preset, and a user who says otherwise is told.
"""

from __future__ import annotations

from typing import Any, Final

from forge.config import ModelConfig, preset_names
from forge.config.model_presets import read_preset
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
FACTS: Final = (*_DENSE, "rope_scaling", *_EXPERTS)
"""The keys of `ModelConfig` that describe an architecture."""


def merge(model: ModelConfig, folder_facts: ModelConfig) -> ModelConfig:
    """The user's section with the facts of the folder in it.

    The folder wins over what a preset says. A key that the user set to something else than both is refused, since one
    of the two must be a mistake.
    """
    preset = preset_facts(model)
    for key in FACTS:
        asked, found = getattr(model, key), getattr(folder_facts, key)
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
    return model.model_copy(update={key: getattr(folder_facts, key) for key in FACTS})


def complete(model: ModelConfig) -> ModelConfig:
    """The same section, with what its preset says where the user said nothing; all facts to build it are there.

    Raises `ModelError` that names the missing ones.
    """
    preset = preset_facts(model)
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
            else "model.path, model.preset, or every fact of the architecture",
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
            "Rotary embeddings turn pairs of numbers.",
            path="model.head_dim",
            value=model.head_dim,
            rule="must be even",
            repair="set it to what the model's config.json says",
        )
    return model


def preset_facts(model: ModelConfig) -> dict[str, Any]:
    """What the preset that a section names says about the architecture; empty where there is none."""
    name = preset_of(model)
    if name is None:
        return {}
    said = read_preset(name).data["model"]
    facts = ModelConfig.model_validate({key: said[key] for key in said if key in FACTS})
    return {key: getattr(facts, key) for key in FACTS}


def preset_of(model: ModelConfig) -> str | None:
    """The preset that a section means: `preset`, or else `name` where that is a preset or the repository of one."""
    if model.preset in preset_names():
        return model.preset
    if model.preset is not None or model.name is None:
        return None
    for preset in preset_names():
        if model.name in (preset, read_preset(preset).data["model"].get("hf_repo")):
            return preset
    return None
