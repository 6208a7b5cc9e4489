"""What the GPU's attention refuses before it launches anything; no GPU is needed for that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from forge.errors import ModelError
from forge.models.gpu_attention import Extents, decode_attend, write_kv

CACHE = torch.zeros(3, 2, 16, 8)
ROWS = torch.zeros(4, 2, 8)
LENS = torch.zeros(4, dtype=torch.int32)
TABLE = torch.zeros(4, 3, dtype=torch.int32)


def decode(
    q: torch.Tensor, k: torch.Tensor = CACHE, v: torch.Tensor = CACHE, table: torch.Tensor = TABLE
) -> torch.Tensor:
    return decode_attend(q, k, v, context_lens_S=LENS, table_SP=table, scale=1.0)


@pytest.mark.parametrize(
    ("path", "call"),
    [
        ("v_cache", lambda: decode(ROWS, v=CACHE[:2])),
        ("v_cache", lambda: decode(ROWS, v=CACHE.half())),
        ("v_cache", lambda: decode(ROWS, v=CACHE.transpose(1, 2).contiguous().transpose(1, 2))),
        ("k_cache", lambda: decode(ROWS, CACHE[:, :, :8], CACHE[:, :, :8])),
        ("k_cache", lambda: decode(ROWS, CACHE.flatten(0, 1), CACHE.flatten(0, 1))),
        ("k_cache", lambda: decode(ROWS, CACHE.mT.contiguous().mT, CACHE.mT.contiguous().mT)),
        ("q_SHD", lambda: decode(ROWS[0])),
        ("q_SHD", lambda: decode(torch.zeros(4, 2, 4))),
        ("q_SHD", lambda: decode(torch.zeros(4, 8, 2).mT)),
        ("q_SHD", lambda: decode(torch.zeros(4, 3, 8))),
        ("q_SHD", lambda: decode(ROWS.half())),
        ("table_SP", lambda: decode(ROWS, table=TABLE.mT.contiguous().mT)),
        ("k_THD", lambda: write_kv(torch.zeros(4, 4, 8), ROWS, LENS.long(), CACHE, CACHE)),
        ("v_THD", lambda: write_kv(ROWS, ROWS.half(), LENS.long(), CACHE, CACHE)),
        ("v_THD", lambda: write_kv(ROWS, ROWS[:3], LENS.long(), CACHE, CACHE)),
        ("slots_T", lambda: write_kv(ROWS, ROWS, LENS[:3].long(), CACHE, CACHE)),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(path: str, call: Callable[[], object]) -> None:
    with pytest.raises(ModelError) as caught:
        call()
    assert caught.value.path == path
    assert "strides" in str(caught.value.value)
    assert caught.value.rule
    assert caught.value.repair


def test_extents_are_what_the_lengths_say() -> None:
    extents = Extents.of([3, 1], [7, 20], device="cpu")
    assert (extents.max_context, extents.num_keys) == (20, 27)
    assert extents.context_starts.dtype == torch.int32
    assert extents.context_starts.tolist() == [0, 7, 27]
    nothing = Extents.of([], [], device="cpu")
    assert (nothing.max_context, nothing.num_keys) == (0, 0)
