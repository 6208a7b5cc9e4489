"""The storage volumes of a run: processes that hold published weights. They are replaced when they die, and what they
held is published again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from forge import store
from forge.config import StoreConfig
from forge.errors import ActorFailure, FanoutError
from forge.runtime.endpoints import endpoint
from forge.service.actor import ForgeActor
from forge.trainer.publishing import readable_digest
from forge.trainer.recovering import RecoveringTrainer

if TYPE_CHECKING:
    from forge.generator.engine import UpdateReport
    from forge.loops.workers import Workers

_log = logging.getLogger("forge.grpo")


class StorageVolume(ForgeActor):
    """A volume of the store as a service: the process that replaces a dead one holds what is published from then on."""

    def __init__(self, label: str) -> None:
        self.label = label

    @endpoint
    async def setup(self) -> None:
        from forge.store.volumes import register_volume

        register_volume(self.label)

    @endpoint
    async def close(self) -> None:
        """Do nothing: what it holds goes with its process."""


async def start_volumes(section: StoreConfig) -> None:
    """Set up the store as a configuration says, before the first publication. `forge.run` ends the volumes."""
    if not section.volumes and section.distribution == "auto":
        return
    await store.setup(copies=section.copies, distribution=section.distribution)
    for number in range(section.volumes):
        label = f"store-volume-{number}"
        await StorageVolume.options(mesh_name=label).as_service(label)


async def load_version(workers: Workers, version: int, *, name: str) -> list[UpdateReport]:
    """Let generators load a version. If the process that held it has died, it is published again."""
    try:
        return await workers.policy.update_weights(version)
    except FanoutError as error:
        if await readable_digest(name, version) is not None:
            raise
        _log.warning("version %d was lost with the process that held it, and is published again", version)
        trainer = workers.trainer
        if not (isinstance(trainer, RecoveringTrainer) and await trainer.republish(version, name=name)):
            raise ActorFailure(f"version {version} was lost with the process that held it", path=name) from error
        return await workers.policy.update_weights(version)
