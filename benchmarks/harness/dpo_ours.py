"""Our side of `dpo.py`: a process that trains in turns and speaks as `trl_dpo.py` does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from harness.dpo_plan import DPOPlan
from harness.sft_ours import Turns, say


def settings_of(plan: DPOPlan, folder: Path) -> list[str]:
    """The configuration of our run, as it would be written on the command line of `apps/dpo/main.py`."""
    return [
        f"run.output_dir={folder / 'runs'}",
        f"model.path={folder / 'model'}",
        f"data.sources=[{{path: {folder / 'pairs.jsonl'}}}]",
        "data.shuffle=false",  # both sides see the same pairs in each step, so their losses can be compared
        f"preference.beta={plan.beta}",
        f"training.batch_size={plan.num_pairs}",
        f"training.max_seq_len={plan.longest}",
        f"training.microbatch_tokens={4 * plan.longest}",
        f"training.max_steps={plan.num_steps}",
        f"training.learning_rate={plan.learning_rate}",
        "training.schedule=constant",
        "training.warmup_steps=0",
        f"distributed.num_threads={plan.threads}",
        "distributed.with_gpus=false",
        "checkpointing.save_interval=null",
        "checkpointing.save_interval_s=null",
        "checkpointing.export_hf=false",
        *plan.settings,
    ]


def serve(folder: Path, plan: DPOPlan) -> None:
    """Train as `apps/dpo/main.py` does, with `Turns` between the loop and its trainer."""
    from forge.config import PreferenceConfig, load
    from forge.loops import supervised
    from forge.loops.preference import run_preference

    open_trainer = supervised.open_trainer

    async def in_turns(*args: Any, **named: Any) -> Turns:
        return Turns(await open_trainer(*args, **named), plan)

    supervised.open_trainer = in_turns  # type: ignore[assignment]
    result = asyncio.run(run_preference(load(PreferenceConfig, overrides=settings_of(plan, folder))))
    say("done", steps=result.step)
