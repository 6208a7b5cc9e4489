"""All rules over one run, and how the outcome reads."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forge.observe.diagnosis.evidence import Evidence, read_evidence
from forge.observe.diagnosis.findings import Finding
from forge.observe.diagnosis.policy import (
    entropy_collapse,
    learning_rate_too_high,
    nonfinite_numbers,
    sampler_mismatch,
    stale_data,
)
from forge.observe.diagnosis.rewards import failing_rewards, memorised_prompts, reward_hacking
from forge.observe.diagnosis.signal import completions_cut_off, nothing_to_learn_from
from forge.observe.diagnosis.text import moved, solved_text
from forge.observe.sink import REWARD_MEAN

Rule = Callable[[Evidence], Finding | None]

RULES: Final[Mapping[Rule, tuple[Rule, ...]]] = {
    failing_rewards: (learning_rate_too_high, nothing_to_learn_from, entropy_collapse),
    nonfinite_numbers: (learning_rate_too_high, entropy_collapse),
    stale_data: (
        learning_rate_too_high, entropy_collapse, completions_cut_off, nothing_to_learn_from, memorised_prompts,
    ),
    learning_rate_too_high: (entropy_collapse, completions_cut_off, nothing_to_learn_from),
    reward_hacking: (completions_cut_off, entropy_collapse),
    memorised_prompts: (nothing_to_learn_from,),
    entropy_collapse: (nothing_to_learn_from,),
    completions_cut_off: (nothing_to_learn_from,),
    nothing_to_learn_from: (),
    sampler_mismatch: (),
}  # fmt: skip
"""The rules, in the order in which their findings are listed; each with those whose symptoms follow from it."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the rules found in a run: nothing where none of them is sure."""

    run: Evidence
    findings: tuple[Finding, ...]

    def plain(self) -> Mapping[str, Any]:
        """Return it as what JSON can hold."""
        steps = {"num_steps": len(self.run.steps), "last_step": self.run.steps[-1] if self.run.steps else 0}
        return {"folder": str(self.run.folder), **steps, "findings": [each.plain() for each in self.findings]}


def diagnose(folder: str | os.PathLike[str]) -> Diagnosis:
    """Look for known reasons why a run does not learn. The run may be running, over or killed.

    `DataError` where the folder holds no run of reinforcement learning that has taken a step or evaluated.
    """
    run = read_evidence(Path(folder))
    found: dict[Rule, Finding] = {}
    hidden: set[Rule] = set()
    for rule, followers in RULES.items():
        if rule not in hidden and (finding := rule(run)) is not None:
            found[rule] = finding
            hidden |= set(followers)
    return Diagnosis(run, tuple(found.values()))


def diagnosis_lines(found: Diagnosis, *, width: int = 100) -> Iterator[str]:
    """Yield a diagnosis as text."""
    yield _head(found.run)
    if not found.findings:
        yield "No known problem was found. That is no proof that there is none."
    for each in found.findings:
        yield ""
        yield each.name.upper() + ("" if each.step is None else f" (from step {each.step} on)")
        parts = (("symptom", (each.symptom,)), ("evidence", each.evidence), ("cause", (each.cause,)))
        for label, texts in (*parts, ("repair", each.repair)):
            for number, text in enumerate(texts):
                start = f"  {label if number == 0 else '':<9} {'- ' if len(texts) > 1 else ''}"
                yield textwrap.fill(
                    text, width, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
                )


def _head(run: Evidence) -> str:
    """`runs/mine: 40 steps; rollout/reward_mean 0.231 -> 0.921; evaluation/avg@1 23.4% -> 97.4% of 192 prompts`."""
    parts = [f"{run.folder}: {len(run.steps)} steps"]
    if (reward := run.trend(REWARD_MEAN)) is not None:
        parts.append(moved(REWARD_MEAN, reward))
    if len(run.solved()) > 1:
        parts.append(solved_text(run))
    return "; ".join(parts)
