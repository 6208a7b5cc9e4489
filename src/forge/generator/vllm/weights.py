"""The weights of a running engine: updates, whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from forge.config import UpdateMode, Verify
from forge.errors import EngineDead, ForgeError, StoreKeyError
from forge.generator.engine import UpdateReport
from forge.generator.vllm.process import Counts
from forge.models.adapter_names import AdapterSpec
from forge.types import INITIAL_VERSION

_log = logging.getLogger("forge.generator.vllm")

PAUSES: Final[dict[UpdateMode, tuple[str, bool]]] = {
    "drain": ("wait", True),
    "keep": ("keep", False),
    "recompute": ("keep", True),
    "abort": ("abort", True),
}
"""How vLLM pauses for each mode: its own mode, and whether it drops all keys and values."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where the weights of an engine come from.

    Attributes:
        weights: their name in the store.
        facts: the model's architecture.
        verify: how thoroughly what was fetched is checked.
        adapter: the shape of the LoRA adapter that is trained; None where versions hold all weights.
        adapter_path: the PEFT folder that it starts from; None for an adapter that changes nothing.
    """

    weights: str
    facts: dict[str, Any]
    verify: Verify = "cheap"
    adapter: AdapterSpec | None = None
    adapter_path: str | None = None


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
        source: WeightSource,
        *,
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
        self._source = source
        self._counts = counts
        self._digest = ""
        self._address = f"forge-vllm-{os.getpid()}-{secrets.token_hex(8)}"
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    async def open(self) -> None:
        """Initialise the transfer of weights in the workers, and the adapter that is trained."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._notices.bind("\0" + self._address)
        self._notices.setblocking(False)
        source = self._source
        info = {"weights": source.weights, "facts": source.facts, "verify": source.verify}
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        if source.adapter is not None:
            arguments = (asdict(source.adapter), source.adapter_path)
            for error in filter(None, await self._llm.collective_rpc("forge_open_adapter", args=arguments)):
                raise pickle.loads(error)

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
            digest, received = await self._fetch(number)
            if (number, digest) == (self.version, self._digest):
                await self._llm.collective_rpc("forge_release")
                return UpdateReport(number, mode, time.perf_counter() - began, 0.0, received_bytes=received)
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
            took_s = time.perf_counter() - began
            return UpdateReport(number, mode, took_s, stall_s, num_aborted=num_aborted, received_bytes=received)

    async def _find(self, version: int | Literal["latest"]) -> int:
        """Return the number of a version that can be fetched. All workers get this number, not "latest"."""
        from forge.store import Weights

        numbers = [info.number for info in await Weights(self._source.weights).versions()]
        if not numbers or (version != "latest" and version not in numbers):
            raise StoreKeyError(
                "There is no such version of the weights." if numbers else "No weights were published yet.",
                path=f"Weights({self._source.weights!r})",
                value=version,
                rule=f"versions that can be fetched: {numbers}",
                repair="publish it first, or request one of those versions",
            )
        return max(numbers) if version == "latest" else version

    async def _fetch(self, number: int) -> tuple[str, int]:
        """Let every worker fetch and check the version during generation. Return its digest, which all agree on, and
        how many bytes came from other hosts."""
        self._discard_notices()
        workers = await self._llm.collective_rpc("forge_fetch", args=(number, self._address))
        try:
            for _ in workers:
                await self._notice()
            found = await self._llm.collective_rpc("forge_fetched")
        except asyncio.CancelledError:
            await asyncio.shield(self._llm.collective_rpc("forge_release"))
            raise
        for *_, error in found:
            if error:
                await self._llm.collective_rpc("forge_release")
                raise pickle.loads(error)
        digests = {str(digest) for _, digest, *_ in found}
        if len(digests) != 1:
            await self._llm.collective_rpc("forge_release")
            raise ForgeError("Workers fetched different weights.", path=f"version {number}", value=sorted(digests))
        return digests.pop(), sum(received for *_, received, _ in found)

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
        llm, began = self._llm, time.perf_counter()
        await self._pause(mode)
        if mode == "drain":
            began = time.perf_counter()  # until here tokens were made
        try:
            await self._load(number)
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

    async def _load(self, number: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._llm
        if self._source.adapter is not None:
            await llm.collective_rpc("forge_install_adapter", args=(number,))
            await llm.update_weight_version(str(number))
            return
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info={"version": number}))
        await llm.finish_weight_update(weight_version=str(number))

    async def differing(self, version: int) -> dict[str, tuple[int, int]] | None:
        """Compare the adapter in use with a published one; None where versions hold all weights, which vLLM packs."""
        if self._source.adapter is None:
            return None
        async with self.lock:
            await self._fetch(version)
            try:
                found, *_ = await self._llm.collective_rpc("forge_differing")
            finally:
                await asyncio.shield(self._llm.collective_rpc("forge_release"))
        return None if found is None else {name: (published, used) for name, (published, used) in found.items()}

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
