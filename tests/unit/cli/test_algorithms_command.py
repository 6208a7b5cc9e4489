"""`forge algorithms`."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import pytest

from forge.cli import main
from forge.config.algorithm import AlgorithmConfig
from forge.config.algorithm_presets import PRESETS
from forge.config.algorithm_table import ALGORITHMS, PEERS
from forge.config.preference import PreferenceKind

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "algorithms.md"


def test_every_preset_and_every_preference_loss_is_listed_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(ALGORITHMS) == {*PRESETS, *typing.get_args(PreferenceKind)}
    assert main(["algorithms"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed[:-1]] == list(ALGORITHMS)


@pytest.mark.parametrize("name", list(PRESETS))
def test_the_keys_shown_are_those_that_the_preset_sets(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", name, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)[name]["sets"]
    chosen, plain = (AlgorithmConfig(preset=preset).model_dump(mode="json") for preset in (name, "grpo"))

    def value(values: typing.Any, path: str) -> typing.Any:
        for key in path.split(".")[1:]:
            values = values[key]
        return values

    assert {path: value(chosen, path) for path in shown} == shown
    for section, default in plain.items():
        if not isinstance(default, dict):
            continue
        changed = {key for key in default if chosen[section][key] != default[key]}
        assert changed <= {path.split(".")[2] for path in shown if path.split(".")[1] == section}


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_an_algorithm_is_shown_with_formula_reference_and_peers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", name]) == 0
    shown, facts = capsys.readouterr().out, ALGORITHMS[name]
    assert facts.loss in shown
    assert facts.reference in shown
    assert facts.key in shown
    assert set(facts.peers) <= set(PEERS)
    assert all(word in shown for word in facts.peers.values())


def test_the_page_has_the_same_references() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in PRESETS:
        _, found, number = ALGORITHMS[name].reference.partition("arXiv ")
        assert f"| `{name}`" in text
        assert not found or number.split()[0] in text


def test_another_name_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "grpoo"]) == 2
    told = capsys.readouterr().err
    assert "grpoo" in told
    assert "'grpo'" in told or "`grpo`" in told or "grpo?" in told
