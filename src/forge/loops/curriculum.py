"""The curriculum of a run: its place in checkpoints, and how it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forge.config import CurriculumConfig
from forge.loops.planning import GRPOPlan
from forge.rollout.curriculum import Curriculum

if TYPE_CHECKING:
    from forge.rollout.buffer import ReplayBuffer
    from forge.rollout.taken_batch import TakenBatch


def make_curriculum(plan: GRPOPlan) -> Curriculum | None:
    """Return the curriculum of a run as it starts; None without one."""
    if plan.curriculum_rule is None:
        return None
    config = plan.config
    return Curriculum(plan.prompts, config=config.curriculum, rule=plan.curriculum_rule, seed=config.run.seed)


def groups_with_tasks(plan: GRPOPlan) -> frozenset[int] | None:
    """Return the groups that have the same tasks as before a resume, as far as a curriculum decides: None for all.

    A group that was begun after the checkpoint is chosen anew, and may get another task if the run is asynchronous.
    """
    assert plan.checkpoint is not None
    caller = plan.checkpoint.extra["caller"]
    before = caller.get("curriculum")
    if plan.curriculum_rule is None:
        return None if before is None else frozenset()
    return frozenset(map(int, caller["buffer"]["pending"] if before is None else before["choices"]))


def describe_curriculum(config: CurriculumConfig, num_prompts: int) -> str:
    """Say which rule chooses prompts, and how long a prompt may wait."""
    if config.explore == 0:
        return f"{config.kind}; no group explores, so a prompt may never come"
    most = math.ceil(2 * num_prompts / config.explore)
    return f"{config.kind}; {config.explore:g} of the groups explore, so each prompt comes within {most:,} groups"


class RunCurriculum:
    """The curriculum of a run with its place in checkpoints. Without a curriculum it does nothing."""

    def __init__(self, curriculum: Curriculum | None) -> None:
        self._curriculum = curriculum

    def commit(self, taken: TakenBatch, *, step: int) -> None:
        """Count the groups of a batch that a step learned from."""
        if self._curriculum is not None:
            self._curriculum.commit((group.number for group in taken.groups), taken.drops, step=step)

    def state(self, buffer: ReplayBuffer) -> dict[str, Any]:
        """Return what a checkpoint keeps; nothing without a curriculum."""
        return {} if self._curriculum is None else {"curriculum": self._curriculum.state(buffer.pending)}

    def restore(self, extra: Mapping[str, Any]) -> None:
        """Resume from what a checkpoint kept. A run that had no curriculum before starts one."""
        if self._curriculum is not None:
            self._curriculum.load(extra.get("curriculum"), pending=extra["buffer"]["pending"])
