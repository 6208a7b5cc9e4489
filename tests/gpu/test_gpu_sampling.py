"""Sampling on a GPU in one kernel, against a running sum in float64.

Where there is no GPU but Triton is installed, `TRITON_INTERPRET=1` runs these in Triton's interpreter, on the CPU.
"""

from __future__ import annotations

import importlib.util
import math
import os

import pytest
import torch
from torch import Tensor

from forge.config import Sampling
from forge.generator.native import gpu_sampling
from forge.generator.native.sampler import Sampler, SampleRow

ON_GPU = torch.cuda.is_available()
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if ON_GPU and not IN_INTERPRETER else "cpu"
NEAR = 1e-6
"""How far a boundary between two tokens may be off, as a part of all probability."""

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not (ON_GPU or IN_INTERPRETER), reason="no NVIDIA GPU is visible here"),
]


def uniforms_of(num_rows: int) -> Tensor:
    found = torch.rand(num_rows, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found[0], found[1] = 0.0, 1 - 2**-53
    return found.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("vocab", [1, 5, 2047, 2048, 2049, 5000, 151_936])
def test_a_token_is_where_the_running_sum_passes_the_uniform_number(
    vocab: int, scaled: bool, dtype: torch.dtype
) -> None:
    logits = (3 * torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))).to(DEVICE, dtype)
    scale = torch.tensor([[1.0], [2.0], [0.5], [1.0], [10.0], [0.1]], device=DEVICE) if scaled else None
    uniforms = uniforms_of(6)
    token_ids, logprobs = gpu_sampling.sample(logits, uniforms, scale_S1=scale)
    wanted = (logits.double() * (1.0 if scale is None else scale.double())).log_softmax(-1)
    places = token_ids[:, None]
    torch.testing.assert_close(logprobs.double(), wanted.gather(1, places).squeeze(1), rtol=1e-5, atol=2e-5)
    upper = wanted.exp().cumsum(-1).gather(1, places).squeeze(1)
    lower = upper - wanted.exp().gather(1, places).squeeze(1)
    assert bool((lower - NEAR <= uniforms).all())
    assert bool((uniforms <= upper + NEAR).all())


def test_a_token_without_probability_is_never_sampled() -> None:
    logits = torch.full((4, 5000), -math.inf, device=DEVICE)
    logits[:, 2500] = 1.0
    token_ids, logprobs = gpu_sampling.sample(logits, uniforms_of(4), scale_S1=None)
    assert token_ids.tolist() == [2500] * 4
    assert logprobs.tolist() == [0.0] * 4


def test_logits_that_are_not_finite_give_some_token_and_nan() -> None:
    logits = torch.zeros(3, 3000, device=DEVICE)
    logits[0, 5], logits[1, 7], logits[2] = math.nan, math.inf, -math.inf
    token_ids, logprobs = gpu_sampling.sample(logits, uniforms_of(3), scale_S1=None)
    assert bool(((token_ids >= 0) & (token_ids < 3000)).all())
    assert bool(logprobs.isnan().all())


def test_equal_logits_of_the_largest_vocabulary_do_not_overflow() -> None:
    vocab = 1 << 20
    token_ids, logprobs = gpu_sampling.sample(torch.zeros(3, vocab, device=DEVICE), uniforms_of(3), scale_S1=None)
    assert token_ids[:2].tolist() == [0, vocab - 1]
    assert logprobs.tolist() == pytest.approx([-math.log(vocab)] * 3)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    logits = torch.randn(9, 5000, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    uniforms = uniforms_of(9)
    together = gpu_sampling.sample(logits, uniforms, scale_S1=None)
    for row in (0, 4, 8):
        alone = gpu_sampling.sample(logits[row : row + 1], uniforms[row : row + 1], scale_S1=None)
        assert all(torch.equal(one, all_[row : row + 1]) for one, all_ in zip(alone, together, strict=True))


@pytest.mark.skipif(DEVICE != "cuda", reason="only a real GPU has this")
def test_the_sampler_agrees_with_its_passes_over_the_logits() -> None:
    vocab = 151_936
    logits = (2 * torch.randn(64, vocab, generator=torch.Generator().manual_seed(5))).to(DEVICE, torch.bfloat16)

    def rows(**more: object) -> list[SampleRow]:
        chosen = Sampling.model_validate({"temperature": 0.7, **more})
        return [SampleRow(chosen, seed=seed, prompt_ids=(1, 2), token_ids=[3]) for seed in range(64)]

    plain = Sampler(vocab, DEVICE).sample(logits, rows()).fetch()
    shaped = Sampler(vocab, DEVICE).sample(logits, rows(min_p=1e-30)).fetch()  # rules nothing out, but is not plain
    num_same = sum(one == other for one, other in zip(plain[0], shaped[0], strict=True))
    assert num_same >= 62  # a uniform number may lie within rounding of a boundary
    assert plain[2] == pytest.approx(shaped[2], abs=1e-4) or num_same < 64
