"""The LoRA adapter that is trained, inside a worker of vLLM.

vLLM computes a request with the adapter that is registered under the request's number. All requests of the policy have
the number `LIVE_ID`, and an update registers other weights under it while nothing is generated: requests in progress
continue with them, as they do after an update of all weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from forge.config import ModelConfig
from forge.errors import ModelError
from forge.generator.vllm.lora_arguments import LIVE_ID
from forge.models.adapter_names import PEFT_PREFIX, AdapterSpec, adapter_map
from forge.models.peft_files import peft_views, read_adapter


class LiveAdapter:
    """The adapter that is trained, in one worker. `manager` is the worker's: `LRUCacheWorkerLoRAManager`."""

    def __init__(self, manager: Any, facts: ModelConfig, spec: AdapterSpec) -> None:
        self._worker_manager, self._manager = manager, manager._adapter_manager
        self._facts, self._spec = facts, spec
        self._slots = adapter_map(facts, spec)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of a version, and their shapes."""
        return {name: shape for slot in self._slots for name, shape in zip(slot.names, slot.shapes, strict=True)}

    def first(self, path: str | None) -> Any:
        """Return the adapter of a PEFT folder, or one that changes nothing. Raise `ModelError` if vLLM lacks one of
        its layers."""
        if path is not None:
            made = self._pack(read_adapter(Path(path), self._facts, self._spec))
        else:
            made = self.prepare({name: torch.zeros(shape) for name, shape in self.shapes.items()})
        homeless = sorted(set(made.loras) - set(self._manager.modules))
        if homeless:
            raise ModelError(
                f"vLLM has no place for the adapters of {len(homeless)} layers.",
                path="adapter.targets",
                value=homeless[0],
                rule="layers of the model that vLLM computes with an adapter",
                repair="choose other targets, or set generator.engine: native",
            )
        return made

    def prepare(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return a version's tensors in the form that vLLM keeps. They are copied, and nothing of vLLM is changed."""
        return self._pack(dict(peft_views(tensors, self._slots)))

    def _pack(self, tensors: Mapping[str, Tensor]) -> Any:
        manager, spec = self._manager, self._spec
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        made = LoRAModel.from_lora_tensors(
            lora_model_id=LIVE_ID,
            # vLLM multiplies them with the scale, in place
            tensors={name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()},
            peft_helper=PEFTHelper(spec.rank, spec.alpha, list(spec.targets), use_rslora=spec.rslora),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=self._worker_manager.vocab_size,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
            skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
        )
        manager._create_merged_loras_inplace(made)
        return made

    def install(self, made: Any) -> None:
        """Compute with an adapter from now on. Between two steps only."""
        manager = self._manager
        manager.remove_adapter(LIVE_ID)
        if len(manager) >= manager.capacity:
            manager.remove_oldest_adapter()
        manager.add_adapter(made)
        manager._registered_adapters.pin(LIVE_ID)  # there is no folder from which vLLM could load it again
        manager.activate_adapter(LIVE_ID)

    def differing(self, expected: Any) -> dict[str, tuple[int, int]] | None:
        """Return the digests of tensors that are not as in `expected`: theirs, and those of the tensors in use.

        Tensors are compared as vLLM computes with them, in its precision and with the scale multiplied in. None with
        tensor parallelism, where a worker has parts of them.
        """
        from forge.store.digest import digest_tensor

        if any(module.tp_size > 1 for module in self._manager.modules.values()):
            return None
        self._manager.activate_adapter(LIVE_ID)
        found = {}
        for name, wanted, used in self._in_use(expected):
            digests = digest_tensor(wanted.contiguous()), digest_tensor(used.cpu().contiguous())
            if digests[0] != digests[1]:
                found[name] = digests
        return found

    def _in_use(self, expected: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield every tensor of an adapter with its name here, and the one that is computed with."""
        manager = self._manager
        place = manager.lora_index_to_id.index(LIVE_ID)
        ours = {
            peft.removeprefix(PEFT_PREFIX): name
            for slot in self._slots
            for name, (peft, *_) in zip(slot.names, slot.peft_names, strict=True)
        }
        for module_name, layer in expected.loras.items():
            module = manager.modules[module_name]
            layers = manager.packed_modules.get(module_name, [module_name])
            for letter, stacked in (("A", module.lora_a_stacked), ("B", module.lora_b_stacked)):
                wanted = layer.lora_a if letter == "A" else layer.lora_b
                for part, tensor in enumerate(wanted if isinstance(wanted, list) else [wanted]):
                    if tensor is not None:
                        rows, columns = tensor.shape
                        name = f"{layers[part]}.lora_{letter}.weight"
                        yield ours.get(name, name), tensor, stacked[part][place, 0, :rows, :columns]
