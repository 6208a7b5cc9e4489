"""How metrics read on a console in the style `episode`, which tools may know. Pure functions; nothing here prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from forge.observe.sink import (
    ACCURACY,
    ENTROPY,
    EPOCH,
    EVALUATION,
    EVALUATION_PROMPTS,
    EVALUATION_REWARD,
    GENERATION_TOKENS_PER_S,
    GRAD_NORM,
    KL,
    LEAGUE_ELO,
    LEAGUE_WIN_RATE,
    LEARNING_RATE,
    MEMORY_GIB,
    MFU,
    NUM_FAILED,
    REWARD_MARGIN,
    REWARD_MEAN,
    SKIPPED,
    STALENESS,
    STEP_TIME,
    TIME_GENERATING,
    TIME_SYNCING,
    TIME_TRAINING,
    TIME_WAITING,
    TOKENS_PER_S,
    TRAIN_LOSS,
    VALIDATION_ACCURACY,
    VALIDATION_BEST,
    VALIDATION_ECE,
    VALIDATION_LOSS,
    VALIDATION_MARGIN,
    Value,
)


def format_loss(loss: float) -> str:
    """Two to four decimals: 2.45, 0.1234. Below a thousandth three digits, so that a small loss does not read as 0."""
    if not math.isfinite(loss) or 0 < abs(loss) < 1e-3:
        return f"{loss:.3g}"
    whole, _, decimals = f"{loss:.4f}".partition(".")
    return f"{whole}.{decimals.rstrip('0').ljust(2, '0')}"


def format_rate(rate: float) -> str:
    """Return a learning rate, as short as it can be: 0.0001, 1e-05."""
    return f"{rate:g}"


def format_norm(norm: float) -> str:
    return f"{norm:.2g}" if 0 < abs(norm) < 1e-2 else f"{norm:.2f}"


def format_tokens_per_s(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 or not math.isfinite(rate) else f"{rate:.2g}"


def format_part(part: float) -> str:
    """Return a part of a whole in percent."""
    return f"{100 * part:.1f}%"


_TRAIN_FIELDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    (TRAIN_LOSS, "Loss: {}", format_loss),
    (ACCURACY, "Accuracy: {}", format_part),
    (REWARD_MARGIN, "Margin: {}", format_loss),
    (LEARNING_RATE, "LR: {}", format_rate),
    (TOKENS_PER_S, "Tokens/s: {}", format_tokens_per_s),
    (GRAD_NORM, "Grad: {}", format_norm),
    (MEMORY_GIB, "Mem: {} GiB", lambda size: f"{size:.1f}"),
    (MFU, "MFU: {}%", lambda part: f"{100 * part:.1f}"),
)


def train_line(step: int, values: Mapping[str, Value], *, num_epochs: int | None = None) -> str:
    """`Epoch 1/10 | Step 100 | Loss: 2.45 | LR: 0.0001`, then what else is known, in a fixed order."""
    parts = []
    if EPOCH in values:
        parts.append(f"Epoch {values[EPOCH]}" + (f"/{num_epochs}" if num_epochs is not None else ""))
    parts.append(f"Step {step}")
    parts += [text.format(show(float(values[name]))) for name, text, show in _TRAIN_FIELDS if name in values]
    if values.get(SKIPPED):
        parts.append("skipped")
    return " | ".join(parts)


def validation_line(step: int, values: Mapping[str, Value]) -> str:
    """`Validation | Step 100 | Loss: 2.31 | best`, the last word only where it is the lowest loss so far.

    Where answers are compared, their accuracy stands behind the loss, and the calibration error where it is known, else
    the margin of rewards.
    """
    parts = ["Validation", f"Step {step}", f"Loss: {format_loss(float(values[VALIDATION_LOSS]))}"]
    for name, text in ((VALIDATION_ACCURACY, "Accuracy: {:.1%}"), (VALIDATION_ECE, "ECE: {:.3f}")):
        parts += [text.format(float(values[name]))] if name in values else []
    if VALIDATION_MARGIN in values and VALIDATION_ECE not in values:
        parts.append(f"Margin: {format_loss(float(values[VALIDATION_MARGIN]))}")
    if values.get(VALIDATION_BEST):
        parts.append("best")
    return " | ".join(parts)


def bar_text(values: Mapping[str, Value]) -> str:
    """Return the end of a progress bar: loss, learning rate and tokens per second, where they are known."""
    shown = {TRAIN_LOSS: "loss {}", LEARNING_RATE: "lr {}", TOKENS_PER_S: "{} tokens/s"}
    known = [(name, show) for name, _, show in _TRAIN_FIELDS if name in shown and name in values]
    return ", ".join(shown[name].format(show(float(values[name]))) for name, show in known)


# ---- steps of reinforcement learning


def format_staleness(steps: float) -> str:
    return f"{steps:.3g}"


def format_seconds(seconds: float) -> str:
    """0.12 s, 8.1 s, 123 s."""
    return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


_ROLLOUT_FIELDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    (REWARD_MEAN, "Avg Reward: {}", format_loss),
    (KL, "KL Divergence: {}", format_loss),
    (ENTROPY, "Entropy: {}", format_loss),
    (LEAGUE_ELO, "Elo: {}", lambda rating: f"{rating:.0f}"),
    (LEAGUE_WIN_RATE, "Win Rate: {}", lambda rate: f"{rate:.0%}"),
    (STALENESS, "Staleness: {}", format_staleness),
    (GENERATION_TOKENS_PER_S, "Gen: {} tok/s", format_tokens_per_s),
    (TOKENS_PER_S, "Train: {} tok/s", format_tokens_per_s),
)
_SHARES = ((TIME_WAITING, "wait"), (TIME_GENERATING, "gen"), (TIME_TRAINING, "train"), (TIME_SYNCING, "sync"))


def time_shares(values: Mapping[str, Value]) -> dict[str, float]:
    """Return how the time of a step splits, in the order wait, gen, train, sync; empty where it is not known.

    The whole is `time/step`. Where parts overlap and come to more than that, the whole is their sum.
    """
    seconds = {name: max(0.0, float(values[key])) for key, name in _SHARES if key in values}
    whole = max(float(values.get(STEP_TIME, 0.0)), sum(seconds.values()))
    return {name: spent / whole for name, spent in seconds.items()} if 0 < whole < float("inf") else {}


def rollout_line(step: int, values: Mapping[str, Value], *, word: str = "Episode") -> str:
    """`Episode 1 | Avg Reward: 0.75 | KL Divergence: 0.12`, then what else is known, in a fixed order."""
    parts = [f"{word} {step}"]
    parts += [text.format(show(float(values[name]))) for name, text, show in _ROLLOUT_FIELDS if name in values]
    shares = time_shares(values)
    if shares:
        split = ", ".join(f"{name} {part:.0%}" for name, part in shares.items())
        whole = f"{format_seconds(float(values[STEP_TIME]))} " if STEP_TIME in values else ""
        parts.append(f"Time: {whole}({split})")
    if values.get(NUM_FAILED):
        parts.append(f"Failed: {float(values[NUM_FAILED]):g}")
    if values.get(SKIPPED):
        parts.append("skipped")
    return " | ".join(parts)


def evaluation_line(step: int, values: Mapping[str, Value]) -> str:
    """`Evaluation at step 10 | reward 0.71 | pass@8 0.93 | 64 prompts`: every metric of the held-out set."""
    parts = [f"Evaluation at step {step}", f"reward {format_loss(float(values[EVALUATION_REWARD]))}"]
    for name, value in values.items():
        if name.startswith(EVALUATION) and name not in (EVALUATION_REWARD, EVALUATION_PROMPTS):
            text = value if isinstance(value, str) else format_loss(float(value))
            parts.append(f"{name.removeprefix(EVALUATION)} {text}")
    if EVALUATION_PROMPTS in values:
        parts.append(f"{float(values[EVALUATION_PROMPTS]):g} prompts")
    return " | ".join(parts)
