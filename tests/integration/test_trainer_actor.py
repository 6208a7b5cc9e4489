"""The trainer as an actor on one rank and on two, and frozen as a service; its weights through the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine_ranks import made_batch
from forge.config import DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.errors import NonFiniteError
from forge.losses import PolicyLoss
from forge.store import Weights
from forge.trainer.actor import Trainer
from forge.types import Batch
from hf_state import to_ours

pytestmark = pytest.mark.usefixtures("leaves_nothing")

VOCAB = 64
MODEL = ModelConfig(
    family="qwen3",
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCAB,
    tie_embeddings=True,
    max_seq_len=64,
    rope_theta=1000.0,
    norm_eps=1e-6,
)
LENGTHS = (9, 1, 15, 4, 2, 11, 16)


def config_of(**options: Any) -> TrainerConfig:
    training = {"max_seq_len": 16, "schedule": "constant", "warmup_steps": 0, "learning_rate": 1e-2, "adam_eps": 1e-4}
    distributed = options.pop("distributed", {})
    return TrainerConfig(
        model=MODEL,
        training=TrainingConfig(**training),
        distributed=DistributedConfig(with_gpus=False, **distributed),
        seed=3,
        **options,
    )


def batch_of(seed: int = 0) -> Batch:
    return made_batch(LENGTHS, vocab=VOCAB, fields=PolicyLoss().fields, seed=seed)


def exported(folder: Path) -> dict[str, Tensor]:
    """The weights of a Hugging Face folder, under our names."""
    files: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        files |= load_file(file)
    return to_ours(files, MODEL)


async def learn(procs: int, folder: Path) -> dict[str, Any]:
    """What a trainer on so many ranks answers, one call after the other."""
    config = config_of(checkpoint_dir=folder / "checkpoints")
    trainer = await Trainer.options(procs=procs, num_threads=1).as_actor(config, PolicyLoss())
    found: dict[str, Any] = {"scores": await answers(trainer.forward_logprobs.call(batch_of(), 0.8))}
    found["first"] = await answers(trainer.train_step.call(batch_of()))
    await trainer.publish_weights.call(1)
    await trainer.export_hf.call(folder / "one")
    await trainer.save.call({"place": 17})
    await trainer.wait_saved.call()
    found["second"] = await answers(trainer.train_step.call(batch_of(1)))
    await trainer.publish_weights.call(2)
    await trainer.export_hf.call(folder / "two")
    bad = batch_of(2)
    bad.fields["advantages"].fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="made:0") as error:
        await trainer.train_step.call(bad)
    found["error"] = error.value
    found["extra"] = await answers(trainer.load.call("must"))
    found["again"] = await answers(trainer.train_step.call(batch_of(1)))
    found["state"] = await answers(trainer.state.call())
    found["fetched"] = {
        version: {
            name: tensor.clone() for name, tensor in (await Weights("policy").fetch(version=version)).tensors.items()
        }
        for version in (1, 2)
    }
    await trainer.release_memory.call()  # there is no GPU: nothing to do
    await trainer.publish_weights.call(2, name="half", dtype="bfloat16")
    half = await Weights("half").fetch(version=2)
    found["half"] = {name: tensor.clone() for name, tensor in half.tensors.items()}
    half.release()
    await trainer.close.call()
    await trainer.stop()
    return found


async def answers(call: Any) -> list[Any]:
    return list((await call).values())


@pytest.mark.parametrize("procs", [1, 2])
def test_a_trainer_learns_publishes_and_goes_back(drive: Callable[..., Any], tmp_path: Path, procs: int) -> None:
    found = drive(learn(procs, tmp_path))
    scores, *others = found["scores"]
    assert others == [None] * (procs - 1)
    assert [len(of_sample) for of_sample in scores] == list(LENGTHS)
    for name, step in (("first", 1), ("second", 2), ("again", 2)):
        assert len(found[name]) == procs
        assert {result.step for result in found[name]} == {step}
        timeless = [replace(result, seconds=0.0) for result in found[name]]
        assert timeless == timeless[:1] * procs, "every rank gives the same answer"
    assert replace(found["again"][0], seconds=0.0) == replace(found["second"][0], seconds=0.0)
    assert found["error"].path.startswith("made:0")
    assert found["extra"] == [{"place": 17}] * procs
    assert found["state"][0]["step"] == 2
    assert found["state"][0]["num_ranks"] == procs
    for version, folder in ((1, "one"), (2, "two")):
        weights, expected = found["fetched"][version], exported(tmp_path / folder)
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), name
    assert any(not torch.equal(found["fetched"][1][name], found["fetched"][2][name]) for name in expected)
    for name, tensor in found["fetched"][2].items():
        assert torch.equal(found["half"][name], tensor.bfloat16()), name


def test_a_frozen_trainer_is_a_service(drive: Callable[..., Any]) -> None:
    async def body() -> None:
        service = await Trainer.options(num_replicas=2, num_threads=1).as_service(config_of(frozen=True))
        asked = [service.forward_logprobs.route(batch_of(seed)) for seed in (0, 0, 1, 1)]
        scores = await asyncio.gather(*asked)
        for one, other in (scores[:2], scores[2:]):
            for mine, theirs in zip(one, other, strict=True):
                assert torch.equal(mine, theirs), "replicas have the same weights"
        assert not torch.equal(scores[0][0], scores[2][0])
        states = await service.state.fanout()
        assert [state["step"] for state in states] == [0, 0]
        with pytest.raises(RuntimeError, match="frozen"):
            await service.train_step.route(batch_of())
        assert len(await service.state.fanout()) == 2, "both replicas are still in service"

    drive(body())
