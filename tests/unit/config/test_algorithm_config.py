"""The section `algorithm`: what presets and conventions lay beneath the user's keys, and what is refused."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from forge.config import load
from forge.config.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    Convention,
    CorrectionConfig,
    KLConfig,
    PolicyLossConfig,
    Preset,
)
from forge.config.algorithm_presets import CONVENTIONS, PRESETS
from forge.config.base import ConfigModel
from forge.config.loading import dump
from forge.errors import ConfigError


class Root(ConfigModel):
    algorithm: AlgorithmConfig = AlgorithmConfig()


def loaded(*overrides: str) -> AlgorithmConfig:
    return load(Root, overrides=[f"algorithm.{override}" for override in overrides]).algorithm


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        loaded(*overrides)
    return refused.value


# ---- Layers ----------------------------------------------------------------------------------------------------------


def test_grpo_is_what_the_schema_says_by_itself() -> None:
    config = AlgorithmConfig()
    assert config == AlgorithmConfig(preset="grpo") == loaded() == loaded("preset=grpo")
    sections = (config.advantage, config.loss, config.kl)
    assert sections == (AdvantageConfig(), PolicyLossConfig(), KLConfig())
    assert config.kl.coefficient == 0


@pytest.mark.parametrize(
    ("preset", "changed"),
    [
        ("dapo", {"loss": {"clip_high": 0.28}}),
        ("dr_grpo", {"advantage": {"scale": "none"}, "loss": {"average": "constant"}}),
        ("gspo", {"loss": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "average": "sequence_mean"}}),
        ("cispo", {"loss": {"kind": "cispo", "clip_low": 1.0, "clip_high": 4.0}}),
        ("sapo", {"loss": {"kind": "sapo", "average": "sequence_mean"}}),
        ("gigpo", {"advantage": {"function": "gigpo"}}),
        ("reinforce", {"advantage": {"baseline": "none", "scale": "none"}, "loss": {"kind": "reinforce"}}),
        (
            "rloo",
            {
                "advantage": {"baseline": "leave_one_out", "scale": "none"},
                "loss": {"kind": "reinforce"},
                "kl": {"estimator": "k1", "place": "reward"},
            },
        ),
        (
            "reinforce_pp",
            {
                "advantage": {"baseline": "none", "scale": "none", "whiten": True},
                "kl": {"estimator": "k1", "place": "reward"},
            },
        ),
        ("reinforce_pp_baseline", {"advantage": {"scale": "none", "whiten": True}, "kl": {"estimator": "k2"}}),
    ],
)
def test_a_preset_sets_what_it_is_known_for_and_nothing_else(preset: Any, changed: dict[str, Any]) -> None:
    plain, found = AlgorithmConfig().model_dump(), loaded(f"preset={preset}").model_dump()
    assert found.pop("preset") == preset
    for section, keys in changed.items():
        for key, value in keys.items():
            assert plain[section][key] != value, "this key says nothing"
            plain[section][key] = value
    assert found == {key: value for key, value in plain.items() if key != "preset"}


def test_later_layers_win() -> None:
    """Default 2.0 < convention 3.0 < the user's 4.0; the preset's clipping stays, and the user's average wins."""
    assert loaded().loss.correction.high == 2.0
    assert loaded("convention=trl").loss.correction == CorrectionConfig(kind="mask", level="sequence", high=3.0)
    config = loaded("loss.correction.high=4", "convention=trl", "preset=dapo", "loss.average=sequence_mean")
    assert config.loss.correction == CorrectionConfig(kind="mask", level="sequence", high=4.0)
    assert (config.loss.clip_high, config.loss.average, config.loss.proximal) == (0.28, "sequence_mean", "trainer")
    # What a convention says of a preset lies above the preset, and beneath the user.
    assert loaded("preset=cispo", "convention=verl").loss.clip_high == 0.2
    assert loaded("preset=cispo", "convention=verl", "loss.clip_high=1").loss.clip_high == 1.0
    assert loaded("preset=grpo", "convention=verl").loss.dual_clip == 3.0
    assert loaded("preset=grpo", "convention=verl", "loss.dual_clip=null").loss.dual_clip is None


def test_sections_given_as_objects_count_by_what_was_set_in_them() -> None:
    loss = PolicyLossConfig(average="sequence_mean", correction=CorrectionConfig(level="token"))
    config = AlgorithmConfig(preset="dapo", convention="trl", loss=loss, advantage=AdvantageConfig(clip=3.0))
    assert (config.loss.average, config.loss.clip_high) == ("sequence_mean", 0.28)
    assert config.loss.correction == CorrectionConfig(kind="mask", level="token", high=3.0)
    assert (config.advantage.clip, config.advantage.epsilon) == (3.0, 1e-4)


def test_every_name_has_its_values() -> None:
    assert set(PRESETS) == set(get_args(Preset))
    assert set(CONVENTIONS) == set(get_args(Convention))
    assert {preset for _, particular in CONVENTIONS.values() for preset in particular} <= set(PRESETS)


@pytest.mark.parametrize("preset", get_args(Preset))
@pytest.mark.parametrize("convention", [None, *get_args(Convention)])
def test_what_is_dumped_reads_back_equal(preset: Any, convention: Any, tmp_path: Any) -> None:
    root = Root.model_validate({"algorithm": {"preset": preset, "convention": convention, "loss": {"dual_clip": 5}}})
    file = tmp_path / "config.yaml"
    file.write_text(dump(root), encoding="utf-8")
    assert load(Root, files=[file]) == root
    assert root.algorithm.loss.dual_clip == 5
    assert root.algorithm.kl.coefficient == 0


@pytest.mark.parametrize(("convention", "epsilon"), [("trl", 1e-4), ("verl", 1e-6), ("openrlhf", 1e-9), ("nemo", 1e-6)])
def test_conventions_by_what_they_are_known_for(convention: Any, epsilon: float) -> None:
    config = AlgorithmConfig(convention=convention)
    assert (config.advantage.epsilon, config.advantage.std_ddof) == (epsilon, 1)
    assert config.loss.proximal == "trainer"
    assert config.loss.average == "token_mean"
    assert config.loss.correction.kind == ("mask" if convention == "trl" else "none")
    assert config.kl.weighted == (convention == "trl")
    assert config.advantage.scale == ("others_std" if convention == "nemo" else "group_std")


@pytest.mark.parametrize(
    ("convention", "preset", "wanted"),
    [
        ("trl", "grpo", {"loss": {"count_masked": True}, "kl": {"clamp": None, "credit": "completion"}}),
        ("verl", "grpo", {"loss": {"count_masked": True}, "kl": {"credit": "completion"}}),
        ("verl", "reinforce_pp", {"kl": {"credit": "return_to_go"}}),
        ("verl", "reinforce_pp_baseline", {"kl": {"credit": "completion"}}),
        ("openrlhf", "rloo", {"advantage": {"whiten": False}, "loss": {"kind": "clip", "count_masked": False}}),
        ("openrlhf", "grpo", {"kl": {"credit": "return_to_go"}}),
        ("nemo", "grpo", {"kl": {"score_gradient": True, "weighted": False, "credit": "token"}}),
        ("nemo", "rloo", {"kl": {"place": "loss", "estimator": "k3"}}),
        ("nemo", "cispo", {"loss": {"clip_low": 1.0, "clip_high": 5.0}}),
        *[
            (
                convention,
                preset,
                {
                    "advantage": {
                        "whiten": True,
                        "whiten_over": "tokens",
                        "std_ddof": ddof,
                        "epsilon": 1e-8,
                        "epsilon_place": place,
                    }
                },
            )
            for convention, ddof, place in [("verl", 1, "variance"), ("openrlhf", 0, "floor"), ("nemo", 0, "floor")]
            for preset in ("reinforce_pp", "reinforce_pp_baseline")
        ],
    ],
)
def test_what_a_convention_sets_for_a_preset(convention: Any, preset: Any, wanted: dict[str, Any]) -> None:
    config = loaded(f"convention={convention}", f"preset={preset}").model_dump()
    found = {section: {key: config[section][key] for key in keys} for section, keys in wanted.items()}
    assert found == wanted


def test_a_file_that_an_older_version_wrote_still_loads() -> None:
    """It has every value of its time written out, as 0.1.0 did: RLOO of `openrlhf` was whitened."""
    old = {"preset": "rloo", "convention": "openrlhf", "advantage": {"whiten": True, "std_ddof": 0, "epsilon": 1e-9}}
    config = AlgorithmConfig.model_validate({**old, "kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1"}})
    assert (config.advantage.whiten, config.advantage.std_ddof, config.advantage.epsilon) == (True, 0, 1e-9)
    assert config.advantage.whiten_over == "tokens"


@pytest.mark.parametrize(
    ("convention", "clamps"),
    [
        ("trl", [None, None, None]),
        ("verl", [None, None, 10.0]),
        ("openrlhf", [10.0, 10.0, 10.0]),
        ("nemo", [10.0, 10.0, 10.0]),
    ],
)
def test_which_estimates_a_convention_clamps(convention: Any, clamps: list[float | None]) -> None:
    """`verl` clamps k3 alone; the user's estimator decides, wherever it was written."""
    given = [loaded(f"convention={convention}", f"kl.estimator={name}").kl.clamp for name in ("k1", "k2", "k3")]
    objects = [AlgorithmConfig(convention=convention, kl=KLConfig(estimator=name)) for name in ("k1", "k2", "k3")]
    assert given == [each.kl.clamp for each in objects] == clamps
    assert loaded(f"convention={convention}", "kl.clamp=5").kl.clamp == 5
    assert loaded(f"convention={convention}", "kl.clamp=null").kl.clamp is None
    assert AlgorithmConfig().kl.clamp is None


@pytest.mark.parametrize("word", ["inf", ".inf", "Infinity", "+inf"])
def test_an_upper_bound_may_be_infinite(word: str, tmp_path: Any) -> None:
    written = ("loss.proximal=trainer", "loss.correction.kind=truncate", f"loss.correction.high={word}")
    config = loaded(*written, f"loss.clip_high={word}")
    assert (config.loss.correction.high, config.loss.clip_high) == (float("inf"), float("inf"))
    file = tmp_path / "config.yaml"
    file.write_text(dump(Root(algorithm=config)), encoding="utf-8")
    assert load(Root, files=[file]).algorithm == config
    text = json.dumps(config.model_dump(mode="json"), allow_nan=False)
    assert AlgorithmConfig.model_validate_json(text) == config


# ---- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "path", "parts"),
    [
        (["loss.correction.low=3"], "loss.correction.low", ["which is 2", "lower it"]),
        (["loss.correction.high=.nan"], "loss.correction.high", ["greater than 0", "`inf` for no limit"]),
        (["loss.clip_high=.nan"], "loss.clip_high", ["equal to 0", "`inf` for no limit"]),
        (["loss.correction.high=-inf"], "loss.correction.high", ["-inf"]),
        (["loss.correction.high=many"], "loss.correction.high", ["many"]),
        (["loss.correction.low=.inf"], "loss.correction.low", ["finite"]),
        (["kl.clamp=0"], "kl.clamp", ["0"]),
        (["loss.tau_positive=0"], "loss.tau_positive", ["0"]),
        (["loss.correction.sequence_mask={low: 2, high: 1}"], "loss.correction.sequence_mask.low", ["which is 1"]),
        (["advantage.gamma=0"], "advantage.gamma", ["0"]),
        (["advantage.gamma=0.9", "advantage.function=turn"], "advantage.gamma", ["`turn`", "args.gamma"]),
        (
            ["advantage.gamma=0.9", "advantage.whiten=true"],
            "advantage.whiten_over",
            ["`tokens` with advantage.gamma `0.9`", "algorithm.advantage.gamma: 1"],
        ),
        (["preset=gigpo", "advantage.whiten=true"], "advantage.whiten", ["false with advantage.function `gigpo`"]),
        (["preset=gigpo", "advantage.scale=batch_std"], "advantage.scale", ["group_std or others_std or none"]),
        (["preset=gigpo", "advantage.baseline=none"], "advantage.baseline", ["group_mean or leave_one_out"]),
        (
            ["preset=reinforce_pp", "kl.coefficient=0.1", "kl.credit=token"],
            "advantage.whiten_over",
            ["`tokens` with kl.credit `token`", "whiten_over: tokens"],
        ),
        (["loss.length=5"], "loss.length", ["`token_mean`", "average: constant"]),
        (["loss.clip_low=1.5"], "loss.clip_low", ["1.5"]),
        (["loss.dual_clip=1"], "loss.dual_clip", ["1"]),
        (["preset=grop"], "preset", ["grpo"]),
        (["convention=tlr"], "convention", ["trl"]),
        (["preset=[dapo]"], "preset", ["dapo"]),
        (["preset=dapo", "loss=5"], "loss", ["5"]),
        (["preset=dapo", "loss.clip=0.2"], "loss.clip", ["clip"]),
    ],
)
def test_a_broken_rule_is_named_with_its_repair(overrides: list[str], path: str, parts: list[str]) -> None:
    error = refusal(*overrides)
    assert error.path == f"algorithm.{path}"
    assert [part for part in parts if part not in str(error)] == [], str(error)
    assert error.rule
    assert error.repair


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.proximal=trainer", "loss.correction.kind=truncate"],
        ["preset=rloo", "loss.correction.kind=truncate"],
        ["loss.correction.kind=mask", "loss.correction.low=0.5"],
        ["preset=dr_grpo", "loss.length=5"],
        ["preset=reinforce_pp", "kl.credit=token"],
        ["preset=reinforce_pp", "kl.coefficient=0.1", "kl.credit=token", "advantage.whiten_over=tokens"],
        ["preset=rloo", "kl.coefficient=0.1", "kl.credit=return_to_go"],
    ],
)
def test_what_is_allowed(overrides: list[str]) -> None:
    assert loaded(*overrides) != AlgorithmConfig()
