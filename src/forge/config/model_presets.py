"""The model presets that come with the library: YAML files of architecture facts, in `presets/`."""

from __future__ import annotations

from functools import cache
from importlib import resources

from forge.config.layers import Layer, Origin
from forge.config.yaml_text import read_yaml

_FOLDER = "presets"


@cache
def preset_names() -> tuple[str, ...]:
    """The names that `model.preset` may have, sorted."""
    entries = resources.files("forge.config").joinpath(_FOLDER).iterdir()
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in entries if entry.name.endswith(".yaml")))


@cache
def read_preset(name: str) -> Layer:
    """The keys that a preset sets. The name must be one of `preset_names()`."""
    text = resources.files("forge.config").joinpath(_FOLDER, f"{name}.yaml").read_text("utf-8")
    return Layer(read_yaml(text, source=f"preset {name}").data, Origin("preset", name))
