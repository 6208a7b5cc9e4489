"""`forge run … --ui`: the UI beside a run, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from forge.cli.run_folder import RunFolder


def start_ui(files: Sequence[str], words: Sequence[str], *, keeps: bool) -> None:
    """Start `forge ui` for the folder that a program's configuration names, opened at its run.

    It ends when this process ends, unless `keeps`. It is not a child of this process: a supervisor ends what a crashed
    run has left behind, and what has a terminal's Ctrl-C is the run.
    """
    folder = _run_folder(files, words)
    command = [sys.executable, "-m", "forge.cli", "ui"]
    if folder is None:
        runs_dir = Path("runs")
    else:
        runs_dir = folder.path.parent
        command += ["--run", folder.path.name]
    runs_dir.mkdir(parents=True, exist_ok=True)
    _start_apart([*command, *(["--stays"] if keeps else ["--until", str(os.getpid())]), "--", str(runs_dir)])


def _run_folder(files: Sequence[str], words: Sequence[str]) -> RunFolder | None:
    from forge.config.command_line import detect_kind
    from forge.config.layers import split_words
    from forge.config.loading import merge_layers

    more_files, overrides = split_words([word for word in words if not word.startswith("-")])
    files = [*files, *(file for file in more_files if os.path.isfile(file))]
    return RunFolder.of(merge_layers(detect_kind(files, overrides).schema, files=files, overrides=overrides))


def _start_apart(command: Sequence[str]) -> None:
    """Start a process that is not a descendant of this one, in a session of its own. It prints to standard error."""
    between = os.fork()
    if between == 0:
        try:
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
        finally:
            os._exit(0)
    os.waitpid(between, 0)
