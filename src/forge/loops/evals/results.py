"""The figures of an evaluation, from the scores of its samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.config import EvalSection
from forge.loops.evals.record import SampleScore
from forge.loops.evals.statistics import Estimate, mean_estimate, pass_at_k, rate_estimate

_CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class TaskScore:
    """What the samples of one task earned, in the order of samples."""

    index: int
    id: str
    rewards: tuple[float, ...]
    solved: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What an evaluation found. Tasks that lack a sample are left out of all figures.

    Attributes:
        folder: where samples and results are.
        num_tasks: tasks that count.
        num_missing: tasks that lack a sample because of faults.
        num_samples: samples per task.
        reward: the mean reward, over tasks.
        pass_at: pass@k for each k.
        parts: the mean of each reward by name, over samples.
        length: tokens per sample, on average; None where an endpoint reports none.
        turns: completions per sample, on average.
        outcomes: how many samples ended in which way.
        num_reward_failures: samples of which a reward failed; that part counted 0.
        faults: faults by kind, those included after which a sample was run again.
        unresolved: the samples that are missing: task, sample, and the last fault's text where it is known.
        tasks: what each task earned.
        allows_missing: whether missing tasks are accepted.
        notes: what a reader should know.
    """

    folder: Path
    num_tasks: int
    num_missing: int
    num_samples: int
    reward: Estimate | None
    pass_at: Mapping[int, Estimate]
    parts: Mapping[str, float]
    length: float | None
    turns: float
    outcomes: Mapping[str, int]
    num_reward_failures: int
    faults: Mapping[str, int]
    unresolved: Sequence[tuple[int, int, str | None]]
    tasks: Sequence[TaskScore]
    allows_missing: bool = False
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """What a program exits with: 1 where tasks are missing that must not be."""
        return 1 if self.num_missing and not self.allows_missing else 0

    def figures(self) -> dict[str, Any]:
        """Return the figures as JSON can hold them."""
        return {
            "num_tasks": self.num_tasks,
            "num_missing": self.num_missing,
            "num_samples": self.num_samples,
            "reward": None if self.reward is None else self.reward.plain(),
            "pass_at": {str(k): estimate.plain() for k, estimate in self.pass_at.items()},
            "parts": dict(self.parts),
            "length": self.length,
            "turns": self.turns,
            "outcomes": dict(self.outcomes),
            "num_reward_failures": self.num_reward_failures,
            "faults": dict(self.faults),
        }

    def plain(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it."""
        return {
            **self.about,
            "figures": self.figures(),
            "unresolved": [{"task": task, "sample": sample, "fault": fault} for task, sample, fault in self.unresolved],
            "notes": list(self.notes),
            "tasks": [
                {"index": each.index, "id": each.id, "rewards": list(each.rewards), "solved": list(each.solved)}
                for each in self.tasks
            ],
        }


def solved_by(section: EvalSection) -> Callable[[SampleScore], bool]:
    """Return the rule that says whether a sample is solved."""

    def is_solved(score: SampleScore) -> bool:
        value = score.reward if section.reward is None else score.parts.get(section.reward, 0.0)
        return value >= section.solved_at - _CLOSE

    return is_solved


def summarize(
    section: EvalSection,
    by_task: Sequence[Sequence[SampleScore]],
    indices: Sequence[int],
    *,
    folder: Path,
    faults: Mapping[str, int],
    last_faults: Mapping[tuple[int, int], str],
    notes: Sequence[str] = (),
    about: Mapping[str, Any] | None = None,
) -> EvalResult:
    """Compute the figures. `by_task` has the samples of each task of `indices`, in order."""
    is_solved, n, confidence = solved_by(section), section.num_samples, section.confidence
    whole = [(index, samples) for index, samples in zip(sorted(indices), by_task, strict=True) if len(samples) == n]
    tasks = [
        TaskScore(
            index,
            samples[0].task_id,
            tuple(score.reward for score in samples),
            tuple(is_solved(score) for score in samples),
        )
        for index, samples in whole
    ]
    flat = [score for _, samples in whole for score in samples]
    unresolved = [
        (index, sample, last_faults.get((index, sample)))
        for index, samples in zip(sorted(indices), by_task, strict=True)
        for sample in sorted(set(range(n)) - {score.sample for score in samples})
    ]
    means = [math.fsum(task.rewards) / n for task in tasks]
    lengths = [score.num_tokens for score in flat if score.num_tokens is not None]
    names = sorted({name for score in flat for name in score.parts})
    return EvalResult(
        folder=folder,
        num_tasks=len(tasks),
        num_missing=len(indices) - len(tasks),
        num_samples=n,
        reward=mean_estimate(means, confidence=confidence) if means else None,
        pass_at={
            k: rate_estimate(
                [pass_at_k(n, sum(task.solved), k) for task in tasks], num_samples=n, confidence=confidence
            )
            for k in section.ks
            if tasks
        },
        parts={name: math.fsum(score.parts.get(name, 0.0) for score in flat) / len(flat) for name in names},
        length=sum(lengths) / len(lengths) if lengths and len(lengths) == len(flat) else None,
        turns=sum(score.num_turns for score in flat) / len(flat) if flat else 0.0,
        outcomes=dict(Counter(score.outcome for score in flat).most_common()),
        num_reward_failures=sum(score.num_failures > 0 for score in flat),
        faults=dict(faults),
        unresolved=unresolved,
        tasks=tasks,
        allows_missing=section.allow_missing,
        notes=(*notes, *_reward_note(section, names)),
        about=about or {},
    )


def _reward_note(section: EvalSection, names: Sequence[str]) -> list[str]:
    """Warn where no sample has the reward that decides: an episode's program names its rewards as it runs."""
    if section.reward is None or not names or section.reward in names:
        return []
    return [f"eval.reward is {section.reward!r}, but the samples have only {', '.join(names)}: none counts as solved"]
