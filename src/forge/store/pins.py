"""Pinned versions of a run's weights: kept in the store for readers, and in the run's folder for a resume."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from forge.errors import StoreError
from forge.store.client import in_thread
from forge.store.version_file import damaged, read_version, version_path, versions_in, write_version
from forge.store.weights import Pin, Weights


@dataclass(frozen=True, slots=True)
class PinnedVersion:
    """One pinned version: its number, its digest, and the host memory that it takes in the store."""

    number: int
    digest: str
    num_bytes: int


class PinnedVersions:
    """The versions of weights that one process pins; in a run the controller.

    Generators serve each of them beside the live weights: `policy.generate.route(..., version=N)`. A pinned version is
    in host memory that does not depend on the trainer: neither newer versions, nor a trainer that goes back to a
    checkpoint, nor one that ends, take it away. Where the published version lies in such memory already it is pinned
    in place, without a copy.

    With a folder each version is also written there, once, so that a later process can `restore` it.

    The methods may be called concurrently; those that change something run one after the other.

    Args:
        name: of the weights, such as `policy`.
        folder: where the files are; None to keep none.
        max_versions: how many there may be at once; None for no limit.
    """

    def __init__(self, name: str, *, folder: Path | None = None, max_versions: int | None = None) -> None:
        self.name, self.folder, self.max_versions = name, folder, max_versions
        self._weights = Weights(name)
        self._pins: dict[int, Pin] = {}
        self._changing = asyncio.Lock()

    @property
    def versions(self) -> tuple[int, ...]:
        """The pinned versions, in rising order."""
        return tuple(sorted(self._pins))

    @property
    def num_bytes(self) -> int:
        """The host memory of all pinned versions together, in the store."""
        return sum(pin.num_bytes for pin in self._pins.values())

    def __getitem__(self, version: int) -> PinnedVersion:
        pin = self._pins[version]
        return PinnedVersion(pin.version, pin.digest, pin.num_bytes)

    async def add(self, version: int) -> PinnedVersion:
        """Pin a version that is published now, and write its file. When it returns, generators can serve it.

        A version that is pinned already stays as it is. Raises `StoreKeyError` for a version that is not published:
        published are the newest `store.keep` versions. Raises `StoreError` where `max_versions` are pinned. If it
        raises, nothing is pinned.
        """
        async with self._changing:
            if version not in self._pins:
                self._check_room(version)
                self._pins[version] = await self._pin(version)
            return self[version]

    async def _pin(self, version: int) -> Pin:
        pin = await self._weights.pin(version)
        try:
            if self.folder is None and pin.is_lasting:
                return pin
            fetched = await Weights(pin.name).fetch()
            try:
                if self.folder is not None:
                    path = version_path(self.folder, version)
                    await in_thread(write_version, path, fetched.tensors, version=version, digest=pin.digest)
                if pin.is_lasting:
                    return pin
                pin.release()  # what was fetched stays as it is
                return await self._weights.pin_copy(fetched.tensors, version=version)
            finally:
                fetched.release()
        except BaseException:
            pin.release()
            raise

    async def remove(self, version: int, *, keep_file: bool = False) -> None:
        """End the pin of a version, and delete its file. Completions that it is sampling are finished by it.

        A run that crashes now resumes from its last checkpoint, which may still need the version: keep the file then,
        and call `delete_files` when a checkpoint without the version is complete. Does nothing for a version that is
        not pinned.
        """
        async with self._changing:
            pin = self._pins.pop(version, None)
            if pin is not None:
                pin.release()
                if self.folder is not None and not keep_file:
                    version_path(self.folder, version).unlink(missing_ok=True)

    async def restore(self, versions: Iterable[int]) -> None:
        """Pin versions from their files, as they were when they were pinned. Published versions of the same numbers do
        not matter. Raises `CheckpointError` for a file that is missing or damaged; then none of them is pinned."""
        async with self._changing:
            restored: dict[int, Pin] = {}
            try:
                for version in versions:
                    if version not in self._pins:
                        self._check_room(version, more=len(restored))
                        restored[version] = await self._restore(version)
            except BaseException:
                for pin in restored.values():
                    pin.release()
                raise
            self._pins |= restored

    async def _restore(self, version: int) -> Pin:
        if self.folder is None:
            raise StoreError(
                "pinned versions can only be restored from a folder",
                path="PinnedVersions(folder=)",
                value=None,
                rule="the folder where they were written",
                repair="give the folder of the run",
            )
        path = version_path(self.folder, version)
        file = await in_thread(read_version, path)
        if file.version != version:
            raise damaged(path, f"version {file.version}")
        pin = await self._weights.pin_copy(file.tensors, version=version, digest=file.digest)
        if pin.digest != file.digest:
            pin.release()
            raise damaged(path, f"digest {pin.digest[:16]}…, written {file.digest[:16]}…")
        return pin

    async def delete_files(self, *, keep: Collection[int] = ()) -> list[int]:
        """Delete the files of versions that are not pinned, except those to `keep`; return the versions."""
        async with self._changing:
            found = {} if self.folder is None else versions_in(self.folder)
            stale = {version: path for version, path in found.items() if version not in {*self._pins, *keep}}
            for path in stale.values():
                path.unlink(missing_ok=True)
            return list(stale)

    def close(self) -> None:
        """End all pins, and keep the files. The end of this process does the same."""
        pins, self._pins = self._pins, {}
        for pin in pins.values():
            pin.release()

    def _check_room(self, version: int, *, more: int = 0) -> None:
        if self.max_versions is not None and len(self._pins) + more >= self.max_versions:
            raise StoreError(
                "no more versions can be pinned",
                path=f"PinnedVersions({self.name!r}).add",
                value=version,
                rule=f"at most {self.max_versions} at once; pinned are {list(self.versions)}",
                repair="remove one first, or raise max_versions",
            )
