"""What the backward pass needs of a layer, in bytes for one row of tokens.

Each term is a tensor that autograd keeps, found by reading the model's code and checked against what it keeps when it
runs (`tests/unit/memory/test_memory_activations.py` counts the saved tensors of the real model to the byte). With D
the width of the model, F that inside the feed-forward layer, Q and K those of all query and of all key heads, H of one
head, s the bytes of a number, a token of a layer keeps without checkpointing, on a GPU in half precision:

    s (4 D + 2 (Q + K) + K + Q + 4 F) + 8 H + 4 (2 + heads + kv_heads) + 4 heads
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forge.models.sizes import Sizes

AttentionPath = Literal["kernel", "documents", "rows"]
"""How attention is computed: by one kernel (a GPU in half precision), document by document (a GPU in float32, a CPU in
half precision), or by our kernel for rows (a CPU in float32)."""

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class Setting:
    """How layers compute.

    Attributes:
        item: bytes of a number.
        attention: the path.
        on_gpu: whether norms are one kernel there.
        tensor: ranks that split heads and widths; `splits_rows` whether they split the tokens between layers too.
        several_documents: whether a row has several documents, which the path `documents` puts together again.
        is_compiled: whether layers are compiled, which computes the gate's function again in the backward pass.
    """

    item: int
    attention: AttentionPath
    on_gpu: bool
    tensor: int = 1
    splits_rows: bool = False
    several_documents: bool = True
    is_compiled: bool = False

    @classmethod
    def of(
        cls, compute: str, *, on_gpu: bool, tensor: int = 1, splits_rows: bool = False, is_compiled: bool = False
    ) -> Setting:
        """The setting of a precision on a device."""
        item = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}[compute]
        if on_gpu:
            path: AttentionPath = "kernel" if item == 2 else "documents"
        else:
            path = "rows" if compute == "float32" else "documents"
        return cls(item, path, on_gpu, tensor, splits_rows and tensor > 1, is_compiled=is_compiled)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of tokens: `tokens` are computed, `attended` take part in attention; more where beginnings are shared."""

    tokens: int
    attended: int

    @property
    def is_shared(self) -> bool:
        return self.attended > self.tokens


def kept_bytes(sizes: Sizes, setting: Setting, row: Row, checkpointing: Checkpointing = "none") -> int:
    """What one layer keeps for the backward pass."""
    if checkpointing == "full":
        return setting.item * _between(sizes, setting) * row.tokens
    if checkpointing == "selective":
        return _kept_selectively(sizes, setting, row)
    per_token = _norm_bytes(sizes, setting) + _feed_forward_bytes(sizes, setting) + 8 * sizes.head_dim
    return per_token * row.tokens + _attention_bytes(sizes, setting, row)


def recomputed_bytes(sizes: Sizes, setting: Setting, row: Row, checkpointing: Checkpointing) -> int:
    """What comes on top of what all layers keep while one layer is computed again."""
    if checkpointing == "none":
        return 0
    whole = kept_bytes(sizes, setting, row)
    if checkpointing == "full":
        return whole
    return max(0, whole - _still_there(sizes, setting, row))


def backward_bytes(sizes: Sizes, setting: Setting, row: Row) -> int:
    """The gradients that are alive at once inside one layer, at the larger of two places.

    In the feed-forward layer: of its middle, of one of the middle's factors, and of the layer's output. In the rotary
    embedding, which works in float32: four copies of the queries; the feed-forward layer's tensors are gone by then.
    """
    tensor, item = setting.tensor, setting.item
    inner = sizes.num_chosen * sizes.inner // tensor
    in_middle = item * (2 * inner + 2 * _between(sizes, setting))
    in_rotary = 16 * sizes.queries // tensor + 2 * item * _between(sizes, setting)
    later = in_rotary * row.tokens - _feed_forward_bytes(sizes, setting) * row.tokens
    return max(in_middle * row.tokens, later)


def forward_bytes(sizes: Sizes, setting: Setting, num_tokens: int) -> int:
    """The tensors that are alive at once in a forward pass without gradients."""
    inner = sizes.num_chosen * sizes.inner // setting.tensor
    in_middle = 3 * inner + 3 * sizes.hidden
    in_attention = 2 * sizes.queries // setting.tensor + 4 * sizes.keys // setting.tensor + 3 * sizes.hidden
    return setting.item * max(in_middle, in_attention) * num_tokens


def _between(sizes: Sizes, setting: Setting) -> int:
    """The width of the residual stream on this rank."""
    return sizes.hidden // setting.tensor if setting.splits_rows else sizes.hidden


def _norm_bytes(sizes: Sizes, setting: Setting) -> int:
    """Inputs and outputs of the two norms of a layer, and inputs of the norms of heads, for one token.

    On a GPU a norm keeps its input and one factor for each row. On a CPU it is several operations: it also keeps the
    input divided by its root, and where numbers are narrow, both in float32.
    """
    tensor = setting.tensor
    heads = (sizes.queries + sizes.keys) // tensor if sizes.has_head_norms else 0
    num_head_rows = (sizes.num_heads + sizes.num_kv_heads) // tensor if sizes.has_head_norms else 0
    on_cpu = 2 * setting.item if setting.item >= 4 else 8
    inputs = setting.item if setting.on_gpu else on_cpu
    between = _between(sizes, setting)
    # The output of the norm goes into products that need all tokens: tensor parallel ranks gather it.
    outputs = 2 * sizes.hidden * setting.item
    return inputs * (2 * between + heads) + outputs + 4 * (2 + num_head_rows)


def _attention_bytes(sizes: Sizes, setting: Setting, row: Row) -> int:
    item, tensor = setting.item, setting.tensor
    queries, keys, heads = sizes.queries // tensor, sizes.keys // tensor, sizes.num_heads // tensor
    if setting.attention == "documents":  # keys and values are repeated for each query head
        attended = item * 4 * queries + 4 * heads
        output = item * queries if setting.several_documents or row.is_shared else 0
    elif setting.attention == "kernel":  # only keys and values are repeated
        attended, output = item * 2 * keys, item * 2 * queries + 4 * heads
    else:
        attended = item * (2 * queries + 2 * keys) + 4 * heads
        output = item * queries if row.is_shared else 0
    return attended * row.attended + output * row.tokens


def _feed_forward_bytes(sizes: Sizes, setting: Setting) -> int:
    """For one token: the middle's two factors, the gate after its function, and the product of both.

    Our kernel for rows keeps no gate after its function, and neither do compiled dense layers. A mixture keeps this
    for each chosen expert, with the tokens as they were sent there and what came back, and the choice itself.
    """
    keeps_gate = setting.attention != "rows" and not (setting.is_compiled and not sizes.num_experts)
    item, num_kept = setting.item, 4 if keeps_gate else 3
    if not sizes.num_experts:
        return num_kept * item * sizes.inner // setting.tensor
    chosen = sizes.num_chosen
    numbers = num_kept * chosen * sizes.inner // setting.tensor + chosen * sizes.hidden
    choice = item * (sizes.num_experts + 2 * chosen + 1) + 24 * chosen
    return item * numbers + 4 * chosen * sizes.hidden + choice


def _kept_selectively(sizes: Sizes, setting: Setting, row: Row) -> int:
    """The layer's input, what attention gives, and every second product: queries, values, the gate, the output."""
    item, tensor = setting.item, setting.tensor
    queries, keys = sizes.queries // tensor, sizes.keys // tensor
    inner = sizes.num_chosen * sizes.inner // tensor
    products = queries + keys + inner + sizes.num_chosen * sizes.hidden
    attention = (item * queries + 4 * sizes.num_heads // tensor) * _num_asking(setting, row)
    return item * (_between(sizes, setting) + products) * row.tokens + attention


def _still_there(sizes: Sizes, setting: Setting, row: Row) -> int:
    """Of what a layer keeps, the tensors that selective checkpointing kept all along."""
    item, tensor = setting.item, setting.tensor
    inner = sizes.num_chosen * sizes.inner // tensor
    per_token = (sizes.queries + sizes.keys) // tensor + inner + _between(sizes, setting)
    return item * per_token * row.tokens + item * sizes.queries // tensor * _num_asking(setting, row)


def _num_asking(setting: Setting, row: Row) -> int:
    """The tokens that have a query: one kernel repeats keys and values of shared beginnings, and nothing else."""
    return row.tokens if setting.attention == "kernel" else row.attended
