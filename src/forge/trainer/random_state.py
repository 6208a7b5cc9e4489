"""The state of this process's random number generators as tensors, which a checkpoint can hold and load in place."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from forge.errors import CheckpointError

_NEEDED = ("python", "python_gauss", "numpy", "numpy_gauss", "torch")


def rng_state() -> dict[str, Tensor]:
    """The state of Python's, numpy's and torch's generators, and of the current CUDA device's where there is one.

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
