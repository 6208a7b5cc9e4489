"""How many bytes of tensors are alive, and how many were at most: counted at every operation, on any device."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While it is on, every storage that an operation returns is counted until it is freed.

    FSDP frees a storage by making it empty, which is no operation: flat buffers are looked at again each time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._elastic: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        return out

    def count(self, tensor: Tensor) -> None:
        """Take a tensor into account that was made before."""
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._drop, key)
            if tensor.dim() == 1:
                self._elastic[key] = weakref.ref(storage)
        self._resize(key, storage.nbytes())
        for other, reference in list(self._elastic.items()):
            found = reference()
            if found is not None:
                self._resize(other, found.nbytes())
        self.peak = max(self.peak, self.live)

    def _resize(self, key: int, size: int) -> None:
        self.live += size - self._sizes[key]
        self._sizes[key] = size

    def _drop(self, key: int) -> None:
        self._elastic.pop(key, None)
        self.live -= self._sizes.pop(key, 0)


def tracked_step(config: Any, batch: Any, *, loss: Any = None) -> tuple[int, int]:
    """The bytes that an engine holds between steps, and the most that it held in the second of two steps."""
    from forge.trainer.engine import Engine

    counter = LiveBytes()
    with counter:
        engine = Engine(config, loss=loss)
        try:
            engine.train_step(batch)
            lasting, counter.peak = counter.live, 0
            engine.train_step(batch)
        finally:
            engine.close()
    return lasting, counter.peak
