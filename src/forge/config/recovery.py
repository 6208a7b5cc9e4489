"""What happens when a process that holds the state of training dies."""

from __future__ import annotations

from pydantic import Field

from forge.config.base import ConfigModel


class RecoveryConfig(ConfigModel):
    """How a run continues after the death of its trainer or critic, without a restart of the program."""

    max_restarts: int = Field(
        default=3,
        ge=0,
        description="Restarts of each of them within window_s; one more death ends the run. 0 ends it at the first.",
    )
    window_s: float = Field(default=3600.0, gt=0, description="Seconds after which a restart no longer counts.")
    backoff_s: float = Field(
        default=1.0,
        ge=0,
        description="Seconds to wait before the second restart within window_s; each later wait is twice as long.",
    )
    max_batches_gb: float = Field(
        default=4.0,
        gt=0,
        description="Host memory for the batches since the last checkpoints, in GiB; they are trained again after a "
        "restart. When half of it is used, a checkpoint is saved early.",
    )
