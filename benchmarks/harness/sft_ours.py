"""Our side of `sft.py`: a process that trains in turns and speaks as `trl_sft.py` does."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from harness.sft_plan import Plan
from harness.windows import cpu_each_s


class Turns:
    """A trainer's handle that counts tokens and time, validates, and waits for its turn after each window."""

    def __init__(self, trainer: Any, plan: Any, held_out: Path | None = None) -> None:
        self._trainer, self._plan = trainer, plan
        self._held_out = [] if held_out is None else _batches_of(held_out, num_tokens=4 * plan.longest)
        self._tokens = self._steps = self._due = 0
        self._losses: list[float] = []
        self.peak_bytes = 0
        self._mark()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    async def train_step(self, batch: Any) -> Any:
        if self._steps == 0:
            await self._validate()
            self._mark()
        result = await self._trainer.train_step(batch)
        self._tokens += result.num_tokens
        self._steps += 1
        self._losses.append(result.loss)
        seconds, cpu_seconds = time.perf_counter() - self._wall, _family_cpu_s() - self._cpu_s
        if self._held_out and (self._tokens >= self._due or self._steps == self._plan.num_steps):
            await self._validate()
            began = time.perf_counter() - seconds, _family_cpu_s() - cpu_seconds
            self._wall, self._cpu_s = began
        if self._steps % self._plan.window == 0:
            spent = {"seconds": seconds, "cpu_seconds": cpu_seconds}
            self.peak_bytes = max(self.peak_bytes, _trainer_peak_bytes())
            say("window", step=self._steps, tokens=self._tokens - self._before, losses=self._losses, **spent)
            if not sys.stdin.readline():
                raise EOFError("the measuring program has gone")
            self._mark()
        return result

    async def _validate(self) -> None:
        if not self._held_out:
            return
        loss = weight = 0.0
        for batch in self._held_out:
            batch_loss, batch_weight, _ = await self._trainer.evaluate(batch)
            loss, weight = loss + batch_loss, weight + batch_weight
        say("validation", tokens=self._tokens, loss=loss / weight, validation_tokens=int(weight))
        every = self._plan.validate_every_tokens
        self._due = (self._tokens // every + 1) * every

    def _mark(self) -> None:
        self._before, self._wall, self._cpu_s = self._tokens, time.perf_counter(), _family_cpu_s()
        self._losses = []


def _family_cpu_s() -> float:
    """CPU seconds of this process and those that it started."""
    import psutil

    family = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    return sum(cpu_each_s(family).values())


def _trainer_peak_bytes() -> int:
    """Return the most memory that the trainer has had: of the processes that this one started, the largest."""
    import psutil

    peaks = [0]
    for child in psutil.Process().children(recursive=True):
        text = Path(f"/proc/{child.pid}/status").read_text()
        peaks += [int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM:")]
    return max(peaks)


def _batches_of(path: Path, *, num_tokens: int) -> list[Any]:
    """The held-out tokens, in batches small enough for one call."""
    import torch

    from forge.types import Batch, Sample

    samples = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        weights = torch.tensor([float(label != -100) for label in record["labels"]])
        weights[0] = 0.0
        samples.append(Sample(torch.tensor(record["input_ids"]), weights))
    batches: list[list[Sample]] = [[]]
    for sample in samples:
        if batches[-1] and sum(map(len, batches[-1])) + len(sample) > num_tokens:
            batches.append([])
        batches[-1].append(sample)
    return [Batch.of(batch) for batch in batches]


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def settings_of(plan: Plan, folder: Path) -> list[str]:
    """The configuration of our run, as it would be written on the command line of `apps/sft/main.py`."""
    adapter = (
        [] if plan.lora_rank is None else [f"adapter.rank={plan.lora_rank}", f"adapter.alpha={2 * plan.lora_rank}"]
    )
    return [
        *adapter,
        f"run.output_dir={folder / 'runs'}",
        f"model.path={folder / 'model'}",
        f"data.sources=[{{path: {folder / 'train.chat.jsonl'}}}]",
        f"training.batch_size={plan.num_rows}",
        f"training.max_seq_len={plan.longest}",
        f"training.max_steps={plan.num_steps}",
        "training.learning_rate=1e-3",
        "training.schedule=constant",
        "training.warmup_steps=0",
        f"distributed.num_threads={plan.threads}",
        "distributed.with_gpus=false",
        "checkpointing.save_interval=null",
        "checkpointing.save_interval_s=null",
        "checkpointing.export_hf=false",
        *plan.settings,
    ]


def serve(folder: Path, plan: Plan) -> None:
    """Train as `apps/sft/main.py` does, with `Turns` between the loop and its trainer."""
    from forge.config import SFTConfig, load
    from forge.loops import supervised
    from forge.loops.sft import run_sft

    open_trainer = supervised.open_trainer
    turns: list[Turns] = []

    async def in_turns(*args: Any, **named: Any) -> Turns:
        turns.append(Turns(await open_trainer(*args, **named), plan, folder / "held_out.ids.jsonl"))
        return turns[-1]

    supervised.open_trainer = in_turns  # type: ignore[assignment]
    config = load(SFTConfig, overrides=settings_of(plan, folder))
    result = asyncio.run(run_sft(config))
    say("done", steps=result.step, peak_bytes=turns[-1].peak_bytes)
