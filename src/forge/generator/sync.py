"""Weight updates of a generator, the proof that they arrived, and the stop after a failed proof."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

from forge.config import GeneratorConfig, UpdateMode
from forge.errors import EngineDead, StoreError, SyncError, WeightMismatch
from forge.generator.engine import GenerationEngine, UpdateReport
from forge.types import INITIAL_VERSION

_log = logging.getLogger("forge.generator")
T = TypeVar("T")
Version = int | Literal["latest"]

_BOUNDS = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.5, "fp8": 1.0}


class Sync:
    """The weights of one engine. Requests pass through `watched` and `hold`, so that a failed proof stops them all."""

    def __init__(self, engine: GenerationEngine, config: GeneratorConfig) -> None:
        self._engine, self._config = engine, config
        self._proven = asyncio.Event()
        self._proven.set()
        self._stop: SyncError | None = None
        self._is_proof_due = False
        """Whether weights came while the engine was asleep that are still to be proven."""
        self._trusted: set[Version] = {INITIAL_VERSION}
        self._under_way: set[asyncio.Task[Any]] = set()
        self._updating = asyncio.Lock()

    # ---- Requests -----------------------------------------------------------------------------------------------

    @property
    def is_stopped(self) -> bool:
        """Whether requests are refused until an update passes."""
        return self._stop is not None

    def check(self) -> None:
        """Raise `SyncError` if generation has stopped."""
        if self._stop is not None:
            raise self._stop

    async def hold(self, versions: Iterable[int]) -> None:
        """Hold back tokens of weights that are being proven. Proven weights pass, and those that failed raise."""
        made_by = set(versions)
        if not self._trusted.issuperset(made_by):
            await self._proven.wait()
        self.check()
        if not self._trusted.issuperset(made_by):
            raise _unproven(min(made_by - self._trusted))

    async def watched(self, work: Awaitable[T]) -> T:
        """Await work that a failed proof cancels."""
        task = cast("asyncio.Task[T]", asyncio.ensure_future(work))
        self._under_way.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            caller = asyncio.current_task()
            if self._stop is not None and not (caller is not None and caller.cancelling()):
                raise self._stop from None
            raise
        finally:
            self._under_way.discard(task)

    # ---- Weights ------------------------------------------------------------------------------------------------

    def trust(self, version: int) -> None:
        """Trust the trainer's own weights, with which the engine computes, as this version without a proof.

        Versions before it stay trusted: completions that began with them may be in progress.
        """
        self._trusted = {version, *(each for each in self._trusted if isinstance(each, int) and each < version)}

    async def update_weights(self, version: Version, mode: UpdateMode) -> UpdateReport:
        """Load a version, trying as often as the configuration says, and prove it; see `Generator.update_weights`.

        If the caller is cancelled when the new weights are in place already, they are proven all the same.
        """
        async with self._updating:
            began = time.perf_counter()
            self._proven.clear()
            before, trusted = self._engine.version, set(self._trusted)
            try:
                report = await self._try_update(version, mode)
            except BaseException:
                now = self._engine.version
                self._trusted |= trusted - {now}
                if now not in self._trusted and (now != before or self._stop is None):
                    with contextlib.suppress(SyncError):  # requests raise it
                        await _uncancelled(self._prove_current())
                self._proven.set()
                raise
            difference = await _uncancelled(self._prove_current())
            return replace(report, canary=difference, seconds=time.perf_counter() - began)

    async def _prove_current(self) -> float | None:
        """Prove the weights in use, or stop everything. If the engine is asleep, they are proven when it wakes."""
        version = self._engine.version
        try:
            self._is_proof_due = self._engine.stats().is_asleep
            difference = None if self._is_proof_due else await self._prove(version)
            self._stop = None
            return difference
        except EngineDead:
            raise
        except Exception as error:
            stop = error if isinstance(error, SyncError) else _unproven(version)
            self._halt(stop)
            raise stop from error
        finally:
            self._proven.set()

    async def _try_update(self, version: Version, mode: UpdateMode) -> UpdateReport:
        most, wait_s = self._config.update.max_attempts, self._config.update.retry_wait_s
        for attempt in range(1, most + 1):
            try:
                number = await self._number(version)
                self._trusted.discard(number)  # after a rewind the number stands for other weights
                report = await self._engine.update_weights(number, mode)
            except WeightMismatch as error:  # another try would find the same
                _log.error("the update to version %s was refused: %s", version, error.message)
                raise
            except (StoreError, OSError) as error:
                _log.warning(
                    "the update to version %s failed (attempt %d of %d): %s; still serving version %d",
                    *(version, attempt, most, error, self._engine.version),
                )
                if attempt == most:
                    raise
                await asyncio.sleep(wait_s * 2 ** (attempt - 1))
            else:
                return replace(report, num_attempts=attempt)
        raise AssertionError("unreachable")

    async def _number(self, version: Version) -> Version:
        """Return the number of the latest version. Where there is none, the engine's error says what is missing."""
        if version != "latest":
            return version
        from forge.store import Weights

        published = await Weights(self._config.weights).versions()
        return published[-1].number if published else "latest"

    async def catch_up(self) -> None:
        """Update to the newest version if it is newer than that in use. A failure is logged, or raised by requests."""
        try:
            newest = await self._number("latest")
            if newest != "latest" and newest > self._engine.version:
                await self.update_weights(newest, "keep")
        except SyncError:
            _log.error("this generator accepts no requests until an update succeeds")
        except (StoreError, OSError) as error:
            _log.warning("cannot find out whether version %d is the newest: %s", self._engine.version, error)

    async def sleep(self) -> None:
        """Release the engine's memory."""
        async with self._updating:  # a sleeping engine cannot prove an update
            await self._engine.sleep()

    async def wake(self) -> None:
        """Restore the memory, and prove the weights that came meanwhile."""
        async with self._updating:
            self._proven.clear()
            try:
                await self._engine.wake()
            except BaseException:
                self._proven.set()
                raise
            if self._is_proof_due:
                await _uncancelled(self._prove_current())
            self._proven.set()

    # ---- Proof --------------------------------------------------------------------------------------------------

    async def _prove(self, version: int) -> float | None:
        """Compare the canary's logprobs with the trainer's. Return the largest difference, or None without a canary."""
        from forge.store.canary import get_canary, largest_difference

        canary = await get_canary(self._config.weights, version) if self._config.canary.enabled else None
        if canary is None:
            self._trusted.add(version)
            return None
        # What is finished is not handed out until the proof is made: it overtakes all requests.
        found = await self._engine.score([canary.token_ids[: self._engine.max_seq_len]], urgent=True)
        difference = largest_difference(canary, found[0])
        bound = self._config.canary.bound or _BOUNDS[self._precision()]
        if difference <= bound:
            self._trusted.add(version)
            return difference
        self._trusted.discard(version)
        differing = await self._engine.differing(version)
        raise SyncError(
            f"after the update to version {version} the generator's logprobs are not the trainer's",
            tensors=tuple(differing or ()),
            path="generator.canary.bound",
            value=f"largest difference {difference:.4g}",
            rule=f"at most {bound:g}; " + _describe(differing),
            repair="publish the version again and update; if no tensor differs, compare the models' configurations and "
            "precisions, or set generator.canary.enabled=false",
        )

    def _precision(self) -> str:
        if self._config.kv_cache_dtype != "auto":
            return self._config.kv_cache_dtype
        import torch

        on_gpu = torch.cuda.is_available() if self._config.with_gpus is None else self._config.with_gpus
        return self._config.precision_on(gpu=on_gpu)

    def _halt(self, error: SyncError) -> None:
        """Stop generation: everything in progress, and everything that comes until an update passes."""
        _log.error("generation stops: %s", error)
        self._stop = error
        for task in tuple(self._under_way):
            task.cancel()


async def _uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Await work to its end, even if the caller is cancelled; then raise `CancelledError`."""
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        task.exception()  # the caller is gone
        raise asyncio.CancelledError
    return task.result()


def _unproven(version: Version) -> SyncError:
    return SyncError(
        f"the weights of version {version} were not verified against the trainer's",
        path="generator.canary",
        value=version,
        rule="completions of a version are returned only after its canary was compared",
        repair="update again; generator.canary.enabled=false leaves the comparison out",
    )


def _describe(differing: Mapping[str, tuple[int, int]] | None, most: int = 4) -> str:
    if differing is None:
        return "this engine cannot report which tensors differ"
    if not differing:
        return "every tensor has the digest that was published"
    shown = [f"{name} ({here:016x}, published {published:016x})" for name, (published, here) in differing.items()]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return f"these tensors have other digests than were published: {', '.join(shown[:most])}{more}"
