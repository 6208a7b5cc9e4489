"""Which model a section means: its folder, its facts, and what is said when it is not there."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from pathlib import Path

import pytest

from forge.config import ForgeConfig, ModelConfig, load
from forge.errors import ModelError
from forge.models.architecture import ARCHITECTURE_KEYS
from forge.models.hf_config import read_hf_config
from forge.models.locate import ResolvedModel, resolve
from forge.models.tiny import TINY_FILES, make_tiny


def facts_of(model: ModelConfig) -> dict[str, object]:
    return {key: getattr(model, key) for key in ARCHITECTURE_KEYS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny(tmp_path / "model", num_layers=1)
    return tmp_path / "model"


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_a_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = resolve(ModelConfig(path=str(folder)))
    assert (found.folder, found.name) == (folder, "model")
    assert facts_of(found.architecture) == facts_of(read_hf_config(folder))
    assert resolve(ModelConfig(path=str(folder), hf_repo="a/b")).name == "a/b"
    assert resolve(ModelConfig(path=str(folder), hf_repo="a/b", name="mine")).name == "mine"
    assert caplog.records == []


def test_a_folder_wins_over_the_preset(folder: Path) -> None:
    model = load(ForgeConfig, overrides=["model.preset=qwen3_8b", f"model.path={folder}"]).model
    assert facts_of(resolve(model).architecture) == facts_of(read_hf_config(folder))
    with pytest.raises(ModelError, match="contradicts"):
        resolve(load(ForgeConfig, overrides=[f"model.path={folder}", "model.num_layers=7"]).model)


def test_a_relative_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert resolve(ModelConfig(path=".")).name == "model"


def test_folders_that_are_not_whole(folder: Path) -> None:
    def refusal(**section: str) -> ModelError:
        with pytest.raises(ModelError) as caught:
            resolve(ModelConfig.model_validate({"path": str(folder), **section}))
        assert (caught.value.path, caught.value.value) == ("model.path", section.get("path", str(folder)))
        return caught.value

    error = refusal(path=str(folder / "none"), preset="qwen3_8b")
    assert f"forge download Qwen/Qwen3-8B --output-dir {folder / 'none'}" in (error.repair or "")
    assert "forge download OWNER/NAME" in (refusal(path=str(folder / "config.json")).repair or "")

    weights = folder / "model.safetensors"
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}), encoding="utf-8"
    )
    assert "missing: model-2.safetensors" in (refusal().rule or "")
    (folder / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="weight_map"):
        resolve(ModelConfig(path=str(folder)))
    (folder / "model.safetensors.index.json").unlink()

    weights.rename(folder / "pytorch_model.bin")
    assert ".bin and .pth files are not read" in (refusal().rule or "")
    (folder / "pytorch_model.bin").unlink()
    assert (refusal().rule or "").endswith("as .safetensors files")
    (folder / "config.json").unlink()
    assert "must hold a config.json" in (refusal(hf_repo="own/er").rule or "")


def test_tiny_is_made_once(cache: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    made = resolve(ModelConfig(preset="tiny"), environ=cache)
    assert made.folder is not None
    assert (made.name, sorted(path.name for path in made.folder.iterdir())) == ("tiny", sorted(TINY_FILES))
    assert made.folder.is_relative_to(cache["XDG_CACHE_HOME"])
    assert facts_of(read_hf_config(made.folder)) == facts_of(made.architecture)
    stamps = [path.stat().st_mtime_ns for path in sorted(made.folder.iterdir())]
    loaded = load(ForgeConfig, overrides=["model.preset=tiny"]).model
    for section in (ModelConfig(preset="tiny"), ModelConfig(name="tiny"), loaded):
        assert resolve(section, environ=cache).folder == made.folder
    assert [path.stat().st_mtime_ns for path in sorted(made.folder.iterdir())] == stamps
    assert caplog.records == []


def test_tiny_of_another_shape_is_another_folder(cache: dict[str, str]) -> None:
    usual = resolve(ModelConfig(preset="tiny"), environ=cache)
    other = resolve(ModelConfig(preset="tiny", num_layers=2, name="small"), environ=cache)
    assert other.folder not in (None, usual.folder)
    assert other.name == "small"
    assert other.folder is not None
    assert read_hf_config(other.folder).num_layers == 2


def test_many_at_once_get_the_same_whole_folder(cache: dict[str, str]) -> None:
    found: list[ResolvedModel] = []
    gate = threading.Barrier(6)

    def ask() -> None:
        gate.wait()
        found.append(resolve(ModelConfig(preset="tiny"), environ=cache))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each.folder for each in found}) == 1
    assert len(found) == 6
    folder = found[0].folder
    assert folder is not None
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing else is left behind"
    assert sorted(path.name for path in folder.iterdir()) == sorted(TINY_FILES)


def test_a_cache_that_lost_files_is_named(cache: dict[str, str]) -> None:
    folder = resolve(ModelConfig(preset="tiny"), environ=cache).folder
    assert folder is not None
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"must hold tokenizer\.json") as caught:
        resolve(ModelConfig(preset="tiny"), environ=cache)
    assert caught.value.path == str(folder)
    shutil.rmtree(folder)
    assert resolve(ModelConfig(preset="tiny"), environ=cache).folder == folder
    assert (folder / "tokenizer.json").is_file()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be written") as caught:
        resolve(ModelConfig(preset="tiny"), environ={"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert "XDG_CACHE_HOME" in (caught.value.repair or "")


def test_the_cache_is_in_the_home_unless_said_otherwise(tmp_path: Path) -> None:
    folder = resolve(ModelConfig(preset="tiny", num_layers=1), environ={"HOME": str(tmp_path)}).folder
    assert folder is not None
    assert folder.parent == tmp_path / ".cache" / "torchforge" / "models"


def test_a_preset_without_a_path_has_random_weights_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="forge.models"):
        found = resolve(ModelConfig(preset="qwen3_0_6b"))
    assert (found.folder, found.name, found.architecture.num_layers) == (None, "qwen3_0_6b", 28)
    (record,) = caplog.records
    assert "random weights" in record.getMessage()
    assert "forge download Qwen/Qwen3-0.6B --output-dir models/qwen3-0.6b" in record.getMessage()


def test_facts_without_a_preset(caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    with caplog.at_level(logging.WARNING, logger="forge.models"):
        found = resolve(read_hf_config(folder))
    assert (found.folder, found.name) == (None, "qwen3 with random weights")
    assert "random weights" in caplog.text
    with pytest.raises(ModelError, match="not described completely"):
        resolve(ModelConfig(name="something"))
