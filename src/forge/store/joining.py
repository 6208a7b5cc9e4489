"""Joining a version: every rank says what it will write, and gets a assignment when all have said so."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import weakref
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace

import torch

from forge.errors import StoreError
from forge.runtime.rendezvous import ConnectionFailure
from forge.store.client import StoreClient
from forge.store.records import Assignment, Begin, Layout


@dataclass(frozen=True, slots=True)
class Contribution:
    """One rank's part of a version to be."""

    key: str
    kind: str
    version: int | None
    rank: int = 0
    world_size: int = 1
    keep: int = 1
    extra: bytes = b""
    timeout_s: float | None = None
    group: str = ""


def ranks_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Which of how many publishing ranks this process is, unless the user has said so."""
    if rank is not None and world_size is not None:
        return rank, world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _request_for(contribution: Contribution, layout_id: str, layout: Layout | None) -> Begin:
    return Begin(
        key=contribution.key,
        kind=contribution.kind,
        version=contribution.version,
        rank=contribution.rank,
        world_size=contribution.world_size,
        layout_id=layout_id,
        layout=layout,
        keep=contribution.keep,
        timeout_s=contribution.timeout_s,
        group=contribution.group,
    )


_joiners: weakref.WeakSet[Joiner] = weakref.WeakSet()


def _withdraw_all() -> None:
    """The process ends. Who waits for other ranks would keep it from that."""
    for joiner in list(_joiners):
        joiner.withdraw()


# Python waits for threads before it calls what `atexit` has: this comes before both.
getattr(threading, "_register_atexit", atexit.register)(_withdraw_all)


class Joiner:
    """Asks the registry for assignments, for one key of one process. The layout is told once, as long as it stays."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._told: str | None = None
        self._token = ""
        self._joining: Future[Assignment] | None = None
        self._is_withdrawn = False
        self._is_joining = threading.Lock()
        _joiners.add(self)

    def fits(self, layout: Layout) -> bool:
        """Whether this is the layout that the registry was told, which `begin_early` relies on."""
        return self._told == layout.id

    def begin_early(self, contribution: Contribution) -> Future[Assignment] | None:
        """Ask for a assignment before the tensors are looked at, if they are likely those of last time and nobody else
        takes part, who would have to begin again if they are not."""
        if self._told is None or contribution.world_size > 1:
            return None
        return self._client.line.request("begin", _request_for(contribution, self._told, None))

    def give_back(self, early: Future[Assignment]) -> None:
        assignment = early.result()
        if not assignment.needs_layout:
            self._client.line.call("give_up", (assignment.id, "the state dict has changed its layout"))

    def begin(self, contribution: Contribution, layout: Layout, early: Future[Assignment] | None) -> Assignment:
        if early is not None:
            assignment = early.result()
            if not assignment.needs_layout:
                return assignment
        known = None if self._told == layout.id and early is None else layout
        self._token = secrets.token_hex(8)
        request = replace(_request_for(contribution, layout.id, known), token=self._token)
        assignment = self._join(request)
        if assignment.needs_layout:
            assignment = self._join(replace(request, layout=layout))
        self._told = layout.id
        return assignment

    def _join(self, request: Begin) -> Assignment:
        """Join a version; waits until every rank has, or until this one withdraws."""
        try:
            with self._is_joining:
                if self._is_withdrawn:
                    raise CancelledError
                self._joining = self._client.line.request("begin", request)
            return self._joining.result()
        except CancelledError:
            raise StoreError(
                f"rank {request.rank} gave up before all ranks had begun to publish {request.key!r}",
                path=request.key,
                value=f"rank {request.rank} of {request.world_size}",
                rule=f"all {request.world_size} ranks publish",
                repair="publish again, from every rank",
            ) from None
        finally:
            self._joining = None

    def withdraw(self) -> None:
        """Wait for other ranks no longer, now and later: what is not begun is given up, what is goes on."""
        with self._is_joining:
            self._is_withdrawn = True
            joining = self._joining
        if joining is not None and joining.cancel() and self._client.line.is_open:
            with contextlib.suppress(ConnectionFailure):  # it has just ended
                self._client.line.notify("withdraw", self._token)  # the answer may have been on its way
