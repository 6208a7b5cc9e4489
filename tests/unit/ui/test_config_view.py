"""A configuration beside its presets, or beside that of another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge.config import GRPOConfig, SFTConfig, load, save
from forge.ui.config_view import view_config


def grpo_run(folder: Path, *overrides: str) -> Path:
    folder.mkdir()
    save(load(GRPOConfig, files=["apps/grpo/tiny.yaml"], overrides=overrides), folder)
    return folder


def differing(view: dict[str, Any]) -> dict[str, tuple[str | None, str | None]]:
    return {key: (mine, theirs) for key, mine, theirs in view["rows"] if mine != theirs}


def test_against_its_presets_only_what_was_chosen_differs(tmp_path: Path) -> None:
    view = view_config(
        grpo_run(tmp_path / "run", "run.seed=7", "model.preset=tiny", "algorithm.preset=dapo", "rollout.staleness=3"),
        None,
    )
    assert view["note"] == ""
    assert view["base"] == "tiny + dapo"
    found = differing(view)
    assert found["run.seed"] == ("7", "0")
    assert found["rollout.staleness"] == ("3", "0")
    assert found["algorithm.loss.entropy_coefficient"] == ("0.02", "0.0")  # the file's; the rest is the preset's
    assert [key for key in found if key.startswith("algorithm.")] == ["algorithm.loss.entropy_coefficient"]
    assert [key for key in found if key.startswith("model.")] == ["model.path"]
    assert len(view["rows"]) > 200
    assert view["text"].startswith("# The resolved configuration")


def test_against_another_run_every_difference_is_named(tmp_path: Path) -> None:
    one = grpo_run(tmp_path / "one", "run.seed=7", "run.tags=[a, b]")
    other = grpo_run(tmp_path / "other", "run.seed=8")
    view = view_config(one, other)
    assert view["base"] == "other"
    assert differing(view) == {"run.seed": ("7", "8"), "run.tags": ('["a", "b"]', "[]")}


def test_keys_of_the_other_run_alone_are_there_too(tmp_path: Path) -> None:
    one = grpo_run(tmp_path / "one")
    (tmp_path / "other").mkdir()
    save(load(SFTConfig, overrides=["data.sources=[{path: x.jsonl}]", "model.preset=tiny"]), tmp_path / "other")
    found = differing(view_config(one, tmp_path / "other"))
    assert found["rollout.staleness"] == ("0", None)
    assert found["data.packing"][0] is None
    assert any(mine is None for mine, _ in found.values())


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (None, "There is no config.yaml."),
        ("a: [", "config.yaml could not be read in full, so only its text is shown."),
        ("- 1\n- 2\n", "config.yaml could not be read in full, so only its text is shown."),
        ("a: 1\na: 2\n", "config.yaml could not be read in full, so only its text is shown."),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path: Path, text: str | None, note: str) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    view = view_config(tmp_path, None)
    assert (view["rows"], view["note"], view["text"]) == ([], note, text or "")


def test_a_configuration_of_another_program_is_shown_without_comparison(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine:\n  own: 1\nmodel:\n  preset: no-such-preset\n")
    view = view_config(tmp_path, None)
    assert [row[:2] for row in view["rows"]] == [["mine.own", "1"], ["model.preset", "no-such-preset"]]
    assert view["base"] == ""
    assert view["note"].startswith("It cannot be compared with its presets")
