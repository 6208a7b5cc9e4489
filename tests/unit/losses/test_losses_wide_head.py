"""The output layer with logits in float32 over bfloat16 inputs: `model.head_precision: float32`."""

from __future__ import annotations

import pytest
import torch

from forge.generator.native.sampler import _at, _logsumexp
from forge.losses import chunked_logprobs, chunked_nll
from forge.models.layers import rows_linear

WIDTH, VOCAB, TOKENS = 64, 500, 50


def inputs(offset: float = 25.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits around `offset`, as a model that was trained has them: bfloat16 has steps of 0.125 there."""
    maker = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=maker) + 1.0
    weight = 0.1 * torch.randn(VOCAB, WIDTH, generator=maker) + offset / WIDTH
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=maker)
    return hidden.bfloat16(), weight.bfloat16(), targets


def exact(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def test_logits_are_not_rounded_to_the_models_precision() -> None:
    hidden, weight, targets = inputs()
    right = exact(hidden, weight, targets)
    wide, _ = chunked_logprobs(hidden, weight, targets, fp32_logits=True)
    narrow, _ = chunked_logprobs(hidden, weight, targets)
    assert (wide - right).abs().max() < 1e-4
    assert (narrow - right).abs().mean() > 0.01


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("num_rows", [1, 3, TOKENS])
def test_a_token_has_the_bits_that_a_generator_gives_it(num_rows: int, temperature: float) -> None:
    """A generator makes logits of a few rows, and divides later; a trainer makes chunks of many."""
    hidden, weight, targets = inputs()
    ours, _ = chunked_logprobs(hidden, weight, targets, temperature=temperature, chunk_tokens=7, fp32_logits=True)
    with torch.no_grad():
        logits = rows_linear(hidden[:num_rows].float(), weight.float())
        if temperature != 1.0:
            logits = logits * (1.0 / temperature)
        theirs = _at(logits, targets[:num_rows]) - _logsumexp(logits, torch.softmax(logits, dim=-1))
    assert torch.equal(ours[:num_rows], theirs)


def test_a_sampler_that_differs_a_little_is_not_driven_further_away() -> None:
    """Another kernel gives another last bit of a hidden state. Rounded logits make it a step of 0.125, or none."""
    hidden, weight, targets = inputs()
    maker = torch.Generator().manual_seed(1)
    other = (hidden.float() * (1 + 0.002 * torch.randn(hidden.shape, generator=maker))).bfloat16()
    apart = {}
    for wide in (False, True):
        mine, theirs = (chunked_logprobs(each, weight, targets, fp32_logits=wide)[0] for each in (hidden, other))
        apart[wide] = float((mine - theirs).abs().mean())
    assert apart[True] < 0.5 * apart[False]


def test_gradients_are_those_of_the_inputs_precision() -> None:
    hidden, weight, targets = inputs()
    counts = torch.rand(TOKENS, generator=torch.Generator().manual_seed(2))

    def gradients(loss_of: object, *, wide: bool = False) -> list[torch.Tensor]:
        leaves = [(tensor.double() if wide else tensor).clone().requires_grad_() for tensor in (hidden, weight)]
        loss_of(*leaves).backward()  # type: ignore[operator]
        return [leaf.grad for leaf in leaves]  # type: ignore[misc]

    right = gradients(lambda h, w: -(exact(h, w, targets) * counts).sum(), wide=True)
    found = [
        gradients(lambda h, w: chunked_nll(h, w, targets, counts, chunk_tokens=16, fp32_logits=True)[0]),
        gradients(lambda h, w: -(chunked_logprobs(h, w, targets, chunk_tokens=16, fp32_logits=True)[0] * counts).sum()),
    ]
    for each in found:
        for mine, expected in zip(each, right, strict=True):
            assert mine.dtype == torch.bfloat16
            assert (mine - expected).abs().max() <= 0.02 * expected.abs().max()
