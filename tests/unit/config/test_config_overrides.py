"""Overrides: how they are read and what they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from forge.config import ConfigModel, FrozenDict, InvalidConfig, load, load_with_origins, split_words
from forge.config.layers import Assignment, Removal, parse_override
from forge.config.problems import format_path, parse_path
from forge.config.yaml_text import write_yaml


class Stage(ConfigModel):
    name: str = ""
    steps: int = 0


class Loose(ConfigModel):
    text: str | None = "default"
    stages: tuple[Stage, ...] = ()
    labels: Mapping[str, str] = Field(default_factory=FrozenDict)
    nested: Mapping[str, Mapping[str, int]] = Field(default_factory=FrozenDict)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("text=a=b", "a=b"),
        ("text==", "="),
        ("text=", None),
        ("text=null", None),
        ("text=~", None),
        ("text=''", ""),
        ('text="3"', "3"),
        ("text=01:30:00", "01:30:00"),
        ("text=2026-01-31", "2026-01-31"),
        ("text=yes", "yes"),
        ("text=${oc.env:HOME}", "${oc.env:HOME}"),
        ("text=tcp://h:1", "tcp://h:1"),
        (" text = a ", "a"),
    ],
)
def test_the_key_ends_at_the_first_equals_and_the_value_is_yaml(word: str, value: str | None) -> None:
    assert load(Loose, overrides=[word]).text == value


def test_indices_reach_into_lists() -> None:
    config = load(
        Loose, overrides=["stages=[{name: a}, {name: b, steps: 1}]", "stages.1.name=c", "stages.0={steps: 7}"]
    )
    assert config.stages == (Stage(name="a", steps=7), Stage(name="c", steps=1))


@pytest.mark.parametrize(
    "word", ["stages.1.name=x", "stages.-1.name=x", "stages.last=x", "stages.²=x", f"stages.{'9' * 5000}=x"]
)
def test_an_index_must_be_in_the_list(word: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(Loose, overrides=["stages=[{name: a}]", word])
    assert "list" in caught.value.problems[0].rule
    assert caught.value.problems[0].origin == f"override {word}"


def test_an_element_of_a_list_cannot_be_removed_but_a_key_in_it_can() -> None:
    with pytest.raises(InvalidConfig, match="not an element of a list"):
        load(Loose, overrides=["stages=[{name: a}]", "~stages.0"])
    assert load(Loose, overrides=["stages=[{name: a, steps: 2}]", "~stages.0.name"]).stages == (Stage(steps=2),)


def test_a_removed_element_key_forgets_its_origin() -> None:
    loaded = load_with_origins(Loose, overrides=["stages=[{name: a, steps: 2}]", "~stages.0.name"])
    assert str(loaded.origins["stages.0.name"]) == "default"


def test_a_replaced_list_forgets_the_origins_of_its_elements() -> None:
    loaded = load_with_origins(Loose, overrides=["stages=[{name: a, steps: 2}]", "stages=[{steps: 3}]"])
    assert str(loaded.origins["stages.0.name"]) == "default"
    assert str(loaded.origins["stages.0.steps"]) == "override stages=[{steps: 3}]"


def test_mappings_are_merged_and_can_be_replaced_after_a_removal() -> None:
    assert load(Loose, overrides=["labels={a: x}", "labels={b: y}"]).labels == {"a": "x", "b": "y"}
    assert load(Loose, overrides=["labels={a: x}", "~labels", "labels={b: y}"]).labels == {"b": "y"}


def test_quoted_keys_may_hold_dots_and_equals() -> None:
    config = load(Loose, overrides=['labels."example.org/team"=x', "labels.'a=b'=y"])
    assert config.labels == {"example.org/team": "x", "a=b": "y"}


def test_an_override_makes_the_mappings_above_it() -> None:
    assert load(Loose, overrides=["nested.a.b=1"]).nested == {"a": {"b": 1}}
    assert load(Loose, overrides=["nested.a=null", "nested.a.b=1"]).nested == {"a": {"b": 1}}


def test_there_is_no_way_through_a_scalar() -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(Loose, overrides=["text=a", "text.b=1"])
    (problem,) = caught.value.problems
    assert problem.path == "text.b"
    assert "has no keys below it" in problem.rule


def test_removing_what_nobody_set_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(Loose, overrides=["labels.team=x", "~labels.taem", "~text"])
    near, far = caught.value.problems
    assert (near.path, near.repair) == ("labels.taem", "did you mean `~labels.team`?")
    assert (far.path, far.repair) == ("text", "leave it out: the default holds already")


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("=1", "a key is empty"),
        ("a..b=1", "a key is empty"),
        ("a.=1", "a key is empty"),
        ("", "a key is empty"),
        ("~", "a key is empty"),
        ('a."b=1', "not closed"),
        ("a b=1", "a dot is expected"),
        ("~a=1", "takes no value"),
        ("a.b", "`key=value` or `~key`"),
        ("a=[1", "valid YAML"),
        ("a=@x", "valid YAML"),
        ("a={b: 1, b: 2}", "only once"),
    ],
)
def test_an_override_that_cannot_be_read(word: str, rule: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(Loose, overrides=[word])
    (problem,) = caught.value.problems
    assert rule in problem.rule
    assert problem.repair
    assert problem.origin is not None
    assert problem.origin.startswith(f"override {word}")


def test_words_are_told_apart_by_their_look() -> None:
    words = ["a.yaml", "run.seed=1", "~x", "./lr=0.1.yaml", "../a=b", "/tmp/a=b", "~/c.yaml", "b.yaml"]
    files, overrides = split_words(words)
    assert files == ["a.yaml", "./lr=0.1.yaml", "../a=b", "/tmp/a=b", "~/c.yaml", "b.yaml"]
    assert overrides == ["run.seed=1", "~x"]


text = st.text(st.characters(codec="utf-8"), max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3))


@given(st.lists(text, min_size=1, max_size=4))
def test_a_path_survives_being_written(keys: list[str]) -> None:
    assert parse_path(format_path(tuple(keys))) == tuple(keys)


@given(st.lists(text, min_size=1, max_size=3), values)
def test_an_override_survives_being_written(keys: list[str], value: Any) -> None:
    word = f"{format_path(tuple(keys))}={write_yaml(value)}"
    assert parse_override(word) == Assignment(tuple(keys), value, word)
    removal = f"~{format_path(tuple(keys))}"
    assert parse_override(removal) == Removal(tuple(keys), removal)


@given(st.text(max_size=20))
def test_no_word_makes_the_parser_raise(word: str) -> None:
    parsed = parse_override(word)
    assert isinstance(parsed, Assignment | Removal) or all(problem.rule for problem in parsed)
