"""What saves memory and time changes nothing else; and what is not finite leaves no trace.

Precisions, states of the optimizer, torch.compile, clipping and accumulation; batches whose loss is NaN, and batches
that every rank must refuse; frozen engines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from engine_ranks import Ranks, gradients_of, made_batch, opened, ranks_of, whole_weights
from forge.config import DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.errors import ConfigError, DataError, NonFiniteError
from forge.losses import CrossEntropy, Loss, PolicyLoss
from forge.models.sizes import num_parameters
from forge.models.weights import named_parameters
from forge.types import Batch, StepResult

if TYPE_CHECKING:
    from forge.trainer.engine import Engine

VOCAB = 64
MODEL = ModelConfig(
    family="qwen3",
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCAB,
    tie_embeddings=False,
    max_seq_len=64,
    rope_theta=1000.0,
    norm_eps=1e-6,
)
LENGTHS = (9, 1, 15, 4, 2, 11, 16, 3, 7)
BAD = 5
"""Which sample of a batch is made bad."""
FIELDS = ("advantages", "old_logprobs")
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "replicate": {"strategy": "replicate"},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
}


def config_of(training: dict[str, Any], distributed: dict[str, Any], **options: Any) -> TrainerConfig:
    usual = {"max_seq_len": 16, "schedule": "constant", "warmup_steps": 0, "learning_rate": 1e-2, "adam_eps": 1e-6}
    return TrainerConfig(
        model=MODEL,
        training=TrainingConfig(**usual | training),
        distributed=DistributedConfig(**distributed),
        seed=3,
        **options,
    )


def batch_of(seed: int = 0) -> Batch:
    return made_batch(LENGTHS, vocab=VOCAB, fields=FIELDS, seed=seed)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield from ranks_of(__name__)


# Options. Each is trained for some steps on one batch.

STEPS = 6
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "bfloat16": ({}, {"precision": "bfloat16"}),
    "bfloat16_pure": ({}, {"precision": "bfloat16_pure"}),
    "half states": ({"optimizer_dtype": "bfloat16"}, {}),
    "float64": ({"microbatch_tokens": 64}, {"precision": "float64"}),
    "float64 in rows": ({"microbatch_tokens": 16}, {"precision": "float64"}),
}


@dataclass(frozen=True)
class Trained:
    results: list[StepResult]
    weights: dict[str, Tensor]
    state_dtypes: set[torch.dtype]
    gradient_dtypes: set[torch.dtype]


def run_options(options: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Trained]:
    return {name: train(config_of(*option)) for name, option in options.items()}


def train(config: TrainerConfig) -> Trained:
    with opened(config) as engine:
        results = [engine.train_step(batch_of()) for _ in range(STEPS - 1)]
        with gradients_of(engine) as gradients:
            results.append(engine.train_step(batch_of()))
        assert engine.optimizer is not None
        states = engine.optimizer.state_dict()
        return Trained(
            results,
            whole_weights(engine),
            {state.dtype for kind in ("exp_avg", "exp_avg_sq") for state in states[kind].values()},
            {gradient.dtype for gradient in gradients.values()},
        )


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Trained]]:
    found = {}
    for num_ranks in (1, 2):
        scratch = tmp_path_factory.mktemp("options")
        found[num_ranks] = ranks.run(run_options, num_ranks, scratch=scratch, options=OPTIONS)[0]
    return found


def losses(trained: Trained) -> list[float]:
    return [result.loss for result in trained.results]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("option", "weights", "states"),
    [
        ("plain", torch.float32, torch.float32),
        ("bfloat16", torch.float32, torch.float32),
        ("bfloat16_pure", torch.bfloat16, torch.bfloat16),
        ("half states", torch.float32, torch.bfloat16),
        ("float64", torch.float64, torch.float64),
    ],
)
def test_precision(trained: Any, num_ranks: int, option: str, weights: torch.dtype, states: torch.dtype) -> None:
    found: Trained = trained[num_ranks][option]
    assert {weight.dtype for weight in found.weights.values()} == {weights}
    assert found.gradient_dtypes == {weights}
    assert found.state_dtypes == {states}
    assert losses(found)[-1] < 0.75 * losses(found)[0], "it learns"
    assert not any(result.skipped for result in found.results)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_halves_come_close_and_are_not_the_same(trained: Any, num_ranks: int) -> None:
    plain = losses(trained[num_ranks]["plain"])
    for option, tolerance in (("bfloat16", 0.02), ("bfloat16_pure", 0.05), ("half states", 0.02)):
        found = losses(trained[num_ranks][option])
        assert found == pytest.approx(plain, rel=tolerance), option
        assert found[-1] != plain[-1], f"{option} was not used"
    assert trained[num_ranks]["bfloat16"].results[0].loss != plain[0], "it computes in bfloat16"
    assert trained[num_ranks]["half states"].results[0].loss == plain[0], "only its states are bfloat16"


def test_accumulation_over_rows_is_one_row(trained: Any) -> None:
    whole, rows = trained[1]["float64"], trained[1]["float64 in rows"]
    assert losses(rows) == pytest.approx(losses(whole), rel=1e-9)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(rows.weights[name], weight, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("option", ["plain", "float64"])
def test_two_ranks_learn_the_same(trained: Any, option: str) -> None:
    assert losses(trained[2][option]) == pytest.approx(losses(trained[1][option]), rel=1e-5)


# Rows of one step on one rank, whose gradients are added up before anything is reduced.


class Broken(Exception):
    """What a pass is made to fail with."""


@contextmanager
def broken_once(engine: Engine, where: str) -> Iterator[None]:
    """Let the second row of the block fail: in a layer's forward pass, in its backward pass, or in the loss."""
    rows: list[Any] = []

    def count(*_: Any) -> None:
        rows.append(None)
        if len(rows) == 2:
            raise Broken

    layer = engine.parts[0].layers["1"]
    if where == "forward":
        handle = layer.feed_forward.register_forward_pre_hook(count)
    elif where == "backward":
        handle = layer.attention_norm.register_forward_hook(
            lambda module, inputs, output: output.register_hook(count) and None
        )
    else:
        handle = engine.parts[0].lm_head.register_forward_hook(count)
    with pytest.raises(Broken):
        yield
    handle.remove()


class _NotAlone:
    """The dimensions of a layout, with a second data parallel rank that is not there."""

    dp_replicate, dp_shard, ep = 2, 1, 1

    def __init__(self, dims: Any) -> None:
        self._dims = dims

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dims, name)


def learned(engine: Engine) -> tuple[dict[str, Tensor], list[Tensor]]:
    for seed in range(3):
        engine.train_step(batch_of(seed))
    return whole_weights(engine), engine.forward_logprobs(batch_of(9))


def run_rows() -> dict[str, tuple[dict[str, Tensor], list[Tensor]]]:
    config = config_of({"microbatch_tokens": 16}, {"precision": "bfloat16"})
    found: dict[str, tuple[dict[str, Tensor], list[Tensor]]] = {}
    with opened(config, loss=PolicyLoss()) as engine:
        found["reduced once"] = learned(engine)
    with opened(config, loss=PolicyLoss()) as engine:
        engine.assembled = replace(engine.assembled, dims=_NotAlone(engine.assembled.dims))
        found["each reduced"] = learned(engine)
    for where in ("forward", "backward", "output"):
        with opened(config, loss=PolicyLoss()) as engine:
            kept = whole_weights(engine)
            with broken_once(engine, where):
                engine.train_step(batch_of(5))
            after = whole_weights(engine)
            assert all(torch.equal(kept[name], weight) for name, weight in after.items())
            assert {weight.dtype for weight in after.values()} == {torch.float32}, "what is kept, not what computes"
            found[f"after a failed {where} pass"] = learned(engine)
    with opened(config, loss=PolicyLoss()) as engine:
        with broken_once(engine, "forward"):
            engine.forward_logprobs(batch_of(5))
        assert {weight.dtype for weight in whole_weights(engine).values()} == {torch.float32}
        found["after failed scoring"] = learned(engine)
    return found


def test_rows_that_are_reduced_once_are_as_if_each_were_and_failed_passes_leave_nothing(
    ranks: Ranks, tmp_path: Any
) -> None:
    found = ranks.run(run_rows, 1, scratch=tmp_path)[0]
    weights, logprobs = found.pop("reduced once")
    assert len(found) == 5
    for what, (others, scores) in found.items():
        for name, weight in weights.items():
            assert torch.equal(weight, others[name]), f"{what}: {name}"
        assert torch.equal(torch.cat(logprobs), torch.cat(scores)), what


# torch.compile.


def run_compiled(cache: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    """One layer is enough: each is compiled by itself. Nothing is taken from an earlier run's cache."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    found = []
    for training in ({}, {"compile": True}):
        config = config_of({"microbatch_tokens": 40, **training}, {})
        with opened(config.model_copy(update={"model": MODEL.model_copy(update={"num_layers": 1})})) as engine:
            with gradients_of(engine) as gradients:
                results = [engine.train_step(batch_of())]
            results.append(engine.train_step(made_batch((13, 2, 5), vocab=VOCAB, seed=1)))
            found.append(([result.loss for result in results], gradients))
    return found


def test_compiled_layers_give_the_same_loss_and_gradients(ranks: Ranks, tmp_path: Any) -> None:
    (plain, gradients), (compiled, others) = ranks.run(
        run_compiled, 1, scratch=tmp_path, cache=str(tmp_path / "cache")
    )[0]
    assert compiled == pytest.approx(plain, rel=1e-5)
    for name, gradient in gradients.items():
        assert (others[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


# Clipping and zeroing.

SMALL, LARGE = 0.01, 1e6


def run_clipping(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Norms and gradients of the same batch, without clipping (twice), with a small and with a large maximum."""
    found = {}
    for name, layout in layouts.items():
        found[name] = []
        for maximum in (None, SMALL, LARGE):
            training = {"max_grad_norm": maximum, "learning_rate": 1e-60}
            with opened(config_of(training, {"precision": "float64", **layout})) as engine:
                for _ in range(2 if maximum is None else 1):
                    with gradients_of(engine) as gradients:
                        result = engine.train_step(batch_of())
                    found[name].append((result.grad_norm, gradients))
                left = [name for name, parameter in named_parameters(engine.parts) if parameter.grad is not None]
                assert left == [], "no gradient stays behind"
    return found


@pytest.fixture(scope="module")
def clipped(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[float, Any]]]:
    one = ranks.run(run_clipping, 1, scratch=tmp_path_factory.mktemp("one"), layouts={"one": {}})
    two = ranks.run(run_clipping, 2, scratch=tmp_path_factory.mktemp("two"), layouts=LAYOUTS)
    found = dict(one[0])
    for name in LAYOUTS:
        assert [norm for norm, _ in two[0][name]] == [norm for norm, _ in two[1][name]]
        pairs = zip(two[0][name], two[1][name], strict=True)
        found[name] = [(norm, mine | others) for (norm, mine), (_, others) in pairs]
    return found


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_clipping_scales_the_gradient(clipped: Any, layout: str) -> None:
    (norm, plain), _, (norm_of_small, small), (norm_of_large, large) = clipped[layout]
    assert norm == pytest.approx(float(torch.stack([gradient.norm() for gradient in plain.values()]).norm()), rel=1e-9)
    assert norm == pytest.approx(clipped["one"][0][0], rel=1e-9)
    assert norm > 2 * SMALL
    assert norm_of_small == pytest.approx(norm, rel=1e-12), "what is reported is the norm before clipping"
    assert norm_of_large == pytest.approx(norm, rel=1e-12)
    for name, gradient in plain.items():
        torch.testing.assert_close(small[name], gradient * SMALL / norm, rtol=1e-9, atol=1e-15)
        torch.testing.assert_close(large[name], gradient, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_gradients_are_zeroed_between_steps(clipped: Any, layout: str) -> None:
    (norm, first), (again, second), *_ = clipped[layout]
    assert again == pytest.approx(norm, rel=1e-12)
    for name, gradient in first.items():
        torch.testing.assert_close(second[name], gradient, rtol=1e-9, atol=1e-15)


# What is not finite.


def bad_batch(kind: str) -> Batch:
    """A batch in which one counted token of one sample has a NaN."""
    samples = list(batch_of(seed=1).samples())
    bad = samples[BAD]
    counted = int(torch.nonzero(bad.loss_weights)[0])
    weights, fields = bad.loss_weights.clone(), {name: values.clone() for name, values in bad.fields.items()}
    (weights if kind == "weights" else fields[kind])[counted] = float("nan")
    samples[BAD] = replace(bad, loss_weights=weights, fields=fields)
    return Batch.of(samples)


NONFINITE: dict[str, tuple[str, Loss]] = {
    "weights": ("weights", CrossEntropy()),
    "advantages": ("advantages", PolicyLoss()),
    "sampler": ("old_logprobs", PolicyLoss()),
}


@dataclass(frozen=True)
class Survived:
    message: str
    path: str
    kept: bool
    skipped: StepResult
    after_stop: StepResult
    after_skip: StepResult
    clean: StepResult
    weights: list[dict[str, Tensor]]


def kept_of(engine: Any) -> dict[str, Any]:
    """Everything that a step may change, whole."""
    from torch.distributed.tensor import DTensor

    states = engine.optimizer.state_dict()
    kept = {
        f"{kind} of {name}": (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for kind in ("exp_avg", "exp_avg_sq")
        for name, value in states[kind].items()
    }
    return {**whole_weights(engine), **kept, "steps": torch.tensor([engine.step, states["num_steps"]])}


def survive(layout: dict[str, Any], kind: str, loss: Loss) -> Survived:
    """A good step, a bad one, and a good one; and the same without the bad one."""
    with opened(config_of({}, layout), loss) as engine:
        engine.train_step(batch_of())
        before = kept_of(engine)
        with pytest.raises(NonFiniteError) as error:
            engine.train_step(bad_batch(kind))
        after = kept_of(engine)
        kept = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        after_stop = engine.train_step(batch_of(seed=2))
        weights = [whole_weights(engine)]
    with opened(config_of({"on_nonfinite": "skip"}, layout), loss) as engine:
        engine.train_step(batch_of())
        skipped = engine.train_step(bad_batch(kind))
        after_skip = engine.train_step(batch_of(seed=2))
        weights.append(whole_weights(engine))
    with opened(config_of({}, layout), loss) as engine:
        engine.train_step(batch_of())
        clean = engine.train_step(batch_of(seed=2))
        weights.append(whole_weights(engine))
    return Survived(str(error.value), str(error.value.path), kept, skipped, after_stop, after_skip, clean, weights)


def run_nonfinite(cases: list[tuple[str, dict[str, Any], str]]) -> dict[tuple[str, str], Survived]:
    return {(name, kind): survive(layout, *NONFINITE[kind]) for name, layout, kind in cases}


BAD_ON_ONE = [("one", {}, kind) for kind in NONFINITE]
BAD_ON_TWO = [
    *((name, layout, "advantages") for name, layout in LAYOUTS.items()),
    *((name, LAYOUTS[name], "weights") for name in ("fsdp", "pipeline")),
]


@pytest.fixture(scope="module")
def survived(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Survived]]:
    found = {}
    for num_ranks, cases in ((1, BAD_ON_ONE), (2, BAD_ON_TWO)):
        answers = ranks.run(run_nonfinite, num_ranks, scratch=tmp_path_factory.mktemp("bad"), cases=cases)
        found |= {key: [answer[key] for answer in answers] for key in answers[0]}
    return found


BAD_CASES = [(name, kind) for name, _, kind in BAD_ON_ONE + BAD_ON_TWO]


@pytest.mark.parametrize("case", BAD_CASES, ids="-".join)
def test_stop_names_the_sample_on_every_rank_and_changes_nothing(survived: Any, case: tuple[str, str]) -> None:
    for of_rank in survived[case]:
        assert of_rank.path == f"made:{BAD}"
        assert of_rank.message == survived[case][0].message
        assert "step 2" in of_rank.message
        assert of_rank.kept
        assert replace(of_rank.after_stop, seconds=0.0) == replace(of_rank.clean, seconds=0.0)


@pytest.mark.parametrize("case", BAD_CASES, ids="-".join)
def test_skip_goes_on_as_if_the_batch_had_not_been(survived: Any, case: tuple[str, str]) -> None:
    for of_rank in survived[case]:
        assert of_rank.skipped.skipped
        assert of_rank.skipped.step == 2
        assert of_rank.skipped.metrics["bad_samples"] == f"made:{BAD}"
        assert replace(of_rank.after_skip, seconds=0.0, step=2) == replace(of_rank.clean, seconds=0.0)
        assert of_rank.after_skip.step == 3
        after_stop, after_skip, clean = of_rank.weights
        for name, weight in clean.items():
            assert torch.equal(after_stop[name], weight), name
            assert torch.equal(after_skip[name], weight), name


def run_overflow() -> tuple[str, bool, StepResult]:
    """A model whose own numbers are too large, and then repaired."""
    with opened(config_of({}, {})) as engine:
        engine.train_step(batch_of())
        weight = dict(named_parameters(engine.parts))["norm.weight"]
        original = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(1e38)
        before = kept_of(engine)
        with pytest.raises(NonFiniteError) as error:
            engine.train_step(batch_of())
        after = kept_of(engine)
        with torch.no_grad():
            weight.copy_(original)
        kept = all(torch.equal(before[name], after[name]) for name in before)
        return str(error.value.path), kept, engine.train_step(batch_of())


def test_a_model_that_overflows_is_reported(ranks: Ranks, tmp_path: Any) -> None:
    path, kept, result = ranks.run(run_overflow, 1, scratch=tmp_path)[0]
    assert "made:0" in path
    assert kept
    assert result.step == 2
    assert not result.skipped


# What only one rank would notice.


def run_refusals(layouts: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """A token outside the vocabulary, or a field too short, in a sample that only one rank has; a missing field."""
    found = {}
    good = batch_of()
    tokens = good.token_ids.clone()
    tokens[-1] = VOCAB
    outside, lacking = replace(good, token_ids=tokens), replace(good, fields={})
    short = replace(good, fields={**good.fields, "advantages": good.fields["advantages"][:-1]})
    negative = replace(good, loss_weights=-good.loss_weights)
    for name, layout in layouts.items():
        found[name] = []
        with opened(config_of({}, layout), PolicyLoss()) as engine:
            for attempt, batch in (
                (engine.train_step, outside),
                (engine.forward_logprobs, outside),
                (engine.evaluate, outside),
                (engine.train_step, lacking),
                (engine.train_step, short),
                (engine.train_step, negative),
            ):
                with pytest.raises(DataError) as error:
                    attempt(batch)
                found[name].append(str(error.value))
            with pytest.raises(ConfigError, match="temperature"):
                engine.forward_logprobs(good, temperature=0.0)
            assert engine.train_step(good).step == 1
    return found


def test_every_rank_refuses_what_one_rank_cannot_take(ranks: Ranks, tmp_path: Any) -> None:
    """Else the other ranks would wait for the one that failed."""
    first, second = ranks.run(run_refusals, 2, scratch=tmp_path, layouts=LAYOUTS)
    assert first == second
    for messages in first.values():
        for message in messages[:3]:
            assert f"made:{len(LENGTHS) - 1}" in message
            assert str(VOCAB) in message
        assert "advantages" in messages[3]
        assert "fields['advantages']" in messages[4]
        assert "loss weight is negative" in messages[5]


# Frozen engines.


def run_frozen(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, layout in layouts.items():
        with opened(config_of({}, layout)) as engine:
            expected = engine.forward_logprobs(batch_of(), temperature=0.7), engine.evaluate(batch_of())
        with opened(config_of({"schedule": "cosine"}, layout, frozen=True)) as engine:
            scores = engine.forward_logprobs(batch_of(), temperature=0.7), engine.evaluate(batch_of())
            assert engine.optimizer is None
            assert engine.describe()["num_parameters"] == num_parameters(MODEL), "of the whole model, on every rank"
            assert not any(parameter.requires_grad for _, parameter in named_parameters(engine.parts))
            with pytest.raises(RuntimeError, match="frozen"):
                engine.train_step(batch_of())
        found[name] = expected, scores
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_frozen_engine_scores_and_does_not_learn(ranks: Ranks, tmp_path: Any, num_ranks: int) -> None:
    layouts = {"one": {}} if num_ranks == 1 else LAYOUTS
    for of_rank in ranks.run(run_frozen, num_ranks, scratch=tmp_path, layouts=layouts):
        for (expected, sums), (scores, frozen_sums) in of_rank.values():
            assert frozen_sums[:2] == pytest.approx(sums[:2], rel=1e-6)
            assert frozen_sums.metrics == sums.metrics
            for mine, theirs in zip(scores, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
                assert (mine[1:] < 0).all()
