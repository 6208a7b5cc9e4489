"""A trainer whose ranks are killed: it is restored without a restart of the program, and has the same weights."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dying_parts import DyingLoss, arm
from engine_ranks import made_batch
from forge.config import (
    CheckpointConfig,
    DistributedConfig,
    ModelConfig,
    RecoveryConfig,
    SFTConfig,
    TrainerConfig,
    TrainingConfig,
    load,
)
from forge.errors import RecoveryError
from forge.loops.run_paths import run_dir
from forge.loops.sft import run_sft
from forge.losses import PolicyLoss
from forge.observe import read_jsonl
from forge.trainer.checkpoint_folder import list_checkpoints
from forge.trainer.handles import open_trainer
from forge.trainer.recovering import RecoveringTrainer
from forge.trainer.replay_log import fingerprint
from forge.types import Batch
from local_services import services_here

pytestmark = pytest.mark.usefixtures("leaves_nothing")
VOCAB = 64
MODEL = ModelConfig(
    family="qwen3",
    num_layers=1,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCAB,
    max_seq_len=64,
    tie_embeddings=True,
    rope_theta=1000.0,
    norm_eps=1e-6,
)


def trainer_config(folder: Path, **distributed: Any) -> TrainerConfig:
    return TrainerConfig(
        model=MODEL,
        training=TrainingConfig(max_seq_len=16, schedule="constant", learning_rate=1e-2),
        distributed=DistributedConfig(with_gpus=False, **distributed),
        checkpoint_dir=folder / "checkpoints",
        checkpointing=CheckpointConfig(keep=9),
    )


def batches(count: int) -> list[Batch]:
    return [made_batch((9, 1, 15), vocab=VOCAB, fields=PolicyLoss().fields, seed=seed) for seed in range(count)]


async def exported(trainer: RecoveringTrainer, folder: Path) -> str:
    await trainer.export_hf(folder / "hf", overwrite=True)
    return hashlib.sha256((folder / "hf" / "model.safetensors").read_bytes()).hexdigest()


def test_two_ranks_are_restored_when_one_is_killed_in_a_step_during_a_save(
    drive: Callable[[Any], Any], tmp_path: Path
) -> None:
    rules = RecoveryConfig(max_restarts=1)
    data = batches(4)

    async def scenario() -> None:
        loss, chosen = DyingLoss(PolicyLoss(), tmp_path), trainer_config(tmp_path, shard=2)
        trainer = await open_trainer(chosen, loss, recovery=(rules, tmp_path / "crashes"))
        assert isinstance(trainer, RecoveringTrainer)
        await trainer.load("never")
        await trainer.save(extra={})
        undisturbed = [fingerprint(await trainer.train_step(batch)) for batch in data]
        weights = await exported(trainer, tmp_path)
        assert await trainer.load(str(tmp_path / "checkpoints" / "step-00000000")) is not None

        results = [await trainer.train_step(batch) for batch in data[:2]]
        await trainer.save(extra={"after": 2})  # in the background
        arm(tmp_path, rank=1)
        results += [await trainer.train_step(batch) for batch in data[2:]]
        await trainer.wait_saved()
        saved = list_checkpoints(tmp_path / "checkpoints")
        assert [info.extra["caller"]["after"] for info in saved if info.step == 2] == [2]
        assert [fingerprint(result) for result in results] == undisturbed
        assert await exported(trainer, tmp_path) == weights
        assert trainer.take_metrics()["recovery/restarts"] == 1
        assert trainer.take_metrics() == {}

        os.kill((await trainer.service.get_metrics()).replicas[0].pids[0], signal.SIGKILL)
        with pytest.raises(RecoveryError) as caught:
            await trainer.train_step(data[0])
        assert (caught.value.path, caught.value.rule) == ("recovery.max_restarts", "at most 1 in 3600 s")
        assert "rank 0" in str(caught.value.value)
        assert "--resume" in str(caught.value.repair)
        await trainer.close()

    drive(scenario())


def sft_config(folder: Path, *overrides: str) -> SFTConfig:
    folder.mkdir()
    (folder / "train.jsonl").write_text(
        "".join(f'{{"prompt": "{number}?", "response": "{number}!"}}\n' for number in range(64))
    )
    return load(
        SFTConfig,
        overrides=[
            *("model.preset=tiny", f"data.sources=[{{path: {folder / 'train.jsonl'}}}]", f"run.output_dir={folder}"),
            *("training.max_steps=7", "training.max_seq_len=64", "training.batch_size=2", "metrics.tensorboard=false"),
            f"loss={{function: 'dying_parts:dying_cross_entropy', args: {{folder: '{folder}'}}}}",
            *("checkpointing.save_interval=2", "checkpointing.asynchronous=false", *overrides),
        ],
    )


def test_fine_tuning_continues_after_a_kill_and_ends_at_a_step_that_kills_twice(tmp_path: Path) -> None:
    whole, marks = sft_config(tmp_path / "a"), tmp_path / "b"
    sink = f"metrics.sinks=[{{kind: 'dying_parts:Arming', args: {{marks: '{marks}', at: {{'3': 1, '6': 2}}}}}}]"
    killed = sft_config(marks, sink, "recovery.backoff_s=0")
    with services_here():
        asyncio.run(run_sft(whole))
    with pytest.raises(RecoveryError, match="died twice in train_step after 6 step") as caught:
        asyncio.run(asyncio.wait_for(run_sft(killed), 600))
    lines = [list(read_jsonl(run_dir(chosen) / "metrics.jsonl")) for chosen in (whole, killed)]
    losses, again = ([line.values["train/loss"] for line in each if line.step <= 6] for each in lines)
    assert (losses, len(losses)) == (again, 6)
    assert [line.step for line in lines[1] if "recovery/restarts" in line.values] == [4]

    assert "rank 0" in str(caught.value.value)
    assert "README.md" in str(caught.value.repair)
    folder = Path(str(caught.value.path))
    assert folder.parent == run_dir(killed) / "crashes"
    batch = torch.load(folder / "batch.pt", weights_only=False)
    assert isinstance(batch, Batch)
    assert batch.identities[0] in (folder / "README.md").read_text()
