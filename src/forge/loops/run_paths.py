"""What every loop begins with: where its files go, and the tokenizer of its model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from forge.config import CheckpointConfig, GRPOConfig, MetricsConfig, RunConfig
from forge.errors import ConfigError
from forge.models.locate import ResolvedModel
from forge.models.tokenizer import ChatTokenizer
from forge.trainer.checkpoint_folder import WriterLock


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


def crash_dir(config: HasRunPaths) -> Path:
    """Return where batches are that a trainer or critic died on."""
    return run_dir(config) / "crashes"


def journal_dir(config: GRPOConfig) -> Path:
    """Return where the journals of deterministic episodes are until their groups are done with.

    A program with other arguments or limits has another folder: what it did before must not be replayed.
    """
    keys = {"kind", "args", "limits", "tool_format"} | ({"agents"} if config.episode.agents else set())
    section = config.episode.model_dump_json(include=keys)
    return run_dir(config) / "journals" / hashlib.blake2b(section.encode(), digest_size=6).hexdigest()


@contextmanager
def locked_folder(folder: Path, *, is_writer: bool = True) -> Iterator[None]:
    """Make a folder, and refuse it if another process writes into it; of several ranks the writer alone does that."""
    if not is_writer:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = WriterLock(folder)
    try:
        yield
    finally:
        lock.release()


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
