"""How figures of reinforcement learning read on a console. Pure functions; nothing here prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forge.observe.lines import format_loss, format_tokens_per_s
from forge.observe.sink import (
    ENTROPY,
    EVALUATION,
    EVALUATION_PROMPTS,
    EVALUATION_REWARD,
    GENERATION_TOKENS_PER_S,
    KL,
    NUM_FAILED,
    REWARD_MEAN,
    SKIPPED,
    STALENESS,
    STEP_TIME,
    TIME_GENERATING,
    TIME_SYNCING,
    TIME_TRAINING,
    TIME_WAITING,
    TOKENS_PER_S,
    Value,
)


def format_figure(value: float) -> str:
    """Two to four decimals, as a loss: 0.75, 0.1234, 12.00."""
    return format_loss(value)


def format_staleness(steps: float) -> str:
    return f"{steps:.3g}"


def format_seconds(seconds: float) -> str:
    """0.12 s, 8.1 s, 123 s."""
    return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


_FIELDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    (REWARD_MEAN, "Avg Reward: {}", format_figure),
    (KL, "KL Divergence: {}", format_figure),
    (ENTROPY, "Entropy: {}", format_figure),
    (STALENESS, "Staleness: {}", format_staleness),
    (GENERATION_TOKENS_PER_S, "Gen: {} tok/s", format_tokens_per_s),
    (TOKENS_PER_S, "Train: {} tok/s", format_tokens_per_s),
)
_SHARES = ((TIME_WAITING, "wait"), (TIME_GENERATING, "gen"), (TIME_TRAINING, "train"), (TIME_SYNCING, "sync"))


@dataclass(frozen=True, slots=True)
class Share:
    """What part of a step's time went where; 1 is all of it."""

    name: str
    part: float


def time_shares(values: Mapping[str, Value]) -> list[Share]:
    """How the time of a step splits, in the order wait, gen, train, sync; empty where it is not known.

    The whole is `time/step`. Where parts overlap and come to more than that, the whole is their sum.
    """
    seconds = {name: max(0.0, float(values[key])) for key, name in _SHARES if key in values}
    whole = max(float(values.get(STEP_TIME, 0.0)), sum(seconds.values()))
    return [Share(name, spent / whole) for name, spent in seconds.items()] if 0 < whole < float("inf") else []


def episode_line(step: int, values: Mapping[str, Value]) -> str:
    """`Episode 1 | Avg Reward: 0.75 | KL Divergence: 0.12`, then what else is known, in a fixed order."""
    parts = [f"Episode {step}"]
    parts += [text.format(show(float(values[name]))) for name, text, show in _FIELDS if name in values]
    shares = time_shares(values)
    if shares:
        split = ", ".join(f"{share.name} {share.part:.0%}" for share in shares)
        whole = f"{format_seconds(float(values[STEP_TIME]))} " if STEP_TIME in values else ""
        parts.append(f"Time: {whole}({split})")
    if values.get(NUM_FAILED):
        parts.append(f"Failed: {float(values[NUM_FAILED]):g}")
    if values.get(SKIPPED):
        parts.append("skipped")
    return " | ".join(parts)


def evaluation_line(step: int, values: Mapping[str, Value]) -> str:
    """`Evaluation at step 10 | reward 0.71 | pass@8 0.93 | 64 prompts`: every figure of the held-out set."""
    parts = [f"Evaluation at step {step}", f"reward {format_figure(float(values[EVALUATION_REWARD]))}"]
    for name, value in values.items():
        if name.startswith(EVALUATION) and name not in (EVALUATION_REWARD, EVALUATION_PROMPTS):
            text = value if isinstance(value, str) else format_figure(float(value))
            parts.append(f"{name.removeprefix(EVALUATION)} {text}")
    if EVALUATION_PROMPTS in values:
        parts.append(f"{float(values[EVALUATION_PROMPTS]):g} prompts")
    return " | ".join(parts)


def panel_figures(values: Mapping[str, Value]) -> list[tuple[str, str]]:
    """The figures of a step for a small display: what each is called, and how it reads."""
    names = {
        REWARD_MEAN: "reward",
        KL: "KL",
        ENTROPY: "entropy",
        STALENESS: "staleness",
        GENERATION_TOKENS_PER_S: "gen tok/s",
        TOKENS_PER_S: "train tok/s",
    }
    return [(names[name], show(float(values[name]))) for name, _, show in _FIELDS if name in values]
