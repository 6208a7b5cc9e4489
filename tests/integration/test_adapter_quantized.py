"""Reinforcement learning of an adapter whose base is kept in few bits: one base for trainer and generator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forge.config import AdapterConfig, GRPOConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.config.problems import InvalidConfig
from forge.errors import CheckpointError
from forge.loops.planning import plan_run
from forge.loops.run_paths import run_dir
from forge.memory.devices import trainer_jobs
from forge.memory.resolved import resolve_run
from forge.memory.trainer import training_moments
from forge.models.adapter_names import adapter_map
from forge.models.quantized import quantized_tensors, quantized_weights
from forge.models.tiny import make_tiny
from forge.trainer.checkpoint_folder import list_checkpoints
from forge.trainer.checkpointer import Checkpointer
from forge.trainer.engine import Engine
from forge.types import Batch, Sample
from grpo_runs import config, episodes, metrics, train_here, weights_digest

pytest.importorskip("bitsandbytes", reason="the extra `quantized` is not installed")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_tiny(folder)
    return folder


def quantized(folder: Path, base: Path, *overrides: str) -> GRPOConfig:
    adapter = ("adapter.rank=4", "adapter.alpha=8", "adapter.base_dtype=nf4", f"model.path={base}")
    rates = ("training.learning_rate=1e-2", "training.max_steps=2", "algorithm.kl.coefficient=0.1")
    return config(folder, "model.preset=null", *adapter, *rates, *overrides)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory, base: Path) -> GRPOConfig:
    chosen = quantized(tmp_path_factory.mktemp("runs") / "apart", base)
    train_here(chosen)
    return chosen


def test_sampler_and_trainer_agree_to_the_last_bit(apart: GRPOConfig) -> None:
    seen = list(episodes(apart))
    assert len(seen) == 2 * 2 * 3
    for episode in seen:
        assert episode["logprobs"] == episode["trainer_logprobs"], episode["group"]
    assert set(metrics(apart, "sync/canary")) == {0.0}


def test_the_reference_is_the_quantised_base(apart: GRPOConfig) -> None:
    divergence = metrics(apart, "train/kl")
    assert divergence[0] == pytest.approx(0.0, abs=1e-7), "a new adapter changes nothing"
    assert divergence[-1] > 0


def test_one_process_shares_the_base_and_a_stopped_run_resumes_with_it(
    apart: GRPOConfig, base: Path, tmp_path: Path
) -> None:
    options = ("placement=shared", "checkpointing.save_interval=1")
    train_here(quantized(tmp_path / "run", base, *options, "training.max_steps=1"))
    again = quantized(tmp_path / "run", base, *options, "checkpointing.resume=must")
    train_here(again)
    assert weights_digest(again) == weights_digest(apart)


@pytest.mark.parametrize("other", ["int8", "null"])
def test_a_checkpoint_of_another_base_is_refused_before_anything_starts(
    other: str, apart: GRPOConfig, base: Path
) -> None:
    again = quantized(run_dir(apart), base, "checkpointing.resume=must", f"adapter.base_dtype={other}")
    with pytest.raises(CheckpointError, match="another base_dtype") as refused:
        plan_run(again)
    assert "adapter.base_dtype" in str(refused.value.repair)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        (("distributed.tensor=2",), "distributed.tensor"),
        (("distributed.expert=2", "distributed.shard=2"), "distributed.expert"),
        (("training.compile=true",), "training.compile"),
        (("placement=shared", "model.path=null", "model.preset=tiny"), "model.path"),
        (("adapter.base_dtype=int3",), "adapter.base_dtype"),
    ],
)
def test_what_weights_in_few_bits_do_not_admit_is_refused(
    options: tuple[str, ...], path: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        quantized(tmp_path / "refused", base, *options)
    assert any(problem.path == path for problem in caught.value.problems), caught.value


def test_checkpoints_name_the_base_and_tell_its_bits_apart(apart: GRPOConfig, base: Path, tmp_path: Path) -> None:
    said = list_checkpoints(run_dir(apart) / "checkpoints")[-1]
    assert said.extra["adapter"]["base_dtype"] == "nf4"
    assert AdapterConfig.of_checkpoint(said.extra).base_dtype == "nf4"  # type: ignore[union-attr]
    with opened(base, "nf4", tmp_path) as (engine, checkpointer):
        weight = next(iter(quantized_weights(engine.parts).values()))
        weight.packed[0] ^= 1  # one bit
        with pytest.raises(CheckpointError, match="other base weights"):
            checkpointer.load(str(said.path))


class opened:
    """An engine with an adapter of rank 4 over a base, and its checkpointer."""

    def __init__(self, base: Path, base_dtype: Any, folder: Path | None = None) -> None:
        settings = TrainerConfig(
            model=ModelConfig(path=str(base)),
            adapter=AdapterConfig(rank=4, alpha=8, base_dtype=base_dtype),
            training=TrainingConfig(max_steps=4, max_seq_len=32, learning_rate=1e-2),
            checkpoint_dir=folder,
        )
        self._engine = Engine(settings)

    def __enter__(self) -> tuple[Engine, Checkpointer]:
        self._checkpointer = Checkpointer(self._engine)
        return self._engine, self._checkpointer

    def __exit__(self, *exc: object) -> None:
        self._checkpointer.close()
        self._engine.close()


def test_the_plan_of_the_trainer_knows_the_bytes(apart: GRPOConfig, base: Path) -> None:
    ((_, job),) = trainer_jobs(resolve_run(apart))
    with opened(base, "nf4") as (engine, _):
        tensors = [*engine.own_parameters().values(), *quantized_tensors(engine.parts).values()]
        assert job.weight_bytes == sum(tensor.nbytes for tensor in tensors)
    assert any(part.name == "dequantised weight" for moment in training_moments(job) for part in moment.parts)


@pytest.mark.parametrize("base_dtype", ["int8", "nf4"])
def test_the_merged_model_is_the_dequantised_base_with_the_adapter(base_dtype: Any, base: Path, tmp_path: Path) -> None:
    sample = Sample(torch.arange(20), torch.tensor([0.0] + [1.0] * 19), identity="one")
    with opened(base, base_dtype) as (engine, checkpointer):
        engine.train_step(Batch.of([sample]))
        engine.train_step(Batch.of([sample]))
        found = engine.forward_logprobs(Batch.of([sample]))[0]
        checkpointer.export(tmp_path / "merged", dtype="bfloat16")
        checkpointer.export(tmp_path / "wide")
        assert engine.adapter is not None
        spec, trained = engine.adapter.spec, engine.trained_parameters()
        files, facts = load_file(tmp_path / "merged" / "model.safetensors"), engine.model.architecture
        for slot in adapter_map(facts, spec):
            weight = quantized_weights(engine.parts)[slot.base.name].dequantize(torch.float32)
            a, b = (trained[name] for name in slot.names)
            expected = (weight + spec.scale * (b @ a)).bfloat16()
            assert torch.equal(files[slot.base.hf_names[0]], expected), slot.base.name
    merged = Engine(TrainerConfig(model=ModelConfig(path=str(tmp_path / "wide")), frozen=True))
    try:
        again = merged.forward_logprobs(Batch.of([sample]))[0]
    finally:
        merged.close()
    assert torch.allclose(found, again, atol=2e-5)
