"""One profile of this process by torch.profiler: of all its threads, and of its GPUs, from a start to a stop."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forge.errors import OptionError

MAX_BYTES: Final = 256 << 20
"""The largest profile that is returned, compressed."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What is profiled, and for how long at most."""

    max_seconds: float = 20.0
    shapes: bool = False
    memory: bool = False


class TorchProfile:
    """A profile under way. One thread of its own starts and stops it, as the profiler demands."""

    def __init__(self, options: ProfileOptions) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forge-profile")
        self._profile: Any = None
        self._timer: threading.Timer | None = None
        self._is_recording = False
        try:
            self._thread.submit(self._start, options).result()
        except BaseException:
            self._thread.shutdown(wait=False)
            raise

    def _start(self, options: ProfileOptions) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        every_thread = _ExperimentalConfig(profile_all_threads=True, trace_only=True)
        self._profile = profile(
            activities=activities,
            record_shapes=options.shapes,
            profile_memory=options.memory,
            experimental_config=every_thread,
        )
        self._profile.start()
        self._is_recording = True
        self._timer = threading.Timer(options.max_seconds, self._stop_late)
        self._timer.daemon = True
        self._timer.start()

    def _stop_late(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is finished at this moment
            self._thread.submit(self._stop)

    def _stop(self) -> None:
        if self._is_recording:
            self._is_recording = False
            self._profile.stop()

    def _finish(self) -> bytes:
        self._stop()
        with tempfile.TemporaryDirectory(prefix="forge-profile-") as folder:
            path = Path(folder) / "profile.json.gz"
            self._profile.export_chrome_trace(str(path))
            if path.stat().st_size > MAX_BYTES:
                raise OptionError(
                    "the profile of a step is too large",
                    path="record.profile.max_seconds",
                    value=f"{path.stat().st_size / 2**20:.0f} MiB",
                    rule=f"at most {MAX_BYTES / 2**20:.0f} MiB, compressed",
                    repair="profile a shorter part of the step",
                )
            return path.read_bytes()

    def finish(self) -> bytes:
        """Stop, and return the profile: gzipped JSON in Chrome's Trace Event Format."""
        assert self._timer is not None
        self._timer.cancel()
        try:
            return self._thread.submit(self._finish).result()
        finally:
            self._thread.shutdown(wait=False)

    def discard(self) -> None:
        """Stop, and forget what was recorded."""
        assert self._timer is not None
        self._timer.cancel()
        try:
            self._thread.submit(self._stop).result()
        finally:
            self._thread.shutdown(wait=False)


_under_way: TorchProfile | None = None
_guard = threading.Lock()


def start_profile(options: ProfileOptions) -> None:
    """Start to profile this process. A profile that is under way is discarded."""
    global _under_way
    with _guard:
        before, _under_way = _under_way, None
    if before is not None:
        before.discard()
    profile = TorchProfile(options)
    with _guard:
        _under_way = profile


def finish_profile() -> bytes | None:
    """Return the profile since `start_profile`; None if none is under way."""
    global _under_way
    with _guard:
        profile, _under_way = _under_way, None
    return None if profile is None else profile.finish()


def _begin_anew() -> None:
    global _under_way, _guard
    _under_way, _guard = None, threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


def write_profile(path: Path, data: bytes) -> None:
    """Write a profile, which appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    os.replace(part, path)
