"""The first weights of the native engine's model: a folder's, random ones, and those of an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from forge.config import AdapterConfig
from forge.models.adapter_names import AdapterSpec, is_adapter
from forge.models.adapters import draw_adapters
from forge.models.language_model import LanguageModel
from forge.models.locate import ResolvedModel
from forge.models.peft_files import load_adapter
from forge.models.weights import draw_weights, load_hf


def load_weights(model: LanguageModel, source: ResolvedModel, *, shared: Mapping[str, Tensor] | None) -> None:
    """Fill the weights of a model, unless they are a trainer's. The adapter is left out."""
    if shared is not None:
        return
    if source.folder is not None:
        load_hf([model], source.folder, source.architecture)
    else:
        draw_weights([model], num_layers=source.architecture.num_layers or 1, seed=0)


def load_first_adapter(
    model: LanguageModel,
    source: ResolvedModel,
    *,
    config: AdapterConfig,
    spec: AdapterSpec,
    shared: Mapping[str, Tensor] | None,
) -> None:
    """Fill the adapter of a model, unless it is a trainer's: from its folder, or as one that changes nothing."""
    if shared is not None and any(map(is_adapter, shared)):
        return
    draw_adapters([model], seed=0)
    if config.path is not None:
        load_adapter([model], Path(config.path), source.architecture, spec)
