"""Text: how YAML is read, dumping and saving, and that nothing can be changed."""

from __future__ import annotations

import copy
import math
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ConfigDict, Field, ValidationError

import forge.config.loading as saving
from forge._version import __version__
from forge.config import ConfigModel, ForgeConfig, FrozenDict, PolicyConfig, dump, load, save
from forge.config.yaml_text import read_yaml, write_yaml
from forge.errors import ConfigError


def read(text: str) -> Any:
    document = read_yaml(text, source="test")
    assert not document.problems
    return document.data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-2e+3", -2000.0),
        ("1.5e-4", 1.5e-4),
        (".5", 0.5),
        ("3.", 3.0),
        ("-.inf", -math.inf),
        ("1_000_000", 1000000),
        ("0x1F", 31),
        ("0o17", 15),
        ("-0", 0),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        # text here, though YAML 1.1 makes of them: 5400, a date, true, false, 7
        ("01:30:00", "01:30:00"),
        ("2026-01-31", "2026-01-31"),
        ("yes", "yes"),
        ("off", "off"),
        ("007", "007"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("1.2.3", "1.2.3"),
        ('"1e-4"', "1e-4"),
    ],
)
def test_plain_words(text: str, value: object) -> None:
    found = read(text)
    assert found == value
    assert type(found) is type(value)


def test_nan_is_read() -> None:
    assert math.isnan(read(".nan"))


def test_keys_are_text() -> None:
    assert read("{1: a, true: b, ~: c, on: d}") == {"1": "a", "true": "b", "~": "c", "on": "d"}


def test_only_a_plain_merge_key_is_refused() -> None:
    assert read('{"<<": 1}') == {"<<": 1}


texts = st.text(st.characters(codec="utf-8"), max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))


@given(values)
def test_what_is_written_is_read_back(value: Any) -> None:
    found = read(write_yaml(value))
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    "text", ["yes", "on", "1e-4", "007", "01:30:00", "2026-01-31", "null", "=", "<<", "0b1", "1_0"]
)
def test_text_is_quoted_where_either_version_of_yaml_would_read_something_else(text: str) -> None:
    assert yaml.safe_load(write_yaml({"a": text})) == {"a": text} == read(write_yaml({"a": text}))


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)
seconds = st.floats(min_value=0.001, max_value=1e9)
workers = st.fixed_dictionaries(
    {},
    optional={
        "env": st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,5}", fullmatch=True), texts, max_size=3),
        "setup_timeout_s": st.none() | seconds,
        "max_restarts": st.none() | st.integers(0, 64),
    },
)
overlays = st.fixed_dictionaries(
    {},
    optional={
        "run": st.fixed_dictionaries({"name": names, "seed": st.integers(0, 2**32 - 1)}),
        "model": st.fixed_dictionaries(
            {}, optional={"preset": st.sampled_from(["tiny", "llama3_1_8b"]), "num_experts": st.none() | st.integers(1)}
        ),
        "launcher": st.fixed_dictionaries(
            {"hosts": st.lists(st.integers(1, 65535).map(lambda port: f"tcp://h:{port}"), unique=True, max_size=3)}
        ),
        "workers": st.fixed_dictionaries({"generator": workers}),
        "generator": st.fixed_dictionaries({"with_gpus": st.none() | st.booleans()}),
    },
)


@settings(max_examples=60, deadline=None)
@given(overlays)
def test_a_dumped_configuration_loads_back_equal(tmp_path_factory: pytest.TempPathFactory, overlay: Any) -> None:
    config = load(PolicyConfig, defaults=overlay)
    file = tmp_path_factory.getbasetemp() / "dumped.yaml"
    file.write_text(dump(config), encoding="utf-8")
    assert load(PolicyConfig, files=[file]) == config


def test_a_null_over_a_preset_survives_the_dump(tmp_path: Path) -> None:
    overrides = ["model.preset=llama3_1_8b", "model.rope_scaling=null", "~model.num_layers"]
    config = load(ForgeConfig, overrides=overrides)
    assert (config.model.rope_scaling, config.model.num_layers) == (None, None)
    assert load(ForgeConfig, files=[save(config, tmp_path)]) == config


class Rich(ConfigModel):
    model_config = ConfigDict(allow_inf_nan=True)

    numbers: list[int] = Field(default_factory=lambda: [1, 2])
    table: dict[str, list[dict[str, int]]] = Field(default_factory=lambda: {"a": [{"b": 1}]})
    where: Path = Path("x")
    limit: float = math.inf
    by_rank: Mapping[int, str] = Field(default_factory=FrozenDict)


def test_types_that_yaml_lacks_survive(tmp_path: Path) -> None:
    config = load(Rich, overrides=["where=a/b", "by_rank={0: x, 1: y}", "numbers=[3]"])
    assert (config.where, config.by_rank, config.limit) == (Path("a/b"), {0: "x", 1: "y"}, math.inf)
    assert load(Rich, files=[save(config, tmp_path)]) == config


def test_saving_is_whole_and_says_who_wrote_it(tmp_path: Path) -> None:
    config = load(ForgeConfig, overrides=["run.seed=7"])
    file = save(config, tmp_path / "new" / "run")
    assert file == tmp_path / "new" / "run" / "config.yaml"
    assert __version__ in file.read_text().splitlines()[0]
    assert file.read_text().startswith("#")
    save(load(ForgeConfig, overrides=["run.seed=8"]), file.parent)
    assert load(ForgeConfig, files=[file]).run.seed == 8
    assert sorted(os.listdir(file.parent)) == ["config.1.yaml", "config.yaml"], "an earlier one that differs is kept"
    assert load(ForgeConfig, files=[file.with_name("config.1.yaml")]).run.seed == 7
    save(load(ForgeConfig, overrides=["run.seed=8"]), file.parent)
    assert len(os.listdir(file.parent)) == 2, "the same one is not kept twice"


def test_a_save_that_fails_keeps_the_old_file_and_leaves_no_rubbish(tmp_path: Path) -> None:
    (tmp_path / saving.FILE_NAME).mkdir()
    with pytest.raises(ConfigError) as caught:
        save(ForgeConfig(), tmp_path)
    assert caught.value.path == str(tmp_path / "config.yaml")
    assert caught.value.rule
    assert caught.value.repair
    assert os.listdir(tmp_path) == ["config.yaml"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        save(ForgeConfig(), tmp_path / "file")


def test_nothing_can_be_changed() -> None:
    config = load(ForgeConfig, overrides=["launcher.kubernetes.labels={X: y}", "launcher.hosts=[tcp://h:1]"])
    with pytest.raises(ValidationError):
        config.run = config.run
    with pytest.raises(ValidationError):
        config.run.seed = 3
    env: Any = config.launcher.kubernetes.labels
    for change in (
        lambda: env.update(X="z"),
        lambda: env.__setitem__("X", "z"),
        lambda: env.__delitem__("X"),
        lambda: env.__ior__({"X": "z"}),
        env.clear,
        env.popitem,
        lambda: env.pop("X"),
        lambda: env.setdefault("Z", "z"),
    ):
        with pytest.raises(TypeError, match="cannot be changed"):
            change()
    assert env == {"X": "y"}
    assert isinstance(config.launcher.hosts, tuple)


@pytest.mark.parametrize("overrides", [[], ["numbers=[1]", "table={a: [{b: 2}]}"]])
def test_lists_and_dicts_of_an_application_are_frozen_too_defaults_included(overrides: list[str]) -> None:
    config = load(Rich, overrides=overrides)
    numbers: Any = config.numbers
    table: Any = config.table
    assert isinstance(numbers, tuple)
    assert isinstance(table, FrozenDict)
    assert isinstance(table["a"], tuple)
    assert isinstance(table["a"][0], FrozenDict)


def test_a_configuration_can_be_copied_pickled_and_hashed() -> None:
    config = load(ForgeConfig, overrides=["launcher.kubernetes.labels={X: y}"])
    for twin in (copy.deepcopy(config), copy.copy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert hash(twin) == hash(config)
        assert isinstance(twin.launcher.kubernetes.labels, FrozenDict)


def test_integers_are_taken_for_numbers() -> None:
    assert (
        repr(load(ForgeConfig, overrides=["launcher.slurm.start_timeout_s=2"]).launcher.slurm.start_timeout_s) == "2.0"
    )


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 3000, "[" * 3000 + "]" * 3000])
def test_text_that_is_nested_too_deep_is_a_problem(text: str) -> None:
    document = read_yaml(text, source="deep.yaml")
    (problem,) = document.problems
    assert (document.readable, document.data, problem.path) == (False, None, "deep.yaml")
    assert problem.rule == "must not be nested hundreds of levels deep"
    assert problem.repair == "check its brackets"
