"""Profiles of a process: of all its threads, bounded in time, one at a time."""

from __future__ import annotations

import gzip
import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forge.observe import torch_profile
from forge.observe.torch_profile import ProfileOptions, finish_profile, start_profile, write_profile


@contextmanager
def working() -> Iterator[Callable[[], None]]:
    """A thread that multiplies when it is asked to. It has done so once: it was there before any profile."""
    torch = pytest.importorskip("torch")
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
    answered: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def work() -> None:
        matrix = torch.ones(64, 64)
        while asked.get():
            torch.mm(matrix, matrix)
            answered.put(True)

    def multiply() -> None:
        asked.put(True)
        answered.get(timeout=600)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        multiply()
        yield multiply
    finally:
        asked.put(False)
        thread.join()


def names(data: bytes | None) -> set[str]:
    assert data is not None
    found: dict[str, Any] = json.loads(gzip.decompress(data))
    return {event["name"] for event in found["traceEvents"]}


def test_what_other_threads_do_is_in_a_profile() -> None:
    with working() as multiply:
        start_profile(ProfileOptions())
        multiply()
        assert "aten::mm" in names(finish_profile())
    assert finish_profile() is None


def test_a_new_profile_replaces_one_that_nobody_finished() -> None:
    with working() as multiply:
        start_profile(ProfileOptions())
        discarded = torch_profile._under_way
        assert discarded is not None
        start_profile(ProfileOptions(shapes=True, memory=True))
        discarded._stop_late()  # as its timer would at this moment
        multiply()
        assert "aten::mm" in names(finish_profile())


def test_a_profile_is_bounded_in_time() -> None:
    torch = pytest.importorskip("torch")
    start_profile(ProfileOptions(max_seconds=0.01))
    profile = torch_profile._under_way
    assert profile is not None
    assert profile._timer is not None
    profile._timer.join()
    profile._thread.submit(lambda: None).result()  # what the timer asked for is done
    torch.ones(3).cumsum(0)
    assert "aten::cumsum" not in names(finish_profile())
    start_profile(ProfileOptions())
    torch.ones(3).cumsum(0)
    assert "aten::cumsum" in names(finish_profile())


def test_a_profile_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "profiles" / "step.json.gz"
    write_profile(path, gzip.compress(b"{}"))
    write_profile(path, gzip.compress(b"[]"))
    assert gzip.decompress(path.read_bytes()) == b"[]"
    assert [each.name for each in path.parent.iterdir()] == ["step.json.gz"]
