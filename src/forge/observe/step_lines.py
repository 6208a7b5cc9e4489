"""The lines of a run on a console: one for each step, none longer than the console is wide. Pure functions.

    Step 51/100 | reward 0.9395 | KL 0.0034 | entropy 0.1005 | 0.39 s | 0:25 left

Where there is too little room for all that is known, what matters least is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from forge.observe.lines import format_loss, format_part, format_seconds, time_shares
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
    TOKENS_PER_S,
    TRAIN_LOSS,
    VALIDATION_ACCURACY,
    VALIDATION_BEST,
    VALIDATION_ECE,
    VALIDATION_LOSS,
    VALIDATION_MARGIN,
    Value,
)

WIDTH = 80
"""Of a console whose width is not known."""
Part = tuple[int, str]
"""A part of a line, and how much it matters: those with the smallest numbers stay longest."""


def format_short(value: float) -> str:
    """Return a number in at most ten characters."""
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e5:
        return format_loss(value)
    return f"{value:.3g}"


def format_count(value: float) -> str:
    """Return a number of many digits: 950, 4.6k, 105k, 1.2M."""
    if not math.isfinite(value) or abs(value) < 1000:
        return f"{value:.0f}" if abs(value) >= 10 or not math.isfinite(value) else f"{value:.2g}"
    for unit in "kMGTP":
        value /= 1000
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
    return f"{value:.2e}P"


def format_clock(seconds: float) -> str:
    """Return a time: 0:25, 1:02:03, 3 d 4 h."""
    if not 0 <= seconds < 1e12:
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_step(step: int, total: int | None) -> str:
    return f"{step}" if total is None else f"{step}/{total}"


def fitted(parts: Sequence[Part], width: int) -> str:
    """Join parts with ` | ` in their order: the first one, and as many as fit, those that matter most before others."""
    first = parts[0][1][:width]
    chosen, room = [0], width - len(first)
    for place in sorted(range(1, len(parts)), key=lambda place: (parts[place][0], place)):
        if len(parts[place][1]) + 3 <= room:
            chosen.append(place)
            room -= len(parts[place][1]) + 3
    return " | ".join([first, *(parts[place][1] for place in sorted(chosen)[1:])])


_TEXTS: tuple[tuple[str, int, str, Callable[[float], str]], ...] = (
    (TRAIN_LOSS, 1, "loss {}", format_short),
    (ACCURACY, 4, "accuracy {}", format_part),
    (REWARD_MARGIN, 7, "margin {}", format_short),
    (LEARNING_RATE, 5, "lr {}", lambda rate: f"{rate:.3g}"),
    (TOKENS_PER_S, 6, "{} tok/s", format_count),
    (GRAD_NORM, 8, "grad {}", format_short),
    (MEMORY_GIB, 9, "{} GiB", lambda size: f"{size:.1f}"),
    (MFU, 10, "MFU {}", format_part),
)
_ROLLOUT_TEXTS: tuple[tuple[str, int, str, Callable[[float], str]], ...] = (
    (REWARD_MEAN, 1, "reward {}", format_short),
    (KL, 4, "KL {}", format_short),
    (ENTROPY, 6, "entropy {}", format_short),
    (LEAGUE_ELO, 4, "Elo {}", lambda rating: f"{rating:.0f}"),
    (LEAGUE_WIN_RATE, 5, "win {}", lambda rate: f"{rate:.0%}"),
    (STALENESS, 8, "staleness {}", lambda steps: f"{steps:.3g}"),
    (GENERATION_TOKENS_PER_S, 9, "gen {} tok/s", format_count),
    (TOKENS_PER_S, 10, "train {} tok/s", format_count),
    (STEP_TIME, 7, "{}", format_seconds),
)


def _known(texts: Sequence[tuple[str, int, str, Callable[[float], str]]], values: Mapping[str, Value]) -> list[Part]:
    return [(rank, text.format(show(float(values[name])))) for name, rank, text, show in texts if name in values]


def step_line(
    step: int,
    values: Mapping[str, Value],
    *,
    total: int | None = None,
    num_epochs: int | None = None,
    left_s: float | None = None,
    width: int = WIDTH,
) -> str:
    """Return the line of a step: of rollouts where it has rewards, else of its loss. `left_s` is the time that is
    left."""
    is_rollout = REWARD_MEAN in values
    parts: list[Part] = [(0, f"Step {format_step(step, total)}")]
    if EPOCH in values and not is_rollout:
        epoch = int(float(values[EPOCH]))
        parts.append((6, f"epoch {epoch}" + (f"/{num_epochs}" if num_epochs is not None else "")))
    parts += _known(_ROLLOUT_TEXTS if is_rollout else _TEXTS, values)
    if is_rollout and (shares := time_shares(values)):
        parts.append((11, " ".join(f"{name} {part:.0%}" for name, part in shares.items())))
    if is_rollout and values.get(NUM_FAILED):
        parts.append((2, f"failed {float(values[NUM_FAILED]):g}"))
    if values.get(SKIPPED):
        parts.append((2, "skipped"))
    if left_s is not None:
        parts.append((3, f"{format_clock(left_s)} left"))
    return fitted(parts, width)


def validation_line(step: int, values: Mapping[str, Value], *, total: int | None = None, width: int = WIDTH) -> str:
    """`Validation at step 100/400 | loss 2.31 | best`, the last word where it is the lowest loss so far."""
    parts: list[Part] = [(0, f"Validation at step {format_step(step, total)}")]
    parts.append((1, f"loss {format_short(float(values[VALIDATION_LOSS]))}"))
    for name, rank, text, show in (
        (VALIDATION_ACCURACY, 3, "accuracy {}", format_part),
        (VALIDATION_ECE, 4, "ECE {}", format_short),
        (VALIDATION_MARGIN, 5, "margin {}", format_short),
    ):
        if name in values:
            parts.append((rank, text.format(show(float(values[name])))))
    if values.get(VALIDATION_BEST):
        parts.append((2, "best"))
    return fitted(parts, width)


def evaluation_line(step: int, values: Mapping[str, Value], *, total: int | None = None, width: int = WIDTH) -> str:
    """`Evaluation at step 10/100 | reward 0.71 | pass@8 0.93 | 64 prompts`, as many metrics of it as fit."""
    parts: list[Part] = [(0, f"Evaluation at step {format_step(step, total)}")]
    parts.append((1, f"reward {format_short(float(values[EVALUATION_REWARD]))}"))
    for name, value in values.items():
        if name.startswith(EVALUATION) and name not in (EVALUATION_REWARD, EVALUATION_PROMPTS):
            text = " ".join(value.split()) if isinstance(value, str) else format_short(float(value))
            parts.append((4 if name == f"{EVALUATION}length" else 3, f"{name.removeprefix(EVALUATION)} {text}"))
    if EVALUATION_PROMPTS in values:
        parts.append((2, f"{float(values[EVALUATION_PROMPTS]):g} prompts"))
    return fitted(parts, width)


def plain_line(step: int, values: Mapping[str, Value], *, total: int | None = None, width: int = WIDTH) -> str:
    """`Step 100 | reward/mean: 0.5`: metrics by their names, as many as fit, for steps that are of no known kind."""
    parts: list[Part] = [(0, f"Step {format_step(step, total)}")]
    for name, value in values.items():
        text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
        parts.append((1, f"{name}: {text}"))
    return fitted(parts, width)
