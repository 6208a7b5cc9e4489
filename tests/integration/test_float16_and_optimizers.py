"""Steps on ranks in float16 and with other optimizers.

In float16: gradients of float32 to rounding, loss scaling that never loses a batch, and exact resume. With Muon and an
optimizer of one's own: the steps of one rank on shards, and exact resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_ranks import Ranks, gradients_of, made_batch, opened, ranks_of, whole_weights
from forge.config import AdapterConfig, DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.errors import CheckpointError, NonFiniteError
from forge.losses import CrossEntropy, KLPenalty, Loss, PolicyLoss
from forge.trainer.checkpointer import Checkpointer
from forge.types import Batch

VOCAB = 64
MODEL = ModelConfig(
    family="qwen3",
    num_layers=2,
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=VOCAB,
    max_seq_len=64,
    rope_theta=100.0,
    norm_eps=1e-6,
    tie_embeddings=False,
)
LENGTHS = (9, 3, 15, 4, 2, 11, 16, 7)
FIELDS = ("advantages", "old_logprobs", "ref_logprobs")
LOSSES: dict[str, Loss] = {
    "cross entropy": CrossEntropy(),
    "policy": PolicyLoss(kl=KLPenalty(0.1), entropy_coefficient=0.01),
    "plain policy": PolicyLoss(),
}
HUGE = 2.0**24


def config(
    precision: str = "float16",
    *,
    folder: Path | None = None,
    adapter: bool = False,
    layout: Any = None,
    **training: Any,
) -> TrainerConfig:
    options = {"max_seq_len": 16, "schedule": "constant", "learning_rate": 1e-3, "weight_decay": 0.1, **training}
    return TrainerConfig(
        model=MODEL,
        adapter=AdapterConfig(rank=2) if adapter else None,
        training=TrainingConfig(**options),
        distributed=DistributedConfig(**{"with_gpus": False, "shard": 1, "precision": precision, **(layout or {})}),
        checkpoint_dir=folder,
    )


def batch(seed: int = 3) -> Batch:
    return made_batch(LENGTHS, vocab=VOCAB, fields=FIELDS, seed=seed)


def scaling(scale: float = 2.0**16, **options: Any) -> dict[str, Any]:
    return {"loss_scaling": {"initial_scale": scale, **options}}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield from ranks_of(__name__)


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each gradient, as a part of its largest value."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name].double() - each.double()).abs().max() / each.double().abs().max())
        for name, each in expected.items()
        if each is not None and float(each.abs().max()) > 0
    }


# ---- Gradients ------------------------------------------------------------------------------------------------------


def gradient_cases(cases: list[tuple[str, dict[str, Any], str]]) -> list[tuple[float, dict[str, Tensor]]]:
    """Cases that differ in their losses alone share an engine, whose rate is too low to move weights."""
    found: dict[int, tuple[float, dict[str, Tensor]]] = {}
    for precision, options in {str(case[:2]): case[:2] for case in cases}.values():
        still = {"learning_rate": 1e-30, "weight_decay": 0.0, "max_grad_norm": None}
        with opened(config(precision, **still, **options), LOSSES["policy"]) as engine:
            for place, case in enumerate(cases):
                if case[:2] == (precision, options):
                    engine.loss = LOSSES[case[2]]
                    with gradients_of(engine) as gradients:
                        norm = engine.train_step(batch()).grad_norm
                    found[place] = (norm, {name: each for name, each in gradients.items() if each is not None})
    return [found[place] for place in range(len(cases))]


ROUNDING = 0.012
"""By so much of a tensor's largest gradient, float16 may differ from float32: 24 roundings. Which sums are rounded when
differs between CPUs, and with it the worst difference: 0.004 to 0.0061 were seen."""
ONE_ROW = {"microbatch_tokens": 128}
SHARED = {"share_prefixes": True, "microbatch_tokens": 128}


def test_gradients_are_those_of_float32_whatever_the_loss_and_the_split(ranks: Ranks, tmp_path: Path) -> None:
    """Each is rounded to 11 bits a few times on its way, and the loss scale leaves no trace."""
    cases: list[tuple[str, dict[str, Any], str]] = []
    for loss in LOSSES:
        cases += [("float32", ONE_ROW, loss), ("float16", ONE_ROW, loss), ("float16", {}, loss), ("bfloat16", {}, loss)]
    cases += [("float32", {"adapter": True}, "policy"), ("float16", {"adapter": True}, "policy")]
    cases += [("float16", SHARED, "policy"), ("float16", ONE_ROW | scaling(2.0**15), "policy")]
    ((*found,),) = ranks.run(gradient_cases, 1, scratch=tmp_path, cases=cases)
    by_case = {(case[0], str(case[1]), case[2]): answer for case, answer in zip(cases, found, strict=True)}
    for loss in LOSSES:
        norm, expected = by_case["float32", str(ONE_ROW), loss]
        worst_bf16 = max(differences(by_case["bfloat16", "{}", loss][1], expected).values())
        for options in ("{}", str(ONE_ROW)):
            own_norm, own = by_case["float16", options, loss]
            worst = max(differences(own, expected).values())
            assert worst < ROUNDING, (loss, options)
            assert worst < worst_bf16 / 2, "float16 has 3 bits more than bfloat16"
            assert own_norm == pytest.approx(norm, rel=2e-3)
    expected = by_case["float32", str(ONE_ROW), "policy"][1]
    assert max(differences(by_case["float16", str(SHARED), "policy"][1], expected).values()) < ROUNDING
    (of_adapter, exact) = (by_case[kind, str({"adapter": True}), "policy"][1] for kind in ("float16", "float32"))
    assert max(differences(of_adapter, exact).values()) < ROUNDING
    lower = by_case["float16", str(ONE_ROW | scaling(2.0**15)), "policy"][1]
    same = by_case["float16", str(ONE_ROW), "policy"][1]
    assert max(differences(lower, same).values()) < 1e-4, "a scale is exact but for what underflows"


def test_gradients_on_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ((_, expected),) = ranks.run(gradient_cases, 1, scratch=tmp_path / "one", cases=[("float32", ONE_ROW, "policy")])[0]
    layouts: list[dict[str, Any]] = [{"shard": 2}, {"replicate": 2}, {"tensor": 2}, {"pipeline": 2}]
    cases = [("float16", {"layout": layout}, "policy") for layout in layouts]
    answers = ranks.run(gradient_cases, 2, scratch=tmp_path / "two", cases=cases)
    for place, layout in enumerate(layouts):
        joined = {name: each for answer in answers for name, each in answer[place][1].items()}
        assert max(differences(joined, expected).values()) < ROUNDING, layout
        assert answers[0][place][0] == answers[1][place][0]


# ---- Overflows ------------------------------------------------------------------------------------------------------


def train(options: dict[str, Any], num_steps: int, *, loss: str = "policy") -> tuple[list[Any], dict[str, Tensor], Any]:
    """Return each step's result, the weights afterwards, and the loss scale."""
    with opened(config(**options), LOSSES[loss]) as engine:
        results = [engine.train_step(batch(seed)) for seed in range(num_steps)]
        return results, whole_weights(engine), engine.loss_scale


def test_a_batch_that_overflows_is_trained_on_once_at_a_lower_scale(ranks: Ranks, tmp_path: Path) -> None:
    ((results, weights, scale),) = ranks.run(train, 1, scratch=tmp_path / "a", options=scaling(HUGE), num_steps=2)
    reached = results[0].metrics["loss_scale"]
    assert results[0].metrics["overflows"] >= 2
    assert reached == HUGE / 2 ** results[0].metrics["overflows"]
    assert [result.skipped for result in results] == [False, False]
    assert [result.step for result in results] == [1, 2]
    ((plain, expected, other),) = ranks.run(train, 1, scratch=tmp_path / "b", options=scaling(reached), num_steps=2)
    assert plain[0].metrics["overflows"] == 0
    assert (plain[0].loss, plain[0].grad_norm) == (results[0].loss, results[0].grad_norm)
    assert all(torch.equal(weights[name], each) for name, each in expected.items())
    assert scale == other


def skip_and_stop() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with opened(config(**scaling(HUGE, max_retries=0)), LOSSES["policy"]) as engine:
        before = whole_weights(engine)
        found["skipped"] = engine.train_step(batch())
        found["scale"] = engine.loss_scale.value
        after = whole_weights(engine)
        found["same"] = all(torch.equal(before[name], each) for name, each in after.items())
    with opened(config(**scaling(HUGE, min_scale=HUGE)), LOSSES["policy"]) as engine:
        try:
            engine.train_step(batch())
        except NonFiniteError as error:
            found["error"], found["kept"] = error, (engine.step, engine.loss_scale.value)
    with opened(config(**scaling()), LOSSES["policy"]) as engine:
        spoiled = batch()
        spoiled.fields["advantages"][spoiled.loss_weights != 0] = float("nan")
        try:
            engine.train_step(spoiled)
        except NonFiniteError as error:
            found["nan"], found["untouched"] = error, engine.loss_scale.value
    return found


def test_retries_end_and_what_a_lower_scale_cannot_help_is_an_error(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks.run(skip_and_stop, 1, scratch=tmp_path)
    assert found["skipped"].skipped
    assert found["skipped"].metrics["overflows"] == 1
    assert found["scale"] == HUGE / 2, "the next batch starts lower"
    assert found["same"]
    assert "min_scale" in found["error"].rule
    assert found["kept"] == (0, HUGE), "as before the step"
    assert "min_scale" not in found["nan"].rule, "the loss itself is not finite: nothing is retried"
    assert found["untouched"] == 2.0**16


def one_overflows() -> list[Any]:
    """On two ranks, each with half of the samples, a batch whose advantages are huge in those of one rank alone."""
    found = []
    for layout in ({"shard": 2}, {"replicate": 2}):
        with opened(config(layout=layout, **scaling(2.0**12)), LOSSES["plain policy"]) as engine:
            large = made_batch((16, 16), vocab=VOCAB, fields=FIELDS, seed=1)
            large.fields["advantages"][:16] *= 3e5
            result = engine.train_step(large)
            weights = whole_weights(engine)
            found.append((result.metrics["overflows"], engine.loss_scale, weights))
    return found


def test_ranks_agree_when_one_of_them_overflows(ranks: Ranks, tmp_path: Path) -> None:
    one, other = ranks.run(one_overflows, 2, scratch=tmp_path)
    for (overflows, scale, weights), theirs in zip(one, other, strict=True):
        assert overflows >= 1
        assert (overflows, scale) == theirs[:2]
        assert all(torch.equal(weights[name], each) for name, each in theirs[2].items())


# ---- Resume ---------------------------------------------------------------------------------------------------------


def save_and_resume(folder: Path) -> list[Any]:
    """Return the loss scale and weights after five steps: in one go, and in two runs."""
    options = scaling(HUGE, growth_interval=2)
    answers = []
    with opened(config(folder=folder, **options), LOSSES["policy"]) as engine:
        checkpointer = Checkpointer(engine)
        for seed in range(5):
            engine.train_step(batch(seed))
            if seed == 2:
                checkpointer.save()
                checkpointer.wait()
                answers.append(engine.loss_scale)
        checkpointer.close()
        answers.append((engine.loss_scale, whole_weights(engine)))
    with opened(config(folder=folder, **options), LOSSES["policy"]) as engine:
        checkpointer = Checkpointer(engine)
        checkpointer.load("must")
        answers.append(engine.loss_scale)
        for seed in (3, 4):
            engine.train_step(batch(seed))
        checkpointer.close()
        answers.append((engine.loss_scale, whole_weights(engine)))
    return answers


def test_a_resume_restores_the_scale_and_its_counter(ranks: Ranks, tmp_path: Path) -> None:
    (answers,) = ranks.run(save_and_resume, 1, scratch=tmp_path, folder=tmp_path / "checkpoints")
    saved, whole, loaded, resumed = answers
    assert saved == loaded
    assert saved.num_good == 1, "one step after a raise: the counter is not 0, so that losing it would show"
    assert saved.value < HUGE
    assert whole[0] == resumed[0]
    assert all(torch.equal(whole[1][name], each) for name, each in resumed[1].items())


# ---- Optimizers ------------------------------------------------------------------------------------------------------


MUON = {"optimizer": "muon"}
LION = {"optimizer": "own_optimizers:Lion", "optimizer_args": {"gain": 2.0}}
LION_ON_SHARDS = LION | {"layout": {"shard": 2}}


def plain(folder: Path | None = None, **options: Any) -> TrainerConfig:
    return config("float32", folder=folder, **({"learning_rate": 1e-2} | options))


def train_each(options: list[dict[str, Any]], num_steps: int) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for each in options:
        with opened(plain(**each)) as engine:
            results = [engine.train_step(batch(seed)) for seed in range(num_steps)]
            found.append(([result.loss for result in results], whole_weights(engine)))
    return found


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max(float((one[name] - each).abs().max()) for name, each in other.items())


def test_shards_take_the_steps_of_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Muon's weights move by about 1e-2 in a step: a shard that were orthogonalised alone would differ by as much."""
    runs = [MUON, LION]
    (alone,) = ranks.run(train_each, 1, scratch=tmp_path / "one", options=runs, num_steps=2)
    options: list[dict[str, Any]] = [MUON | {"layout": {"shard": 2}}, MUON | {"layout": {"tensor": 2}}]
    options += [LION_ON_SHARDS]
    one, other = ranks.run(train_each, 2, scratch=tmp_path / "two", options=options, num_steps=2)
    for place, each in enumerate(options):
        expected = alone[0 if each["optimizer"] == "muon" else 1]
        if each["optimizer"] == "muon":
            assert largest_difference(one[place][1], expected[1]) < 5e-4, each
        else:  # a sign flips where a gradient is 0 but for rounding
            assert one[place][0] == pytest.approx(expected[0], rel=1e-3), each
        assert largest_difference(one[place][1], other[place][1]) == 0


def save_and_continue(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return the weights after four steps: in one go, and in two runs; and of a checkpoint before the first step."""
    found: dict[str, Any] = {}
    with opened(plain(folder=folder, **options)) as engine:
        checkpointer = Checkpointer(engine)
        checkpointer.save()
        checkpointer.wait()
        for seed in range(4):
            engine.train_step(batch(seed))
            if seed == 1:
                checkpointer.save()
                checkpointer.wait()
        found["whole"] = whole_weights(engine)
        checkpointer.close()
    for name, start in (("resumed", 2), *([("fresh", 0)] if options == LION_ON_SHARDS else [])):
        with opened(plain(folder=folder, **options)) as engine:
            checkpointer = Checkpointer(engine)
            checkpointer.load(str(folder / f"step-{start:08d}"))
            for seed in range(start, 4):
                engine.train_step(batch(seed))
            found[name] = whole_weights(engine)
            checkpointer.close()
    if options != LION_ON_SHARDS:
        return found
    with opened(plain(folder=folder, layout=options["layout"])) as engine:
        checkpointer = Checkpointer(engine)
        try:
            checkpointer.load("must")
        except CheckpointError as error:
            found["error"] = error
        checkpointer.close()
    return found


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, LION_ON_SHARDS),
        (2, MUON | {"layout": {"shard": 2}}),
        (1, MUON | {"adapter": True}),
    ],
    ids=["own on shards", "muon on shards", "muon with an adapter"],
)
def test_a_resume_continues_to_the_bit(ranks: Ranks, tmp_path: Path, num_ranks: int, options: dict[str, Any]) -> None:
    folder = tmp_path / "checkpoints"
    found = ranks.run(save_and_continue, num_ranks, scratch=tmp_path, folder=folder, options=options)[0]
    for name in found.keys() - {"whole", "error"}:
        assert largest_difference(found[name], found["whole"]) == 0, name
    if options == LION_ON_SHARDS:
        assert "fresh" in found, "from a checkpoint before the first step, when there are no states yet"
        error = found["error"]
        assert (error.path, error.value) == ("training.optimizer", "adamw")
        assert options["optimizer"] in error.rule
