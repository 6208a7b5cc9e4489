"""Distillation from stored top-k logprobs: values and gradients against the whole vocabulary, computed by torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from forge.config import TrainerConfig
from forge.errors import ConfigError, DataError, ModelError
from forge.losses import TeacherDivergence, TokenView, chunked_candidates, chunked_top
from forge.losses.distillation import LEAST_TAIL, TEACHER_IDS, TEACHER_LOGPROBS, divergences, outcomes
from forge.trainer.engine import Engine
from forge.trainer.top_logprobs import top_logprobs
from forge.types import Batch, Sample

KINDS = ("forward_kl", "reverse_kl", "mixed", "jsd")


def a_head(*, num: int = 7, width: int = 6, vocab: int = 11, dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num, width, generator=generator, dtype=dtype)
    weight = torch.randn(vocab, width, generator=generator, dtype=dtype)
    return hidden, weight, generator


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_candidates_have_the_logprobs_and_gradients_of_a_plain_softmax(chunk_tokens: int) -> None:
    hidden, weight, generator = a_head()
    candidates = torch.randint(0, 11, (7, 4), generator=generator)
    candidates[0] = candidates[0, 0]  # the same one several times
    grads = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    found = []
    for function in (
        lambda h, w: chunked_candidates(h, w, candidates, chunk_tokens=chunk_tokens),
        lambda h, w: torch.log_softmax(h @ w.T, -1).gather(1, candidates),
    ):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        logprobs = function(*leaves)
        found.append((logprobs.detach(), *torch.autograd.grad(logprobs, leaves, grads)))
    for own, other in zip(*found, strict=True):
        assert torch.allclose(own, other, atol=1e-12)


def test_the_gradient_passes_torchs_own_check() -> None:
    hidden, weight, generator = a_head(num=3, vocab=5)
    candidates = torch.randint(0, 5, (3, 2), generator=generator)
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda h, w: chunked_candidates(h, w, candidates, chunk_tokens=2), leaves)


def test_the_likeliest_tokens_are_those_of_a_plain_softmax() -> None:
    hidden, weight, _ = a_head()
    logprobs, ids = chunked_top(hidden, weight, 4, chunk_tokens=3)
    expected = torch.log_softmax(hidden @ weight.T, -1).topk(4)
    assert torch.equal(ids, expected.indices)
    assert torch.allclose(logprobs, expected.values, atol=1e-12)
    assert [tuple(each.shape) for each in chunked_top(hidden[:0], weight, 4)] == [(0, 4), (0, 4)]


@pytest.mark.parametrize(("k", "group", "path"), [(12, None, "k"), (0, None, "k"), (2, object(), "distributed.tensor")])
def test_what_the_head_cannot_give_is_refused(k: int, group: Any, path: str) -> None:
    hidden, weight, _ = a_head()
    with pytest.raises((ConfigError, ModelError)) as caught:
        chunked_top(hidden, weight, k, group=group)
    assert caught.value.path == path
    with pytest.raises(ModelError, match="candidates_NK"):
        chunked_candidates(hidden, weight, torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(DataError, match="not in the vocabulary"):
        chunked_candidates(hidden, weight, torch.full((7, 2), 11))


def full(kind: str, teacher: torch.Tensor, student: torch.Tensor, beta: float) -> torch.Tensor:
    """The divergence over all outcomes, with torch's own function: kl_div(a, b) is KL(b || a)."""

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)

    if kind == "forward_kl":
        return kl(teacher, student)
    if kind == "reverse_kl":
        return kl(student, teacher)
    if kind == "mixed":
        return (1 - beta) * kl(teacher, student) + beta * kl(student, teacher)
    middle = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * kl(teacher, middle) + (1 - beta) * kl(student, middle)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
@pytest.mark.parametrize("k", [3, 9])
def test_values_and_gradients_are_those_of_the_outcomes_written_out(kind: Any, tail: Any, k: int) -> None:
    """With k = 9, the whole vocabulary: then both tails are the plain divergence."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(2 * torch.randn(5, 9, generator=generator, dtype=torch.float64), -1)
    values, ids = teacher.topk(k)
    student = torch.log_softmax(logits, -1)
    parts = [outcomes(each, tail=tail) for each in (values, student.gather(1, ids))]
    own = divergences(*parts, kind=kind, beta=0.3)

    is_top = torch.zeros_like(teacher).scatter(1, ids, 1.0)
    written = []
    for each in (teacher, student):
        top = each.exp().gather(1, ids)
        rest = (each.exp() * (1 - is_top)).sum(-1, keepdim=True)
        if k == 9:
            written.append(top.log())
        else:
            written.append((torch.cat([top, rest], -1) if tail == "bucket" else top / top.sum(-1, keepdim=True)).log())
    expected = full(kind, *written, beta=0.3)
    assert torch.allclose(own, expected, atol=1e-5 if k == 9 else 1e-12)
    found = [torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in (own, expected)]
    assert torch.allclose(*found, atol=1e-5 if k == 9 else 1e-11)


def a_view(**changes: Any) -> TokenView:
    student = torch.tensor([[-1.0, -2.0], [-0.5, -3.0], [math.nan, math.nan]], requires_grad=True)
    view = TokenView(
        logprobs_T=torch.tensor([-1.0, -3.0, math.nan]),
        weights_T=torch.tensor([1.0, 2.0, 0.0]),
        lengths=(3,),
        fields={
            TEACHER_IDS: torch.tensor([[1, 2], [3, 4], [0, 0]]),
            TEACHER_LOGPROBS: torch.tensor([[-0.5, -1.5], [-0.25, -2.0], [math.nan, -math.inf]]),
        },
        candidate_logprobs_TK=student,
    )
    return replace(view, **changes)


def test_the_loss_is_a_weighted_sum_with_the_data_s_own_tokens() -> None:
    q, p = (torch.tensor(each).exp() for each in ([[-0.5, -1.5], [-0.25, -2.0]], [[-1.0, -2.0], [-0.5, -3.0]]))
    q, p = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1) for each in (q, p))
    kl = (q * (q.log() - p.log())).sum(-1)
    view = a_view()
    terms = TeacherDivergence(label_coefficient=0.5)(view)
    expected = float(kl[0] + 2 * kl[1]) + 0.5 * (1.0 + 2 * 3.0)
    assert terms.total.item() == pytest.approx(expected, abs=1e-5)
    assert float(terms.metrics["nll"]) == 7.0
    assert float(terms.metrics["divergence"]) == pytest.approx(float(kl[0] + 2 * kl[1]), abs=1e-5)
    assert float(terms.metrics["teacher_tail"]) == pytest.approx(float(q[0, 2] + 2 * q[1, 2]), abs=1e-5)
    assert view.candidate_logprobs_TK is not None
    (gradient,) = torch.autograd.grad(terms.total, view.candidate_logprobs_TK)
    assert bool(torch.isfinite(gradient).all())
    assert gradient[2].tolist() == [0.0, 0.0]


def test_a_teacher_that_is_sure_leaves_no_infinite_gradient() -> None:
    for kind in KINDS:
        sure = torch.tensor([[-1e-9, -40.0]])
        student = torch.tensor([[-1e-9, -45.0]], requires_grad=True)
        found = divergences(outcomes(sure, tail="bucket"), outcomes(student, tail="bucket"), kind=kind)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(found.sum(), student)
        assert bool(torch.isfinite(gradient).all()), kind
        assert abs(float(found.detach())) < 10 * LEAST_TAIL


@pytest.mark.parametrize(
    ("changes", "path"), [({"kind": "kl"}, "kind"), ({"tail": "drop"}, "tail"), ({"beta": 1.0}, "beta")]
)
def test_settings_out_of_range_are_refused(changes: Any, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TeacherDivergence(**changes)
    assert caught.value.path == path
    assert caught.value.repair


def test_a_view_without_candidates_is_refused() -> None:
    with pytest.raises(DataError, match="teacher's tokens"):
        TeacherDivergence()(a_view(candidate_logprobs_TK=None))


# ---- Through the engine ---------------------------------------------------------------------------------------------


def an_engine(loss: Any = None, **training: Any) -> Engine:
    config = {
        "model": {"preset": "tiny"},
        "training": {"max_seq_len": 12, "max_steps": 4, "learning_rate": 1e-3, "max_grad_norm": None, **training},
        "distributed": {"precision": "float64", "with_gpus": False},
        "frozen": loss is None,
    }
    return Engine(TrainerConfig.model_validate(config), loss=loss)


def some_samples(k: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for length in (9, 5, 12, 7):
        ids = torch.randint(0, 500, (length,), generator=generator)
        weights = torch.ones(length)
        weights[:2] = 0.0
        logprobs = torch.log_softmax(torch.randn(length, k + 3, generator=generator), -1)[:, :k]
        fields = {TEACHER_IDS: torch.randint(0, 500, (length, k), generator=generator), TEACHER_LOGPROBS: logprobs}
        found.append(Sample(ids, weights, fields))
    return found


def gradients(loss: Any, batch: Batch, **training: Any) -> tuple[float, dict[str, torch.Tensor]]:
    engine = an_engine(loss, **training)
    try:
        engine._pass(batch, backward=True)
        found = {name: each.grad.clone() for name, each in engine._parameters.items() if each.grad is not None}
        return engine._sums().loss, found
    finally:
        engine.close()


def test_the_gradient_does_not_depend_on_rows_chunks_or_order() -> None:
    samples, loss = some_samples(6), TeacherDivergence(kind="jsd", label_coefficient=0.3)
    expected = gradients(loss, Batch.of(samples), microbatch_tokens=64)
    assert max(float(value.abs().max()) for value in expected[1].values()) > 1e-3
    for order, options in (
        ([2, 0, 3, 1], {"microbatch_tokens": 12}),
        ([0, 1, 2, 3], {"microbatch_tokens": 64, "head_chunk_tokens": 3}),
    ):
        found = gradients(loss, Batch.of([samples[index] for index in order]), **options)
        assert found[0] == pytest.approx(expected[0], rel=1e-12)
        for name, value in expected[1].items():
            assert torch.allclose(found[1][name], value, atol=1e-10), name


def test_a_student_with_the_teacher_s_own_logprobs_has_no_divergence() -> None:
    samples = [replace(sample, fields={}) for sample in some_samples(1)]
    teacher = an_engine()
    try:
        top = top_logprobs(teacher, Batch.of(samples), 5)
        plain = teacher.forward_logprobs(Batch.of(samples))
    finally:
        teacher.close()
    taught = []
    for sample, (logprobs, ids) in zip(samples, top, strict=True):
        counted = sample.loss_weights != 0
        assert logprobs.shape == ids.shape == (int(counted.sum()), 5)
        assert bool((logprobs.diff(dim=-1) <= 0).all())
        fields = {
            TEACHER_IDS: torch.zeros(len(sample), 5, dtype=torch.int64),
            TEACHER_LOGPROBS: torch.zeros(len(sample), 5),
        }
        fields[TEACHER_IDS][counted], fields[TEACHER_LOGPROBS][counted] = ids, logprobs
        taught.append(replace(sample, fields=fields))
    engine = an_engine(TeacherDivergence())
    try:
        result = engine.evaluate(Batch.of(taught))
        total = sum(float(each[sample.loss_weights != 0].sum()) for each, sample in zip(plain, samples, strict=True))
        assert abs(result.loss) < 1e-4
        assert result.metrics["nll"][0] == pytest.approx(-total, rel=1e-5)
    finally:
        engine.close()
