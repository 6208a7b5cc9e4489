"""What every loop begins with: where its files go, and the tokenizer of its model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

from forge.config import CheckpointConfig, GRPOConfig, MetricsConfig, RunConfig
from forge.errors import ConfigError
from forge.models.locate import ResolvedModel
from forge.models.tokenizer import ChatTokenizer


class HasRunPaths(Protocol):
    """A configuration that says where a run writes."""

    @property
    def run(self) -> RunConfig: ...

    @property
    def checkpointing(self) -> CheckpointConfig: ...

    @property
    def metrics(self) -> MetricsConfig: ...


def run_dir(config: HasRunPaths) -> Path:
    """Return where a run writes everything but its checkpoints."""
    return config.run.output_dir / config.run.name


def checkpoint_dir(config: HasRunPaths) -> Path:
    """Return where a run's checkpoints are, and in `hf` beside them the model that it made."""
    return config.checkpointing.output_dir or run_dir(config) / "checkpoints"


def journal_dir(config: GRPOConfig) -> Path:
    """Return where the journals of deterministic episodes are until their groups are done with.

    A program with other arguments or limits has another folder: what it did before must not be replayed.
    """
    section = config.episode.model_dump_json(include={"kind", "args", "limits", "tool_format"})
    return run_dir(config) / "journals" / hashlib.blake2b(section.encode(), digest_size=6).hexdigest()


def load_tokenizer(model: ResolvedModel, *, chat_template: str | None, purpose: str) -> ChatTokenizer:
    """Return the tokenizer beside a model's weights. `purpose` begins the sentence that refuses a model without one."""
    if model.folder is None:
        raise ConfigError(
            f"{purpose} needs a model with its tokenizer",
            path="model.path",
            value=None,
            rule="a folder with Hugging Face files, or the preset `tiny`",
            repair=f"run `forge download {model.architecture.hf_repo or 'OWNER/NAME'} --output-dir DIR`, "
            "set model.path=DIR",
        )
    return ChatTokenizer.load(model.folder, chat_template=Path(chat_template) if chat_template else None)
