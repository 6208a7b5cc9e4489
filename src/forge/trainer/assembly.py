"""Put a model on its ranks: build it, cut it into stages, split it over tensor, expert and data parallel ranks.

The output layer computes logprobs a chunk at a time, or the whole loss with its gradient (`head_function`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import forge.models.titan_setup  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.config import TrainingConfig as TitanTraining
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_distributed
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.pipeline_parallel import pipeline_llm

from forge.config import DistributedConfig, ModelConfig, TrainingConfig
from forge.losses.candidates import chunked_candidates, chunked_top
from forge.losses.head import chunked_logprobs, chunked_nll
from forge.models.adapter_names import AdapterSpec
from forge.models.adapters import attach_adapters
from forge.models.attention import DocumentAttention
from forge.models.flash_attention import Situation, choose_kernel, load_kernel
from forge.models.gpu_layers import add_into
from forge.models.language_model import HeadFunction, LanguageModel, titan_config
from forge.models.rows import RowTask
from forge.trainer.layout import Layout

_BACKEND = "partial_dtensor"  # TorchTitan's newer default needs a newer torch


@dataclass(frozen=True, slots=True)
class Precision:
    """In what the weights are kept, computed with, and their gradients summed."""

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @classmethod
    def of(cls, name: str) -> Precision:
        wide, half, double = torch.float32, torch.bfloat16, torch.float64
        return {
            "float32": cls(wide, wide, wide),
            "bfloat16": cls(wide, half, wide),
            "float16": cls(wide, torch.float16, wide),
            "bfloat16_pure": cls(half, half, wide),
            "float64": cls(double, double, double),
        }[name]


@dataclass(slots=True)
class Assembled:
    """What one rank holds of a model: its parts (several for an interleaved pipeline), and how they are driven."""

    parts: list[LanguageModel]
    dims: ParallelDims
    schedule: Any = None
    has_first: bool = True
    has_last: bool = True

    @property
    def _is_alone(self) -> bool:
        return _is_alone(self.dims)

    def expect_more(self, is_more: bool) -> None:
        """Say before a backward pass whether another one of the same step follows it.

        On one data parallel rank gradients of rows are then added up where autograd leaves them, in the precision of
        reductions, and the gathered weights stay. Otherwise FSDP would copy every gradient through a reduction and
        every weight through a gathering for each row, though there is no other rank. Several
        ranks do so after each row, because whole gradients would take the memory that sharding saves.
        """
        if self._is_alone:
            for module in self._sharded():
                module.set_requires_gradient_sync(not is_more, recurse=False)
                module.set_reshard_after_backward(not is_more, recurse=False)

    def give_up(self) -> None:
        """Restore the state before a pass that failed: weights as they are kept, no gradients, and FSDP at rest.

        An error leaves FSDP in the middle of its pass. Layers would keep their gathered weights, which the next
        reader of weights would take for the real ones; and after a failed backward pass later ones would end without
        the sums of their gradients, so that nothing would be learned any more, without a word.
        """
        self.expect_more(False)
        for part in self.parts:
            if isinstance(part, FSDPModule) and part._get_fsdp_state()._is_root:  # it has computed before
                part.reset_iter_state()
        for module in self._sharded():
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for each in group.fsdp_params:
                    each.unsharded_accumulated_grad = None
                    if hasattr(each, "_unsharded_param"):
                        each._unsharded_param.grad = None

    def _sharded(self) -> list[Any]:
        return [module for part in self.parts for module in part.modules() if isinstance(module, FSDPModule)]


@dataclass(frozen=True, slots=True)
class _TitanView:
    """What TorchTitan's `update_from_config` reads."""

    parallelism: ParallelismConfig


def assemble(
    model: ModelConfig,
    *,
    layout: Layout,
    training: TrainingConfig,
    distributed: DistributedConfig,
    device: torch.device,
    loss_fn: Callable[..., Any],
    adapter: AdapterSpec | None = None,
) -> Assembled:
    """Build this rank's part of the model, empty: its weights are to be loaded or initialised next.

    `loss_fn(output, key)` is called by a pipeline for each row that leaves its last stage. With an `adapter`, weights
    are kept in what they are computed with, since they are frozen, and the adapter in what is trained.
    """
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=layout.replicate,
        data_parallel_shard_degree=layout.shard,
        tensor_parallel_degree=layout.tensor,
        pipeline_parallel_degree=layout.pipeline,
        expert_parallel_degree=layout.expert,
        pipeline_parallel_schedule=distributed.pipeline_schedule,
        pipeline_parallel_microbatch_size=1,
        enable_sequence_parallel=distributed.sequence_parallel and layout.tensor > 1,
        spmd_backend=_BACKEND,
    )
    dims = ParallelDims.from_config(parallelism, layout.num_ranks)
    dims.build_mesh()
    titan_distributed.set_spmd_backend(_BACKEND)
    precision = Precision.of(distributed.precision)
    config = titan_config(model, max_seq_len=max(training.max_seq_len, training.microbatch_tokens or 0))
    config.update_from_config(config=_TitanView(parallelism))
    before = torch.get_default_dtype()
    torch.set_default_dtype(precision.master if adapter is None else precision.compute)
    try:
        with torch.device("meta"):
            whole = config.build()
    finally:
        torch.set_default_dtype(before)
    if adapter is not None:
        attach_adapters(whole, model, adapter, dtype=precision.master)
        if model.head == "scalar":
            whole.lm_head.to(precision.master)

    converts = precision.master != precision.compute and adapter is None  # adapters are converted where they are used

    def split(part: LanguageModel, **_: Any) -> LanguageModel:
        shards = _needs_fsdp(dims, converts=converts)
        return _split(part, dims, precision=precision, training=training, on_gpu=device.type == "cuda", shards=shards)

    if layout.pipeline == 1:
        assembled = Assembled([split(whole)], dims)
    else:
        schedule, parts, first, last = pipeline_llm(
            whole,
            parallel_dims=dims,
            training=TitanTraining(local_batch_size=layout.pipeline_microbatches),
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=None,
            dump_folder="",
            device=device,
            model_config=config,
            parallelize_fn=split,
            loss_fn=loss_fn,
        )
        assembled = Assembled(parts, dims, schedule, first, last)
    for part in assembled.parts:
        part.to_empty(device=device)
        with torch.no_grad():
            part.init_states(buffer_device=device)
    return assembled


def _split(
    part: LanguageModel,
    dims: ParallelDims,
    *,
    precision: Precision,
    training: TrainingConfig,
    on_gpu: bool,
    shards: bool,
) -> LanguageModel:
    if dims.tp_enabled or dims.ep_enabled:
        part.parallelize(dims)
    checkpointing = {"none": None, "selective": SelectiveAC, "full": FullAC}[training.activation_checkpointing]
    if checkpointing is not None:
        checkpointing.Config().build().apply(part)
    if training.compile:
        _compile_layers(part)
    if shards:
        _shard(part, dims=dims, precision=precision)
        _settle_sums(part, on_gpu=on_gpu, is_alone=_is_alone(dims))
    return part


def _compile_layers(part: LanguageModel) -> None:
    """Compile each layer for rows of any length. Attention is not compiled."""
    for layer in part.layers.values():
        layer.compile(dynamic=True)


def _is_alone(dims: ParallelDims) -> bool:
    """Whether no other rank has a part in the sums of this one's gradients over data."""
    return bool(dims.dp_replicate * dims.dp_shard == 1 and dims.ep == 1)


def _needs_fsdp(dims: ParallelDims, *, converts: bool) -> bool:
    """Return whether there is anything to gather or to convert."""
    return bool(dims.dp_replicate * dims.dp_shard > 1 or converts or dims.ep > 1)


def _shard(part: LanguageModel, *, dims: ParallelDims, precision: Precision) -> None:
    copies = ["dp_replicate"] if dims.dp_replicate_enabled else []
    apply_fsdp_to_decoder(
        part,
        dims.get_mesh([*copies, "fsdp"]),
        param_dtype=precision.compute,
        reduce_dtype=precision.reduce,
        pp_enabled=dims.pp_enabled,
        # One rank has nothing to save by dropping what it gathered, and would convert it again in the backward pass.
        reshard_after_forward_policy="never" if dims.dp_shard == 1 else "default",
        ep_degree=dims.ep,
        edp_mesh=dims.get_optional_mesh([*copies, "efsdp"]) if dims.ep_enabled else None,
    )


def _settle_sums(part: LanguageModel, *, on_gpu: bool, is_alone: bool) -> None:
    """Undo TorchTitan's division of gradients by one: a needless pass on one rank, and too much for gloo."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            if is_alone:
                module.set_gradient_divide_factor(None)
                _add_quickly(module)
            elif not on_gpu:
                module.set_force_sum_reduction_for_comms(True)


def _add_quickly(module: FSDPModule) -> None:
    """Add up the gradients of rows by a kernel that is faster than FSDP's own addition."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for each in group.fsdp_params:
            each.accumulate_unsharded_grad_if_needed = partial(_accumulate, each)


def _accumulate(parameter: Any) -> None:
    """As `FSDPParam.accumulate_unsharded_grad_if_needed`."""
    sums, gradient = parameter.unsharded_accumulated_grad, parameter.unsharded_param.grad
    if sums is not None and gradient is not None:
        add_into(sums, gradient)
        parameter.unsharded_param.grad = None


def head_function(training: TrainingConfig, *, fp32_logits: bool = False) -> HeadFunction:
    """Return a head that computes logits in chunks; `fp32_logits` is `model.head_precision: float32`.

    See `chunked_logprobs` for what the settings do.
    """
    chunk_tokens, cache_bytes = training.head_chunk_tokens, int(training.head_cache_gb * 2**30)

    def compute(hidden_ND: Tensor, weight_VD: Tensor, row: RowTask, group: Any) -> Any:
        start = 0 if group is None else dist.get_rank(group) * weight_VD.shape[0]
        if row.num_top or row.candidates is not None:
            common = {"chunk_tokens": chunk_tokens, "fp32_logits": fp32_logits, "group": group}
            return _about_candidates(hidden_ND, weight_VD, row, start=start, **common)
        if row.weights is not None:
            return chunked_nll(
                hidden_ND,
                weight_VD,
                row.targets,
                row.weights,
                chunk_tokens=chunk_tokens,
                fp32_logits=fp32_logits,
                group=group,
                vocab_start=start,
            )
        options: dict[str, Any] = {
            "chunk_tokens": chunk_tokens,
            "entropy": row.entropy,
            "fp32_logits": fp32_logits,
            "group": group,
            "vocab_start": start,
            "cache_bytes": cache_bytes,
        }
        if isinstance(row.temperature, Tensor):
            logprobs, entropy = _at_temperatures(hidden_ND, weight_VD, row.targets, row.temperature, **options)
        else:
            logprobs, entropy = chunked_logprobs(
                hidden_ND, weight_VD, row.targets, temperature=row.temperature, **options
            )
        return _as_row(logprobs, entropy, row) if row.as_row else (logprobs, entropy)

    return compute


def _about_candidates(
    hidden_ND: Tensor, weight_VD: Tensor, row: RowTask, *, start: int, **options: Any
) -> tuple[Tensor, ...]:
    """Return the logprobs of the targets [N] and of the candidates [N, K], from one pass over the vocabulary; or the
    logprobs and ids of the likeliest tokens side by side [N, 2 K], where these are asked for."""
    if row.candidates is None:
        logprobs, ids = chunked_top(hidden_ND, weight_VD, row.num_top, **options)
        return (torch.cat([logprobs, ids.to(logprobs.dtype)], dim=-1),)
    every = torch.cat([row.targets[:, None], row.candidates], dim=1)
    logprobs = chunked_candidates(hidden_ND, weight_VD, every, vocab_start=start, **options)
    return logprobs[:, 0], logprobs[:, 1:]


def _at_temperatures(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature_N: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return what `chunked_logprobs` does of targets with several temperatures, for one temperature after the other."""
    found: list[tuple[Tensor, Tensor | None]] = []
    places: list[Tensor] = []
    for temperature in torch.unique(temperature_N).tolist():
        place = torch.nonzero(temperature_N == temperature)[:, 0]
        hidden, targets = hidden_ND.index_select(0, place), targets_N.index_select(0, place)
        found.append(chunked_logprobs(hidden, weight_VD, targets, temperature=temperature, **options))
        places.append(place)
    order = torch.argsort(torch.cat(places))
    logprobs = torch.cat([each for each, _ in found]).index_select(0, order)
    entropies = [each for _, each in found if each is not None]
    return logprobs, torch.cat(entropies).index_select(0, order) if entropies else None


def _as_row(logprobs: Tensor, entropy: Tensor | None, row: RowTask) -> Tensor:
    both = torch.stack([logprobs, torch.zeros_like(logprobs) if entropy is None else entropy], dim=-1)
    return both.new_zeros(row.positions.shape[1], 2).index_copy(0, row.index, both).unsqueeze(0)


def use_attention(parts: Iterable[nn.Module], training: TrainingConfig, device: torch.device) -> str:
    """Choose the attention kernel, let the model's layers use it, and return its name."""
    situation = Situation.of(device, saves_selectively=training.activation_checkpointing == "selective")
    name = choose_kernel(training.attention, situation)
    kernel = load_kernel(name)
    for part in parts:
        for module in part.modules():
            if isinstance(module, DocumentAttention):
                module.kernel = kernel
    return name


SMALLEST_BYTES = 2**20
"""Smaller tensors stay where they are: moving them costs more than they take."""

_Kept: TypeAlias = Any
"""A tensor that stayed, or the device that it came from with its copy."""


def keep_activations_on_host() -> AbstractContextManager[Any]:
    """Keep large tensors that autograd saves in host memory, inside the block; weights stay where they are."""
    return cast(AbstractContextManager[Any], torch.autograd.graph.saved_tensors_hooks(_to_host, _back))


def _to_host(tensor: Tensor) -> _Kept:
    is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
    if is_weight or tensor.nbytes < SMALLEST_BYTES or type(tensor) is not Tensor:
        return tensor
    kept = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return tensor.device, kept.copy_(tensor, non_blocking=True)


def _back(kept: _Kept) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, tensor = kept
    return tensor.to(device, non_blocking=True) if device.type == "cuda" else tensor
