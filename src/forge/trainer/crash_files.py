"""The batch that a trainer died on, twice: written to the run's folder, so that it can be looked at and tried again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from forge.types import Batch

_log = logging.getLogger("forge.trainer")
BATCH_NAME: Final = "batch.pt"
README_NAME: Final = "README.md"


def write_crash(folder: Path, batch: Batch, *, worker: str, step: int, failure: str) -> Path:
    """Write a batch, and how to look at it, to a folder of its own in `folder`; return that folder. It is written once:
    what an earlier run left there of the same step is replaced."""
    import torch

    place = folder / f"{worker}-step-{step:08d}"
    place.mkdir(parents=True, exist_ok=True)
    torch.save(batch, place / BATCH_NAME)
    named = [name for name in batch.identities if name]
    longest = max(batch.lengths, default=0)
    lines = [
        f"# The {worker} died twice in step {step}",
        "",
        f"Each time: {failure}",
        "",
        f"`{BATCH_NAME}` holds the batch of that step, a `forge.types.Batch`: {len(batch)} samples, "
        f"{batch.num_tokens} tokens, the longest sample has {longest}. Look at it with",
        "",
        "```python",
        "import torch",
        f'batch = torch.load("{place / BATCH_NAME}", weights_only=False)',
        "for sample in batch.samples():",
        "    print(sample.identity, len(sample), sample.token_ids[:20])",
        "```",
        "",
        *(["Samples:", "", *(f"- {name}" for name in named)] if named else []),
    ]
    (place / README_NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return place


def try_to_write_crash(folder: Path, batch: Batch, *, worker: str, step: int, failure: str) -> Path | None:
    """Do what `write_crash` does. If the disk refuses, log it: the death of the worker is the error to raise."""
    try:
        return write_crash(folder, batch, worker=worker, step=step, failure=failure)
    except OSError as error:
        _log.warning("the batch that the %s died on could not be written to %s: %s", worker, folder, error)
        return None
