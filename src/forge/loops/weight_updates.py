"""Weights from the trainer through the store to the generators: at once, or during the next step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from forge.generator.engine import UpdateReport
from forge.loops.step_metrics import StepClock
from forge.loops.volumes import load_version
from forge.loops.waits import PUBLISHING, Waits, Work
from forge.loops.workers import Workers
from forge.observe import span


class WeightUpdates:
    """Sends each version of the weights to the generators.

    Args:
        workers: the services of the run.
        name: what the weights are published as.
        waits: shows and logs what takes long.
        clock: gets the time that a step waits.
        published: called when a version is in the store.
        served: called when the generators have a version, with what they report.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        name: str,
        waits: Waits,
        clock: StepClock,
        published: Callable[[int], Awaitable[None]],
        served: Callable[[int, Sequence[UpdateReport]], None],
    ) -> None:
        self._workers, self._name, self._waits, self._clock = workers, name, waits, clock
        self._published, self._served = published, served
        self._syncing: asyncio.Task[None] | None = None
        self.failed: list[asyncio.Task[None]] = []
        """Updates that failed. Each has asked the run to stop, and is raised at its end, when what was learned
        meanwhile is written and saved."""
        self.digest: str | None = None
        """The digest of the weights that were published last; None where they were not digested, or for newer ones."""

    @property
    def under_way(self) -> asyncio.Task[None] | None:
        """The update that is made beside training."""
        return self._syncing

    async def hand_over(self, version: int, *, at_once: bool) -> None:
        """Send new weights to the generators: at once when training is synchronous, else during the next step."""
        await self.finish()
        if self.failed:
            return
        if at_once:
            await self.sync(version)
            return
        with self._clock.part("syncing"):
            await self._publish(version)
        self._syncing = self._waits.stop.watch(self._serve(version), f"the update to version {version}")

    async def sync(self, version: int) -> None:
        """Send weights to the generators, and wait until they have them."""
        with self._clock.part("syncing"):
            await self._publish(version)
            await self._serve(version)

    async def _publish(self, version: int) -> None:
        publishing = self._workers.trainer.publish_weights(version, name=self._name)
        self.digest = await self._waits.during(publishing, PUBLISHING)
        await self._published(version)

    async def _serve(self, version: int) -> None:
        with span("update generators", version=version):
            loading = load_version(self._workers, version, name=self._name)
            work = Work(f"generators load version {version}", "updating generators", "first weight sync")
            reports = await self._waits.during(loading, work)
        self._served(version, reports)

    async def finish(self) -> None:
        """Wait for the update under way."""
        if self._syncing is not None:
            with self._clock.part("syncing"):
                await asyncio.wait({self._syncing})
            if self._syncing.exception() is not None:
                self.failed.append(self._syncing)
            self._syncing = None
