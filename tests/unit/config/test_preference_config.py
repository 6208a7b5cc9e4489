"""The section `preference` and what it demands of others: defaults by kind, and keys that a kind does not read."""

from __future__ import annotations

import pytest

from forge.config import InvalidConfig, PreferenceConfig, load
from forge.memory import Card, plan_memory, resolve_run


def problem(*overrides: str) -> tuple[str, str]:
    with pytest.raises(InvalidConfig) as caught:
        load(PreferenceConfig, overrides=list(overrides))
    (found,) = caught.value.problems
    return str(found.path), str(found.rule)


@pytest.mark.parametrize(
    ("kind", "beta", "nll", "loss_on", "mode"),
    [
        ("dpo", 0.1, 0.0, "answers", "precomputed"),
        ("ipo", 0.1, 0.0, "answers", "precomputed"),
        ("kto", 0.1, 0.0, "answers", "precomputed"),
        ("orpo", 0.1, 1.0, "all", "none"),
        ("simpo", 2.0, 0.0, "answers", "none"),
    ],
)
def test_what_is_usual_depends_on_the_loss(kind: str, beta: float, nll: float, loss_on: str, mode: str) -> None:
    config = load(PreferenceConfig, overrides=[f"preference.kind={kind}"])
    loss = config.preference
    assert (loss.chosen_beta, loss.chosen_nll_coefficient) == (beta, nll)
    assert (config.chosen_loss_on, config.reference_mode) == (loss_on, mode)
    assert (
        load(PreferenceConfig, overrides=[f"preference.kind={kind}", "preference.beta=0.7"]).preference.chosen_beta
        == 0.7
    )


@pytest.mark.parametrize(
    ("overrides", "path", "rule"),
    [
        (["preference.gamma=1.0"], "preference.gamma", "only simpo read it"),
        (["preference.kind=ipo", "preference.variant=hinge"], "preference.variant", "only dpo read it"),
        (
            ["preference.kind=kto", "preference.nll_coefficient=1"],
            "preference.nll_coefficient",
            "left out with kind: kto",
        ),
        (
            ["preference.variant=hinge", "preference.label_smoothing=0.1"],
            "preference.label_smoothing",
            "0 with variant",
        ),
        (["preference.kind=simpo", "reference.mode=online"], "reference.mode", "none with preference.kind: simpo"),
        (["reference.mode=none"], "reference.mode", "precomputed or online with preference.kind: dpo"),
        (["preference.kind=orpo", "reference.path=x"], "reference.path", "null with preference.kind: orpo"),
        (["data.loss_on=all"], "data.loss_on", "unless preference.nll_coefficient is above 0"),
        (
            ["preference.kind=kto", "training.batch_size=1"],
            "training.batch_size",
            "at least 2 with preference.kind: kto",
        ),
    ],
)
def test_keys_that_would_have_no_effect_are_refused(overrides: list[str], path: str, rule: str) -> None:
    found = problem(*overrides)
    assert found[0] == path
    assert rule in found[1]


def test_the_memory_of_a_reference_is_planned() -> None:
    card = Card(80 << 30, 2)
    base = ["model.preset=qwen3_0_6b", "distributed.shard=1", "distributed.with_gpus=true"]

    def names(*overrides: str) -> list[str]:
        run = resolve_run(load(PreferenceConfig, overrides=[*base, *overrides]), card=card)
        return [device.name for device in plan_memory(run, card=card).gpus]

    assert names() == ["trainer"]
    assert names("reference.mode=online") == ["trainer", "reference"]
    assert names("reference.mode=online", "adapter.rank=8") == ["trainer"]
    long_rows = [*base, "training.max_seq_len=1024", "training.microbatch_tokens=2048"]
    run = resolve_run(load(PreferenceConfig, overrides=long_rows), card=card)
    assert run.attended_ratio > 1, "two answers share their prompt"
    assert "no second model is in memory" in " ".join(run.notes)
