"""Which curves a report draws, from the metrics that are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from forge.observe.report.reading import Metrics


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
_CRITIC: Final = "Critic"
_ROLLOUTS: Final = "Rollouts"
_EPISODES: Final = "Episodes"
_LEAGUE: Final = "League"
_CURRICULUM: Final = "Curriculum"
_SPEED: Final = "Speed"
MORE: Final = "More"
"""The section of the metrics that no chart shows."""

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
        _LEARNING,
        "Accuracy on pairs",
        (
            ("train/accuracy", "training"),
            ("validation/accuracy", "validation"),
            ("validation/ranking_accuracy", "validation, by logprob alone"),
        ),
        "The part of pairs whose chosen answer has the larger reward; for KTO, of answers on the right side.",
        unit="%",
    ),
    Chart(
        _LEARNING,
        "Reward margin",
        (("train/reward_margin", "training"), ("validation/reward_margin", "validation")),
        "The reward of chosen answers minus that of rejected ones.",
    ),
    Chart(
        _LEARNING,
        "Rewards of answers",
        (
            ("train/reward_chosen", "chosen"),
            ("train/reward_rejected", "rejected"),
            ("validation/reward_chosen", "chosen, validation"),
            ("validation/reward_rejected", "rejected, validation"),
        ),
        "What the policy's loss takes for the reward of chosen and of rejected answers.",
    ),
    Chart(
        _LEARNING,
        "Logprobs of answers",
        (("train/logprob_chosen", "chosen"), ("train/logprob_rejected", "rejected")),
        "Of whole answers, or of a token on average where the loss compares these.",
    ),
    Chart(
        _LEARNING,
        "Calibration",
        (("validation/ece", "expected calibration error"), ("validation/brier", "Brier score")),
        "How far the confidence of a reward model is from how often it is right, on held-out pairs.",
    ),
    Chart(
        _LEARNING,
        "Reliability",
        (("validation/calibration/*_accuracy", ""), ("validation/calibration/*_confidence", "")),
        "Of held-out pairs in bins of confidence, named by where they begin: how often the reward model is right, and "
        "its mean confidence. In a calibrated model both are alike.",
    ),
    Chart(
        _LEARNING,
        "Pairs by confidence",
        (("validation/calibration/*_share", ""),),
        "The part of held-out pairs in each bin of confidence.",
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
        _CRITIC,
        "Values and returns",
        (("critic/value_mean", "value"), ("critic/return_mean", "return")),
        "Means over the states that the critic learns from: what it expected, and what it learns.",
    ),
    Chart(
        _CRITIC,
        "Explained variance",
        (("critic/explained_variance", "explained"),),
        "The part of the returns' variance that the values predicted before the update: 1 is perfect, 0 no better than "
        "the mean, below 0 worse.",
    ),
    Chart(
        _CRITIC,
        "Critic's loss",
        (("critic/loss", "loss"), ("critic/clip_fraction", "clipped")),
        "Half the squared error before the update, and the part of values that moved farther than critic.value_clip.",
    ),
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
        _CURRICULUM,
        "Pass rate of chosen prompts",
        (("curriculum/pass_rate", "pass rate"), ("curriculum/explored", "explored groups")),
        "Completions that are solved, in groups that the curriculum chose; and the share of groups that explored.",
        unit="%",
    ),
    Chart(
        _CURRICULUM,
        "Prompts",
        (
            ("curriculum/num_unseen", "not asked yet"),
            ("curriculum/num_solved", "always solved"),
            ("curriculum/num_unsolved", "never solved"),
            ("curriculum/num_active", "that the rule may choose"),
        ),
        "By what is known of them after the step.",
    ),
    Chart(
        _LEAGUE,
        "Elo",
        (("league/elo/*", ""),),
        "Ratings of the live policy and of the members of the league, from the games between them.",
    ),
    Chart(
        _LEAGUE,
        "Win rate",
        (("league/win_rate/*", ""),),
        "Of the live policy; a draw counts half. All: the games of the step. By member: recent games count more.",
        unit="%",
    ),
    Chart(
        _LEAGUE,
        "Members",
        (("league/num_members", "members"), ("league/num_games", "games against them")),
        "Versions and checkpoints that opponents are drawn from, and games against them that the step counted.",
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
        "Weights from other hosts",
        (("sync/received_mib", "received"),),
        "What all generators together fetched over the network for the new weights.",
        unit="MiB",
    ),
    Chart(
        _SPEED,
        "Step time",
        (("time/step", "step"), ("train/seconds", "optimizer step")),
        "Seconds.",
        unit="s",
        log=True,
    ),
    Chart(
        _SPEED,
        "Recovery",
        (
            ("recovery/restarts", "restarts"),
            ("recovery/steps_retrained", "steps trained again"),
            ("recovery/seconds", "seconds"),
        ),
        "What the death of a trainer, a critic or a shared policy has cost before a step.",
    ),
    Chart(_SPEED, "Memory", (("train/memory_gib", "peak"),), "Peak of a device.", unit="GiB"),
    Chart(_SPEED, "Model FLOPs utilization", (("train/mfu", "MFU"),), "Part of the devices' peak.", unit="%"),
)


def choose_charts(metrics: Metrics) -> list[dict[str, Any]]:
    """Return the charts that have metrics, ready for the page; then one for each metric that none of them shows.

    A metric that was never a finite number is left out.
    """
    return charts_of([name for name, column in metrics.columns.items() if any(value is not None for value in column)])


def charts_of(present: Sequence[str], charts: Sequence[Chart] = CHARTS) -> list[dict[str, Any]]:
    """Return the charts for metrics of these names; then one for each name that none of them shows."""
    kind = "policy" if "rollout/reward_mean" in present else "fine-tuning"
    shown: set[str] = {chart.band[1] for chart in charts if chart.band and chart.band[0] in present}
    drawn = []
    for chart in charts:
        series = [one for key, label in chart.keys for one in _series(key, label, present)]
        if series and chart.of in (kind, None):
            shown.update(one["key"] for one in series)
            drawn.append(_plan(chart, series, present))
    for name in present:
        if name not in shown:
            series = [{"key": name, "label": name.rpartition("/")[2]}]
            drawn.append(_plan(Chart(MORE, name, (), "", log=True), series, present))
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
