"""The model on its device: its weights, its cache, and one step of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forge.config import GeneratorConfig
from forge.errors import ConfigError, WeightMismatch
from forge.generator.native.cache_size import CacheNeed, pages_on_cpu, pages_on_gpu
from forge.generator.native.pages import PAGE
from forge.generator.native.schedule import Piece
from forge.losses.head import chunked_logprobs
from forge.models.cpu_step import CpuSteps
from forge.models.gpu_attention import Extents
from forge.models.inference import build_for_inference, cache_shapes, page_bytes, paged_layers, parameters_once
from forge.models.linear import rows_linear
from forge.models.locate import ResolvedModel
from forge.models.paged import PagedLayout
from forge.models.paged_attention import PagedRow
from forge.models.random_weights import draw_weights
from forge.models.weights import load_hf

_log = logging.getLogger("forge.generator")

_GIB = 1 << 30
_GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_GRAPH_STEP = 64


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """What one step is about, on the device: tokens int64 [1, T], and the row that tells the layers the rest."""

    token_ids: Tensor
    row: PagedRow


class ModelRunner:
    """Runs steps. It is used by one thread.

    Args:
        config: what the generator was configured with.
        model: the model, resolved.
        max_seq_len: longest sequence.
        shared: weights of a trainer in this process, to compute with instead of weights of its own.
    """

    def __init__(
        self,
        config: GeneratorConfig,
        model: ResolvedModel,
        *,
        max_seq_len: int,
        shared: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.config, self.facts, self.max_seq_len = config, model.facts, max_seq_len
        self.device = _device(config.with_gpus)
        self.dtype = _dtype(config.precision, self.device)
        self._has_wide_head = model.facts.head_precision == "float32" and self.dtype != torch.float32
        self.is_shared = shared is not None
        self.model = build_for_inference(
            model.facts, max_seq_len=max_seq_len, dtype=self.dtype, device=self.device, shared=shared
        )
        if shared is None and model.folder is not None:
            load_hf([self.model], model.folder, model.facts)
        elif shared is None:
            draw_weights([self.model], num_layers=model.facts.num_layers or 1, seed=0)
        self.parameters = parameters_once(self.model)
        self._on_host: dict[str, Tensor] = {}
        self._cpu_steps = None if self.on_gpu else CpuSteps(self.model)
        self.max_pages = -(-max_seq_len // PAGE)
        self.num_pages = self._choose_num_pages()
        self._caches: list[tuple[Tensor, Tensor]] = []
        self._graphs: DecodeGraphs | None = None
        self.allocate()

    # ---- Memory -------------------------------------------------------------------------------------------------

    @property
    def on_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    @property
    def _cache_dtype(self) -> torch.dtype:
        return self.dtype if self.on_gpu else torch.float32

    def _choose_num_pages(self) -> int:
        each = page_bytes(self.facts, item_bytes=self._cache_dtype.itemsize)
        least = self.max_pages + 1
        need = CacheNeed(each, least, least + self.max_pages * self.config.max_batch)
        if self.config.kv_cache_gb is not None:
            num = int(self._checked_gb(self.config.kv_cache_gb) * _GIB) // each
        elif self.on_gpu:
            free, total = torch.cuda.mem_get_info(self.device)
            num = pages_on_gpu(need, free_bytes=free, total_bytes=total, share=self.config.gpu_memory_share)
        else:
            num = pages_on_cpu(need, free_bytes=_free_memory())
        if num < least:
            raise ConfigError(
                "the cache cannot hold one sequence of full length",
                path="generator.kv_cache_gb",
                value=self.config.kv_cache_gb,
                rule=f"at least {least * each / _GIB:.3g} GiB for sequences of {self.max_seq_len} tokens; "
                f"there is room for {num * PAGE} tokens",
                repair="raise generator.kv_cache_gb, or lower generator.max_seq_len",
            )
        return num

    def _checked_gb(self, asked: float) -> float:
        free = (torch.cuda.mem_get_info(self.device)[0] if self.on_gpu else _free_memory()) / _GIB
        if asked > free:
            raise ConfigError(
                "the cache is larger than the memory that is free",
                path="generator.kv_cache_gb",
                value=asked,
                rule=f"at most {free:.3g} GiB now, on {self.device}",
                repair="lower it, or leave it out for what fits",
            )
        return asked

    def allocate(self) -> None:
        """Take the memory of the cache; on a GPU, also record the decode steps."""
        keys, values = cache_shapes(self.facts, num_pages=self.num_pages, on_gpu=self.on_gpu)
        make = {"dtype": self._cache_dtype, "device": self.device}
        for layer in paged_layers(self.model):
            layer.k_cache, layer.v_cache = torch.empty(keys, **make), torch.empty(values, **make)
            self._caches.append((layer.k_cache, layer.v_cache))
        if self.on_gpu and self.config.cuda_graphs and self.facts.num_experts is None:
            self._graphs = DecodeGraphs(self, max_batch=self.config.max_batch)

    def give_back(self) -> None:
        """Free the cache, and keep the weights in host memory: in pinned pages, which stay for the next time."""
        self._graphs = None
        if self._cpu_steps is not None:
            self._cpu_steps.forget()
        self._caches.clear()
        for layer in paged_layers(self.model):
            layer.k_cache = layer.v_cache = None
        if self.on_gpu and not self.is_shared:
            for name, parameter in self.parameters.items():
                if name not in self._on_host:
                    self._on_host[name] = torch.empty_like(parameter.data, device="cpu", pin_memory=True)
                parameter.data = self._on_host[name].copy_(parameter.data, non_blocking=True)
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def take_back(self) -> None:
        """As before `give_back`; the cache is empty."""
        if self.on_gpu and not self.is_shared:
            for parameter in self.parameters.values():
                parameter.data = parameter.data.to(self.device, non_blocking=True)
        self.allocate()

    # ---- Weights ------------------------------------------------------------------------------------------------

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `WeightMismatch` unless these are the weights of this model."""
        own = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        wrong = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
        if wrong:
            name = wrong[0]
            raise WeightMismatch(
                f"the published weights are not those of this model: {len(wrong)} tensors differ in name or shape",
                tensors=wrong,
                path=name,
                value=given.get(name, "not published"),
                rule=f"{own.get(name, 'no such tensor')}, as in this model",
                repair="give trainer and generator the same model",
            )

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the weights in place with tensors that were checked."""
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    # ---- Steps --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages of the cache, each from the first to the second of a pair."""
        if pairs:
            sources, targets = torch.tensor(pairs, device=self.device).unbind(1)
            for caches in self._caches:
                for cache in caches:
                    cache[targets] = cache[sources]

    @torch.inference_mode()
    def hidden(self, pieces: Sequence[Piece], table: np.ndarray, index: Sequence[int]) -> Tensor:
        """Compute pieces, one after the other in a row; the hidden states [R, D] of the tokens at `index`."""
        rows = self._rows(pieces, table, index)
        return self._forward(rows)

    @torch.inference_mode()
    def decode_logits(self, pieces: Sequence[Piece], table: np.ndarray) -> Tensor:
        """Compute pieces of one token each; the logits [S, V], float32, in a buffer that the next step overwrites."""
        if self._graphs is not None and len(pieces) <= self._graphs.max_batch:
            return self._graphs.run(pieces, table)
        rows = self._rows(pieces, table, range(len(pieces)))
        found = None if self._cpu_steps is None else self._cpu_steps.logits(rows.token_ids[0], rows.row)
        return self.logits(self._forward(rows)) if found is None else found

    @torch.inference_mode()
    def logits(self, hidden_RD: Tensor) -> Tensor:
        """The logits [R, V], float32; with `model.head_precision: float32` also summed and never rounded to less."""
        weight = self.model.lm_head.weight
        if not self._has_wide_head:
            return rows_linear(hidden_RD, weight).float()
        if self.on_gpu:
            return torch.mm(hidden_RD, weight.t(), out_dtype=torch.float32)
        return rows_linear(hidden_RD.float(), weight.float())

    @torch.inference_mode()
    def logprobs(self, hidden_RD: Tensor, targets: Sequence[int], *, temperature: float) -> list[float]:
        """The logprob of a target after each hidden state, computed as the trainer does."""
        wanted = torch.tensor(targets, device=self.device)
        weight, is_wide = self.model.lm_head.weight, self._has_wide_head
        found, _ = chunked_logprobs(hidden_RD, weight, wanted, temperature=temperature, fp32_logits=is_wide)
        values: list[float] = found.tolist()
        return values

    def _forward(self, rows: StepRows) -> Tensor:
        found = None if self._cpu_steps is None else self._cpu_steps.hidden(rows.token_ids[0], rows.row)
        if found is not None:
            return found
        book = self.model.book
        key = book.enter(rows.row)
        try:
            hidden: Tensor = self.model(rows.token_ids, key)
            return hidden
        finally:
            book.clear()

    def _rows(self, pieces: Sequence[Piece], table: np.ndarray, index: Sequence[int]) -> StepRows:
        sizes = np.array([piece.end - piece.start for piece in pieces], dtype=np.int64)
        starts = np.zeros(len(pieces) + 1, dtype=np.int32)
        np.cumsum(sizes, out=starts[1:])
        contexts = np.array([piece.end for piece in pieces], dtype=np.int32)
        token_ids: list[int] = []
        for piece in pieces:
            token_ids += piece.sequence.ids[piece.start : piece.end]
        firsts = np.array([piece.start for piece in pieces], dtype=np.int64)
        positions = np.arange(len(token_ids)) - np.repeat(starts[:-1] - firsts, sizes)
        pages = table[[piece.sequence.slot for piece in pieces]][:, : -(-int(contexts.max()) // PAGE)]
        owners = np.repeat(np.arange(len(pieces)), sizes)
        slots = pages[owners, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
        layout = PagedLayout(*(self._put(array) for array in (starts, contexts, pages, slots)))
        row = PagedRow(
            positions=self._put(positions).unsqueeze(0),
            index=self._put(np.asarray(index, dtype=np.int64)),
            layout=layout,
            is_decode=len(token_ids) == len(pieces),
            extents=Extents.of(sizes.tolist(), contexts.tolist(), device=self.device) if self.on_gpu else None,
        )
        return StepRows(self._put(np.array(token_ids, dtype=np.int64)).unsqueeze(0), row)

    def _put(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.to(self.device, non_blocking=True) if self.on_gpu else tensor


class DecodeGraphs:
    """Decode steps on a GPU, recorded once for several numbers of sequences and replayed.

    A step is padded up to the next recorded size with sequences that have no context and write nowhere. So the shapes
    of the products, and with them a token's last bits, depend on how many sequences there are.
    """

    def __init__(self, runner: ModelRunner, *, max_batch: int) -> None:
        self.max_batch = max_batch
        self._runner = runner
        sizes = {size for size in _GRAPH_SIZES if size < max_batch}
        self._sizes = sorted(sizes | set(range(_GRAPH_SIZES[-1], max_batch, _GRAPH_STEP)) | {max_batch})
        device = runner.device
        self._token_ids = torch.zeros(1, max_batch, dtype=torch.int64, device=device)
        self._positions = torch.zeros(1, max_batch, dtype=torch.int64, device=device)
        self._slots = torch.full((max_batch,), -1, dtype=torch.int64, device=device)
        self._contexts = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._table = torch.zeros(max_batch, runner.max_pages, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._record()

    @torch.inference_mode()
    def _record(self) -> None:
        stream = torch.cuda.Stream(self._runner.device)
        pool = None
        for size in reversed(self._sizes):
            with torch.cuda.stream(stream):
                self._step(size)
            torch.cuda.synchronize(self._runner.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                logits = self._step(size)
            pool = pool or graph.pool()
            self._graphs[size] = (graph, logits)

    def _step(self, size: int) -> Tensor:
        starts = torch.arange(size + 1, dtype=torch.int32, device=self._runner.device)
        layout = PagedLayout(starts, self._contexts[:size], self._table[:size], self._slots[:size])
        index = torch.arange(size, device=self._runner.device)
        row = PagedRow(self._positions[:, :size], index, layout, is_decode=True)
        return self._runner.logits(self._runner._forward(StepRows(self._token_ids[:, :size], row)))

    def run(self, pieces: Sequence[Piece], table: np.ndarray) -> Tensor:
        """The logits [S, V] of pieces of one token each."""
        count = len(pieces)
        size = next(size for size in self._sizes if size >= count)
        positions = np.array([piece.start for piece in pieces], dtype=np.int64)
        rows = table[[piece.sequence.slot for piece in pieces]]
        slots = rows[np.arange(count), positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
        numbers = np.zeros((4, size), dtype=np.int64)
        numbers[0, :count] = [piece.sequence.ids[piece.start] for piece in pieces]
        numbers[1, :count] = positions
        numbers[2] = -1
        numbers[2, :count] = slots
        numbers[3, :count] = positions + 1
        on_device = self._runner._put(numbers)
        self._token_ids[0, :size].copy_(on_device[0])
        self._positions[0, :size].copy_(on_device[1])
        self._slots[:size].copy_(on_device[2])
        self._contexts[:size].copy_(on_device[3])
        width = -(-int(positions.max() + 1) // PAGE)
        self._table[:count, :width].copy_(self._runner._put(rows[:, :width]))
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:count]


def _device(with_gpus: bool | None) -> torch.device:
    if with_gpus is None:
        with_gpus = torch.cuda.is_available()
    if not with_gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "a GPU was asked for, and torch sees none",
            path="generator.with_gpus",
            value=True,
            rule="a machine with a GPU and torch's CUDA build",
            repair="set generator.with_gpus=false, or run `forge doctor` to see what is missing",
        )
    return torch.device("cuda", torch.cuda.current_device())


def _dtype(precision: str | None, device: torch.device) -> torch.dtype:
    if precision is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]


def _free_memory() -> int:
    """Memory that this machine can give, in bytes."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 8 * _GIB
