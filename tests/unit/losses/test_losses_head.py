"""The chunked head against whole logits: values, gradients, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._python_dispatch
import torch.utils._pytree

from forge.errors import ConfigError, DataError, ForgeError, ModelError
from forge.losses import chunked_logprobs, chunked_nll, chunks
from forge.losses.chunks import Workspace
from head_reference import Case, gradients_of, make_case, plain_logprobs

CHUNKS = (1, 2, 5, 12, 13, 14, 1000, None)


@pytest.fixture(autouse=True)
def one_thread_and_no_clean_memory() -> Iterator[None]:
    """New memory is full of NaN, so that a buffer that is read before it is written shows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._C._set_deterministic_algorithms(True)  # the public function imports the compiler first
    assert torch.isnan(torch.empty(3)).all()
    yield
    torch._C._set_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_entropy_and_their_gradients_are_those_of_whole_logits(
    chunk_tokens: int | None, temperature: float
) -> None:
    case = make_case()
    weigh = torch.linspace(-1, 2, 13, dtype=torch.float64)
    expected = plain_logprobs(case.hidden, case.weight, case.targets, temperature=temperature)
    found = chunked_logprobs(
        case.hidden, case.weight, case.targets, chunk_tokens=chunk_tokens, temperature=temperature, entropy=True
    )
    assert found[1] is not None
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float64
        close(ours, theirs)
    for by_logprob, by_entropy in ((1.0, 0.0), (0.0, 1.0), (1.0, 0.3)):
        ours = weigh @ (by_logprob * found[0] + by_entropy * found[1])
        theirs = weigh @ (by_logprob * expected[0] + by_entropy * expected[1])
        for mine, its in zip(gradients_of(ours, case), gradients_of(theirs, case), strict=True):
            close(mine, its)
    for one, other in zip(found, expected, strict=True):  # and each alone, so that the other has no gradient
        for mine, its in zip(gradients_of(weigh @ one, case), gradients_of(weigh @ other, case), strict=True):
            close(mine, its)


def test_without_entropy_there_is_none() -> None:
    case = make_case()
    logprobs, entropy = chunked_logprobs(case.hidden, case.weight, case.targets, chunk_tokens=4)
    assert entropy is None
    expected, _ = plain_logprobs(case.hidden, case.weight, case.targets)
    close(logprobs, expected)
    for mine, its in zip(gradients_of(logprobs.sum(), case), gradients_of(expected.sum(), case), strict=True):
        close(mine, its)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_nll_is_cross_entropy(chunk_tokens: int | None) -> None:
    case = make_case()
    each = F.cross_entropy(case.hidden @ case.weight.t(), case.targets, reduction="none")
    expected = (case.weights * each).sum() / 3
    total, logprobs = chunked_nll(case.hidden, case.weight, case.targets, case.weights, chunk_tokens=chunk_tokens)
    close(total / 3, expected)
    close(logprobs, -each.detach())
    assert not logprobs.requires_grad
    for mine, its in zip(gradients_of(total / 3, case), gradients_of(expected, case), strict=True):
        close(mine, its)


def test_gradcheck() -> None:
    case = make_case(5, width=3, vocab=4)

    def logprobs(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        return chunked_logprobs(hidden, weight, case.targets, chunk_tokens=2, temperature=1.3, entropy=True)

    def nll(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return chunked_nll(hidden, weight, case.targets, case.weights, chunk_tokens=2)[0]

    assert torch.autograd.gradcheck(logprobs, (case.hidden, case.weight))
    assert torch.autograd.gradcheck(nll, (case.hidden, case.weight))


def test_nll_can_be_differentiated_twice_over_the_same_graph() -> None:
    case = make_case()
    total, _ = chunked_nll(case.hidden, case.weight, case.targets, case.weights, chunk_tokens=4)
    first, second = gradients_of(total * 2, case), gradients_of(total * 3, case)
    for once, again in zip(first, second, strict=True):
        close(once / 2, again / 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_nll_scales_by_the_gradient_that_arrives(dtype: torch.dtype) -> None:
    """Once without keeping the graph, where memory is used again, as in training."""
    case, again = make_case(dtype=dtype), make_case(dtype=dtype)
    total, _ = chunked_nll(case.hidden, case.weight, case.targets, case.weights, chunk_tokens=4)
    expected = gradients_of(total / 4, case)
    (chunked_nll(again.hidden, again.weight, case.targets, case.weights, chunk_tokens=4)[0] / 4).backward()
    assert again.hidden.grad is not None
    assert torch.equal(again.hidden.grad, expected[0])
    assert again.weight.grad is not None
    assert torch.equal(again.weight.grad, expected[1])


@pytest.mark.parametrize("fp32_logits", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_inputs_give_float32_results_and_gradients_of_their_own_dtype(
    dtype: torch.dtype, fp32_logits: bool
) -> None:
    case = make_case(40, width=32, vocab=50, dtype=dtype)
    wide = Case(
        *(leaf.detach().double().requires_grad_() for leaf in (case.hidden, case.weight)), case.targets, case.weights
    )
    expected, entropies = plain_logprobs(wide.hidden, wide.weight, wide.targets)
    # Logits of bfloat16 are about 20 here and rounded to 1/16; those in float32 differ only in the last digits.
    tolerance = 0.15 if dtype == torch.bfloat16 and not fp32_logits else 2e-5
    made: dict[str, Any] = {"chunk_tokens": 16, "fp32_logits": fp32_logits}
    found, entropy = chunked_logprobs(case.hidden, case.weight, case.targets, entropy=True, **made)
    assert entropy is not None
    assert found.dtype == entropy.dtype == torch.float32
    close(found.double(), expected, tolerance)
    close(entropy.double(), entropies, tolerance)
    total, logprobs = chunked_nll(case.hidden, case.weight, case.targets, case.weights, **made)
    assert total.dtype == logprobs.dtype == torch.float32
    close(logprobs, found.detach())
    plain = gradients_of(-(wide.weights * expected).sum(), wide)
    summed = -(case.weights.float() * found).sum()
    for ours in (gradients_of(total, case), gradients_of(summed, case)):
        for mine, its in zip(ours, plain, strict=True):
            assert mine.dtype == dtype
            off = float((mine.double() - its).norm() / its.norm())
            assert off < (1e-6 if dtype == torch.float32 else 0.01 if fp32_logits else 0.05)


def test_the_gradient_of_a_narrow_weight_is_summed_in_float32() -> None:
    """In bfloat16 a sum of halves stops at 128."""
    num_tokens = 512
    hidden = torch.ones(num_tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(num_tokens, dtype=torch.int64)
    for chunk_tokens in (1, 512):
        total, _ = chunked_nll(hidden, weight, targets, torch.ones(num_tokens), chunk_tokens=chunk_tokens)
        assert torch.autograd.grad(total, weight)[0].tolist() == [[-256.0], [256.0]]
        logprobs, _ = chunked_logprobs(hidden, weight, targets, chunk_tokens=chunk_tokens)
        assert torch.autograd.grad(logprobs.sum(), weight)[0].tolist() == [[256.0], [-256.0]]


def test_a_sure_token_keeps_the_digits_of_its_gradient() -> None:
    """p is 0.9998, which bfloat16 rounds to 1: the gradient p - 1 must be taken before it is rounded."""
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[8.5], [0.0]], dtype=torch.bfloat16)
    total, _ = chunked_nll(hidden, weight, torch.tensor([0]), torch.ones(1))
    expected = -8.5 / (1 + math.exp(8.5))
    assert float(torch.autograd.grad(total, hidden)[0]) == pytest.approx(expected, rel=0.01)


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    weight = torch.tensor([[3e4], [0.0], [-3e4]])
    logprobs, entropy = chunked_logprobs(hidden, weight, torch.tensor([2, 2]), entropy=True)
    assert entropy is not None
    assert logprobs.tolist() == [-6e4, 0.0]
    assert entropy.tolist() == [0.0, 0.0]
    assert torch.isfinite(torch.autograd.grad(logprobs.sum() + entropy.sum(), hidden)[0]).all()


def test_no_tokens() -> None:
    case = make_case(0)
    logprobs, entropy = chunked_logprobs(case.hidden, case.weight, case.targets, entropy=True)
    assert entropy is not None
    assert logprobs.shape == entropy.shape == (0,)
    total, none = chunked_nll(case.hidden, case.weight, case.targets, case.weights)
    assert float(total.detach()) == 0
    assert none.shape == (0,)
    for result in (logprobs.sum() + entropy.sum(), total):
        hidden, weight = gradients_of(result, case)
        assert hidden.shape == (0, 7)
        assert float(weight.abs().sum()) == 0


def test_tokens_of_weight_0_add_nothing_even_where_their_logprob_is_infinite() -> None:
    hidden = torch.tensor([[1.0], [math.inf]])
    total, logprobs = chunked_nll(hidden, torch.tensor([[1.0], [0.0]]), torch.tensor([1, 1]), torch.tensor([1.0, 0.0]))
    assert not math.isfinite(logprobs[1])
    assert float(total) == pytest.approx(math.log(1 + math.e))


def test_only_wanted_gradients_are_computed() -> None:
    case = make_case()
    hidden, weight = case.hidden.detach(), case.weight.detach()
    products = _count_products(lambda: chunked_nll(case.hidden, case.weight, case.targets, case.weights)[0].backward())
    assert products == 3
    assert _count_products(lambda: chunked_nll(hidden, case.weight, case.targets, case.weights)[0].backward()) == 2
    assert _count_products(lambda: chunked_nll(case.hidden, weight, case.targets, case.weights)[0].backward()) == 2
    assert _count_products(lambda: chunked_nll(hidden, weight, case.targets, case.weights)) == 1
    with torch.no_grad():
        assert _count_products(lambda: chunked_nll(case.hidden, case.weight, case.targets, case.weights)) == 1
        total, _ = chunked_nll(case.hidden, case.weight, case.targets, case.weights)
        assert not total.requires_grad
    products = _count_products(lambda: chunked_logprobs(case.hidden, weight, case.targets)[0].sum().backward())
    assert products == 3
    assert case.hidden.grad is not None


def test_whole_logits_never_exist() -> None:
    """The largest tensor that is made has the elements of a chunk, in both passes."""
    num_tokens, vocab, chunk_tokens = 64, 301, 4
    case = make_case(num_tokens, vocab=vocab)

    def work() -> None:
        found, entropy = chunked_logprobs(
            case.hidden, case.weight, case.targets, chunk_tokens=chunk_tokens, entropy=True
        )
        assert entropy is not None
        (found.sum() + entropy.sum()).backward()
        chunked_nll(case.hidden, case.weight, case.targets, case.weights, chunk_tokens=chunk_tokens)[0].backward()

    assert max(_Watch.during(work).sizes) == case.weight.numel() > chunk_tokens * vocab


class _Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Sees every operation and what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sizes: list[int] = [0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        self.sizes += [leaf.numel() for leaf in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(leaf)]
        return result

    @classmethod
    def during(cls, work: Any) -> _Watch:
        with cls() as watch:
            work()
        return watch


def _count_products(work: Any) -> int:
    return sum(name in ("mm", "addmm", "addmm_") for name in _Watch.during(work).names)


BAD: list[tuple[dict[str, Any], type[ForgeError], str]] = [
    ({"targets_N": torch.tensor([0, 11, 1])}, DataError, "targets_N[1]"),
    ({"targets_N": torch.tensor([0, 1, -1])}, DataError, "targets_N[2]"),
    ({"targets_N": torch.tensor([0, 1])}, ModelError, "targets_N"),
    ({"hidden_ND": torch.zeros(1, 3, 7)}, ModelError, "hidden_ND"),
    ({"weight_VD": torch.zeros(11, 8)}, ModelError, "weight_VD"),
    ({"weight_VD": torch.zeros(11, 7, dtype=torch.bfloat16)}, ModelError, "weight_VD"),
    ({"chunk_tokens": 0}, ConfigError, "chunk_tokens"),
    ({"vocab_start": 4}, ConfigError, "vocab_start"),
]


@pytest.mark.parametrize(("change", "kind", "path"), BAD)
@pytest.mark.parametrize("function", ["logprobs", "nll"])
def test_refusals(change: dict[str, Any], kind: type[ForgeError], path: str, function: str) -> None:
    made = {"hidden_ND": torch.zeros(3, 7), "weight_VD": torch.zeros(11, 7), "targets_N": torch.tensor([0, 1, 2])}
    made |= change
    call = (
        chunked_logprobs
        if function == "logprobs"
        else partial(chunked_nll, weights_N=torch.ones(len(made["targets_N"])))
    )
    with pytest.raises(kind) as caught:
        call(**made)
    assert caught.value.path == path
    assert caught.value.rule
    assert caught.value.repair


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_is_positive(temperature: float) -> None:
    case = make_case()
    with pytest.raises(ConfigError) as caught:
        chunked_logprobs(case.hidden, case.weight, case.targets, temperature=temperature)
    assert caught.value.path == "temperature"


def test_one_weight_for_each_target() -> None:
    case = make_case()
    with pytest.raises(ModelError) as caught:
        chunked_nll(case.hidden, case.weight, case.targets, case.weights[1:])
    assert (caught.value.path, caught.value.value) == ("weights_N", (12,))


# ---- The cache of logits, which only a GPU's kernel fills: here with a stand-in for the kernel


def stand_in(logits: torch.Tensor, targets: torch.Tensor, gradient: torch.Tensor | None) -> Any:
    lse = logits.double().logsumexp(-1)
    logprobs = logits.double().gather(1, targets[:, None])[:, 0] - lse
    if gradient is not None:
        gradient.copy_((logits.double() - lse[:, None]).exp() - F.one_hot(targets, logits.shape[1]))
    return logprobs, lse


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel's stand-in is used, and the tokens of each product of logits are noted."""
    counted: list[int] = []
    plain = Workspace._product

    def counting(self: Workspace, rows: slice, **options: Any) -> torch.Tensor:
        counted.append(rows.stop - rows.start)
        return plain(self, rows, **options)

    monkeypatch.setattr(chunks, "_fits_kernel", lambda weight, dtype: True)
    monkeypatch.setattr(chunks, "_target_logprobs", stand_in)
    monkeypatch.setattr(Workspace, "_product", counting)
    return counted


@pytest.mark.parametrize(("room", "computed"), [(0, [4, 4, 4, 1] * 2), (6, [6, 4, 3, 4, 3]), (13, [13]), (99, [13])])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_in_the_cache_are_computed_once(
    products: list[int], room: int, computed: list[int], temperature: float
) -> None:
    case = make_case()
    weigh = torch.linspace(-1, 2, 13, dtype=torch.float64)
    expected, _ = plain_logprobs(case.hidden, case.weight, case.targets, temperature=temperature)
    found, _ = chunked_logprobs(
        case.hidden,
        case.weight,
        case.targets,
        chunk_tokens=4,
        temperature=temperature,
        cache_bytes=room * case.weight.shape[0] * case.weight.itemsize,
    )
    close(found, expected)
    theirs = gradients_of(weigh @ expected, case)
    for mine, its in zip(gradients_of(weigh @ found, case), theirs, strict=True):
        close(mine, its)
    assert products == computed
    for mine, its in zip(gradients_of(weigh @ found, case), theirs, strict=True):  # the cache is gone by now
        close(mine, its)


def test_without_gradients_nothing_is_cached(products: list[int]) -> None:
    case = make_case()
    with torch.no_grad():
        chunked_logprobs(case.hidden, case.weight, case.targets, chunk_tokens=4, cache_bytes=1 << 30)
    assert products == [4, 4, 4, 1]
