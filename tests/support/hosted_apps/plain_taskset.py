"""A taskset of verifiers without a harness of its own."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["PlainTaskset"]


class PlainTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """A question."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.branches[-1].messages[-1].content == "two")


class PlainTaskset(vf.Taskset[PlainTask, vf.TasksetConfig]):
    """One task."""

    def load(self) -> Iterable[PlainTask]:
        yield PlainTask(vf.TaskData(prompt="What comes after one?", system_prompt="Be brief."), self.config.task)
