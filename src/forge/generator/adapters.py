"""The LoRA adapters of a `Generator` by name, the same for every engine: those of its configuration, and those that are
loaded while it runs."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from forge.config import GeneratorConfig, Sampling
from forge.config.generator import BASE_ADAPTER
from forge.errors import ForgeError
from forge.types import AdapterUse, Completion, Delta

_log = logging.getLogger("forge.generator")
SERVICE: Final = "FORGE_SERVICE"
"""The environment variable that names the service of a replica: adapters that its replicas load are noted under it."""


class NamedAdapters:
    """The adapters of one generator.

    What is loaded or unloaded while a service runs is noted in the store, where a replica that is started later finds
    it. Used on one event loop.

    Args:
        config: the generator's configuration.
        engine: an engine that serves adapters.
    """

    def __init__(self, config: GeneratorConfig, engine: Any) -> None:
        self._config, self._engine = config, engine
        service = os.environ.get(SERVICE)
        self._prefix = None if service is None else f"adapters/{service}/"
        self._loaded: dict[str, tuple[str, str]] = {}

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each adapter that requests can select, by name."""
        return {name: digest for name, (_, digest) in sorted(self._loaded.items())}

    async def start(self) -> None:
        """Load the adapters of the configuration, and those that other replicas have loaded meanwhile."""
        noted = await self._noted()
        for name, path in self._config.adapters.items():
            if name not in noted:
                await self._load(name, path)
        await self.catch_up()

    async def catch_up(self) -> None:
        """Load and unload what was noted while this replica started. An adapter that cannot be loaded is logged:
        requests for it raise."""
        for name, path in (await self._noted()).items():
            try:
                if path is None and name in self._loaded:
                    await self._unload(name)
                elif path is not None and self._loaded.get(name, ("", ""))[0] != path:
                    await self._load(name, path)
            except ForgeError as error:
                _log.error("the adapter %r, which was loaded while the service ran, is not available: %s", name, error)

    async def load(self, name: str, path: str) -> str:
        """Load an adapter, or load it again. Return its digest."""
        digest = await self._load(name, path)
        await self._note(name, path)
        return digest

    async def unload(self, name: str) -> None:
        """Unload an adapter."""
        await self._unload(name)
        await self._note(name, None)

    async def _load(self, name: str, path: str) -> str:
        from forge.models.peft_files import adapter_digest

        found: str | None = await self._engine.load_adapter(name, path)
        digest = await asyncio.to_thread(adapter_digest, Path(path)) if found is None else found
        self._loaded[name] = (path, digest)
        return digest

    async def _unload(self, name: str) -> None:
        await self._engine.unload_adapter(name)
        self._loaded.pop(name, None)

    async def _note(self, name: str, path: str | None) -> None:
        from forge.store import put

        if self._prefix is not None:
            await put(self._prefix + quote(name, safe=""), {"path": path})

    async def _noted(self) -> Mapping[str, str | None]:
        """Return where the adapters lie that were loaded while the service ran, by name; None for one unloaded."""
        from forge.store import get, keys

        if self._prefix is None:
            return {}
        found = {key: await get(key) for key in await keys(self._prefix)}
        return {unquote(key.removeprefix(self._prefix)): value["path"] for key, value in found.items()}

    # ---- Requests -----------------------------------------------------------------------------------------------

    def chosen(self, sampling: Sampling) -> Sampling:
        """Return how to sample. Where no adapter is trained, the weights without an adapter are what requests get that
        name none."""
        if sampling.adapter == BASE_ADAPTER and self._config.adapter is None:
            return sampling.model_copy(update={"adapter": None})
        return sampling

    def marked(self, completion: Completion, sampling: Sampling) -> Completion:
        """Return a completion that says which adapter it was sampled with, where the engine did not."""
        name = sampling.adapter
        if name is None or completion.adapter is not None:
            return completion
        return replace(completion, adapter=AdapterUse(name, self.digests.get(name, "")))

    def marked_delta(self, delta: Delta, sampling: Sampling) -> Delta:
        """Return the last delta of a completion with the completion marked."""
        if delta.completion is None:
            return delta
        return replace(delta, completion=self.marked(delta.completion, sampling))
