"""What the steps of one session of a run have in common: from its start, or a resume, to its end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.config import GRPOConfig, TrainerConfig
from forge.config.loading import to_plain
from forge.errors import ReplayError

if TYPE_CHECKING:
    from forge.loops.planning import GRPOPlan


def describe_session(plan: GRPOPlan, *, weights: str | None, trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is recorded of a session. `weights` is the digest of the weights that it starts from, `trainer` what
    the trainer says of itself."""
    return {
        "weights": weights,
        "checkpoint": None if plan.checkpoint is None else str(plan.checkpoint.path.resolve()),
        "hardware": dict(trainer.get("hardware", {})),
        "published_dtype": plan.run.published_dtype if plan.config.placement != "shared" else None,
        "total_steps": plan.trainer.total_steps,
        "on_gpu": plan.run.trainer_on_gpu,
        "own_loss": plan.own_loss,
        "own_advantage": plan.own_advantage,
        "agents": [] if plan.program is None else list(plan.program.agents),
        "config": to_plain(plan.config),
    }


@dataclass(frozen=True, slots=True)
class Session:
    """A session of a run that is replayed.

    Attributes:
        start_step: the step that it started after.
        weights: the digest of the weights that it started from; None where none were published.
        checkpoint: the checkpoint that it started from; None for the model's own weights.
        hardware: what the trainer computed with.
        published_dtype: what weights were published in; None for what the trainer keeps them in.
        total_steps: the optimizer steps that the learning rate's schedule covers.
        on_gpu: whether the trainer had a GPU.
        own_loss, own_advantage: whether these were given to `run_grpo` in Python.
        agents: the agents that the program of its episodes declares.
        config: its configuration.
    """

    start_step: int
    weights: str | None
    checkpoint: Path | None
    hardware: Mapping[str, str]
    published_dtype: str | None
    total_steps: int | None
    on_gpu: bool
    own_loss: bool
    own_advantage: bool
    agents: tuple[str, ...]
    config: GRPOConfig

    @classmethod
    def read(cls, document: Mapping[str, Any], *, path: Path) -> Session:
        """Return the session that a document describes."""
        try:
            config = GRPOConfig.model_validate_json(json.dumps(document["config"]), strict=True)
            checkpoint = document["checkpoint"]
            names = ("start_step", "weights", "hardware", "published_dtype", "total_steps", "on_gpu")
            return cls(
                **{name: document[name] for name in names},
                own_loss=document["own_loss"],
                own_advantage=document["own_advantage"],
                agents=tuple(document["agents"]),
                checkpoint=None if checkpoint is None else Path(checkpoint),
                config=config,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ReplayError(
                f"the record of a session cannot be read: {error}",
                path=str(path),
                rule="a configuration that this release knows",
                repair="replay with the release that wrote it",
            ) from error

    def trainer_config(self, folder: Path) -> TrainerConfig:
        """Return what the trainer was made from, with another folder for checkpoints: the run's own is only read."""
        from forge.loops.planning import make_trainer_config
        from forge.models.locate import resolve

        made = make_trainer_config(self.config, resolve(self.config.model), num_steps=self.total_steps)
        return made.model_copy(update={"checkpoint_dir": folder})

    def trains_like(self, other: Session) -> bool:
        """Return whether a step of this session is computed as one of another: nothing has to be started anew."""
        sections = ("model", "adapter", "training", "distributed", "algorithm", "critic", "rollout", "run", "reference")
        mine, theirs = to_plain(self.config), to_plain(other.config)
        mine["run"], theirs["run"] = mine["run"]["seed"], theirs["run"]["seed"]
        same_sampling = mine["generator"]["sampling"] == theirs["generator"]["sampling"]
        is_same = all(mine[name] == theirs[name] for name in sections) and same_sampling
        facts = ("total_steps", "published_dtype", "own_loss", "own_advantage", "hardware")
        return is_same and all(getattr(self, name) == getattr(other, name) for name in facts)
