"""A configuration as text, and beside the run that it belongs to."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from forge._version import __version__
from forge.config.base import ConfigModel
from forge.config.yaml_text import write_yaml
from forge.errors import ConfigError

FILE_NAME = "config.yaml"


def to_plain(config: ConfigModel) -> dict[str, Any]:
    """The configuration as dicts, lists and scalars, defaults included."""
    return config.model_dump(mode="json", by_alias=True, warnings=False)


def dump(config: ConfigModel) -> str:
    """YAML that `load` with the same schema reads back to an equal configuration.

    Every key is written, defaults and nulls too, so that the text means the same after a default or a preset changes.
    """
    return write_yaml(to_plain(config))


def _keep_other(target: Path, text: str) -> None:
    """Keep an earlier run's configuration that differs under a name of its own: `config.1.yaml` and so on."""
    if not target.exists() or target.read_bytes() == text.encode():
        return
    number = 1
    while (aside := target.with_name(f"config.{number}.yaml")).exists():
        number += 1
    os.link(target, aside)


def save(config: ConfigModel, run_dir: str | os.PathLike[str]) -> Path:
    """Write `config.yaml` into the run's folder, which is made where needed, and return its path.

    The file appears whole or not at all: a reader never sees half of it. An earlier one that differs is kept beside it
    as `config.1.yaml`, `config.2.yaml` and so on.
    """
    target = Path(run_dir) / FILE_NAME
    text = f"# The resolved configuration of this run, written by forge {__version__}.\n{dump(config)}"
    temporary = target.with_name(f".{FILE_NAME}.{uuid.uuid4().hex}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            _keep_other(target, text)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The configuration could not be saved: {error.strerror}",
            path=str(target),
            rule="the run's folder must be writable",
            repair="choose another run.output_dir, or correct its permissions",
        ) from error
    return target
