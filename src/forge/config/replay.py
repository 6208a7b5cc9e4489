"""What a run records so that its steps can be replayed."""

from __future__ import annotations

from pydantic import Field

from forge.config.base import ConfigModel


class ReplayRecordConfig(ConfigModel):
    """The record that `forge replay` and `forge bisect` read: see docs/guides/replay.md."""

    enabled: bool = Field(
        default=True,
        description="Whether each step is recorded in replay/.",
    )
    keep_steps: int | None = Field(
        default=None,
        ge=1,
        description="How many of the newest steps stay recorded; null for all since the oldest checkpoint that is "
        "kept. Steps before that checkpoint are removed with the checkpoints before it.",
    )
    max_gb: float = Field(
        default=10.0, gt=0, description="Disk space of the record in GB (10^9 bytes). The oldest steps are removed."
    )
