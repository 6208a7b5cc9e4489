"""Whether a checkpoint belongs to a run: the same kind of run, adapter and base. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge.config import AdapterConfig, ModelConfig
from forge.errors import CheckpointError
from forge.models.adapter_names import AdapterSpec
from forge.models.peft_files import resolve_adapter
from forge.trainer.checkpoint_folder import CheckpointInfo


def shape_identity(spec: AdapterSpec) -> dict[str, Any]:
    """Return what a checkpoint says of an adapter's shape, and of what its base is kept in."""
    shape = {"rank": spec.rank, "alpha": spec.alpha, "targets": list(spec.targets), "rslora": spec.rslora}
    return {**shape, "base_dtype": spec.base_dtype}


def check_resumed_adapter(info: CheckpointInfo, config: AdapterConfig | None, model: ModelConfig) -> None:
    """Refuse a checkpoint of another kind of run or adapter, before anything is started.

    The base, whose weights must be read for it, is compared when the checkpoint is loaded.
    """
    own = None if config is None else shape_identity(resolve_adapter(config, model))
    check_identity(info.extra.get("adapter"), own, path=str(info.path))


def check_identity(saved: Mapping[str, Any] | None, own: Mapping[str, Any] | None, *, path: str) -> None:
    """Raise `CheckpointError` unless a checkpoint belongs to the same kind of run, adapter and base."""
    if (saved is None) != (own is None):
        has, wants = ("full weights", "an adapter") if saved is None else ("an adapter", "full weights")
        raise CheckpointError(
            f"The checkpoint holds {has}, and this run trains {wants}.",
            path=path,
            rule="a run resumes from checkpoints of its own kind",
            repair="remove `adapter` from the configuration" if saved is None else "add the checkpoint's `adapter`",
        )
    for key in own or {}:
        assert saved is not None
        assert own is not None
        if saved.get(key) != own[key]:
            is_base = key == "base_digest"
            raise CheckpointError(
                "The checkpoint's adapter was trained on other base weights."
                if is_base
                else f"The checkpoint's adapter has another {key}.",
                path=path,
                value=own[key],
                rule=f"{saved.get(key)}, as in the checkpoint",
                repair="give the model.path that the run was started with, in the same precision"
                if is_base
                else f"set adapter.{key} as in the checkpoint",
            )
