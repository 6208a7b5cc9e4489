"""What `model.head_precision` buys in bfloat16: sampler and trainer on one model whose logits are as large as a trained
one's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge.config import DistributedConfig, GeneratorConfig, ModelConfig, Sampling, TrainerConfig, TrainingConfig
from forge.generator.engine import Request
from forge.generator.native.engine import NativeEngine
from forge.models.locate import ResolvedModel, resolve
from forge.models.tiny import make_tiny
from forge.trainer.engine import Engine
from forge.types import Batch, Completion, Sample

LOGIT = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that adds about the same to all logits, which changes no probability in exact arithmetic."""
    place = tmp_path_factory.mktemp("model")
    make_tiny(place, tie_embeddings=False)
    file = place / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] += 0.1
    tensors["lm_head.weight"] += LOGIT / tensors["lm_head.weight"].shape[1]
    save_file(tensors, file, metadata={"format": "pt"})
    return place


async def sampled(model: ResolvedModel) -> list[Completion]:
    config = GeneratorConfig(
        model=model.architecture, max_seq_len=96, max_batch=8, precision="bfloat16", with_gpus=False
    )
    engine = NativeEngine(config, model=model)
    await engine.start()
    try:
        sampling = Sampling(n=2, max_tokens=24, seed=1, ignore_eos=True)
        asked = [Request(str(place), tuple(range(3, 6 + 9 * place)), sampling) for place in range(3)]
        found = await asyncio.gather(*(engine.generate(request) for request in asked))
        scores = await engine.score([one.prompt_ids + one.token_ids for one in found[0]])
        for one, line in zip(found[0], scores, strict=True):  # scored at once, where it was drawn step by step
            assert line[len(one.prompt_ids) :] == pytest.approx(list(one.logprobs), abs=0.1)
        return [completion for each in found for completion in each]
    finally:
        await engine.close()


def trained_on(model: ResolvedModel, batch: Batch) -> list[torch.Tensor]:
    engine = Engine(
        TrainerConfig(
            model=model.architecture,
            training=TrainingConfig(max_seq_len=96, schedule="constant"),
            distributed=DistributedConfig(precision="bfloat16", with_gpus=False),
        )
    )
    try:
        return engine.forward_logprobs(batch)
    finally:
        engine.close()


def mismatch(folder: Path, head_precision: str | None) -> torch.Tensor:
    model = resolve(ModelConfig.model_validate({"path": str(folder), "head_precision": head_precision}))
    completions = asyncio.run(sampled(model))
    lines = [torch.tensor(each.prompt_ids + each.token_ids) for each in completions]
    found = trained_on(model, Batch.of([Sample(line, torch.zeros(len(line))) for line in lines]))
    theirs = [torch.tensor(each.logprobs) for each in completions]
    return torch.cat([line[-len(own) :] - own for line, own in zip(found, theirs, strict=True)]).abs()


def test_sampler_and_trainer_come_closer_with_logits_in_float32(folder: Path) -> None:
    rounded, wide = mismatch(folder, None), mismatch(folder, "float32")
    assert rounded.mean() > 0.005, "the test would show nothing"
    assert wide.mean() < 0.35 * rounded.mean()
    assert wide.max() < 0.5 * rounded.max()
