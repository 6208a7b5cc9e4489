"""The model families that can be trained and served: one module each, and one line here.

A family feeds the reading and writing of config.json (`hf_config`), the model definition (`titan`), the names of its
weights (`weight_names`), counts of parameters and operations (`sizes`), and with them the memory plan.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

from forge.config import ModelConfig
from forge.errors import ModelError
from forge.models.families.family import Family
from forge.models.families.llama import LLAMA
from forge.models.families.qwen2 import QWEN2
from forge.models.families.qwen3 import QWEN3
from forge.models.families.qwen3_moe import QWEN3_MOE

__all__ = ["FAMILIES", "Family", "family_of", "find_family", "supported_families"]

FAMILIES: Final = {family.name: family for family in (QWEN3, QWEN3_MOE, QWEN2, LLAMA)}


def find_family(name: str) -> Family:
    """Return the family that `model.family` names: a registered one, or `module:attribute`."""
    if name in FAMILIES:
        return FAMILIES[name]
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute) if attribute else None
    except (ImportError, AttributeError) as error:
        raise _unknown(name, f"{type(error).__name__}: {error}") from error
    if not isinstance(found, Family):
        raise _unknown(name, "it does not name a forge.models.families.Family")
    return found


def family_of(model: ModelConfig) -> Family:
    """Return the family of a model, which must be set."""
    if model.family is None:
        raise ModelError(
            "The model's family is not known.",
            path="model.family",
            value=None,
            rule=f"one of {', '.join(FAMILIES)}, or module:attribute",
            repair="set it, or a preset, or model.path to a folder with a config.json",
        )
    return find_family(model.family)


def supported_families() -> str:
    """Return the registered families as a list for a sentence."""
    return ", ".join(f"{family.label} ({family.architecture})" for family in FAMILIES.values())


def _unknown(name: str, reason: str) -> ModelError:
    return ModelError(
        f"The model family is not known: {reason}.",
        path="model.family",
        value=name,
        rule=f"one of {', '.join(FAMILIES)}, or module:attribute of a forge.models.families.Family",
        repair="correct it, or leave it out: a folder's config.json and presets say it",
    )
