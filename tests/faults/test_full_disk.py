"""A disk that is full: which step a resume continues after, and what the user is told.

The disk is a small file system in memory, mounted in a namespace of its own.
"""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from grpo_runs import app_command

LIMIT_S = 600
MOUNT = "mount -t tmpfs -o size={size} none {folder}"


@functools.cache
def cannot_mount() -> str | None:
    """Why no file system can be mounted here; None if it can."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", "mount -t tmpfs none /mnt"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except FileNotFoundError:
        return "there is no `unshare` here"
    return tried.stderr.strip() or "unshare failed" if tried.returncode else None


def run_on_disk(folder: Path, size: str, *overrides: str) -> tuple[int, str, list[str]]:
    """Run the application with its folder's parent on a small disk. Exit code, output, names of its checkpoints."""
    if (reason := cannot_mount()) is not None:
        pytest.skip(f"no small disk: {reason}")
    disk = folder.parent
    command = app_command(folder, *overrides)
    yaml = disk.with_suffix(".yaml")
    (disk / f"{folder.name}.yaml").rename(yaml)  # the disk will hide it
    command[command.index("--config") + 1] = str(yaml)
    names = disk.with_suffix(".names")
    script = f"{MOUNT.format(size=size, folder=shlex.quote(str(disk)))} && {{ {shlex.join(command)}; code=$?; "
    script += f"ls {shlex.quote(str(folder / 'checkpoints'))} > {shlex.quote(str(names))}; exit $code; }}"
    ended = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return ended.returncode, ended.stdout, names.read_text().split()


def test_a_checkpoint_that_does_not_fit_is_not_taken_for_a_saved_one(tmp_path: Path) -> None:
    """Three checkpoints of 8 MB are on the disk at most, and two fit."""
    folder = tmp_path / "disk" / "run"
    code, told, names = run_on_disk(
        folder,
        "20m",
        *("checkpointing.save_interval=1", "training.max_steps=1000", "placement=shared"),
        *("record.rollouts=none", "record.replay.enabled=false"),
    )
    assert code == 1, told
    assert "SaveError: The checkpoint of step 3 could not be written" in told
    assert [name for name in names if re.fullmatch(r"step-\d+", name)] == ["step-00000001", "step-00000002"]
    assert "--resume continues after step 2" in told
    assert "Traceback" not in told


def test_records_that_do_not_fit_end_the_run_with_one_error(tmp_path: Path) -> None:
    """Rollouts and ledger fill the disk; checkpoints have another."""
    elsewhere = tmp_path / "checkpoints"
    folder = tmp_path / "disk" / "run"
    code, told, _ = run_on_disk(
        folder,
        "320k",
        *(f"checkpointing.output_dir={elsewhere}", "checkpointing.save_interval=2", "training.max_steps=1000"),
        *("record.trace=false", "checkpointing.keep=100", "placement=shared"),
    )
    assert code == 1, told
    assert "RecordError: a record of the run could not be written: No space left on device" in told
    saved = sorted(int(path.name.removeprefix("step-")) for path in elsewhere.glob("step-????????"))
    assert f"--resume continues after step {saved[-1]}" in told
    assert "Traceback" not in told
