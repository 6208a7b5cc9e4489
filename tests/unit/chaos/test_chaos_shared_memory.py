"""Files in shared memory that are left behind are the run's only if no other program had them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from forge.chaos.processes import TAG
from forge.chaos.shared_memory import SegmentWatch

MAPPER = (
    "import mmap, sys\n"
    "files = [open(path, 'r+b') for path in sys.argv[1:]]\n"
    "maps = [mmap.mmap(file.fileno(), 0) for file in files]\n"
    "print(flush=True); sys.stdin.read()"
)


def mapped(*paths: Path, tag: str | None = None) -> subprocess.Popen[bytes]:
    """Start a process that maps new files, and return when it does."""
    for path in paths:
        path.write_bytes(bytes(4096))
    env = {**os.environ, **({} if tag is None else {TAG: tag})}
    command = [sys.executable, "-c", MAPPER, *map(str, paths)]
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
        process.communicate(timeout=60)


def left(watch: SegmentWatch) -> list[str]:
    return asyncio.run(watch.left(limit_s=0.0))


def test_only_what_the_run_left_counts(tmp_path: Path) -> None:
    (tmp_path / "older").touch()
    watch = SegmentWatch("run", folder=tmp_path)
    own, other = mapped(tmp_path / "own", tag="run"), mapped(tmp_path / "other", tag="another run")
    plain = mapped(tmp_path / "plain")
    (tmp_path / "unknown").touch()
    watch.look()
    assert left(watch) == ["unknown"], "the others are in use"
    end(own, other, plain)
    assert left(watch) == ["own", "unknown"]


def test_what_both_sides_mapped_is_the_runs(tmp_path: Path) -> None:
    watch = SegmentWatch("run", folder=tmp_path)
    shared = tmp_path / "shared"
    first = mapped(shared)
    second = mapped(shared, tag="run")
    watch.look()
    end(first, second)
    assert left(watch) == ["shared"]
    shared.unlink()
    assert left(watch) == []


def test_a_run_that_removes_its_files_later_is_waited_for(tmp_path: Path) -> None:
    watch = SegmentWatch("run", folder=tmp_path)
    (tmp_path / "late").touch()

    async def run() -> list[str]:
        waiting = asyncio.create_task(watch.left(limit_s=600.0))
        await asyncio.sleep(0)
        (tmp_path / "late").unlink()
        return await waiting

    assert asyncio.run(run()) == []
