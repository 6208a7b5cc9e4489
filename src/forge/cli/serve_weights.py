"""New weights for `forge serve`: from a model's folder, or from the newest checkpoint of a run, into the store."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.errors import ConfigError, ForgeError

if TYPE_CHECKING:
    from forge.config import PolicyConfig
    from forge.generator.openai import OpenAIServer

_log = logging.getLogger("forge.cli.serve")


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """Weights on disk.

    Attributes:
        path: a model's folder, or a checkpoint's.
        step: the step of a checkpoint; None for a model's folder.
        stamp: changes whenever other weights are there.
    """

    path: Path
    step: int | None
    stamp: tuple[Any, ...]


def find_weights(folder: str) -> FoundWeights:
    """Return the newest weights in the folder of a model, a checkpoint or a run. Raise `ConfigError` without any."""
    from forge.trainer.checkpoint_folder import readable_checkpoints

    place = Path(folder).expanduser()
    if (place / "config.json").is_file():
        return _model_weights(place)
    if (place / "checkpoint.json").is_file():
        from forge.trainer.checkpoint_folder import read_checkpoint

        return _checkpoint_weights(read_checkpoint(place))
    parent = place / "checkpoints" if (place / "checkpoints").is_dir() else place
    found = []
    if (parent / "hf" / "config.json").is_file():
        found.append(_model_weights(parent / "hf"))
    if parent.is_dir() and (infos := readable_checkpoints(parent)):
        newest = max(infos, key=lambda info: (info.sequence, info.step))
        found.append(_checkpoint_weights(newest))
    if not found:
        raise ConfigError(
            "there are no weights to update from",
            path="serve.update_from",
            value=folder,
            rule="the folder of a model (with config.json), of a checkpoint, or of a run that has saved one",
            repair="name such a folder, or wait until the run has saved a checkpoint",
        )
    return max(found, key=lambda weights: weights.stamp[0])


def _model_weights(folder: Path) -> FoundWeights:
    files = sorted(folder.glob("*.safetensors"))
    stats = [file.stat() for file in files]
    newest = max((stat.st_mtime_ns for stat in stats), default=0)
    sizes = tuple((file.name, stat.st_size, stat.st_mtime_ns) for file, stat in zip(files, stats, strict=True))
    return FoundWeights(folder, None, (newest, str(folder.resolve()), sizes))


def _checkpoint_weights(info: Any) -> FoundWeights:
    changed = (info.path / "checkpoint.json").stat().st_mtime_ns
    return FoundWeights(info.path, info.step, (changed, str(info.path.resolve()), info.sequence))


class ModelPublisher:
    """Publishes weights in the store from a worker process, which lives as long as its version is served.

    The worker has the model in memory, and keeps the published copy there: replicas that are restarted fetch it.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._source = config.serve.update_from or config.model.path
        self._served: Any = None
        self._pending: Any = None
        self._pending_version = 0
        self.last: FoundWeights | None = None

    def find(self, folder: str | None = None) -> FoundWeights:
        """Return the newest weights in a folder, or in the usual one."""
        source = folder or self._source
        if source is None:
            raise ConfigError(
                "there is no folder to update the weights from",
                path="serve.update_from",
                value=None,
                rule="a model of random weights has no folder",
                repair="set serve.update_from, or name a folder in the request",
            )
        return find_weights(str(source))

    async def publish(self, folder: str | None, *, newer_than: int) -> tuple[int, str]:
        """See `WeightPublisher`. The version of a checkpoint is its step, unless that is not a larger number."""
        from forge.trainer.actor import ReferenceModel

        found = await asyncio.to_thread(self.find, folder)
        version = newer_than + 1 if found.step is None else max(found.step, newer_than + 1)
        generator, model = self._config.generator, self._config.model
        if found.step is None:
            model = model.model_copy(update={"path": str(found.path), "preset": None})
        work = Path(tempfile.mkdtemp(prefix="forge-serve-"))
        try:
            service = await ReferenceModel.options(
                with_gpus=False, mesh_name="publisher", num_threads=generator.num_threads
            ).as_service(_trainer_config(model, work))
            self._pending, self._pending_version = service, version
            try:
                if found.step is not None:
                    await service.load.route(str(found.path.resolve()))
                from forge.runtime.placement import wants_gpus

                dtype = generator.precision_on(gpu=wants_gpus(generator.with_gpus))
                await service.publish_weights.route(version, generator.weights, dtype=dtype)
            except BaseException:
                await self.withdraw()
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self.last = found
        return version, str(found.path)

    async def keep(self) -> None:
        """See `WeightPublisher`."""
        before, self._served, self._pending = self._served, self._pending, None
        if before is not None:
            await before.shutdown()

    async def withdraw(self) -> None:
        """See `WeightPublisher`."""
        from forge.store import Weights

        service, self._pending = self._pending, None
        if service is not None:
            await Weights(self._config.generator.weights).rewind(to=self._pending_version - 1)
            await service.shutdown()


def _trainer_config(model: Any, work: Path) -> Any:
    from forge.config import DistributedConfig, TrainerConfig

    return TrainerConfig(
        model=model, distributed=DistributedConfig(with_gpus=False), checkpoint_dir=work / "unused", frozen=True
    )


async def update_and_report(server: OpenAIServer) -> None:
    """Update a server's weights, and print what is served then. A failure is logged, and the old weights are served."""
    from forge.envs.chat_api.errors import RequestError

    try:
        outcome = await server.update_weights()
    except (ForgeError, RequestError, OSError) as error:
        _log.error("the weights were not updated: %s", error)
        return
    print(
        f"Serving version {outcome.version} from {outcome.source} ({outcome.num_replicas} replicas, "
        f"{outcome.seconds:.1f} s)",
        flush=True,
    )


async def follow(server: OpenAIServer, publisher: ModelPublisher, *, every_s: float, served: str | None) -> None:
    """Look for newer weights again and again, and serve them. `served` is the folder that is served at first."""
    tried = None if served is None else find_weights(served).stamp
    while True:
        try:
            found = await asyncio.to_thread(publisher.find)
        except ForgeError as error:
            _log.info("nothing to follow yet: %s", error)
        else:
            if found.stamp != tried:
                tried = found.stamp
                await update_and_report(server)
        await asyncio.sleep(every_s)
