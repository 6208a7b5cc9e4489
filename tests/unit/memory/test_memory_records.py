"""The count of parameters is that of the model which is built, for every preset and for every way to split it."""

from __future__ import annotations

import pytest
import torch

from forge.config import ForgeConfig, ModelConfig, load, preset_names
from forge.memory.records import holdings
from forge.models.architecture import complete
from forge.models.language_model import titan_config
from forge.models.sizes import Sizes, num_parameters
from forge.trainer.layout import Layout


def preset(name: str) -> ModelConfig:
    return complete(load(ForgeConfig, overrides=[f"model.preset={name}"]).model)


def built_count(model: ModelConfig) -> int:
    """The parameters of the model on the meta device, tied ones once."""
    with torch.device("meta"):
        built = titan_config(model, max_seq_len=16).build()
    return sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize("name", preset_names())
def test_the_count_is_that_of_the_built_model(name: str) -> None:
    model = preset(name)
    few = model.model_copy(update={"num_layers": 2})  # every layer is the same, and building 64 takes seconds
    assert Sizes.of(few).total == built_count(few)
    assert Sizes.of(model).total == num_parameters(model)
    assert Sizes.of(model).total - Sizes.of(few).total == ((model.num_layers or 0) - 2) * Sizes.of(model).layer


@pytest.mark.parametrize("name", ["qwen3_1_7b", "llama3_1_8b"])
@pytest.mark.parametrize("shard", [1, 2, 8])
def test_shards_make_up_the_model(name: str, shard: int) -> None:
    sizes = Sizes.of(preset(name))
    ((_, holding),) = holdings(sizes, Layout(shard=shard))
    assert 0 <= holding.held * shard - sizes.total < shard


def test_tensor_ranks_hold_norms_each_and_share_the_rest() -> None:
    sizes = Sizes.of(preset("qwen3_8b"))
    ((_, holding),) = holdings(sizes, Layout(tensor=4))
    norms = sizes.num_layers * sizes.layer_norms + sizes.hidden
    assert holding.held == (sizes.total - norms) // 4 + norms
    assert holding.vocab == sizes.vocab // 4


def test_stages_of_a_pipeline_make_up_the_model() -> None:
    sizes = Sizes.of(preset("qwen3_8b"))
    (_, first), (_, last) = holdings(sizes, Layout(pipeline=2, num_stages=2, pipeline_microbatches=4))
    assert first.held + last.held == sizes.total
    assert first.has_embedding
    assert last.has_head
    assert not first.has_head


def test_experts_are_divided_by_those_who_share_them() -> None:
    sizes = Sizes.of(preset("qwen3_30b_a3b"))
    ((_, one),) = holdings(sizes, Layout(shard=8))
    ((_, split),) = holdings(sizes, Layout(shard=8, expert=4))
    assert abs(one.held - split.held) < 8  # both hold an eighth; what differs is how much they gather
    assert split.gathered_layer < one.gathered_layer // 2
