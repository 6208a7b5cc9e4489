"""The weights of a running engine: updates, whole or not at all, and LoRA adapters by name."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

from forge.config import UpdateMode, Verify
from forge.errors import ConfigError, EngineDead, ForgeError, ModelError, OptionError, PromptError, StoreKeyError
from forge.generator.engine import UpdateReport
from forge.generator.vllm.process import Counts
from forge.types import INITIAL_VERSION

_log = logging.getLogger("forge.generator.vllm")

PAUSES: Final[dict[UpdateMode, tuple[str, bool]]] = {
    "drain": ("wait", True),
    "keep": ("keep", False),
    "recompute": ("keep", True),
    "abort": ("abort", True),
}
"""How vLLM pauses for each mode: its own mode, and whether it drops all keys and values."""


class Updates:
    """Updates the weights of an engine from the store, one version at a time.

    Attributes:
        version: the weights that serve.
        epoch: a number that changes with them. Requests of different epochs share no keys and values.
        lock: held while the engine is paused.
        is_paused: whether the engine sleeps, so that an update does not resume it.
        are_weights_away: whether it sleeps and its weights are in host memory.
    """

    def __init__(
        self,
        llm: Any,
        weights: str,
        facts: dict[str, Any],
        *,
        verify: Verify = "cheap",
        counts: Counts,
        died: asyncio.Event,
        fail: Callable[[BaseException], None],
    ) -> None:
        """`died` is set when the engine has ended; `fail` ends it."""
        self.version = INITIAL_VERSION
        self.epoch = 0
        self.lock = asyncio.Lock()
        self.is_paused = False
        self.are_weights_away = False
        self._died, self._fail = died, fail
        self._llm = llm
        self._name, self._verify = weights, verify
        self._facts = facts
        self._counts = counts
        self._digest = ""
        self._address = f"forge-vllm-{os.getpid()}-{secrets.token_hex(8)}"
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    async def open(self) -> None:
        """Initialise the transfer of weights in the workers."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._notices.bind("\0" + self._address)
        self._notices.setblocking(False)
        info = {"weights": self._name, "facts": self._facts, "verify": self._verify}
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    def close(self) -> None:
        self._llm = None
        self._notices.close()

    async def update_weights(self, version: int | Literal["latest"], mode: UpdateMode) -> UpdateReport:
        """Fetch and check a version while tokens are made, then load it while none are.

        Until everything was checked nothing is changed, so an update that fails there leaves the old weights serving.
        One that fails later, which takes a fault of vLLM or of the machine, leaves none: then `EngineDead` is raised
        and `died` is set. Cancelling it waits until the weights are whole again.
        """
        async with self.lock:
            began = time.perf_counter()
            number = await self._find(version)
            digest = await self._fetch(number)
            if (number, digest) == (self.version, self._digest):
                await self._llm.collective_rpc("forge_release")
                return UpdateReport(number, mode, time.perf_counter() - began, 0.0)
            num_before = self._counts.num_aborted
            loading = asyncio.ensure_future(self._apply(number, mode))
            try:
                stall_s = await asyncio.shield(loading)
            except asyncio.CancelledError:
                await asyncio.wait([loading])
                if not loading.cancelled() and loading.exception() is None:
                    self._digest = digest
                raise
            self._digest = digest
            num_aborted = self._counts.num_aborted - num_before if mode == "abort" else 0
            return UpdateReport(number, mode, time.perf_counter() - began, stall_s, num_aborted=num_aborted)

    async def _find(self, version: int | Literal["latest"]) -> int:
        """Return the number of a version that can be fetched. All workers get this number, not "latest"."""
        from forge.store import Weights

        numbers = [info.number for info in await Weights(self._name).versions()]
        if not numbers or (version != "latest" and version not in numbers):
            raise StoreKeyError(
                "There is no such version of the weights." if numbers else "No weights were published yet.",
                path=f"Weights({self._name!r})",
                value=version,
                rule=f"versions that can be fetched: {numbers}",
                repair="publish it first, or request one of those versions",
            )
        return max(numbers) if version == "latest" else version

    async def _fetch(self, number: int) -> str:
        """Let every worker fetch and check the version during generation. Return its digest, which all agree on."""
        self._discard_notices()
        workers = await self._llm.collective_rpc("forge_fetch", args=(number, self._address))
        try:
            for _ in workers:
                await self._notice()
            found = await self._llm.collective_rpc("forge_fetched")
        except asyncio.CancelledError:
            await asyncio.shield(self._llm.collective_rpc("forge_release"))
            raise
        for _, _, _, _, error in found:
            if error:
                await self._llm.collective_rpc("forge_release")
                raise pickle.loads(error)
        digests = {digest for _, digest, _, _, _ in found}
        if len(digests) != 1:
            await self._llm.collective_rpc("forge_release")
            raise ForgeError("Workers fetched different weights.", path=f"version {number}", value=sorted(digests))
        return str(digests.pop())

    async def _notice(self) -> None:
        """Wait until a worker has fetched."""
        arrived = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(self._notices, 16))
        died = asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait([arrived, died], return_when=asyncio.FIRST_COMPLETED)
            if not arrived.done():
                raise EngineDead("vLLM's engine ended while it fetched weights.", path="generator.engine")
        finally:
            arrived.cancel()
            died.cancel()

    def _discard_notices(self) -> None:
        """Discard notices of an earlier fetch that was cancelled."""
        with contextlib.suppress(BlockingIOError):
            while self._notices.recv(16):
                pass

    async def _apply(self, number: int, mode: UpdateMode) -> float:
        """Load what was fetched, in place. Return the seconds for which nothing was generated."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm, began = self._llm, time.perf_counter()
        await self._pause(mode)
        if mode == "drain":
            began = time.perf_counter()  # until here tokens were made
        try:
            await llm.start_weight_update()
            await llm.update_weights(WeightTransferUpdateRequest(update_info={"version": number}))
            await llm.finish_weight_update(weight_version=str(number))
        except BaseException as error:
            _log.exception("loading version %d failed halfway: this engine no longer has complete weights", number)
            broken = _broken()
            self._fail(broken)
            raise broken from error
        self.version = number
        self.epoch += 1
        if not self.is_paused:
            await llm.resume_generation()
        return time.perf_counter() - began

    async def _pause(self, mode: UpdateMode) -> None:
        """Pause generation. A sleeping engine cannot drain: then `drain` is `recompute`."""
        if self.is_paused and mode == "drain":
            mode = "recompute"
        how, clear_cache = PAUSES[mode]
        try:
            await self._llm.pause_generation(mode=how, clear_cache=clear_cache)
            if self.are_weights_away:
                await self._llm.wake_up(["weights"])
                self.are_weights_away = False
        except BaseException:
            if not self._llm.errored and not self.is_paused:
                await self._llm.resume_generation()
            raise


def _broken() -> EngineDead:
    return EngineDead(
        "vLLM's engine no longer has complete weights.",
        path="generator.engine",
        value="vllm",
        rule="an update that was begun is completed",
        repair="nothing: the replica is replaced automatically",
    )


# ---- Adapters --------------------------------------------------------------------------------------------------------


class Adapters:
    """The loaded adapters. vLLM identifies them by number, requests by name."""

    def __init__(self, llm: Any, *, is_enabled: bool) -> None:
        self._llm = llm
        self._is_enabled = is_enabled
        self._requests: dict[str, Any] = {}
        self._numbers = itertools.count(1)
        self._num_loads = 0

    @property
    def names(self) -> list[str]:
        return sorted(self._requests)

    def salt(self, epoch: int) -> str:
        """Return what requests must have in common to share a cached prefix: the weights, and the adapters as they are
        now. vLLM distinguishes adapters by name, not by what was loaded under it."""
        return f"{epoch}.{self._num_loads}"

    def find(self, name: str | None) -> Any:
        """Return vLLM's record of an adapter; None for the model itself."""
        if name is None:
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


def _refused(path: str, why: str) -> ModelError:
    return ModelError(
        "vLLM cannot load this adapter.",
        path="load_adapter(path)",
        value=path,
        rule=why,
        repair="raise generator.engine_args.max_lora_rank or max_loras, or use another adapter",
    )
