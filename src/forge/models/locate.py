"""From the `model` section of a configuration to the model that it means: its config, and the folder with its files."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from forge.config import ModelConfig
from forge.config.layers import read_preset
from forge.errors import ModelError
from forge.kernels.native_build import cache_directory
from forge.models.architecture import ARCHITECTURE_KEYS, complete, merge, preset_of
from forge.models.hf_config import read_hf_config
from forge.models.tiny import TINY_FILES, write_tiny
from forge.models.weight_folder import INDEX_FILE, indexed_files

_log = logging.getLogger("forge.models")

# Part of the cached folder's name: raise it when the tiny model's files change.
_TINY_EDITION: Final = 1


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that can be built.

    Attributes:
        architecture: the user's section with every key of the architecture set.
        folder: the folder with config.json, weights and tokenizer; None for random weights and no tokenizer.
        name: what to call it in logs.
    """

    architecture: ModelConfig
    folder: Path | None
    name: str


def resolve(model: ModelConfig, *, environ: Mapping[str, str] | None = None) -> ResolvedModel:
    """Find the model that a section means, or raise `ModelError` with what to do.

    With a path the folder must be whole, and its config.json wins over the preset. The preset `tiny` is made in the
    user's cache (`$XDG_CACHE_HOME/torchforge`, or `~/.cache/torchforge`) when it is not there yet; any number of
    processes may ask for it at once. Any other model without a path gets random weights, with a warning.
    """
    preset = preset_of(model)
    if model.path is not None:
        folder = Path(model.path)
        check_folder(folder, repo=model.hf_repo or _repo(preset))
        config = complete(merge(model, read_hf_config(folder, family=model.family)))
        return ResolvedModel(config, folder, model.name or model.hf_repo or readable_name(folder))
    config = complete(model)
    name = model.name or preset or model.hf_repo or f"{config.family} with random weights"
    if preset == "tiny":
        return ResolvedModel(config, _cached_tiny(config, os.environ if environ is None else environ), name)
    repo = model.hf_repo or _repo(preset)
    _log.warning(
        "%s gets random weights and has no tokenizer, because model.path is not set. %s",
        name,
        f"For the real weights run `{_command(repo)}` and set model.path to that folder."
        if repo
        else "If there are weights, set model.path to their folder.",
    )
    return ResolvedModel(config, None, name)


def check_head(model: ResolvedModel, head: Literal["language", "scalar"]) -> None:
    """Refuse a model whose output layer does not give what is asked of it: logprobs or values."""
    if model.architecture.head != head:
        raise ModelError(
            "this needs the values of a scalar head"
            if head == "scalar"
            else "this needs the logits of a language model",
            path="model.head",
            value=model.architecture.head,
            rule=head,
            repair=f"set model.head to `{head}`"
            + ("" if head == "scalar" else ", or use forward_values and a loss that reads values"),
        )


def readable_name(folder: Path) -> str:
    """Return what people call the model in a folder.

    Of the model of a run (`runs/mine/checkpoints/hf`) it is the run's name, of a snapshot in the cache of the Hugging
    Face Hub (`models--OWNER--NAME/snapshots/HASH`) that of its repository, and of any other folder its own.
    """
    place = folder.resolve()
    if place.parent.name == "snapshots" and place.parent.parent.name.startswith("models--"):
        return place.parent.parent.name.removeprefix("models--").replace("--", "/")
    if place.name == "hf" and place.parent.name:
        place = place.parent
        if place.name == "checkpoints" and place.parent.name:
            place = place.parent
    return place.name


def check_folder(folder: Path, *, repo: str | None = None) -> None:
    """Raise `ModelError` unless a folder holds a config.json and every file of its safetensors weights."""
    if not folder.is_dir():
        raise _incomplete(folder, "a folder with the model's files; there is none here", repo)
    if not (folder / "config.json").is_file():
        raise _incomplete(folder, "must hold a config.json", repo)
    index = folder / INDEX_FILE
    if index.is_file():
        missing = [name for name in indexed_files(index) if not (folder / name).is_file()]
        if missing:
            raise _incomplete(
                folder, f"must hold every file that {INDEX_FILE} names; missing: {', '.join(missing)}", repo
            )
    elif not any(folder.glob("*.safetensors")):
        others = any(folder.glob("*.bin")) or any(folder.glob("*.pth"))
        rule = "must hold weights as .safetensors files" + ("; .bin and .pth files are not read" if others else "")
        raise _incomplete(folder, rule, repo)


def _incomplete(folder: Path, rule: str, repo: str | None) -> ModelError:
    return ModelError(
        "The model's folder cannot be used.",
        path="model.path",
        value=str(folder),
        rule=rule,
        repair=f"correct the path, or fetch the model: `{_command(repo or 'OWNER/NAME', folder)}`",
    )


def _command(repo: str | None, folder: Path | str | None = None) -> str:
    usual = "models/" + str(repo).rpartition("/")[2].lower()
    return f"forge download {repo} --output-dir {shlex.quote(str(folder or usual))}"


def _repo(preset: str | None) -> str | None:
    return None if preset is None else read_preset(preset).data["model"].get("hf_repo")


def _cached_tiny(config: ModelConfig, environ: Mapping[str, str]) -> Path:
    """Return the folder of a tiny model, made unless it is there. It appears under its name only when it is whole."""
    described = json.dumps(
        [_TINY_EDITION, config.model_dump(include=set(ARCHITECTURE_KEYS), mode="json")], sort_keys=True
    )
    parent = cache_directory(environ) / "models"
    folder = parent / f"tiny-{hashlib.sha256(described.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        _check_cached(folder)
        return folder
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tiny-", dir=parent, ignore_cleanup_errors=True) as draft:
            write_tiny(config.model_copy(update={"head": "language"}), draft)  # a scalar head is made when it is loaded
            _flush(Path(draft))
            _publish(Path(draft), folder)
    except OSError as error:
        raise ModelError(
            "The tiny model cannot be written into the cache.",
            path=str(error.filename or parent),
            rule=f"a folder that can be written: {error.strerror}",
            repair="set XDG_CACHE_HOME to such a folder, or make the model there and set model.path",
        ) from None
    return folder


def _check_cached(folder: Path) -> None:
    missing = [name for name in TINY_FILES if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            "The tiny model in the cache is not whole.",
            path=str(folder),
            rule=f"must hold {', '.join(missing)}: files were removed",
            repair="remove the folder; it is made again",
        )


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _publish(draft: Path, folder: Path) -> None:
    """Move a complete folder to its name. A process that comes second finds the same files there."""
    try:
        shutil.copymode(folder.parent, draft)
        draft.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
