"""Save and load an engine: checkpoints to resume from, and Hugging Face folders."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge.config.training import export_dtype
from forge.errors import CheckpointError
from forge.models.hf_config import write_hf_config
from forge.models.peft_files import write_adapter
from forge.models.quantized import quantized_tensors
from forge.models.weights_out import attempt, export_hf, raise_any
from forge.observe.phases import phase
from forge.trainer.adapter_identity import check_identity
from forge.trainer.checkpoint import Checkpoints
from forge.trainer.loss_scaling import LossScale
from forge.trainer.optimizer_choice import check_same_optimizer

if TYPE_CHECKING:
    from forge.trainer.engine import Engine


class Checkpointer:
    """Saves and loads the whole state of an engine. All ranks make the same calls in the same order."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._checkpoints: Checkpoints | None = None

    @property
    def checkpoints(self) -> Checkpoints:
        if self._checkpoints is None:
            config = self._engine.config
            if config.checkpoint_dir is None:
                raise CheckpointError(
                    "this trainer has no folder for checkpoints",
                    path="checkpoint_dir",
                    value=None,
                    rule="a folder",
                    repair="set checkpointing.output_dir",
                )
            rules = config.checkpointing
            self._checkpoints = Checkpoints(
                config.checkpoint_dir,
                keep=rules.keep,
                keep_best=rules.keep_best,
                asynchronous=rules.asynchronous,
            )
        return self._checkpoints

    def save(
        self,
        *,
        extra: Mapping[str, Any] | None = None,
        metric: float | None = None,
        parts: Mapping[str, Path] | None = None,
        step: int | None = None,
    ) -> None:
        """Save everything that a resume needs, `extra`, which belongs to the caller, and checkpoints of other models
        (see `Checkpoints.save`). `step` names it where the other models may have taken steps without this one."""
        engine = self._engine
        self.checkpoints.save(
            engine.step if step is None else step,
            self._state(),
            extra={"step": engine.step, "caller": dict(extra or {}), **self._identity(), **self._facts()},
            metric=metric,
            parts=parts,
        )

    def _identity(self) -> dict[str, Any]:
        """Return what a checkpoint of an adapter says of the adapter and of the weights below it."""
        engine = self._engine
        if engine.adapter is None:
            return {}
        below = engine.own_parameters()
        if engine.data_rank == 0:  # every data parallel rank has weights in few bits whole
            below |= quantized_tensors(engine.parts)
        return {"adapter": engine.adapter.identity(below, engine.ranks)}

    def _facts(self) -> dict[str, Any]:
        """Return what a checkpoint says of the optimizer and of the loss scale."""
        engine, facts = self._engine, {}
        if engine.optimizer is not None:
            name = engine.config.training.optimizer
            facts["optimizer"] = {"name": name, "has_states": engine.optimizer.has_states}
        if engine.loss_scaling is not None:
            facts["loss_scale"] = asdict(engine.loss_scale)
        return facts

    def load(self, resume: str) -> dict[str, Any] | None:
        """Resume from a checkpoint, chosen as `checkpointing.resume` says. Returns the caller's `extra`.

        None when there is no checkpoint and that is allowed.
        """
        engine = self._engine
        found = self.checkpoints.find(resume)
        if found is None:
            return None
        check_identity(found.extra.get("adapter"), self._identity().get("adapter"), path=str(found.path))
        if engine.optimizer is not None:
            check_same_optimizer(found.extra.get("optimizer"), engine.config.training, path=str(found.path))
        state = self._state(for_loading=found.extra.get("optimizer", {}).get("has_states", True))
        with phase("restoring the checkpoint"):
            extra = self.checkpoints.load(found, state, partial=engine.optimizer is None)
        if engine.optimizer is not None:
            engine.optimizer.finish_loading(state["optimizer"])
        if own := state["rng"].get(self._rng_key):
            set_rng_state(own)
        engine.step = int(extra["step"])
        if engine.loss_scaling is not None and "loss_scale" in extra:  # not in a checkpoint of another precision
            engine.loss_scale = LossScale(**extra["loss_scale"])
        caller: dict[str, Any] = extra["caller"]
        return caller

    def wait(self) -> None:
        """Wait until the last save is complete."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def export(self, folder: Path, *, dtype: str | None = None, overwrite: bool = False) -> None:
        """Write the weights as a complete Hugging Face folder, with configuration and tokenizer."""
        engine = self._engine
        chosen = dtype or export_dtype(engine.config.distributed.precision)

        def finish(partial: Path) -> None:
            write_hf_config(engine.model.architecture, partial, source=engine.model.folder, dtype=chosen)

        export_hf(
            engine.parts,
            folder,
            engine.model.architecture,
            dtype=getattr(torch, chosen),
            overwrite=overwrite,
            finish=finish,
            adapter=None if engine.adapter is None else engine.adapter.spec,
        )

    def export_adapter(self, folder: Path) -> None:
        """Write the adapter as a PEFT folder, in place of one that is there. Its weights keep their precision."""
        engine = self._engine
        assert engine.adapter is not None, "this engine trains all weights"
        whole = {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
            for name, tensor in engine.trained_parameters().items()
        }
        if engine.layout.pipeline > 1:  # each stage has its own
            stages = engine.ranks.gather(whole if engine.ranks.rank % engine.layout.tensor == 0 else {})
            whole = {name: tensor for stage in stages for name, tensor in stage.items()}
        error = None
        if engine.ranks.rank == 0:
            model = engine.model
            base = None if model.folder is None else str(model.folder)
            error = attempt(
                folder, write_adapter, folder, whole, model=model.architecture, spec=engine.adapter.spec, base=base
            )
        raise_any(engine.ranks.gather(error), mine=error)

    def close(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None

    @property
    def _rng_key(self) -> str:
        return f"rank{self._engine.ranks.rank}"

    def _state(self, *, for_loading: bool = False) -> dict[str, Any]:
        engine = self._engine
        state: dict[str, Any] = {"model": engine.trained_parameters(), "rng": {self._rng_key: rng_state()}}
        if engine.optimizer is not None:
            state["optimizer"] = engine.optimizer.state_dict(for_loading=for_loading)
        return state


_NEEDED = ("python", "python_gauss", "numpy", "numpy_gauss", "torch")


def rng_state() -> dict[str, Tensor]:
    """Return the state of Python's, numpy's and torch's random generators, and of the current CUDA device's.

    The tensors are copies on the CPU and always have the same shapes, so a fresh `rng_state()` is what a checkpoint is
    loaded into. Each rank stores its own, under a key such as `rng/rank3`.
    """
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    twister = numpy["state"]
    state = {
        "python": torch.tensor([version, *words, int(gauss is not None)], dtype=torch.int64),
        "python_gauss": torch.tensor([gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*twister["key"].tolist(), twister["pos"], numpy["has_gauss"]], dtype=torch.int64),
        "numpy_gauss": torch.tensor([numpy["gauss"]], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Tensor]) -> None:
    """Put the generators into a state that `rng_state` returned. CUDA's is set where there is a device and a state."""
    if missing := [name for name in _NEEDED if name not in state]:
        raise CheckpointError(
            "This is not a state of the random number generators.",
            path="rng",
            value=f"lacks {', '.join(missing)}",
            rule="what rng_state() returns",
        )
    version, *words, has_gauss = state["python"].tolist()
    random.setstate((version, tuple(words), state["python_gauss"].item() if has_gauss else None))
    *key, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, has_gauss, state["numpy_gauss"].item()))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
