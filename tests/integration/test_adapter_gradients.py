"""Gradients of LoRA adapters, in float64: against the gradient of the whole weight, and in every layout.

For y = x (W + s B A)^T the gradient of the whole weight G gives those of the adapter: dA = s B^T G and dB = s G A^T.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_ranks import Ranks, gradients_of, made_batch, opened, ranks_of
from forge.config import AdapterConfig, CheckpointConfig, DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.losses import CrossEntropy
from forge.models.adapter_names import AdapterSpec, adapter_map, adapter_slots, is_adapter
from forge.models.peft_files import write_adapter
from forge.trainer.checkpoint_folder import list_checkpoints
from forge.trainer.checkpointer import Checkpointer
from forge.types import Batch
from gradient_cases import TOLERANCE, Options, Outcome, check_equal, outcomes_on, run_on_rank, split_options

HAS_LIBRARY = importlib.util.find_spec("bitsandbytes") is not None
VOCAB = 64
FACTS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "vocab_size": VOCAB,
    "max_seq_len": 64,
    "rope_theta": 100.0,
    "norm_eps": 1e-6,
    "intermediate_size": 24,
}
MODELS = {
    "dense": ModelConfig(family="qwen3", tie_embeddings=True, **FACTS),
    "biased": ModelConfig(family="qwen2", tie_embeddings=False, **FACTS),
    "mixture": ModelConfig(
        family="qwen3_moe",
        tie_embeddings=False,
        num_experts=4,
        num_experts_per_token=2,
        expert_intermediate_size=12,
        **FACTS,
    ),
}
TARGETS: dict[str, Any] = {"all": None, "attention": "attention", "experts": "experts", "two": ("q_proj", "v_proj")}


@dataclass(frozen=True)
class Case:
    """One way to compute the gradients of an adapter."""

    model: str = "dense"
    targets: str = "all"
    training: Options = ()
    distributed: Options = ()
    base_dtype: Any = None

    @property
    def plain(self) -> Case:
        return Case(self.model, self.targets, base_dtype=self.base_dtype)

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.training + self.distributed]
        base = [] if self.base_dtype is None else [self.base_dtype]
        return ", ".join([self.model, self.targets, *base, *options])


def case(model: str = "dense", targets: str = "all", base_dtype: str | None = None, **options: Any) -> Case:
    return Case(model, targets, *split_options(options), base_dtype=base_dtype)


ON_ONE = [
    case(microbatch_tokens=16),
    case(activation_checkpointing="full", microbatch_tokens=20),
    case(activation_checkpointing="selective"),
    case(share_prefixes=True),
    case("mixture", microbatch_tokens=16),
    case("biased", "two", microbatch_tokens=16),
]
ON_TWO = [
    case(strategy="fsdp", microbatch_tokens=16),
    case(strategy="replicate", microbatch_tokens=16),
    case(tensor=2, microbatch_tokens=16),
    case(tensor=2, sequence_parallel=False),
    case(tensor=2, activation_checkpointing="full"),
    case("biased", pipeline=2, microbatch_tokens=16),
    case("biased", "two", tensor=2),
    case("mixture", strategy="fsdp", microbatch_tokens=16),
    case("mixture", expert=2, microbatch_tokens=16),
    case("mixture", "experts", expert=2, tensor=2),
]
if HAS_LIBRARY:  # the weights below the adapter in few bits
    ON_ONE += [
        case(base_dtype="nf4", activation_checkpointing="full", microbatch_tokens=20),
        case(base_dtype="int8", activation_checkpointing="selective"),
        case("mixture", base_dtype="nf4", microbatch_tokens=16, activation_offload=True),
    ]
    ON_TWO += [
        case(base_dtype="nf4", strategy="fsdp", microbatch_tokens=16),
        case("mixture", base_dtype="int8", strategy="replicate", microbatch_tokens=16),
        case("biased", base_dtype="nf4", pipeline=2, microbatch_tokens=16),
    ]
PLAIN = list(dict.fromkeys(one.plain for one in ON_ONE + ON_TWO))
DENSE = [case(), case(targets="attention"), case("biased", "two"), case("mixture"), case("mixture", "experts")]
DENSE += [one for one in PLAIN if one.base_dtype is not None]


# The ranks' side.


def batch() -> Batch:
    return made_batch((9, 1, 15, 4, 2, 11, 16, 7), vocab=VOCAB, seed=11)


_FOLDERS: list[Path] = []


def removing_folders(run: Any) -> Any:
    """Remove the folders that `folder_of` made in this process when `run` ends."""

    @functools.wraps(run)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        finally:
            folder_of.cache_clear()
            while _FOLDERS:
                shutil.rmtree(_FOLDERS.pop())

    return wrapped


@functools.cache
def folder_of(model: str, targets: str) -> Path:
    """A PEFT folder with an adapter whose B is not zero. Every rank writes the same."""
    spec = AdapterSpec.of(AdapterConfig(rank=3, alpha=5, targets=TARGETS[targets]), MODELS[model])
    draw = torch.Generator().manual_seed(3)
    shapes = {
        name: shape
        for slot in adapter_map(MODELS[model], spec)
        for name, shape in zip(slot.names, slot.shapes, strict=True)
    }
    tensors = {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}
    folder = Path(tempfile.mkdtemp(prefix="forge-adapter-"))
    _FOLDERS.append(folder)
    write_adapter(folder, tensors, model=MODELS[model], spec=spec)
    return folder


def config_of(one: Case) -> TrainerConfig:
    """Weights do not move: the optimizer's rate is far below what float64 resolves. Nothing is clipped."""
    training = {"max_seq_len": 16, "microbatch_tokens": 100, **dict(one.training)}
    fixed = {"schedule": "constant", "learning_rate": 1e-60, "max_grad_norm": None}
    return TrainerConfig(
        model=MODELS[one.model],
        adapter=AdapterConfig(path=str(folder_of(one.model, one.targets)), base_dtype=one.base_dtype),
        training=TrainingConfig(**training, **fixed),
        distributed=DistributedConfig(precision="float64", **dict(one.distributed)),
        seed=5,
    )


@removing_folders
def run_cases(cases: list[Case]) -> list[Outcome]:
    found = run_on_rank(cases, config_of=config_of, batch_of=lambda one: batch(), loss_of=lambda one: CrossEntropy())
    for outcome in found:
        frozen = [name for name in outcome.gradients if not is_adapter(name)]
        assert frozen
        assert all(outcome.gradients.pop(name) is None for name in frozen), "a frozen weight has a gradient"
    return found


@removing_folders
def run_dense(cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """The gradients of whole weights, of a model into which the adapter was merged; and the adapter."""
    found = []
    for number, one in enumerate(cases):
        with opened(config_of(one)) as engine:
            Checkpointer(engine).export(folder / f"merged{number}", dtype="float64")
            adapter = {name: tensor.clone() for name, tensor in engine.trained_parameters().items()}
            assert engine.adapter is not None
            scale = engine.adapter.spec.scale
        full = config_of(one).model_copy(
            update={"adapter": None, "model": ModelConfig(path=str(folder / f"merged{number}"))}
        )
        with opened(full) as engine, gradients_of(engine) as gradients:
            loss = engine.train_step(batch()).loss
        found.append({"loss": loss, "gradients": gradients, "adapter": adapter, "scale": scale})
    return found


@removing_folders
def save_one(one: Case, folder: Path) -> None:
    """Save a checkpoint, which says what its base is."""
    kept = {"checkpoint_dir": folder, "checkpointing": CheckpointConfig(asynchronous=False)}
    with opened(config_of(one).model_copy(update=kept)) as engine:
        checkpointer = Checkpointer(engine)
        checkpointer.save()
        checkpointer.close()


# The tests' side.


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield from ranks_of(__name__)


plain = outcomes_on(1, run_cases, list(dict.fromkeys([*PLAIN, *DENSE])))
on_one = outcomes_on(1, run_cases, ON_ONE)
on_two = outcomes_on(2, run_cases, ON_TWO)


@pytest.mark.parametrize("one", ON_ONE, ids=str)
def test_on_one_rank(one: Case, on_one: dict[Case, Outcome], plain: dict[Case, Outcome]) -> None:
    check_equal(on_one[one], plain[one.plain])


@pytest.mark.parametrize("one", ON_TWO, ids=str)
def test_on_two_ranks(one: Case, on_two: dict[Case, Outcome], plain: dict[Case, Outcome]) -> None:
    check_equal(on_two[one], plain[one.plain])


@pytest.mark.skipif(not HAS_LIBRARY, reason="the extra `quantized` is not installed")
def test_a_base_in_few_bits_is_the_same_in_every_layout(ranks: Ranks, tmp_path: Path) -> None:
    layouts = (case("biased", base_dtype="nf4"), *(one for one in ON_TWO if one.base_dtype == "nf4"))
    digests: dict[str, set[str]] = {}
    for number, one in enumerate((case(base_dtype="nf4"), *layouts)):
        folder = tmp_path / str(number)
        ranks.run(save_one, 2 if one.distributed else 1, scratch=tmp_path / f"ranks{number}", one=one, folder=folder)
        (saved,) = list_checkpoints(folder)
        digests.setdefault(one.model, set()).add(saved.extra["adapter"]["base_digest"])
    assert [len(found) for found in digests.values()] == [1, 1]


def test_gradients_follow_from_those_of_the_whole_weights(
    ranks: Ranks, plain: dict[Case, Outcome], tmp_path: Path
) -> None:
    (dense,) = ranks.run(run_dense, 1, scratch=tmp_path / "ranks", cases=DENSE, folder=tmp_path)
    for one, whole in zip(DENSE, dense, strict=True):
        own = plain[one]
        assert own.loss == pytest.approx(whole["loss"], rel=1e-12)
        spec = AdapterSpec.of(AdapterConfig(rank=3, alpha=5, targets=TARGETS[one.targets]), MODELS[one.model])
        assert spec.scale == whole["scale"]
        slots = adapter_slots(MODELS[one.model], spec)
        assert set(own.gradients) == {name for slot in slots.values() for name in slot.names}
        for name, slot in slots.items():
            gradient = whole["gradients"][name]
            a, b = (whole["adapter"][each] for each in slot.names)
            expected = (spec.scale * b.mT @ gradient, spec.scale * gradient @ a.mT)
            for each, value in zip(slot.names, expected, strict=True):
                assert value.abs().max() > 1e-6, each
                assert torch.allclose(own.gradients[each], value, rtol=1e-8, atol=TOLERANCE), each
