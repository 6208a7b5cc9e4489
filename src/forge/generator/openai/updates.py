"""Weight updates of a server that runs: publish a version, then update one replica after another."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Protocol

from forge.config import UpdateMode
from forge.envs.chat_api.errors import RequestError
from forge.errors import FanoutError, WeightMismatch
from forge.generator.openai.replicas import ServedPolicy
from forge.generator.openai.server_metrics import ServerMetrics
from forge.types import INITIAL_VERSION

_log = logging.getLogger("forge.generator.openai")


class WeightPublisher(Protocol):
    """Puts weights into the store, where the replicas fetch them."""

    async def publish(self, folder: str | None, *, newer_than: int) -> tuple[int, str]:
        """Publish the weights of a folder, or of the usual one, as a version with a number above `newer_than`.

        Return the version, and where its weights are from.
        """
        ...

    async def keep(self) -> None:
        """Keep what was published last, for replicas that are restarted, and release what was published before."""
        ...

    async def withdraw(self) -> None:
        """Release what was published last, which no replica serves."""
        ...


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """A weight update that succeeded.

    Attributes:
        version: what all replicas serve now.
        source: where the weights are from.
        num_replicas: how many replicas were updated. One that was being restarted loads the version by itself.
        seconds: how long the whole update took.
    """

    version: int
    source: str
    num_replicas: int
    seconds: float


class WeightUpdates:
    """Updates the weights of a server, one update at a time."""

    def __init__(
        self, policy: ServedPolicy, publisher: WeightPublisher, *, mode: UpdateMode, metrics: ServerMetrics
    ) -> None:
        self._policy, self._publisher, self._mode, self._metrics = policy, publisher, mode, metrics
        self._updating = asyncio.Lock()
        self._version = INITIAL_VERSION

    async def run(self, folder: str | None = None) -> UpdateOutcome:
        """Update all replicas, and return when all serve the new weights. If it raises, the old ones are served.

        Once a replica serves the new weights, they are kept even if another refuses them: the error says which.
        """
        if self._updating.locked():
            text = "Another weight update is in progress."
            raise RequestError(text, status=409, kind="conflict_error", code="update_in_progress")
        async with self._updating:
            started = time.perf_counter()
            try:
                outcome = await self._update(folder, started)
            except BaseException as error:
                self._metrics.updates.add(1, "failed")
                _log.error("the weight update failed: %s", error)
                raise
            self._metrics.updates.add(1, "ok")
            return outcome

    async def _update(self, folder: str | None, started: float) -> UpdateOutcome:
        stats = await self._policy.read_stats()
        newest = max([self._version, *(engine.version for engine in stats.values())])
        version, source = await self._publisher.publish(folder, newer_than=newest)
        try:
            reports = await self._policy.update_weights(version, self._mode)
        except FanoutError as error:
            if any(outcome.ok for outcome in error.outcomes):
                self._version = version
                await self._publisher.keep()
            else:
                await self._publisher.withdraw()
            cause = error.__cause__
            if isinstance(cause, WeightMismatch):
                raise _mismatch(cause) from None
            raise (error if cause is None else cause) from None
        except WeightMismatch as error:
            await self._publisher.withdraw()
            raise _mismatch(error) from None
        except BaseException:
            await self._publisher.withdraw()
            raise
        self._version = version
        await self._publisher.keep()
        return UpdateOutcome(version, source, len(reports), time.perf_counter() - started)


def _mismatch(error: WeightMismatch) -> RequestError:
    return RequestError(str(error), param="path", code="weight_mismatch")
