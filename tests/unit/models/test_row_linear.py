"""Products, gates and logprobs of a row in float32 on a CPU: the same bits whatever else there is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.config import ModelConfig
from forge.generator.native.sampler import _at, _logsumexp
from forge.kernels import cpu_layers
from forge.kernels.cpu_linear import row_floor
from forge.losses.head import chunked_logprobs, chunked_nll
from forge.models.language_model import Head, titan_config
from forge.models.layers import Experts, RowFeedForward, RowLinear, gated, rows_linear
from forge.models.rows import Documents, RowTask

FAILING = ((1100, 40), (2048, 40), (896, 151))
"""Widths and outputs for which torch on an Intel Xeon with two threads gives a row other bits in another batch."""
COUNTS = (1, 2, 3, 4, 5, 7, 15, 16, 17, 31, 100, 255, 300)
NUM_ROWS = 400

pytestmark = pytest.mark.usefixtures("one_thread")
threads = pytest.mark.parametrize("num_threads", [1, 2])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_rowwise(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Any rows by themselves get what they get among all, wherever in memory they lie."""
    whole = function(x)
    for count in COUNTS:
        for start in (0, 1, 37):
            rows = slice(start, start + count)
            assert torch.equal(function(x[rows].clone()), whole[rows]), (count, start)


@pytest.mark.parametrize(
    ("num_in", "num_out"),
    [*((64, 64), (80, 213), (512, 96), (213, 80), (64, 6), (33, 6), (130, 8), (514, 10), (64, 1), (77, 1)), *FAILING],
)
@threads
def test_a_row_does_not_depend_on_the_others(num_in: int, num_out: int, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    weight = random(num_out, num_in, seed=1)
    assert_rowwise(lambda x: rows_linear(x, weight), random(NUM_ROWS, num_in))


@pytest.mark.parametrize(("num_in", "num_out"), FAILING)
def test_a_trainer_with_two_threads_computes_what_a_sampler_with_one_does(num_in: int, num_out: int) -> None:
    x, weight = random(NUM_ROWS, num_in), random(num_out, num_in, seed=1)
    with torch.no_grad():
        sampled = torch.cat([rows_linear(row[None], weight) for row in x[:40]])
    torch.set_num_threads(2)
    trained = rows_linear(x, weight.requires_grad_())
    assert trained.requires_grad
    assert torch.equal(trained[:40].detach(), sampled)


def test_torch_by_itself_does_depend_on_them() -> None:
    """Why there is a kernel. If this fails on every processor, torch has got better and the kernel may go."""
    x, weight = random(NUM_ROWS, 512), random(96, 512, seed=1)
    whole = F.linear(x, weight)
    assert not all(torch.equal(F.linear(x[:count], weight), whole[:count]) for count in COUNTS)


def test_the_floor_grows_with_threads() -> None:
    assert row_floor() == 16
    torch.set_num_threads(8)
    assert row_floor() == 32


@pytest.mark.parametrize("shape", [(3, 8), (1, 3, 8), (2, 2, 8), (8,), (0, 8), (1, 40, 8)])
@pytest.mark.parametrize("width", [8, 7])
def test_shapes_and_gradients(shape: tuple[int, ...], width: int) -> None:
    """Those of torch's own layer, with and without a bias."""
    x = random(*shape[:-1], width).requires_grad_()
    weight, bias = (nn.Parameter(random(*size, seed=1)) for size in ((5, width), (5,)))
    for leaves in ((x, weight), (x, weight, bias)):
        found, expected = rows_linear(*leaves), F.linear(*leaves)
        torch.testing.assert_close(found, expected)
        gradient = random(*expected.shape, seed=2)
        for ours, theirs in zip(
            torch.autograd.grad(found, leaves, gradient), torch.autograd.grad(expected, leaves, gradient), strict=True
        ):
            torch.testing.assert_close(ours, theirs)


def test_other_precisions_are_left_alone() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        x, weight = random(3, 8).to(dtype), random(5, 8, seed=1).to(dtype)
        assert torch.equal(rows_linear(x, weight), F.linear(x, weight))


def test_a_compiled_model_does_not_see_the_padding() -> None:
    weight = random(5, 8, seed=1)
    compiled = torch.compile(lambda x: gated(rows_linear(x, weight), rows_linear(x, weight)), backend="eager")
    torch.testing.assert_close(
        compiled(random(3, 8)), gated(F.linear(random(3, 8), weight), F.linear(random(3, 8), weight))
    )


@pytest.mark.parametrize("width", [1, 7, 213, 256])
@threads
def test_gates_do_not_depend_on_the_place(width: int, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    up = random(NUM_ROWS, width, seed=1)
    gates = random(NUM_ROWS, width) * 20
    both = torch.cat([gates, up], dim=1)
    assert_rowwise(lambda x: gated(x[:, :width].contiguous(), x[:, width:].contiguous()), both)


def test_gates_are_right() -> None:
    x = torch.cat(
        [random(500) * 5, torch.tensor([0.0, -0.0, -86.0, -88.0, -100.0, 100.0, 1e30, -1e30, 3e-39, torch.nan])]
    )
    up = random(len(x), seed=1)
    expected = F.silu(x.double()) * up.double()
    torch.testing.assert_close(gated(x, up).double(), expected, rtol=1e-6, atol=1e-35, equal_nan=True)
    leaves = [tensor.requires_grad_() for tensor in (x[:500].clone(), up[:500].clone())]
    wide = [tensor.detach().double().requires_grad_() for tensor in leaves]
    ours = torch.autograd.grad(gated(*leaves).sum(), leaves)
    theirs = torch.autograd.grad((F.silu(wide[0]) * wide[1]).sum(), wide)
    for found, known in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found.double(), known, rtol=1e-5, atol=1e-6)


def test_gates_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    cpu_layers.library.cache_clear()
    try:
        assert torch.equal(gated(random(9), random(9, seed=1)), F.silu(random(9)) * random(9, seed=1))
    finally:
        cpu_layers.library.cache_clear()
    assert "no C compiler" in caplog.text


def experts_of(num_experts: int) -> Experts:
    experts = Experts(Experts.Config(dim=80, hidden_dim=37, num_experts=num_experts))
    for seed, parameter in enumerate(experts.parameters()):
        parameter.data = random(*parameter.shape, seed=seed) * 0.1
    return experts


def test_an_expert_with_few_tokens() -> None:
    experts, x = experts_of(2), random(NUM_ROWS, 80)
    with torch.no_grad():
        whole = experts(x, torch.tensor([NUM_ROWS, 0]))
        for count in COUNTS:
            found = experts(torch.cat([x[:count], x[:5]]), torch.tensor([count, 5]))
            assert torch.equal(found[:count], whole[:count]), count


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("width", [80, 896])
@threads
def test_logprobs_do_not_depend_on_chunks_or_tokens(width: int, temperature: float, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    hidden, weight = random(NUM_ROWS, width), random(331, width, seed=1) * (80 / width) ** 0.5
    targets = torch.randint(331, (NUM_ROWS,), generator=torch.Generator().manual_seed(2))

    def logprobs(rows: slice, chunk: int | None) -> Tensor:
        found, _ = chunked_logprobs(hidden[rows], weight, targets[rows], chunk_tokens=chunk, temperature=temperature)
        return found

    whole = logprobs(slice(None), None)
    for count in (1, 5, 16, 17, 100):
        rows = slice(37, 37 + count)
        for chunk in (None, 3, 16):
            assert torch.equal(logprobs(rows, chunk), whole[rows]), (count, chunk)
        logits = rows_linear(hidden[rows], weight) * (1 / temperature)
        found = _at(logits, targets[rows]) - _logsumexp(logits, torch.softmax(logits, dim=-1))
        assert torch.equal(found, whole[rows])
        if temperature == 1.0:
            _, of_nll = chunked_nll(hidden[rows], weight, targets[rows], torch.ones(count), chunk_tokens=13)
            assert torch.equal(of_nll, whole[rows])
    expected = (hidden.double() @ weight.double().T / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(whole.double(), expected, rtol=1e-6, atol=2e-5)


def test_the_head_without_a_function_gives_logits_row_by_row() -> None:
    head = Head(Head.Config(in_features=80, out_features=331))
    head.weight.data = random(331, 80, seed=1)
    nothing = torch.zeros(0, dtype=torch.int64)
    task = RowTask(Documents.of(()), nothing[None], nothing, nothing)
    with torch.no_grad():
        assert_rowwise(lambda x: head(x[None], task)[0], random(NUM_ROWS, 80))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_every_linear_layer_of_a_model_is_of_this_kind(family: str) -> None:
    facts = {"num_experts": 4, "num_experts_per_token": 2, "expert_intermediate_size": 12}
    config = ModelConfig(
        family=family,
        num_layers=1,
        hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=32,
        max_seq_len=64,
        tie_embeddings=False,
        **(facts if family == "qwen3_moe" else {}),
    )
    model = titan_config(config, max_seq_len=64).build()
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {type(module) for module in linears.values()} == {RowLinear, Head}
    assert len(linears) == (8 if family == "qwen3" else 6)
    assert any(isinstance(module, RowFeedForward) for module in model.modules()) == (family == "qwen3")
