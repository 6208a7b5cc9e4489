"""The seam through which metrics leave a run, and the names that the built-in sinks know.

A *sink* takes the metrics of one step. Anything with `write` and `close` is one; a list in memory for tests is in
`forge.testing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

Value = float | int | str

TRAIN_LOSS: Final = "train/loss"
LEARNING_RATE: Final = "train/learning_rate"
GRAD_NORM: Final = "train/grad_norm"
EPOCH: Final = "train/epoch"
NUM_TOKENS: Final = "train/num_tokens"
NUM_LOSS_TOKENS: Final = "train/num_loss_tokens"
STEP_SECONDS: Final = "train/seconds"
SKIPPED: Final = "train/skipped"
TOKENS_PER_S: Final = "train/tokens_per_s"
MEMORY_GIB: Final = "train/memory_gib"
MFU: Final = "train/mfu"
ACCURACY: Final = "train/accuracy"
REWARD_MARGIN: Final = "train/reward_margin"
VALIDATION_LOSS: Final = "validation/loss"
VALIDATION_BEST: Final = "validation/best"
VALIDATION_ACCURACY: Final = "validation/accuracy"
VALIDATION_MARGIN: Final = "validation/reward_margin"
VALIDATION_ECE: Final = "validation/ece"

REWARD_MEAN: Final = "rollout/reward_mean"
REWARD_STD: Final = "rollout/reward_std"
NUM_FAILED: Final = "rollout/num_failed"
STALENESS: Final = "rollout/staleness_mean"
GENERATION_TOKENS_PER_S: Final = "rollout/tokens_per_s"
KL: Final = "train/kl"
ENTROPY: Final = "train/entropy"
STEP_TIME: Final = "time/step"
TIME_WAITING: Final = "time/waiting"
TIME_GENERATING: Final = "time/generating"
TIME_TRAINING: Final = "time/training"
TIME_SYNCING: Final = "time/syncing"
TIME_OTHER: Final = "time/other"
LEAGUE_ELO: Final = "league/elo/live"
LEAGUE_WIN_RATE: Final = "league/win_rate/all"
EVALUATION: Final = "evaluation/"
"""Comes before every metric of an evaluation on the held-out set."""

EVALUATION_REWARD: Final = "evaluation/reward"
EVALUATION_PROMPTS: Final = "evaluation/num_prompts"


@runtime_checkable
class Sink(Protocol):
    """Somewhere that metrics go.

    A caller may rely on this: `write` takes any finite or non-finite number and any text, in any order of names; what
    it took does not change when the caller's mapping does; what it wrote is with the operating system when it returns,
    so that `kill -9` loses none of it (trackers excepted, which write in the background). `close` may be called twice.
    `write` after `close` raises `ValueError`.
    """

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Take the metrics of one step. A step may be written in parts: training first, validation after it."""

    def close(self) -> None:
        """Write everything and release it."""


@dataclass(frozen=True, slots=True)
class Table:
    """A few rows of text and numbers, such as samples. A tracker keeps the newest `max_rows` of a run."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    max_rows: int = 1000


@runtime_checkable
class TableSink(Protocol):
    """A sink that takes tables as well."""

    def write_table(self, step: int, name: str, table: Table) -> None:
        """Take a table of one step."""


@runtime_checkable
class LinkSink(Protocol):
    """A sink that keeps files of a run, or where they are."""

    def link(self, name: str, path: Path) -> None:
        """Keep a file, such as the report."""


def closed_error(sink: Sink) -> ValueError:
    """Return what `write` raises after `close`."""
    return ValueError(f"{type(sink).__name__} is closed: metrics can no longer be written to it")
