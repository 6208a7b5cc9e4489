"""A training step in float32 on a CPU, by the kernels: the gradient of float64, and the same bits each time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forge.config import DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.kernels import cpu_attention_backward, cpu_layers
from forge.losses import KLPenalty, PolicyLoss
from forge.models.tiny import make_tiny
from forge.trainer.engine import Engine
from forge.types import Batch, Sample

FAMILIES = ("qwen3", "qwen2", "llama")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rollouts() -> Batch:
    """Groups of completions of prompts that go through the model once, and one sample by itself."""
    chance = torch.Generator().manual_seed(5)
    samples = []
    for length, size in ((19, 5), (8, 3), (33, 1)):
        prompt = torch.randint(0, 500, (length,), generator=chance)
        for place in range(size):
            ids = torch.cat([prompt, torch.randint(0, 500, (3 + 4 * place,), generator=chance)])
            fields = {name: torch.rand(len(ids), generator=chance) - 0.5 for name in ("advantages", "ref_logprobs")}
            fields["old_logprobs"] = torch.rand(len(ids), generator=chance) * -6
            samples.append(Sample(ids, (torch.arange(len(ids)) >= length).float(), fields))
    return Batch.of(samples)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("steps") / request.param
    make_tiny(place, family=request.param, num_layers=2)
    return place


def gradients(folder: Path, *, share: bool, precision: str, num_threads: int) -> dict[str, Tensor]:
    torch.set_num_threads(num_threads)
    training = TrainingConfig(
        max_seq_len=64, microbatch_tokens=128, schedule="constant", share_prefixes=share, max_steps=9
    )
    engine = Engine(
        TrainerConfig(
            model=ModelConfig(path=str(folder)),
            training=training,
            distributed=DistributedConfig(with_gpus=False, precision=precision),
        ),
        loss=PolicyLoss(kl=KLPenalty(0.1), entropy_coefficient=0.01),
    )
    engine._pass(rollouts(), backward=True)
    found = {name: parameter.grad.clone() for name, parameter in engine._parameters.items()}
    engine.close()
    return found


def test_the_gradient_is_that_of_float64(folder: Path) -> None:
    assert cpu_attention_backward.library() is not None
    assert cpu_layers.library() is not None
    expected = gradients(folder, share=False, precision="float64", num_threads=1)
    for share in (False, True):
        found = gradients(folder, share=share, precision="float32", num_threads=1)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            error = (gradient.double() - expected[name]).abs().max() / expected[name].abs().max()
            assert error < 1e-5, (name, share)


def test_a_step_has_the_same_bits_each_time(folder: Path) -> None:
    one, other = (gradients(folder, share=True, precision="float32", num_threads=2) for _ in range(2))
    assert all(torch.equal(gradient, other[name]) for name, gradient in one.items())
