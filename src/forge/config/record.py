"""What is written down of a run's processes: the trace, what they use, and profiles of chosen steps."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from forge.config.base import ConfigModel, broken_rule


class ProfileConfig(ConfigModel):
    """Profiles of chosen steps by torch.profiler: see docs/guides/tracing.md."""

    steps: tuple[int, ...] = Field(default=(), description="The steps that are profiled; 1 is the first.")
    workers: tuple[str, ...] = Field(
        default=("trainer", "generator", "policy"),
        description="Whose processes are profiled, by the names of their rows in the trace without numbers. `policy` "
        "is the trainer and generator of placement `shared`.",
    )
    max_seconds: float = Field(
        default=20.0,
        gt=0,
        description="The most of a step that is profiled, in seconds from its start. A profile has some 100,000 events "
        "for each second of generation.",
    )
    shapes: bool = Field(default=False, description="Whether the shapes of tensors are recorded, too.")
    memory: bool = Field(default=False, description="Whether allocations are recorded, too.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(step < 1 for step in self.steps):
            raise broken_rule("numbers of steps from 1 on", repair="give steps such as [3, 4]", key="steps")
        if not self.workers:
            raise broken_rule("at least one worker", repair="leave it out for trainer and generator", key="workers")
        return self


class ObserveConfig(ConfigModel):
    """What is recorded of every kind of run."""

    trace: bool = Field(default=True, description="Whether trace.json is written, which shows what waited for what.")
    system_interval_s: float | None = Field(
        default=2.0,
        ge=0,
        description="Seconds between two lines of system.jsonl, at the ends of steps: CPU, memory and GPU of each "
        "process, versions that replicas serve, queues. 0 for every step, null to write none.",
    )
    system_max_mb: float = Field(
        default=32.0,
        ge=1,
        description="MiB of system.jsonl at most. A run that writes more keeps its newest lines and, of the older "
        "ones, some that are evenly spread over its time.",
    )
    profile: ProfileConfig = Field(
        default_factory=ProfileConfig, description="Steps that are profiled with torch.profiler."
    )
