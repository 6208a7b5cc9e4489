"""A LoRA adapter in the training engine: what moves, what is kept, what is saved, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from engine_ranks import made_batch
from forge.config import (
    AdapterConfig,
    CheckpointConfig,
    DistributedConfig,
    ModelConfig,
    TrainerConfig,
    TrainingConfig,
)
from forge.errors import CheckpointError, ConfigError, ModelError
from forge.losses import CrossEntropy
from forge.models.adapter_names import adapter_map, num_adapter_parameters
from forge.trainer.checkpointer import Checkpointer
from forge.trainer.engine import Engine
from forge.types import Batch

VOCAB = 64
MODEL = ModelConfig(
    family="qwen3",
    num_layers=2,
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=VOCAB,
    max_seq_len=64,
    rope_theta=100.0,
    norm_eps=1e-6,
    tie_embeddings=True,
)
ADAPTER = AdapterConfig(rank=2, alpha=4)


def config(folder: Path, **changes: Any) -> TrainerConfig:
    settings: dict[str, Any] = {
        "model": MODEL,
        "adapter": ADAPTER,
        "training": TrainingConfig(max_seq_len=16, max_steps=6, learning_rate=1e-2, warmup_steps=0),
        "checkpoint_dir": folder / "checkpoints",
        "checkpointing": CheckpointConfig(asynchronous=False),
        "seed": 3,
    }
    return TrainerConfig(**(settings | changes))


@contextmanager
def opened(settings: TrainerConfig) -> Iterator[tuple[Engine, Checkpointer]]:
    engine = Engine(settings, loss=CrossEntropy())
    checkpointer = Checkpointer(engine)
    try:
        yield engine, checkpointer
    finally:
        checkpointer.close()
        engine.close()


def batch(seed: int) -> Batch:
    return made_batch((9, 15, 4, 11, 16), vocab=VOCAB, seed=seed)


def copies(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.own_parameters().items()}


def test_training_moves_the_adapter_and_no_other_bit(tmp_path: Path) -> None:
    with opened(config(tmp_path)) as (engine, _):
        before, plain = copies(engine), engine.forward_logprobs(batch(1))
        first = [engine.train_step(batch(1)).loss for _ in range(6)]
        after = copies(engine)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == set(engine.trained_parameters())
        assert first[-1] < first[0]
        without = engine.forward_logprobs(batch(1), base=True)
        with_adapter = engine.forward_logprobs(batch(1))
        assert all(map(torch.equal, without, plain)), "the base must be a reference model, bit for bit"
        assert not any(map(torch.equal, with_adapter, plain))


def test_optimizer_and_gradients_are_the_adapters_alone(tmp_path: Path) -> None:
    with opened(config(tmp_path)) as (engine, _):
        assert engine.optimizer is not None
        assert engine.adapter is not None
        num_weights = num_adapter_parameters(adapter_map(MODEL, engine.adapter.spec))
        states = engine.optimizer.state_dict()
        for kind in ("exp_avg", "exp_avg_sq"):
            assert sum(state.numel() for state in states[kind].values()) == num_weights
        assert num_weights == sum(tensor.numel() for tensor in engine.trained_parameters().values())
        needing = [parameter for parameter in engine.parts[0].parameters() if parameter.requires_grad]
        assert sum(parameter.numel() for parameter in needing) == num_weights


def test_a_resumed_run_is_the_run_bit_for_bit(tmp_path: Path) -> None:
    with opened(config(tmp_path / "whole")) as (engine, _):
        for seed in range(4):
            engine.train_step(batch(seed))
        expected = copies(engine)
    with opened(config(tmp_path)) as (engine, checkpointer):
        for seed in range(2):
            engine.train_step(batch(seed))
        checkpointer.save()
        saved = FileSystemReader(checkpointer.checkpoints.list()[-1].path).read_metadata().state_dict_metadata
        held = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
        assert held == set(engine.trained_parameters())
    with opened(config(tmp_path)) as (engine, checkpointer):
        assert checkpointer.load("must") == {}
        for seed in range(2, 4):
            engine.train_step(batch(seed))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in engine.own_parameters().items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"adapter": None}, "an adapter, and this run trains full weights"),
        ({"adapter": AdapterConfig(rank=4, alpha=4)}, "another rank"),
        ({"adapter": AdapterConfig(rank=2, alpha=4, targets="attention")}, "another targets"),
        ({"model": None}, "other base weights"),
    ],
)
def test_another_adapter_or_base_does_not_resume(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with opened(config(tmp_path)) as (engine, checkpointer):
        engine.train_step(batch(0))
        checkpointer.save()
        if "model" in change:
            checkpointer.export(tmp_path / "trained")
            change = {"model": ModelConfig(path=str(tmp_path / "trained"))}
    with opened(config(tmp_path, **change)) as (engine, checkpointer):
        before = copies(engine)
        with pytest.raises(CheckpointError, match=says):
            checkpointer.load("must")
        assert all(torch.equal(before[name], tensor) for name, tensor in engine.own_parameters().items())


def test_full_weights_do_not_resume_as_an_adapter(tmp_path: Path) -> None:
    with opened(config(tmp_path, adapter=None)) as (engine, checkpointer):
        engine.train_step(batch(0))
        checkpointer.save()
    with opened(config(tmp_path)) as (_, checkpointer), pytest.raises(CheckpointError, match="trains an adapter"):
        checkpointer.load("must")


def test_an_exported_adapter_is_where_another_run_starts(tmp_path: Path) -> None:
    with opened(config(tmp_path)) as (engine, checkpointer):
        for seed in range(3):
            engine.train_step(batch(seed))
        checkpointer.export_adapter(tmp_path / "adapter")
        checkpointer.export(tmp_path / "merged")
        expected = {name: tensor.clone() for name, tensor in engine.trained_parameters().items()}
        unmerged = engine.forward_logprobs(batch(7))
    with opened(config(tmp_path / "next", adapter=AdapterConfig(path=str(tmp_path / "adapter")))) as (engine, _):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in engine.trained_parameters().items())
        assert all(map(torch.equal, engine.forward_logprobs(batch(7)), unmerged))
    merged = config(tmp_path / "merged_run", adapter=None, model=ModelConfig(path=str(tmp_path / "merged")))
    with opened(merged) as (engine, _):
        for found, wanted in zip(engine.forward_logprobs(batch(7)), unmerged, strict=True):
            assert torch.allclose(found, wanted, atol=1e-5)


def test_bfloat16_keeps_the_base_narrow_and_the_adapter_wide(tmp_path: Path) -> None:
    with opened(config(tmp_path, distributed=DistributedConfig(precision="bfloat16"))) as (engine, _):
        losses = [engine.train_step(batch(1)).loss for _ in range(6)]
        trained = engine.trained_parameters()
        assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
        rest = {tensor.dtype for name, tensor in engine.own_parameters().items() if name not in trained}
        assert rest == {torch.bfloat16}
        assert losses[-1] < losses[0]


def test_a_scalar_head_is_trained_and_saved_with_the_adapter(tmp_path: Path) -> None:
    scalar = MODEL.model_copy(update={"head": "scalar", "tie_embeddings": False})
    with opened(config(tmp_path, model=scalar, frozen=True)) as (engine, checkpointer):
        assert "lm_head.weight" in engine.trained_parameters()
        checkpointer.export_adapter(tmp_path / "adapter")
        head = engine.own_parameters()["lm_head.weight"].clone()
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (said["modules_to_save"], said["task_type"]) == (["score"], "SEQ_CLS")
    start = AdapterConfig(path=str(tmp_path / "adapter"))
    with opened(config(tmp_path, model=scalar, frozen=True, adapter=start, seed=9)) as (engine, _):
        assert torch.equal(engine.own_parameters()["lm_head.weight"], head)


def test_what_is_not_an_adapter_of_the_model_is_refused(tmp_path: Path) -> None:
    with opened(config(tmp_path)) as (_, checkpointer):
        checkpointer.export_adapter(tmp_path / "good")
    good = tmp_path / "good"

    def refusal(**changes: Any) -> str:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        said = json.loads((good / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(said | changes))
        with pytest.raises(ModelError) as caught, opened(config(tmp_path, adapter=AdapterConfig(path=str(folder)))):
            pass
        return str(caught.value)

    assert "use_dora" in refusal(use_dora=True)
    assert "init_lora_weights" in refusal(init_lora_weights="pissa_niter_4"), "it belongs to the residual of the base"
    assert "lora_alpha" in refusal(lora_alpha=None)
    assert "peft_type" in refusal(peft_type="IA3")
    assert "differ in name or shape" in refusal(r=3)
    assert "modules_to_save" in refusal(modules_to_save=["lm_head"])
    for adapter, says in (
        (AdapterConfig(path=str(tmp_path / "missing")), "adapter_config.json cannot be read"),
        (AdapterConfig(path=str(good), rank=5), "adapter.rank contradicts"),
    ):
        with pytest.raises(ModelError, match=says), opened(config(tmp_path, adapter=adapter)):
            pass
    with (
        pytest.raises(ConfigError, match="no experts"),
        opened(config(tmp_path, adapter=AdapterConfig(targets="experts"))),
    ):
        pass
