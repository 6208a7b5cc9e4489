"""What a run refuses about its folders and its checkpoint, before any process is started.

Nothing here writes, locks or creates anything.
"""

from __future__ import annotations

import os
from pathlib import Path

from forge.errors import ConfigError
from forge.loops.places import Placed, checkpoint_dir, run_dir
from forge.trainer.checkpoint_folder import CheckpointInfo, find_checkpoint


def check_folders(config: Placed) -> CheckpointInfo | None:
    """Refuse folders that a run cannot use, and return the checkpoint that it resumes from; None to start anew."""
    own, checkpoints = run_dir(config), checkpoint_dir(config)
    _check_writable(own, "run.output_dir")
    _check_writable(checkpoints, "checkpointing.output_dir")
    return find_checkpoint(checkpoints, resume=config.checkpointing.resume)


def _check_writable(folder: Path, path: str) -> None:
    """Refuse a folder that cannot be made, or not be written to. Makes nothing."""
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(
            "the run cannot write to its folder",
            path=path,
            value=str(folder),
            rule=f"a folder that can be written; {place} is {'none' if not place.is_dir() else 'not'}",
            repair="choose another one, or correct its permissions",
        )
