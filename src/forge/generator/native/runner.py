"""The model on its device: its weights, its cache, and one step of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge.config import GeneratorConfig
from forge.errors import ConfigError, WeightMismatch
from forge.generator.native.adapters import AttachedAdapters, segments_of
from forge.generator.native.cache_room import choose_num_pages
from forge.generator.native.cache_size import records_steps
from forge.generator.native.decode_graphs import DecodeGraphs, LastSampled, StepRows, places_of, tokens_of
from forge.generator.native.loading import load_first_adapter, load_weights
from forge.generator.native.memory import Caches, choose_memory
from forge.generator.native.pages import PAGE
from forge.generator.native.pinned import PinnedWeights
from forge.generator.native.pinned_models import ModelCopy, PinnedModels, max_pinned, no_room
from forge.generator.native.schedule import Piece
from forge.generator.native.sequences import ScoreJob
from forge.generator.native.transfer import put
from forge.kernels.paged import PagedLayout
from forge.losses.candidates import chunked_top
from forge.losses.head import chunked_logprobs
from forge.models.adapter_names import is_adapter
from forge.models.adapter_segments import LIVE
from forge.models.cpu_step import CpuSteps
from forge.models.gpu_attention import Extents, decode_shares
from forge.models.gpu_step import neighbours_first
from forge.models.inference import (
    PagedRow,
    build_for_inference,
    cache_shapes,
    paged_layers,
    parameters_once,
)
from forge.models.language_model import LanguageModel
from forge.models.layers import rows_linear
from forge.models.locate import ResolvedModel
from forge.models.peft_files import resolve_adapter
from forge.models.quantized import quantized_tensors
from forge.observe.phases import phase

_log = logging.getLogger("forge.generator")

_GIB = 1 << 30
_LOGIT_ROWS = 256
"""Rows of logits that are in memory at once where only the largest counts."""


class ModelRunner:
    """Runs steps. It is used by one thread.

    Args:
        config: the generator's configuration.
        model: the resolved model.
        max_seq_len: longest sequence.
        shared: weights of a trainer in this process, to compute with instead of weights of its own.
        num_pages: of its cache; None for what fits.
    """

    ignores_adapters = False
    """Whether rows of every adapter are computed without one."""

    def __init__(
        self,
        config: GeneratorConfig,
        model: ResolvedModel,
        *,
        max_seq_len: int,
        shared: Mapping[str, Tensor] | None = None,
        num_pages: int | None = None,
    ) -> None:
        self.config, self.facts, self.max_seq_len = config, model.architecture, max_seq_len
        self.device = _device(config.with_gpus)
        self.dtype: torch.dtype = getattr(torch, config.precision_on(gpu=self.device.type == "cuda"))
        self._check_cache_dtype()
        self._has_wide_head = model.architecture.head_precision == "float32" and self.dtype != torch.float32
        self.is_shared = shared is not None
        self.adapter = None if config.adapter is None else resolve_adapter(config.adapter, model.architecture)
        with phase("building the model"):
            self.model = self.build(shared=shared)
        self.parameters = parameters_once(self.model)
        self.quantized = quantized_tensors([self.model])
        own = {} if self.is_shared else self.parameters | self.quantized
        self._memory = choose_memory(self.device, {name: own[name] for name in neighbours_first(own)})
        load_weights(self.model, model, shared=shared)
        if config.adapter is not None and self.adapter is not None:
            load_first_adapter(self.model, model, config=config.adapter, spec=self.adapter, shared=shared)
        self._cpu_steps = None if self.on_gpu else CpuSteps(self.model)
        self._live = ModelCopy(self.model, self._cpu_steps)
        self.adapters = AttachedAdapters(self.model, self.facts, dtype=self.dtype, device=self.device)
        self._in_use: PinnedWeights | None = None
        self.pinned = PinnedModels(self, most=max_pinned(config, on_gpu=self.on_gpu))
        self.max_pages = -(-max_seq_len // PAGE)
        self.num_pages = choose_num_pages(self) if num_pages is None else num_pages
        self._caches: Caches = []
        self._graphs: DecodeGraphs | None = None
        self._saved_graphs: DecodeGraphs | None = None
        with phase("allocating the cache"):
            self.allocate_cache()

    def build(self, *, shared: Mapping[str, Tensor] | None = None) -> LanguageModel:
        """Return a model for this device: with weights of its own, which are empty, or with shared ones."""
        places: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "shared": shared}
        return build_for_inference(self.facts, max_seq_len=self.max_seq_len, adapter=self.adapter, **places)

    # ---- Memory -------------------------------------------------------------------------------------------------

    @property
    def on_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    @property
    def cache_dtype(self) -> torch.dtype:
        if self.config.kv_cache_dtype == "fp8":
            return torch.float8_e4m3fn
        return self.dtype if self.on_gpu else torch.float32

    def _check_cache_dtype(self) -> None:
        if self.config.kv_cache_dtype == "auto":
            return
        capability = torch.cuda.get_device_capability(self.device) if self.on_gpu else None
        if capability is None or capability < (8, 9) or self.dtype == torch.float32:
            found = "a CPU" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
            raise ConfigError(
                "keys and values cannot be cached in 8 bits here",
                path="generator.kv_cache_dtype",
                value=self.config.kv_cache_dtype,
                rule="a GPU of compute capability 8.9 or newer, and generator.precision bfloat16 or float16; "
                f"this is {found} in {str(self.dtype).removeprefix('torch.')}",
                repair="set generator.kv_cache_dtype=auto",
            )

    def allocate_cache(self) -> None:
        """Allocate the cache; on a GPU, also record the decode steps, unless earlier recordings are still valid."""
        shapes = cache_shapes(self.facts, num_pages=self.num_pages, on_gpu=self.on_gpu)
        layers = paged_layers(self.model)
        self._caches = self._memory.allocate_cache(shapes, num_layers=len(layers), dtype=self.cache_dtype)
        for layer, caches in zip(layers, self._caches, strict=True):
            layer.k_cache, layer.v_cache = caches
        self._graphs, self._saved_graphs = self._saved_graphs, None
        if self._graphs is None and self._records_steps:
            self._graphs = DecodeGraphs(self, max_batch=self.config.max_batch)
        self.pinned.set_caches(self._caches, keeps_graphs=self._memory.keeps_addresses)

    @property
    def _records_steps(self) -> bool:
        can = records_steps(self.facts, self.config, on_gpu=self.on_gpu)
        if not can or self.facts.num_experts is None:
            return can
        # On older GPUs torch computes one expert after the other, and the host waits for how many tokens each has.
        return bool(torch.cuda.get_device_capability(self.device) >= (9, 0))

    def release_cache(self) -> None:
        """Release the cache; `allocate_cache` brings it back, empty. Nothing can be computed in between.

        Recorded steps are kept where the cache is restored at the same addresses.
        """
        self.use(None)
        self.pinned.set_caches(None, keeps_graphs=self._memory.keeps_addresses)
        if self._graphs is not None and self._memory.keeps_addresses:
            self._saved_graphs = self._graphs
        self._graphs = None
        if self._cpu_steps is not None:
            self._cpu_steps.forget()
        self._caches = []
        for layer in paged_layers(self.model):
            layer.k_cache = layer.v_cache = None
        self._memory.release_cache()

    def release(self) -> None:
        """Release cache and weights; the weights move to host memory, where `update_weights` reaches them too.

        Pinned versions are loaded again when they are used.
        """
        self.release_cache()
        self.pinned.clear()
        if self.on_gpu:
            self.adapters.release()
            self._memory.release_weights()

    def restore(self) -> None:
        """Undo `release`; the cache is empty. If there is too little memory, nothing changes."""
        try:
            self._memory.restore_weights()
            if self.on_gpu:
                self.adapters.restore()
            self.allocate_cache()
        except BaseException:
            self.release()
            raise

    # ---- Weights ------------------------------------------------------------------------------------------------

    @property
    def updated(self) -> dict[str, Tensor]:
        """The live parameters that a version of the weights holds: all of them, or the adapter's."""
        return {name: each for name, each in self.parameters.items() if self.adapter is None or is_adapter(name)}

    def use(self, weights: PinnedWeights | None) -> None:
        """Compute the next steps with the weights of a pinned version; None for the live weights.

        Raise `OutOfDeviceMemory` if there is no room for them; then the live weights are in use.
        """
        if weights is self._in_use:
            return
        if self._in_use is None:
            self._live.graphs = self._graphs
        try:
            chosen = self._live if weights is None else self.pinned.find(weights, self._caches)
            self._in_use = weights
            self.model, self._cpu_steps, self._graphs = chosen.model, chosen.cpu_steps, chosen.graphs
            if self._graphs is None and self._records_steps:
                chosen.graphs = self._graphs = DecodeGraphs(self, max_batch=self.config.max_batch)
        except torch.OutOfMemoryError as error:
            assert weights is not None
            self.drop(weights)
            self.use(None)
            raise no_room(weights, self.config) from error

    def drop(self, weights: PinnedWeights) -> None:
        """Forget a pinned version."""
        if self._in_use is weights:
            self.use(None)
        self.pinned.drop(weights)

    def check_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `WeightMismatch` unless these are the weights of this model, or of its adapter."""
        own = {name: tuple(parameter.shape) for name, parameter in self.updated.items()}
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
                repair="give trainer and generator the same model and the same adapter",
            )

    @torch.no_grad()
    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the weights in place with tensors that were checked."""
        own = self.updated
        torch._foreach_copy_(list(own.values()), [tensors[name] for name in own])
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
                    plain = cache.view(torch.uint8)  # not every precision can be indexed
                    plain[targets] = plain[sources]

    @torch.inference_mode()
    def hidden(self, pieces: Sequence[Piece], table: np.ndarray, index: Sequence[int]) -> Tensor:
        """Compute pieces, one after the other in a row. Return the hidden states [R, D] of the tokens at `index`."""
        return self.forward(self._rows(pieces, table, index))

    @property
    def has_recorded_steps(self) -> bool:
        """Whether decode steps are replayed CUDA graphs: then neither they nor the host wait for each other."""
        return self._graphs is not None

    @torch.inference_mode()
    def decode_logits(self, pieces: Sequence[Piece], table: np.ndarray, *, last: LastSampled | None = None) -> Tensor:
        """Compute pieces of one token each. Return their logits, in a buffer that the next step overwrites.

        With `last` the tokens are those sampled last, which need not have reached the host. Steps with other adapters
        than the live one are not replayed.
        """
        is_live = self.ignores_adapters or all(piece.sequence.adapter_number == LIVE for piece in pieces)
        if self._graphs is not None and is_live and len(pieces) <= self._graphs.max_batch:
            return self._graphs.run(pieces, table, last=last)
        rows = self._decode_rows(pieces, table, last)
        found = None if self._cpu_steps is None else self._cpu_steps.logits(rows.token_ids[0], rows.row)
        return self.logits(self.forward(rows)) if found is None else found

    def _decode_rows(self, pieces: Sequence[Piece], table: np.ndarray, last: LastSampled | None) -> StepRows:
        positions, slots, pages = places_of(pieces, table)
        starts = np.arange(len(pieces) + 1, dtype=np.int32)
        arrays: tuple[np.ndarray, ...] = (starts, (positions + 1).astype(np.int32), pages, slots)
        if self.on_gpu:
            arrays = (*arrays, self.shares(positions, pages))
        row = PagedRow(
            positions=put(positions, self.device).unsqueeze(0),
            index=put(np.arange(len(pieces)), self.device),
            layout=PagedLayout(*(put(array, self.device) for array in arrays)),
            is_decode=True,
            segments=() if self.ignores_adapters else segments_of(pieces),
        )
        token_ids = put(tokens_of(pieces, last), self.device)
        if last is not None:
            token_ids = last.token_ids.index_select(0, token_ids)
        return StepRows(token_ids.unsqueeze(0), row)

    def shares(self, positions: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """Return which neighbours in a decode step share a prefix of pages, for a GPU to read it once."""
        num_heads, num_kv_heads = self.facts.num_heads or 1, self.facts.num_kv_heads or 1
        return decode_shares(pages, positions + 1, num_heads=num_heads, num_kv_heads=num_kv_heads)

    @torch.inference_mode()
    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return the logits [R, V]: on a CPU float32, on a GPU in the precision of the weights.

        With `model.head_precision: float32` they are summed in float32 and never rounded to less.
        """
        weight = self.model.lm_head.weight
        if not self._has_wide_head:
            logits = rows_linear(hidden_RD, weight)
            return logits if self.on_gpu else logits.float()
        if self.on_gpu:
            return torch.mm(hidden_RD, weight.t(), out_dtype=torch.float32)
        return rows_linear(hidden_RD.float(), weight.float())

    @torch.inference_mode()
    def logprobs(self, hidden_RD: Tensor, targets: Sequence[int], *, temperature: float) -> list[float]:
        """Return the logprob of a target after each hidden state, computed as the trainer does."""
        wanted = torch.tensor(targets, device=self.device)
        weight, is_wide = self.model.lm_head.weight, self._has_wide_head
        found, _ = chunked_logprobs(hidden_RD, weight, wanted, temperature=temperature, fp32_logits=is_wide)
        values: list[float] = found.tolist()
        return values

    def score(self, job: ScoreJob, hidden_RD: Tensor, targets: Sequence[int]) -> None:
        """Add what a score wants to know of the next tokens, given the hidden states before them."""
        job.logprobs += self.logprobs(hidden_RD, targets, temperature=job.temperature)
        if job.wants_best:
            best = self.likeliest(hidden_RD)
            job.best_ids += best
            job.best_logprobs += self.logprobs(hidden_RD, best, temperature=job.temperature)
        if job.num_top:
            job.add_top(*self.top(hidden_RD, job.num_top))

    @torch.inference_mode()
    def top(self, hidden_RD: Tensor, k: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return the k likeliest tokens after each hidden state, and their logprobs."""
        logprobs, ids = chunked_top(hidden_RD, self.model.lm_head.weight, k, fp32_logits=self._has_wide_head)
        return ids.tolist(), logprobs.tolist()

    @torch.inference_mode()
    def likeliest(self, hidden_RD: Tensor) -> list[int]:
        """Return the likeliest token after each hidden state."""
        found: list[int] = []
        for part in hidden_RD.split(_LOGIT_ROWS):
            found += self.logits(part).argmax(-1).tolist()
        return found

    def forward(self, rows: StepRows) -> Tensor:
        """Return the hidden states that a step's row asks for."""
        found = None if self._cpu_steps is None else self._cpu_steps.hidden(rows.token_ids[0], rows.row)
        if found is not None:
            return found
        registry = self.model.row_registry
        key = registry.enter(rows.row)
        try:
            hidden: Tensor = self.model(rows.token_ids, key)
            return hidden
        finally:
            registry.clear()

    def _rows(self, pieces: Sequence[Piece], table: np.ndarray, index: Sequence[int]) -> StepRows:
        sizes = np.array([piece.size for piece in pieces], dtype=np.int64)
        starts = np.zeros(len(pieces) + 1, dtype=np.int32)
        np.cumsum(sizes, out=starts[1:])
        contexts = np.array([piece.reach for piece in pieces], dtype=np.int32)
        token_ids = [token for piece in pieces for token in piece.token_ids]
        firsts = np.array([piece.start for piece in pieces], dtype=np.int64)
        positions = np.arange(len(token_ids)) - np.repeat(starts[:-1] - firsts, sizes)
        pages = table[[piece.sequence.slot for piece in pieces]][:, : -(-int(contexts.max()) // PAGE)]
        owners = np.repeat(np.arange(len(pieces)), sizes)
        slots = pages[owners, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
        layout = PagedLayout(*(put(array, self.device) for array in (starts, contexts, pages, slots)))
        row = PagedRow(
            positions=put(positions, self.device).unsqueeze(0),
            index=put(np.asarray(index, dtype=np.int64), self.device),
            layout=layout,
            is_decode=len(token_ids) == len(pieces),
            extents=Extents.of(sizes.tolist(), contexts.tolist(), device=self.device) if self.on_gpu else None,
            segments=() if self.ignores_adapters else segments_of(pieces),
        )
        return StepRows(put(np.array(token_ids, dtype=np.int64), self.device).unsqueeze(0), row)


def _device(with_gpus: bool | None) -> torch.device:
    if with_gpus is None:
        with_gpus = torch.cuda.is_available()
    if not with_gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "a GPU is required, and torch sees none",
            path="generator.with_gpus",
            value=True,
            rule="a machine with a GPU and torch's CUDA build",
            repair="set generator.with_gpus=false, or run `forge doctor` to see what is missing",
        )
    return torch.device("cuda", torch.cuda.current_device())
