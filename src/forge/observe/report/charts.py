"""Which curves a report draws, from the metrics that are there, and the few numbers at its head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from forge.observe.report.reading import Metrics, Run

Column = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart to draw where at least one of its metrics is there.

    Attributes:
        section, title, help: where it stands, its name, and what it tells.
        keys: the names of metrics, or patterns of names, each with its label; of a pattern the label is what the `*`
            stands for.
        band: for a metric the one that says how far it spreads to both sides.
        unit: what its numbers are in; `%` shows a part of 1.
        stack: whether the metrics add up, and are drawn on top of each other.
        log: whether a logarithmic scale may be chosen.
        of: the only kind of run that it is drawn for; None for every kind.
    """

    section: str
    title: str
    keys: tuple[tuple[str, str], ...]
    help: str
    band: tuple[str, str] | None = None
    unit: str = ""
    stack: bool = False
    log: bool = False
    of: Literal["policy", "fine-tuning"] | None = None


_LEARNING: Final = "Learning"
_POLICY: Final = "Policy"
_OPTIMIZER: Final = "Optimizer"
_ROLLOUTS: Final = "Rollouts"
_EPISODES: Final = "Episodes"
_SPEED: Final = "Speed"

CHARTS: Final = (
    Chart(
        _LEARNING,
        "Reward",
        (("rollout/reward_mean", "mean"),),
        "What the completions scored for a step earned on average, also those of groups without signal; the band is "
        "one standard deviation to each side.",
        band=("rollout/reward_mean", "rollout/reward_std"),
    ),
    Chart(
        _LEARNING,
        "Held-out evaluation",
        (("evaluation/reward", "reward"), ("evaluation/pass@*", "pass@"), ("evaluation/avg@*", "avg@")),
        "On prompts that the policy never learns from. pass@k: the part of prompts with a solution among k tries.",
    ),
    Chart(
        _LEARNING,
        "Rewards by part",
        (("reward/*", ""),),
        "The mean of each reward before its weight, over the same completions.",
    ),
    Chart(
        _LEARNING,
        "Loss",
        (("train/loss", "training"), ("validation/loss", "validation")),
        "Of the tokens that count, before each step.",
        log=True,
        of="fine-tuning",
    ),
    Chart(
        _POLICY,
        "KL divergence",
        (("train/kl", "to the reference"), ("train/approx_kl", "sampler to trainer")),
        "In nats per token: how far the policy moved from the reference model, and from the weights that sampled.",
        log=True,
    ),
    Chart(_POLICY, "Entropy", (("train/entropy", "entropy"),), "Nats per token: how undecided the policy is."),
    Chart(
        _POLICY,
        "Importance ratio",
        (("train/ratio*", "ratio"),),
        "Probability by the trainer over probability by the sampler; 1 where both agree.",
        log=True,
    ),
    Chart(
        _POLICY,
        "Mismatch of sampler and trainer",
        (("train/mismatch", "mean"), ("train/mismatch_max", "largest")),
        "How much the logprob of a token differs between both, in nats.",
        log=True,
    ),
    Chart(
        _POLICY,
        "Tokens that differ",
        (("train/mismatch_outside", "tokens"),),
        "The part of tokens whose probability by the trainer over that by the sampler is below 0.9 or above 1.1.",
        unit="%",
    ),
    Chart(_POLICY, "Clipped", (("train/clip*", "clip"),), "The part of tokens whose ratio was clipped."),
    Chart(
        _OPTIMIZER,
        "Policy loss",
        (("train/loss", "loss"),),
        "What the optimizer lowers. Its value says little: look at the reward.",
        of="policy",
    ),
    Chart(
        _OPTIMIZER,
        "Gradient norm",
        (("train/grad_norm", "norm"),),
        "Of the whole gradient, before clipping.",
        log=True,
    ),
    Chart(_OPTIMIZER, "Learning rate", (("train/learning_rate", "rate"),), "The rate that each step used.", log=True),
    Chart(
        _ROLLOUTS,
        "Completion length",
        (("rollout/length_mean", "training"), ("evaluation/length", "held-out")),
        "Tokens of a completion on average, over all that were scored.",
        unit="tokens",
    ),
    Chart(
        _ROLLOUTS,
        "Staleness",
        (("rollout/staleness_mean", "mean"), ("rollout/staleness_max", "largest")),
        "By how many steps the weights that made a token were older than those that learned from it.",
        unit="steps",
    ),
    Chart(
        _ROLLOUTS,
        "Groups that taught nothing",
        (
            ("rollout/num_no_signal", "no signal"),
            ("rollout/num_empty", "no token"),
            ("rollout/num_failed", "failed reward"),
            ("rollout/num_stale", "too stale"),
        ),
        "No signal: the advantages of the group are all 0. Of failed rewards completions are counted, else groups.",
    ),
    Chart(_ROLLOUTS, "Truncated", (("rollout/truncated", "cut off by length"),), "Completions without an end."),
    Chart(
        _EPISODES,
        "Turns and tool calls",
        (("episode/num_turns", "turns"), ("episode/num_tool_calls", "tool calls")),
        "Of an episode on average, over the groups that the step learned from.",
    ),
    Chart(
        _EPISODES,
        "Endings",
        (("episode/outcome/*", ""),),
        "The part of episodes that finished, and those that a limit ended.",
        unit="%",
        stack=True,
    ),
    Chart(
        _EPISODES,
        "Tokens sampled and read",
        (("episode/num_sampled", "sampled"), ("episode/num_observed", "read")),
        "Of an episode on average. Read: prompts, tool results and other messages, which never enter the loss.",
        unit="tokens",
        log=True,
    ),
    Chart(
        _EPISODES,
        "Tool errors",
        (("episode/num_tool_errors", "all"), ("episode/tool_errors/*", "")),
        "Calls of an episode that failed by what the policy asked for: it reads the error.",
    ),
    Chart(
        _EPISODES,
        "Prefix breaks",
        (("episode/num_prefix_breaks", "all"), ("episode/prefix_breaks/*", "")),
        "Points of an episode at which its history could not be extended token by token; a new root starts there.",
    ),
    Chart(
        _EPISODES,
        "Faults",
        (("episode/num_faults", "all"), ("episode/faults/*", "")),
        "Episodes that the infrastructure ended. They ran again and were not scored.",
    ),
    Chart(
        _EPISODES,
        "Time of an episode",
        (("episode/seconds", "whole"), ("episode/tools_s", "in tools")),
        "Seconds on average.",
        unit="s",
        log=True,
    ),
    Chart(
        _EPISODES,
        "Replays and lost answers",
        (
            ("episode/num_replayed", "entries from journals"),
            ("episode/num_replay_mismatches", "replays that started over"),
            ("episode/num_undelivered", "answers not delivered"),
        ),
        "Of an episode on average.",
    ),
    Chart(
        _SPEED,
        "Tokens per second",
        (("rollout/tokens_per_s", "generating"), ("train/tokens_per_s", "training")),
        "How fast tokens are sampled, of groups without signal, too; and how fast they are learned from.",
        unit="/s",
        log=True,
    ),
    Chart(_SPEED, "Samples per second", (("rollout/samples_per_s", "samples"),), "All that were sampled.", unit="/s"),
    Chart(
        _SPEED,
        "Where the time goes",
        (
            ("time/generating", "generating"),
            ("time/training", "training"),
            ("time/syncing", "syncing"),
            ("time/waiting", "waiting"),
            ("time/other", "other"),
        ),
        "Seconds of each step, by what the trainer's side did.",
        unit="s",
        stack=True,
    ),
    Chart(
        _SPEED,
        "Weight synchronisation",
        (("sync/seconds", "whole"), ("sync/stall_s", "generators stood still")),
        "Seconds until the generators had the new weights.",
        unit="s",
        log=True,
    ),
    Chart(
        _SPEED,
        "Step time",
        (("time/step", "step"), ("train/seconds", "optimizer step")),
        "Seconds.",
        unit="s",
        log=True,
    ),
    Chart(_SPEED, "Memory", (("train/memory_gib", "peak"),), "Peak of a device.", unit="GiB"),
    Chart(_SPEED, "Model FLOPs utilization", (("train/mfu", "MFU"),), "Part of the devices' peak.", unit="%"),
)


def choose_charts(metrics: Metrics) -> list[dict[str, Any]]:
    """Return the charts that have metrics, ready for the page; then one for each metric that none of them shows.

    A metric that was never a finite number is left out.
    """
    present = [name for name, column in metrics.columns.items() if any(value is not None for value in column)]
    kind = "policy" if "rollout/reward_mean" in present else "fine-tuning"
    shown: set[str] = {chart.band[1] for chart in CHARTS if chart.band and chart.band[0] in present}
    drawn = []
    for chart in CHARTS:
        series = [one for key, label in chart.keys for one in _series(key, label, present)]
        if series and chart.of in (kind, None):
            shown.update(one["key"] for one in series)
            drawn.append(_plan(chart, series, present))
    for name in present:
        if name not in shown:
            series = [{"key": name, "label": name.rpartition("/")[2]}]
            drawn.append(_plan(Chart("More", name, (), "", log=True), series, present))
    return drawn


def _series(key: str, label: str, present: Sequence[str]) -> list[dict[str, Any]]:
    if "*" not in key:
        return [{"key": key, "label": label}] if key in present else []
    start = key.index("*")
    return [
        {"key": name, "label": (label + name[start:]).replace("_", " ").strip() or name}
        for name in present
        if fnmatchcase(name, key)
    ]


def _plan(chart: Chart, series: list[dict[str, Any]], present: Sequence[str]) -> dict[str, Any]:
    for one in series:
        if chart.band and one["key"] == chart.band[0] and chart.band[1] in present:
            one["band"] = chart.band[1]
    return {
        "section": chart.section,
        "title": chart.title,
        "help": chart.help,
        "unit": chart.unit,
        "stack": chart.stack,
        "log": chart.log,
        "series": series,
    }


# ---- The numbers at the head --------------------------------------------------------------------------------------

_CHANGES: Final = (
    ("evaluation/reward", "Held-out reward"),
    ("rollout/reward_mean", "Reward"),
    ("validation/loss", "Validation loss"),
    ("train/loss", "Training loss"),
)
_LATEST: Final = (
    ("train/kl", "KL divergence", "nats"),
    ("train/entropy", "Entropy", "nats"),
    ("rollout/tokens_per_s", "Generation", "tokens/s"),
    ("train/tokens_per_s", "Training", "tokens/s"),
    ("rollout/samples_per_s", "Samples", "per second"),
)
_MAX_TILES: Final = 6
_AVERAGED: Final = 5
"""A metric that jumps from step to step is shown as the mean of so many first and last ones."""


def headline(metrics: Metrics) -> list[dict[str, str]]:
    """Return what the run came to, in a few words: where it began and where it is, and its latest state."""
    tiles = []
    is_rl = "rollout/reward_mean" in metrics.columns
    for key, label in _CHANGES:
        if key == "train/loss" and is_rl:
            continue
        values = _known(metrics.columns, key)
        if values:
            count = 1 if key.startswith(("evaluation/", "validation/")) else min(_AVERAGED, max(1, len(values) // 4))
            first, last = sum(values[:count]) / count, sum(values[-count:]) / count
            detail = f"from {_figure(first)}" if len(values) > 1 else "one value so far"
            tiles.append({"label": label, "value": _figure(last), "detail": detail, "key": key})
    for key, label, unit in _LATEST:
        values = _known(metrics.columns, key)
        if values:
            count = min(_AVERAGED, len(values))
            tiles.append({"label": label, "value": _figure(sum(values[-count:]) / count), "detail": unit, "key": key})
    return tiles[:_MAX_TILES]


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


def facts(run: Run) -> list[tuple[str, str]]:
    """Return what was run, from its configuration: label and value."""
    is_rl = run.setting("rollout.group_size") is not None
    found = []
    for path, label in _FACTS:
        value = run.setting(path)
        if isinstance(value, str | int | float) and not (is_rl and path == "training.batch_size"):
            found.append((label, str(value)))
    return found
