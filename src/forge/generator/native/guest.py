"""A generator on a trainer's GPU whose cache is away while the trainer works."""

from __future__ import annotations

from pydantic import Field

from forge.config import GeneratorConfig


class GuestConfig(GeneratorConfig):
    """What such a generator is made from: besides all else, what it leaves to others when it chooses its cache's size.

    Made from a run's configuration, never written by a user: see `forge.loops.workers.generator_config`.
    """

    expected_bytes: int = Field(
        default=0, ge=0, description="Memory that others on the GPU will take after the generator's start, and keep."
    )
    num_guests: int = Field(default=1, ge=1, description="Generators on the GPU, this one included.")
