"""The code that runs inside vLLM's workers: it brings weights from the store into the model.

vLLM imports this module in every worker, because `ForgeWorker` is named as its `worker_extension_cls`. Importing it
registers the weight-transfer backend `forge_store` with vLLM's own factory, and starts to watch the process that the
engine belongs to. A worker is not an actor, but it belongs to the run: its environment has the address of the run's
rendezvous server.

An update has two halves. `forge_fetch` gets a version from the store and checks all of it during generation, without
touching the model. Only then does vLLM's own sequence of `start_weight_update`, `update_weights` and
`finish_weight_update` load it, while nothing is generated. A version of an adapter is installed by
`forge_install_adapter` instead: vLLM drops all adapters when it finishes a weight update.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from forge.config import ModelConfig, Verify
from forge.errors import ForgeError, RemoteError, WeightMismatch
from forge.generator.vllm.arguments import BACKEND
from forge.generator.vllm.environment import OWNER
from forge.generator.vllm.live_adapter import LiveAdapter
from forge.generator.vllm.phases import report_phases
from forge.models.adapter_names import AdapterSpec
from forge.models.weight_names import hf_views, plain_name, weight_map
from forge.store import Fetched, Weights

_log = logging.getLogger("forge.generator.vllm")


@dataclass
class StoreInit(WeightTransferInitInfo):  # type: ignore[misc]
    """What a worker needs to fetch: the name of the weights in the store, and the model's architecture."""

    weights: str
    facts: dict[str, Any]
    verify: Verify = "cheap"


@dataclass
class StoreUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which version to load. It was fetched before."""

    version: int


@dataclass
class FetchResult:
    """The result of fetching a version, in a form that may leave the worker.

    Attributes:
        version, digest: which weights; -1 and nothing if it failed.
        seconds, num_bytes: what it cost.
        num_received: bytes that came from other hosts.
        error: the exception, pickled.
    """

    version: int = -1
    digest: str = ""
    seconds: float = 0.0
    num_bytes: int = 0
    num_received: int = 0
    error: bytes = b""


@dataclass
class _Ready:
    """A version that was fetched and checked, and waits to be loaded: all weights, or an adapter in vLLM's form."""

    version: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    adapter: Any = None
    release: Callable[[], None] = field(default=lambda: None, repr=False)


class StoreTransfer(WeightTransferEngine[StoreInit, StoreUpdate]):  # type: ignore[misc]
    """The backend `forge_store`."""

    init_info_cls = StoreInit
    update_info_cls = StoreUpdate
    supports_draft_weight_update = False

    _weights: Weights | None = None
    _facts: ModelConfig | None = None
    _ready: _Ready | None = None
    _adapter: LiveAdapter | None = None

    def init_transfer_engine(self, init_info: StoreInit) -> None:
        self._weights = Weights(init_info.weights, verify=init_info.verify)
        self._facts = ModelConfig(**init_info.facts)

    def fetch(self, version: int) -> FetchResult:
        """Get a version from the store, as views where it lies on this host, and check that it is this model's."""
        assert self._weights is not None, "init_transfer_engine comes first"
        assert self._facts is not None
        self.release()
        fetched = self._weights.fetch_blocking(version=version)
        try:
            self._ready = self._prepare(fetched)
        except BaseException:
            fetched.release()
            raise
        cost = fetched.seconds, fetched.num_bytes, fetched.num_received
        return FetchResult(fetched.version, fetched.digest, *cost)

    def _prepare(self, fetched: Fetched) -> _Ready:
        assert self._facts is not None
        if self._adapter is not None:
            check_whole(fetched.tensors, self._adapter.shapes, version=fetched.version)
            plain = {plain_name(name): tensor for name, tensor in fetched.tensors.items()}
            ready = _Ready(fetched.version, adapter=self._adapter.prepare(plain))
            fetched.release()  # it was copied
            return ready
        shapes = {slot.name: slot.shape for slot in weight_map(self._facts)}
        check_whole(fetched.tensors, shapes, version=fetched.version)
        tensors = dict(hf_views(fetched.tensors, self._facts))
        return _Ready(fetched.version, tensors, release=fetched.release)

    def open_adapter(self, manager: Any, spec: AdapterSpec, path: str | None) -> None:
        """Compute with the adapter that is trained from now on, as it is before any update."""
        assert self._facts is not None, "init_transfer_engine comes first"
        self._adapter = LiveAdapter(manager, self._facts, spec)
        self._adapter.install(self._adapter.first(path))

    def install_adapter(self, version: int) -> None:
        """Compute with the adapter of the version that was fetched."""
        assert self._adapter is not None
        assert self._ready is not None
        assert self._ready.version == version, "what was fetched is another version"
        self._adapter.install(self._ready.adapter)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.release()

    def differing(self) -> dict[str, tuple[int, int]] | None:
        """Return the digests of the adapter's tensors that are not as fetched; see `LiveAdapter.differing`."""
        assert self._adapter is not None
        assert self._ready is not None
        return self._adapter.differing(self._ready.adapter)

    def release(self) -> None:
        """Release a version that was fetched."""
        if self._ready is not None:
            ready, self._ready = self._ready, None
            ready.tensors.clear()
            ready.release()

    def start_weight_update(self) -> None:
        if self._ready is None:
            raise RuntimeError("no version was fetched: nothing was changed")
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # there is nothing to wait for, and vLLM's own method raises
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StoreUpdate) -> None:
        assert self._ready is not None
        assert self._ready.version == update_info.version, "what was fetched is another version"
        with torch.no_grad():
            self.model.load_weights(self._ready.tensors.items())

    def finish_weight_update(self) -> None:
        with _quiet():
            finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_head(self.model)
        self.release()

    def shutdown(self) -> None:
        self.release()


def check_whole(tensors: dict[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, version: int) -> None:
    """Raise `WeightMismatch` unless these are the tensors that a version must have, all of them, each in its shape."""
    given = {plain_name(name): tuple(tensor.shape) for name, tensor in tensors.items()}
    missing = [name for name in shapes if name not in given]
    unknown = [name for name in given if name not in shapes]
    wrong = [name for name in given if name in shapes and given[name] != shapes[name]]
    for what, names in (("lacks", missing), ("has, beyond the model's,", unknown), ("has in another shape", wrong)):
        if names:
            first = names[0]
            rule = f"{first} is a parameter of the model that generates" if first in shapes else "no other parameters"
            raise WeightMismatch(
                f"version {version} {what} {', '.join(names[:8])}",
                tensors=names,
                path=first,
                value=given.get(first),
                rule=f"{rule}, of shape {shapes[first]}" if first in shapes else rule,
                repair="publish the whole model or the whole adapter, of the same architecture",
            )


def repack_tied_head(model: torch.nn.Module) -> None:
    """Make the output layer use the new weights where it shares the embedding's.

    On the CPU vLLM 0.32.0 keeps a packed copy for the output layer, and a reload renews it only where the layer has
    weights of its own: with tied embeddings, logits would come from the old ones, without an error.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence vLLM's warning about layers without weights: rotary tables and tied output layers have none. That nothing
    else is missing was checked before."""
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


class ForgeWorker:
    """What `collective_rpc` can call besides vLLM's own. vLLM makes it a base class of its worker."""

    weight_transfer_engine: StoreTransfer
    model_runner: Any
    _forge_fetching: threading.Thread | None = None
    _forge_result: FetchResult | None = None

    def forge_fetch(self, version: int, notify: str) -> None:
        """Start to fetch a version on a thread of its own; a datagram goes to the socket `notify` when it is done."""
        transfer = self.weight_transfer_engine

        def fetch() -> None:
            self._forge_result = _fetch(transfer, version)
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
                line.sendto(b"done", "\0" + notify)

        self._forge_result = None
        self._forge_fetching = threading.Thread(target=fetch, name="forge-fetch", daemon=True)
        self._forge_fetching.start()

    def forge_fetched(self) -> tuple[int, str, float, int, int, bytes]:
        """Wait for the fetch and return its result."""
        assert self._forge_fetching is not None
        self._forge_fetching.join()
        found = self._forge_result or FetchResult(error=pickle.dumps(RuntimeError("the fetching thread was lost")))
        return found.version, found.digest, found.seconds, found.num_bytes, found.num_received, found.error

    def forge_release(self) -> None:
        """Release what was fetched: it will not be loaded."""
        if self._forge_fetching is not None:
            self._forge_fetching.join()
        self.weight_transfer_engine.release()

    def forge_open_adapter(self, shape: Mapping[str, Any], path: str | None) -> bytes:
        """Start with the adapter in a PEFT folder, or with one that changes nothing. Return the error, pickled."""
        try:
            spec = AdapterSpec(**{**shape, "targets": tuple(shape["targets"])})
            self.weight_transfer_engine.open_adapter(self.model_runner.lora_manager, spec, path)
        except Exception as error:  # noqa: BLE001 - it is raised where the engine is started
            return pickle.dumps(error if isinstance(error, ForgeError) else _as_remote(error))
        return b""

    def forge_install_adapter(self, version: int) -> None:
        """Compute with the adapter that was fetched. Nothing is generated meanwhile."""
        self.weight_transfer_engine.install_adapter(version)

    def forge_differing(self) -> dict[str, tuple[int, int]] | None:
        """Compare the adapter in use with the one that was fetched."""
        return self.weight_transfer_engine.differing()

    def forge_facts(self) -> dict[str, Any]:
        """Return the worker's process ids, shared memory and environment."""
        parent = multiprocessing.parent_process()
        return {
            "pid": os.getpid(),
            "parent": 0 if parent is None else parent.pid,
            "shm_names": [*filter(None, [os.environ.get("VLLM_DIST_IDENT")]), *_shared_files()],
            "num_threads": torch.get_num_threads(),
            "environment": {name: os.environ[name] for name in _SHOWN if name in os.environ},
        }


def _shared_files() -> list[str]:
    """Return the names of the shared memory and semaphores that this process has open."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {line.partition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}
    return sorted(names)


_SHOWN = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "TORCHDYNAMO_DISABLE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_NO_USAGE_STATS",
    OWNER,
)


def _fetch(transfer: StoreTransfer, version: int) -> FetchResult:
    began = time.perf_counter()
    try:
        return transfer.fetch(version)
    except Exception as error:  # noqa: BLE001 - it is raised where the update was asked for
        _log.warning("version %d was not fetched: %s", version, error)
        kept = error if isinstance(error, ForgeError) else _as_remote(error)
        return FetchResult(seconds=time.perf_counter() - began, error=pickle.dumps(kept))


def _as_remote(error: Exception) -> RemoteError:
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    return RemoteError(f"{name}: {error}", type_name=name)


def _watch_owner() -> None:
    """End this worker, and the engine's process above it, when the process that they belong to has ended.

    vLLM's processes notice only an orderly end; after kill -9 they would stay, with all their memory.
    """
    owner = int(os.environ.get(OWNER, "0"))
    if not owner:
        return
    parent = multiprocessing.parent_process()

    def wait() -> None:
        _wait_for_end(owner)
        if mark := os.environ.get("VLLM_DIST_IDENT"):
            Path(tempfile.gettempdir(), mark).unlink(missing_ok=True)
        if parent is not None and parent.pid and parent.pid != owner and parent.is_alive():
            os.kill(parent.pid, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, name="forge-owner", daemon=True).start()


def _wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([descriptor], [], [])
    finally:
        os.close(descriptor)


def _leave_quickly() -> None:
    """Skip the interpreter's shutdown, which takes four seconds with all that vLLM imports. Everything that vLLM does
    at its end comes before."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, leave, exitpriority=-1000)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, StoreTransfer)
_watch_owner()
_leave_quickly()
report_phases()
