"""Where modules of the user are looked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from forge.config import ForgeConfig, from_command_line
from forge.config.command_line import MODULE_FOLDERS, add_module_folders, module_folders
from forge.runtime import rank_main


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setenv(MODULE_FOLDERS, "")
    (tmp_path / "configs").mkdir()
    return tmp_path


def test_folders_of_files_and_the_working_directory_come_last_and_once(place: Path) -> None:
    before = list(sys.path)
    add_module_folders(["configs/a.yaml", place / "configs" / "b.yaml"])
    added = [str(place / "configs"), str(place)]
    assert sys.path == [*before, *added]
    assert list(module_folders()) == added
    add_module_folders(["configs/a.yaml"])
    assert sys.path == [*before, *added]


def test_a_folder_that_is_searched_already_stays_where_it_is(place: Path) -> None:
    sys.path.insert(0, str(place))
    before = list(sys.path)
    add_module_folders()
    assert sys.path == before
    assert module_folders() == ()


def test_a_file_there_does_not_hide_a_module_of_python(place: Path) -> None:
    (place / "colorsys.py").write_text("raise AssertionError('the wrong one')")
    sys.modules.pop("colorsys", None)
    add_module_folders()
    import colorsys

    assert Path(colorsys.__file__).parent != place


def test_a_programs_command_line_adds_them(place: Path) -> None:
    Path("configs/a.yaml").write_text("run: {seed: 3}\n")
    assert from_command_line(ForgeConfig, ["--config", "configs/a.yaml"]).run.seed == 3
    assert list(module_folders()) == [str(place / "configs"), str(place)]


def test_what_another_process_added_is_not_taken_for_ones_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODULE_FOLDERS, os.pathsep.join([str(place / "configs")]))
    assert module_folders() == ()


def test_ranks_read_the_same_variable() -> None:
    assert rank_main.MODULE_FOLDERS == MODULE_FOLDERS
