"""LoRA adapters that requests select by name, in the native engine: computed beside the live weights, unmerged."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forge.config.generator import BASE_ADAPTER, GeneratorConfig
from forge.errors import EngineDead, ModelError, OptionError, PromptError
from forge.generator.native.pages import ADAPTER_ROOTS, FIXED_ROOTS
from forge.models.adapter_segments import BASE, LIVE, AdapterSegment
from forge.types import AdapterUse

if TYPE_CHECKING:
    import torch

    from forge.config import ModelConfig
    from forge.generator.native.schedule import Piece
    from forge.models.language_model import LanguageModel
    from forge.models.peft_files import AdapterFolder

_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter that requests can select. Loaded again under the same name it is another one, with another number.

    Attributes:
        use: its name and digest.
        number: of the segments that it computes; `BASE` for the weights without the live adapter.
        folder: what was read.
        num_bytes: the memory of its tensors.
        is_fixed: whether no update of the live weights changes what it computes, because only another adapter is
            trained.
    """

    use: AdapterUse
    number: int
    folder: AdapterFolder | None = None
    num_bytes: int = 0
    is_fixed: bool = False

    @property
    def root(self) -> int:
        """The mark of the empty prefix in the cache, so that no other adapter's keys and values are found."""
        return (FIXED_ROOTS if self.is_fixed else ADAPTER_ROOTS) + self.number - BASE


_WITHOUT: Final = LoadedAdapter(AdapterUse(BASE_ADAPTER, ""), BASE, is_fixed=True)


def segments_of(pieces: Iterable[Piece]) -> tuple[AdapterSegment, ...]:
    """Return the segments of a step, whose pieces are in the order of their adapters. Empty if all are live."""
    found: list[AdapterSegment] = []
    end = 0
    for number, group in itertools.groupby(pieces, key=lambda piece: piece.sequence.adapter_number):
        start, end = end, end + sum(piece.size for piece in group)
        found.append(AdapterSegment(number, start, end))
    return () if all(segment.adapter == LIVE for segment in found) else tuple(found)


class AttachedAdapters:
    """The adapters of a runner's live model, on its device. Used by the runner's thread."""

    def __init__(self, model: LanguageModel, facts: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._model, self._facts = model, facts
        self._place: dict[str, Any] = {"dtype": dtype, "device": device}
        self._attached: dict[int, LoadedAdapter] = {}
        self._is_released = False
        self.item_bytes = int(dtype.itemsize)

    def attach(self, adapter: LoadedAdapter) -> None:
        """Let the model compute segments of an adapter. `OutOfDeviceMemory` if there is no room for it."""
        if not self._is_released:
            self._put(adapter)
        self._attached[adapter.number] = adapter

    def detach(self, adapter: LoadedAdapter) -> None:
        """Free an adapter's memory. No sequence may need it."""
        from forge.models.adapters import detach_numbered

        if self._attached.pop(adapter.number, None) is not None:
            detach_numbered(self._model, adapter.number)

    def release(self) -> None:
        """Free the memory of all on the device; `restore` brings them back from the host's."""
        from forge.models.adapters import detach_numbered

        self._is_released = True
        for number in self._attached:
            detach_numbered(self._model, number)

    def restore(self) -> None:
        """Undo `release`."""
        self._is_released = False
        for adapter in self._attached.values():
            self._put(adapter)

    def _put(self, adapter: LoadedAdapter) -> None:
        import torch

        from forge.models.adapters import attach_numbered
        from forge.runtime.device_memory import OutOfDeviceMemory

        folder = adapter.folder
        assert folder is not None
        try:
            tensors = {name: each.to(**self._place).contiguous() for name, each in folder.tensors.items()}
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(
                f"there is no room on the GPU for the adapter {adapter.use.name!r}",
                path="generator.max_adapter_gb",
                value=f"{adapter.num_bytes / _GIB:.3g} GiB",
                rule="the memory that the KV cache leaves to adapters",
                repair="set generator.max_adapter_gb, or lower generator.kv_cache_gb",
            ) from error
        attach_numbered(self._model, adapter.number, tensors, config=self._facts, spec=folder.spec)


@dataclass(slots=True, eq=False)
class _Held:
    adapter: LoadedAdapter
    num_open: int = 0
    is_retired: bool = False


@dataclass(slots=True, eq=False)
class SelectableAdapters:
    """The adapters of an engine by name, on its event loop.

    A request keeps the adapter that it started with: what is loaded under its name later, or unloaded, does not concern
    it. The memory of an adapter is freed with its last request.

    Args:
        config: the generator's configuration.
        facts: the model's.
        ask: calls a function of the attached adapters on the engine's thread.
        item_bytes: returns the bytes of one number of an adapter.
    """

    config: GeneratorConfig
    facts: ModelConfig
    ask: Callable[[Callable[[AttachedAdapters], None]], Future[None]]
    item_bytes: Callable[[], int]
    _named: dict[str, _Held] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(LIVE + 1))
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each adapter, by name."""
        return {name: held.adapter.use.digest for name, held in sorted(self._named.items())}

    @asynccontextmanager
    async def opened(self, name: str | None) -> AsyncIterator[LoadedAdapter | None]:
        """Keep an adapter while the block runs; None for what the engine computes by itself."""
        if name is None or name == BASE_ADAPTER:
            yield _WITHOUT if name is not None and self.config.adapter is not None else None
            return
        held = self._named.get(name)
        if held is None:
            raise _unknown(name, self._named, path="sampling.adapter", error=PromptError)
        held.num_open += 1
        try:
            yield held.adapter
        finally:
            held.num_open -= 1
            if held.is_retired and not held.num_open:
                await self._detach(held.adapter)

    async def load(self, name: str, path: str) -> str:
        """Load an adapter, or replace what is loaded under that name. Return its digest."""
        from forge.models.peft_files import read_adapter_folder

        _check_name(name)
        folder = await asyncio.to_thread(read_adapter_folder, Path(path), self.facts)
        async with self._changing:
            known = self._named.get(name)
            if known is not None and known.adapter.use.digest == folder.digest:
                return folder.digest
            adapter = self._numbered(name, folder)
            self._check_room(adapter)
            try:
                await asyncio.wrap_future(self.ask(lambda attached: attached.attach(adapter)))
            except asyncio.CancelledError:
                self.ask(lambda attached: attached.detach(adapter))
                raise
            self._named[name] = _Held(adapter)
            if known is not None:
                await self._retire(known)
        return folder.digest

    async def unload(self, name: str) -> None:
        """Let no request select an adapter any more. Those in progress finish with it."""
        async with self._changing:
            if name not in self._named:
                raise _unknown(name, self._named, path="unload_adapter(name)", error=OptionError)
            await self._retire(self._named.pop(name))

    def _numbered(self, name: str, folder: AdapterFolder) -> LoadedAdapter:
        num_bytes = sum(tensor.numel() for tensor in folder.tensors.values()) * self.item_bytes()
        use, is_fixed = AdapterUse(name, folder.digest), self.config.adapter is not None
        return LoadedAdapter(use, next(self._numbers), folder, num_bytes, is_fixed)

    def _check_room(self, adapter: LoadedAdapter) -> None:
        name, config = adapter.use.name, self.config
        others = [held.adapter for other, held in self._named.items() if other != name]
        if len(others) >= config.max_adapters:
            raise ModelError(
                f"There is no room for the adapter {name!r}: {len(others)} are loaded.",
                path="generator.max_adapters",
                value=config.max_adapters,
                rule=f"the number of adapters, here at least {len(others) + 1}",
                repair="unload one with unload_adapter(name), or raise it",
            )
        num_bytes = sum(other.num_bytes for other in others) + adapter.num_bytes
        if config.max_adapter_gb is not None and num_bytes > config.max_adapter_gb * _GIB:
            raise ModelError(
                f"There is no room for the adapter {name!r}, of {adapter.num_bytes:,} bytes.",
                path="generator.max_adapter_gb",
                value=config.max_adapter_gb,
                rule=f"GiB for all adapters together, here at least {num_bytes / _GIB:.3g}",
                repair="unload one with unload_adapter(name), or raise it",
            )

    async def _retire(self, held: _Held) -> None:
        held.is_retired = True
        if not held.num_open:
            await self._detach(held.adapter)

    async def _detach(self, adapter: LoadedAdapter) -> None:
        with suppress(EngineDead):
            await asyncio.shield(asyncio.wrap_future(self.ask(lambda attached: attached.detach(adapter))))


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or name == BASE_ADAPTER:
        raise OptionError(
            "An adapter cannot have this name.",
            path="load_adapter(name)",
            value=name,
            rule=f"text that is not empty, and not {BASE_ADAPTER!r}, which stands for the weights without an adapter",
            repair="choose another name",
        )


def _unknown(
    name: str, known: Mapping[str, object], *, path: str, error: type[PromptError] | type[OptionError]
) -> PromptError | OptionError:
    return error(
        "There is no such adapter.",
        path=path,
        value=name,
        rule=f"one of those that are loaded: {', '.join(sorted(known)) or 'none'}",
        repair="load it with load_adapter(name, path), or name it in generator.adapters",
    )
