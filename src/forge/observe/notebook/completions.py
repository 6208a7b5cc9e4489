"""Completions that a run recorded, as a notebook shows them: each token in the color of its probability."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forge.errors import DataError
from forge.observe.report.samples import json_lines

_FILE: Final = re.compile(r"step_(\d+)\.jsonl")
_MAX_TOKENS: Final = 500
"""Tokens that are shown of a completion."""


@dataclass(frozen=True, slots=True)
class RecordedCompletion:
    """One completion of a step, as `rollouts/step_N.jsonl` has it.

    Attributes:
        step, group: the step that learned from it, and the number of its group.
        prompt, answer: what was asked, messages as lines `role: text`, and the expected answer.
        text: what was sampled.
        pieces: the text of each token; `logprobs` are the sampler's.
        reward, parts: the reward, and each part of it by name, before its weight.
        advantage: how much better it was than what it was compared with.
        finish_reason: `stop`, `length` or `abort`.
    """

    step: int
    group: int
    prompt: str
    answer: str | None
    text: str
    pieces: tuple[str, ...]
    logprobs: tuple[float, ...]
    reward: float
    parts: Mapping[str, float]
    advantage: float
    finish_reason: str

    def _repr_html_(self) -> str:
        parts = "".join(f", {name} {value:g}" for name, value in self.parts.items()) if len(self.parts) > 1 else ""
        head = f"step {self.step}, group {self.group}: reward {self.reward:g}{parts}, advantage {self.advantage:+.2f}"
        cut = ", cut off by length" if self.finish_reason == "length" else ""
        expected = "" if self.answer is None else f" (expected: {self.answer})"
        shown = list(zip(self.pieces, self.logprobs, strict=False))[:_MAX_TOKENS]
        tokens = "".join(_token(piece, logprob) for piece, logprob in shown) or html.escape(self.text)
        more = len(self.pieces) - len(shown)
        rest = f' <i style="opacity:.75">{more} more tokens</i>' if shown and more > 0 else ""
        return (
            '<div style="margin:0 0 10px">'
            f'<div style="font-size:12px;opacity:.75">{html.escape(head + cut)}</div>'
            f'<div style="white-space:pre-wrap">{html.escape(self.prompt + expected)}</div>'
            f'<div style="white-space:pre-wrap;font-family:monospace">{tokens}{rest}</div></div>'
        )


class RecordedCompletions(tuple[RecordedCompletion, ...]):
    """Completions of one step, from the lowest reward to the highest."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        words = "The darker a token, the less likely it was. Hover over a token for its probability."
        legend = f'<div style="font-size:12px;opacity:.75;margin:0 0 6px">{words}</div>'
        return legend + "".join(each._repr_html_() for each in self) if self else "<i>no completions</i>"


def _token(piece: str, logprob: float) -> str:
    """A token on a background that is the darker the less likely it was: none at 1, full at e^-4 and below."""
    strength = 0.55 * min(1.0, -logprob / 4) if math.isfinite(logprob) and logprob < 0 else 0.0
    probability = math.exp(min(0.0, logprob)) if not math.isnan(logprob) else math.nan
    label = html.escape(f"{piece!r}: probability {probability:.3g}, logprob {logprob:.3g}", quote=True)
    return f'<span title="{label}" style="background:rgba(224,123,0,{strength:.2f})">{html.escape(piece)}</span>'


def read_completions(folder: Path, *, num: int = 4, step: int | None = None) -> RecordedCompletions:
    """Return `num` completions that a step learned from, spread from the lowest reward to the highest.

    Without `step`, those of the last one that is recorded. `DataError` where that step has none.
    """
    rollouts = folder / "rollouts"
    names = map(_FILE.fullmatch, (path.name for path in rollouts.glob("step_*.jsonl")))
    steps = sorted(int(name[1]) for name in names if name is not None)
    if not steps or (step is not None and step not in steps):
        known = f"recorded steps: {_ranges(steps)}" if steps else "no step of this run is recorded"
        raise DataError(
            "there are no recorded completions of this step" if steps else "this run has no recorded completions",
            path=str(rollouts),
            value=step,
            rule=known,
            repair="name one of these steps" if steps else "run with record.rollouts: all or some",
        )
    chosen = steps[-1] if step is None else step
    path = rollouts / f"step_{chosen:06d}.jsonl"
    with open(path, "rb") as file:
        found = [_completion(fields, where=f"{path}:{place}") for place, fields in enumerate(json_lines(file), start=1)]
    found.sort(key=lambda each: each.reward)
    count = min(max(0, num), len(found))
    places = [round(place * (len(found) - 1) / max(1, count - 1)) for place in range(count)]
    return RecordedCompletions(found[place] for place in places)


def _completion(fields: Mapping[str, Any] | None, *, where: str) -> RecordedCompletion:
    try:
        return _read(fields or {})
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            "a line of recorded rollouts cannot be read",
            path=where,
            rule=f"an episode as docs/guides/report.md describes it ({type(error).__name__}: {error})",
            repair="look at another step, or remove the line",
        ) from None


def _read(fields: Mapping[str, Any]) -> RecordedCompletion:
    prompt = fields["prompt"]
    messages: Sequence[Mapping[str, Any]] = prompt if isinstance(prompt, list) else []
    lines = [f"{message.get('role')}: {message.get('content')}" for message in messages]
    return RecordedCompletion(
        step=int(fields["step"]),
        group=int(fields["group"]),
        prompt="\n".join(lines) if lines else str(prompt),
        answer=fields.get("answer"),
        text=str(fields["text"]),
        pieces=tuple(fields["pieces"]),
        logprobs=tuple(math.nan if value is None else float(value) for value in fields["logprobs"]),
        reward=float(fields["reward"]),
        parts=dict(fields.get("parts") or {}),
        advantage=float(fields["advantage"]),
        finish_reason=str(fields["finish_reason"]),
    )


def _ranges(steps: Sequence[int]) -> str:
    """1-3, 7, 9-12."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1][1:] = [step]
        else:
            parts.append([step])
    return ", ".join("-".join(map(str, part)) for part in parts)
