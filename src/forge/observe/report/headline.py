"""The few numbers at the head of a report, and what was run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

Column = Sequence[float | None]


class HasColumns(Protocol):
    """Metrics by name, one value for each row."""

    @property
    def columns(self) -> Mapping[str, Column]: ...


class HasSettings(Protocol):
    """Something with a configuration."""

    def setting(self, path: str) -> Any: ...


_CHANGES: Final = (
    ("evaluation/reward", "Held-out reward"),
    ("rollout/reward_mean", "Reward"),
    ("validation/loss", "Validation loss"),
    ("validation/accuracy", "Validation accuracy"),
    ("train/loss", "Training loss"),
)
_LATEST: Final = (
    ("train/kl", "KL divergence", "nats"),
    ("train/entropy", "Entropy", "nats"),
    ("rollout/tokens_per_s", "Generation", "tokens/s"),
    ("train/tokens_per_s", "Training", "tokens/s"),
    ("rollout/samples_per_s", "Samples", "per second"),
)
HEADLINE_METRICS: Final = (*(key for key, _ in _CHANGES), *(key for key, *_ in _LATEST))
"""The metrics that `headline` reads."""
_MAX_TILES: Final = 6
_AVERAGED: Final = 5
"""A metric that jumps from step to step is shown as the mean of so many first and last ones."""


def headline(metrics: HasColumns) -> list[dict[str, str]]:
    """Return what the run came to, in a few words: where it began and where it is, and its latest state."""
    tiles = []
    is_rl = "rollout/reward_mean" in metrics.columns
    for key, label in _CHANGES:
        if key == "train/loss" and is_rl:
            continue
        values = _known(metrics.columns, key)
        if values:
            count = num_averaged(key, len(values))
            first, last = sum(values[:count]) / count, sum(values[-count:]) / count
            detail = f"from {_figure(first)}" if len(values) > 1 else "one value so far"
            tiles.append({"label": label, "value": _figure(last), "detail": detail, "key": key})
    for key, label, unit in _LATEST:
        values = _known(metrics.columns, key)
        if values:
            count = min(_AVERAGED, len(values))
            tiles.append({"label": label, "value": _figure(sum(values[-count:]) / count), "detail": unit, "key": key})
    return tiles[:_MAX_TILES]


def num_averaged(key: str, count: int) -> int:
    """Return how many of a metric's `count` values its final one is the mean of: one evaluation, or a few steps."""
    return 1 if key.startswith(("evaluation/", "validation/")) else min(_AVERAGED, max(1, count // 4))


def _known(columns: Mapping[str, Column], key: str) -> list[float]:
    return [value for value in columns.get(key, ()) if value is not None]


def _figure(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


_FACTS: Final = (
    ("model.path", "model"),
    ("model.preset", "model preset"),
    ("algorithm.preset", "algorithm"),
    ("rollout.batch_groups", "groups per step"),
    ("rollout.group_size", "group size"),
    ("rollout.staleness", "staleness bound"),
    ("placement", "placement"),
    ("generator.engine", "engine"),
    ("training.batch_size", "batch size"),
    ("run.seed", "seed"),
)


def facts(run: HasSettings) -> list[tuple[str, str]]:
    """Return what was run, from its configuration: label and value."""
    is_rl = run.setting("rollout.group_size") is not None
    found = []
    for path, label in _FACTS:
        value = run.setting(path)
        if isinstance(value, str | int | float) and not (is_rl and path == "training.batch_size"):
            found.append((label, str(value)))
    return found
