"""How figures read on a console. Pure functions; nothing here prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from forge.observe.sink import (
    EPOCH,
    GRAD_NORM,
    LEARNING_RATE,
    MEMORY_GIB,
    MFU,
    SKIPPED,
    TOKENS_PER_S,
    TRAIN_LOSS,
    VALIDATION_BEST,
    VALIDATION_LOSS,
    Value,
)


def format_loss(loss: float) -> str:
    """Two to four decimals: 2.45, 0.1234. Below a thousandth three digits, so that a small loss does not read as 0."""
    if not math.isfinite(loss) or 0 < abs(loss) < 1e-3:
        return f"{loss:.3g}"
    whole, _, decimals = f"{loss:.4f}".partition(".")
    return f"{whole}.{decimals.rstrip('0').ljust(2, '0')}"


def format_rate(rate: float) -> str:
    """A learning rate, as short as it can be: 0.0001, 1e-05."""
    return f"{rate:g}"


def format_norm(norm: float) -> str:
    return f"{norm:.2g}" if 0 < abs(norm) < 1e-2 else f"{norm:.2f}"


def format_tokens_per_s(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 or not math.isfinite(rate) else f"{rate:.2g}"


_FIELDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    (TRAIN_LOSS, "Loss: {}", format_loss),
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
    parts += [text.format(show(float(values[name]))) for name, text, show in _FIELDS if name in values]
    if values.get(SKIPPED):
        parts.append("skipped")
    return " | ".join(parts)


def validation_line(step: int, values: Mapping[str, Value]) -> str:
    """`Validation | Step 100 | Loss: 2.31 | best`, the last word only where it is the lowest loss so far."""
    parts = ["Validation", f"Step {step}", f"Loss: {format_loss(float(values[VALIDATION_LOSS]))}"]
    if values.get(VALIDATION_BEST):
        parts.append("best")
    return " | ".join(parts)


def plain_line(step: int, values: Mapping[str, Value]) -> str:
    """`Step 100 | reward/mean: 0.5`: every figure by its name, for steps that have no loss of training."""
    shown = (
        f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}" for name, value in values.items()
    )
    return " | ".join([f"Step {step}", *shown])


def bar_text(values: Mapping[str, Value]) -> str:
    """What stands at the end of a progress bar: loss, learning rate and tokens per second, where they are known."""
    shown = {TRAIN_LOSS: "loss {}", LEARNING_RATE: "lr {}", TOKENS_PER_S: "{} tokens/s"}
    return ", ".join(
        shown[name].format(show(float(values[name]))) for name, _, show in _FIELDS if name in shown and name in values
    )
