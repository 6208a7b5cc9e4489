"""The configurations for one, eight and 64 GPUs, scaled down to the tiny model on CPUs by overrides alone.

What a file says about layout, placement, algorithm and launcher stays, but for the numbers of hosts, ranks and
replicas.
"""

from __future__ import annotations

import math
from pathlib import Path

from forge.observe import read_jsonl
from forge.rollout.ledger import check_ledger, read_ledger
from forge.trainer.checkpoint_folder import list_checkpoints

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "apps" / "grpo" / "main.py"
APPS = MAIN.parent
NUM_STEPS = 2

TINY = (
    *("model.preset=tiny", "model.path=null", "distributed.precision=float32", "training.compile=false"),
    *("distributed.with_gpus=false", "generator.with_gpus=false", "generator.engine=native"),
    *("prompts.sources=[{task: arithmetic, num_prompts: 40}]", "evaluation.sources=[]", "record.report=false"),
    "rewards.functions=[{kind: regex, name: digit, args: {pattern: '\\d'}}]",
    *("rollout.batch_groups=2", "rollout.group_size=4", "generator.max_batch=16"),
    *("generator.max_seq_len=96", "generator.sampling.max_tokens=12"),
    *("training.max_seq_len=96", "training.microbatch_tokens=192", f"training.max_steps={NUM_STEPS}"),
    *("training.warmup_steps=0", "training.learning_rate=1e-3", "checkpointing.export_hf=false"),
)
"""The model and the sizes, for any of the files."""


def check_run(folder: Path, *, num_ranks: int) -> None:
    """Check what a run of `NUM_STEPS` has left: every group is accounted for, every rank has saved its part."""
    newest = list_checkpoints(folder / "checkpoints")[-1]
    assert newest.step == NUM_STEPS
    assert len(list(newest.path.glob("__*.distcp"))) == num_ranks
    buffer = newest.extra["caller"]["buffer"]
    ledger = [line for line in read_ledger(folder / "ledger.jsonl") if line.step <= newest.step]
    check_ledger(ledger, pending=buffer["pending"], next_number=buffer["next_number"])
    losses = [line.values["train/loss"] for line in read_jsonl(folder / "metrics.jsonl") if "train/loss" in line.values]
    assert len(losses) == NUM_STEPS
    assert all(map(math.isfinite, losses))
