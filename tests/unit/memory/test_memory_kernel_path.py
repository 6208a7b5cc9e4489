"""What layers keep on a GPU in half precision, traced without one: the real model on tensors that have no data.

Two modules are exchanged for what CUDA would run. Attention is torch's kernel for packed rows, which tells its result's
shapes without running; the norm keeps what CUDA's does: its input, its weight, and one factor for each row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch

import forge.models.titan_setup  # noqa: F401

# isort: split
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.module import Module

from forge.config import ForgeConfig, ModelConfig, load
from forge.memory.activations import Row, Setting, backward_bytes, kept_bytes, recomputed_bytes
from forge.models.architecture import complete
from forge.models.language_model import titan_config
from forge.models.rows import Documents, RowRegistry, RowTask
from forge.models.sizes import Sizes
from memory_tracking import LiveBytes

TOKENS, LAYERS = 2048, 3


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty((*x.shape[:-1], 1)))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class KernelNorm(RMSNorm):
    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return _Normed.apply(x, self.weight)


class KernelAttention(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.row_registry = RowRegistry()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Tensor, scale: float, **_: Any) -> Tensor:
        documents = self.row_registry.find(attention_masks).documents
        ends, longest = documents.offsets, documents.longest
        packed = (each[0] for each in (q, k, v))
        out = varlen_attn(
            *packed, ends, ends, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=q.shape[2] != k.shape[2]
        )
        return out.unsqueeze(0)


def norm(config: RMSNorm.Config) -> KernelNorm.Config:
    return KernelNorm.Config(**{each.name: getattr(config, each.name) for each in fields(config) if each.init})


def as_on_a_gpu(model: ModelConfig) -> Any:
    config = titan_config(model, max_seq_len=TOKENS)
    for layer in config.layers:
        layer.attention.inner_attention = KernelAttention.Config()
        layer.attention_norm, layer.ffn_norm = norm(layer.attention_norm), norm(layer.ffn_norm)
        if layer.attention.qk_norm is not None:
            layer.attention.qk_norm = norm(layer.attention.qk_norm)
    config.norm = norm(config.norm)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return config.build()
    finally:
        torch.set_default_dtype(before)


class _Key(RowRegistry):
    """Keys of rows are read from a tensor, and here tensors have no data: there is one row."""

    def __init__(self, task: RowTask) -> None:
        super().__init__()
        self.task = task

    def find(self, key: Tensor) -> RowTask:
        return self.task


def traced(model: ModelConfig, checkpointing: str) -> tuple[int, int]:
    """Bytes that the layers keep after the forward pass, and the most that is alive beyond them in the backward one."""
    built = as_on_a_gpu(model)
    policy = {"none": None, "selective": SelectiveAC, "full": FullAC}[checkpointing]
    if policy is not None:
        policy.Config().build().apply(built)
    counter = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True):
        built.to_empty(device="cpu")
        places = torch.arange(TOKENS)
        halves = Documents((TOKENS // 2, TOKENS // 2), 0, torch.zeros(3, dtype=torch.int32))
        task = RowTask(halves, positions=places[None], index=places, targets=places)
        built.use(_Key(task), lambda hidden, weight, row, group: hidden)
        tokens, key = torch.zeros(1, TOKENS, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
        for parameter in built.parameters():
            parameter.grad = torch.zeros_like(parameter)  # of the row before
        with counter:
            gradients = (parameter.grad for parameter in built.parameters())
            for tensor in (*built.parameters(), *built.buffers(), *gradients):
                counter.count(tensor)
            held = counter.live
            hidden = built(tokens, key)
            kept = counter.live - held
            counter.peak = 0
            hidden.sum().backward()
            return kept, counter.peak - held - kept


def preset(name: str) -> ModelConfig:
    model = complete(load(ForgeConfig, overrides=[f"model.preset={name}"]).model)
    return model.model_copy(update={"num_layers": LAYERS, "vocab_size": 256})


@pytest.mark.parametrize("name", ["qwen3_0_6b", "qwen3_1_7b", "llama3_1_8b"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_the_real_layers_keep_what_the_formula_says(name: str, checkpointing: Any) -> None:
    model = preset(name)
    sizes, setting, row = Sizes.of(model), Setting.of("bfloat16", on_gpu=True), Row(TOKENS, TOKENS)
    kept, beyond = traced(model, checkpointing)
    ends = 2 * 2 * sizes.hidden * TOKENS  # the last layer's output, and what the head was given
    assert kept == pytest.approx(LAYERS * kept_bytes(sizes, setting, row, checkpointing) + ends, rel=0.01)
    predicted = recomputed_bytes(sizes, setting, row, checkpointing) + backward_bytes(sizes, setting, row)
    assert abs(beyond - predicted) < 0.08 * (kept + predicted + 2 * LAYERS * sizes.layer)
