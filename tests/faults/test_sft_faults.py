"""Fine-tuning whose trainer is killed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from forge.config import SFTConfig, load
from forge.errors import ActorFailure
from forge.loops.sft import run_sft


def test_a_trainer_that_is_killed_is_named(tmp_path: Path) -> None:
    """What the trainer died of is raised, and not that it cannot be closed any more."""
    rows = [{"prompt": f"{number}?", "response": f"{number}!"} for number in range(64)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = load(
        SFTConfig,
        overrides=[
            "model.preset=tiny",
            f"data.sources=[{{path: {tmp_path / 'train.jsonl'}}}]",
            f"run.output_dir={tmp_path}",
            *("training.max_steps=1000", "training.max_seq_len=64", "training.batch_size=2"),
            *("metrics.tensorboard=false", "metrics.log_interval=1"),
            "recovery.max_restarts=0",
            "metrics.sinks=[{kind: 'killing_sinks:KillTrainer', args: {at_step: 2}}]",
        ],
    )
    with pytest.raises(ActorFailure, match="rank 0"):
        asyncio.run(asyncio.wait_for(run_sft(chosen), 600))
