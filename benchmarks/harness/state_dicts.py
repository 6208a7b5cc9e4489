"""State dicts of a given size, shaped like a transformer's, in one warm block of memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]
ALIGN = 256


def transformer(num_elements: int, *, num_layers: int = 27) -> Shapes:
    """About that many elements in 11 tensors a layer and 3 others: 300 with 27 layers."""
    width = max(32, int(math.sqrt(0.9 * num_elements / (12 * num_layers))) // 32 * 32)
    shapes: Shapes = {}
    for layer in range(num_layers):
        at = f"layers.{layer}"
        shapes |= {f"{at}.attention.{name}": (rows, width) for name, rows in _attention(width)}
        shapes |= {f"{at}.mlp.{name}": (3 * width, width) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down"] = (width, 3 * width)
        shapes |= {f"{at}.{name}": (width,) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")}
    shapes["norm"] = (width,)
    left = num_elements - num_elements_of(shapes)
    rows = max(1, left // (2 * width))
    shapes["embed"], shapes["head"] = (rows, width), (rows, width)
    return shapes


def _attention(width: int) -> tuple[tuple[str, int], ...]:
    return ("q", width), ("k", width // 2), ("v", width // 2), ("o", width)


def qwen3(
    *,
    num_layers: int = 28,
    width: int = 2048,
    inner: int = 6144,
    num_heads: int = 16,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    vocab: int = 151936,
) -> Shapes:
    """The state dict of a Qwen3 with tied embeddings; by default that of Qwen3-1.7B, 310 tensors."""
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    for layer in range(num_layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (num_heads * head_dim, width),
            f"{at}.self_attn.k_proj.weight": (num_kv_heads * head_dim, width),
            f"{at}.self_attn.v_proj.weight": (num_kv_heads * head_dim, width),
            f"{at}.self_attn.o_proj.weight": (width, num_heads * head_dim),
            f"{at}.self_attn.q_norm.weight": (head_dim,),
            f"{at}.self_attn.k_norm.weight": (head_dim,),
            f"{at}.mlp.gate_proj.weight": (inner, width),
            f"{at}.mlp.up_proj.weight": (inner, width),
            f"{at}.mlp.down_proj.weight": (width, inner),
            f"{at}.input_layernorm.weight": (width,),
            f"{at}.post_attention_layernorm.weight": (width,),
        }
    return shapes


def small(num_tensors: int, *, num_elements: int = 256) -> Shapes:
    return {f"small.{number}": (num_elements,) for number in range(num_tensors)}


def num_elements_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


class Block:
    """One piece of memory whose pages are all there, and tensors that lie in it one after the other."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        *,
        fill: float = 1.0,
        device: str = "cpu",
    ) -> None:
        size = dtype.itemsize
        step = ALIGN // size
        counts = {name: -(-math.prod(shape) // step) * step for name, shape in shapes.items()}
        self.flat = torch.full((sum(counts.values()),), fill, dtype=dtype, device=device)
        self.tensors: dict[str, Tensor] = {}
        at = 0
        for name, shape in shapes.items():
            self.tensors[name] = self.flat[at : at + math.prod(shape)].view(shape)
            at += counts[name]
        self.num_bytes = num_elements_of(shapes) * size

    def copy_within(self) -> None:
        """A plain copy of as many bytes as the block has, without other memory: each half onto the other."""
        half = self.flat.numel() // 2
        first, second = self.flat[:half], self.flat[half : 2 * half]
        first.copy_(second)
        second.copy_(first)
