"""The LoRA adapters of a running engine."""

from __future__ import annotations

import itertools
import secrets
from pathlib import Path
from typing import Any

from forge.config.generator import BASE_ADAPTER
from forge.errors import ConfigError, EngineDead, ModelError, OptionError, PromptError
from forge.generator.vllm.lora_arguments import LIVE_ID
from forge.types import INITIAL_VERSION


class Adapters:
    """The loaded adapters. vLLM identifies them by number, requests by name; that of a trainer has no name.

    `is_enabled` says whether there is room for adapters with a name, `is_live` whether one is trained.
    """

    def __init__(self, llm: Any, *, is_enabled: bool, is_live: bool = False) -> None:
        self._llm = llm
        self._is_enabled = is_enabled
        self._requests: dict[str, Any] = {}
        self._live = _live_request() if is_live else None
        self._numbers = itertools.count(LIVE_ID + 1)
        self._num_loads = 0

    @property
    def names(self) -> list[str]:
        return sorted(self._requests)

    def salt(self, epoch: int) -> str:
        """Return what requests must have in common to share a cached prefix: the weights, and the adapters as they are
        now. vLLM distinguishes adapters by name, not by what was loaded under it."""
        return f"{epoch}.{self._num_loads}"

    def fixed_version(self, name: str | None) -> int | None:
        """Return the version of all tokens of a request; None where the engine's version is theirs.

        Updates change the adapter that is trained, and nothing below it: requests with another adapter have the model's
        own weights.
        """
        return None if self._live is None or name is None else INITIAL_VERSION

    def find(self, name: str | None) -> Any:
        """Return vLLM's record of an adapter: without a name, of the one that is trained; None for the model alone."""
        if name is None:
            return self._live
        if name == BASE_ADAPTER:
            return None
        if name not in self._requests:
            raise PromptError(
                "There is no such adapter.",
                path="sampling.adapter",
                value=name,
                rule=f"one of those that are loaded: {', '.join(self.names) or 'none'}",
                repair="load it with load_adapter(name, path)",
            )
        return self._requests[name]

    async def load(self, name: str, path: str) -> None:
        """Load an adapter, or replace what is loaded under that name, without a pause."""
        from vllm.lora.request import LoRARequest

        self._check(name, path)
        known = self._requests.get(name)
        number = next(self._numbers) if known is None else known.lora_int_id
        try:
            is_loaded = await self._llm.add_lora(LoRARequest(name, number, path, load_inplace=known is not None))
        except Exception as error:
            if self._llm.errored:
                raise EngineDead("vLLM's engine has ended.", path="load_adapter") from error
            raise _refused(path, str(error)) from error
        if not is_loaded:
            raise _refused(path, "vLLM has no room for it")
        self._num_loads += 1
        self._requests[name] = LoRARequest(name, number, path)

    def _check(self, name: str, path: str) -> None:
        if not self._is_enabled:
            raise ConfigError(
                "The engine was started without adapters.",
                path="generator.engine_args.enable_lora",
                value=False,
                rule="vLLM makes room for adapters when it starts",
                repair="generator.engine_args.enable_lora=true, and max_lora_rank and max_loras as needed",
            )
        if not name:
            raise OptionError("An adapter needs a name.", path="load_adapter(name)", value=name, rule="is not empty")
        if not (Path(path) / "adapter_config.json").is_file():
            raise ModelError(
                "This is not a LoRA adapter.",
                path="load_adapter(path)",
                value=path,
                rule="a folder with adapter_config.json and adapter_model.safetensors, as PEFT writes them",
                repair="check the path; it is read on the generator's host",
            )

    async def unload(self, name: str) -> None:
        """Unload an adapter."""
        if name not in self._requests:
            raise OptionError(
                "There is no such adapter.",
                path="unload_adapter(name)",
                value=name,
                rule=f"one of those that are loaded: {', '.join(self.names) or 'none'}",
                repair="stats().more['adapters'] lists them",
            )
        await self._llm.remove_lora(self._requests.pop(name).lora_int_id)


def _live_request() -> Any:
    """Return vLLM's record of the adapter that is trained. Its name is one that no adapter of a user has."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"live-{secrets.token_hex(8)}", LIVE_ID, "(from the store)")


def _refused(path: str, why: str) -> ModelError:
    return ModelError(
        "vLLM cannot load this adapter.",
        path="load_adapter(path)",
        value=path,
        rule=why,
        repair="raise generator.engine_args.max_lora_rank or max_loras, or use another adapter",
    )
