"""How a checkpoint is compared with the state that it is loaded into, before anything is read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from forge.errors import CheckpointError
from forge.trainer.checkpoint_folder import CheckpointInfo

_PER_RANK: Final = re.compile(r"(?:^|[./])rank\d+(?:[./]|$)")
_NUM_NAMED: Final = 8


class StrictLoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """Refuses a checkpoint that is not of this state, naming what differs, on every rank and before any change.

    A rank may hold a part of the keys (a pipeline stage does): keys that nobody asks for are judged over all ranks.
    Entries of single ranks, those with a part such as `rank3` in their key, are only judged when the number of ranks is
    the one that saved; otherwise those that both sides have are loaded.
    """

    def __init__(self, info: CheckpointInfo, *, partial: bool, world_size: int) -> None:
        super().__init__()
        self._info = info
        self._partial = partial
        self._same_ranks = info.world_size == world_size

    def create_local_plan(self) -> LoadPlan:
        saved = self.metadata.state_dict_metadata
        missing = self._judged(key for key in self.state_dict if key not in saved)
        if missing and not self._partial:
            raise self._error(
                f"The checkpoint lacks {len(missing)} key(s) that this state has: {_names(missing)}",
                rule="every key of the state is in the checkpoint",
                repair="load it into the model and optimizer that saved it, or pass partial=True to keep the present "
                "values of what it lacks",
            )
        differing = [_difference(key, value, saved[key]) for key, value in self.state_dict.items() if key in saved]
        if faults := [text for text in differing if text is not None]:
            raise self._error(
                f"{len(faults)} key(s) of the checkpoint have another shape than in this state: {_names(faults)}",
                rule="shapes are equal (of whole tensors: how they are laid out over ranks may differ)",
                repair="load it into a model of the shape that saved it",
            )
        plan = create_default_local_load_plan(self.state_dict, self.metadata, strict=False)
        return dataclasses.replace(plan, planner_data=tuple(self.state_dict))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        saved = self.metadata.state_dict_metadata
        wanted = {key for plan in global_plan for key in plan.planner_data}
        extra = self._judged(key for key in saved if key not in wanted)
        if extra and not self._partial:
            raise self._error(
                f"The checkpoint has {len(extra)} key(s) that this state lacks: {_names(extra)}",
                rule="every key of the checkpoint is in the state of some rank",
                repair="load it into the model and optimizer that saved it, or pass partial=True to leave them out",
            )
        if not wanted & saved.keys():
            raise self._error(
                f"The checkpoint and this state have no key in common. The checkpoint has {_names(sorted(saved))}",
                rule="at least one key is loaded",
                repair="check that this is a checkpoint of this model",
            )
        plans: list[LoadPlan] = super().create_global_plan(global_plan)
        return plans

    def _judged(self, keys: Iterable[str]) -> list[str]:
        return sorted(key for key in keys if self._same_ranks or not _PER_RANK.search(key))

    def _error(self, message: str, *, rule: str, repair: str) -> CheckpointError:
        return CheckpointError(message, path=str(self._info.path), rule=rule, repair=repair)


def _difference(key: str, value: Any, saved: Any) -> str | None:
    kept_as_tensor = isinstance(saved, TensorStorageMetadata)
    if kept_as_tensor != isinstance(value, Tensor):
        kinds = ("a tensor", "an object")
        here, there = kinds if not kept_as_tensor else reversed(kinds)
        return f"{key} ({there} in the checkpoint, {here} here)"
    if kept_as_tensor and saved.size != value.size():
        return f"{key} ({list(saved.size)} in the checkpoint, {list(value.size())} here)"
    return None


def _names(texts: list[str]) -> str:
    named = ", ".join(texts[:_NUM_NAMED])
    return named if len(texts) <= _NUM_NAMED else f"{named} and {len(texts) - _NUM_NAMED} more"
