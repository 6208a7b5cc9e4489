"""Parameters and operations per token, counted from the configuration, against transformers and torch."""

from __future__ import annotations

from typing import Any

import pytest

from forge.config import ModelConfig, load, preset_names
from forge.config.schema import ForgeConfig
from forge.errors import ConfigError
from forge.models.families import FAMILIES
from forge.models.sizes import (
    flops_per_token,
    mean_context,
    model_flops_utilization,
    num_active_parameters,
    num_parameters,
)


def preset(name: str) -> ModelConfig:
    return load(ForgeConfig, overrides=[f"model.preset={name}"]).model


def reference_model(model: ModelConfig) -> Any:
    """The same architecture in transformers, without memory for its weights."""
    import torch
    import transformers

    keys = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
    }
    assert model.family is not None
    family = FAMILIES[model.family]
    if family.has_experts:
        keys |= {
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.num_experts_per_token,
            "moe_intermediate_size": model.expert_intermediate_size,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    kind = getattr(transformers, family.architecture)
    with torch.device("meta"):
        return kind(kind.config_class(**keys))


SMALL = {"num_layers": 3, "hidden_size": 48, "intermediate_size": 80, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16}
KNOWN = {
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_30b_a3b": 30_532_122_624,
    "llama3_1_8b": 8_030_261_248,
    "llama3_2_1b": 1_235_814_400,
    "qwen2_5_1_5b": 1_543_714_304,
}
MIXTURE = {"num_experts": 5, "num_experts_per_token": 2, "expert_intermediate_size": 24}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_as_transformers_makes_them(family: str, tied: bool) -> None:
    mixture = MIXTURE if family == "qwen3_moe" else {}
    model = ModelConfig.model_validate({"family": family, "vocab_size": 97, "tie_embeddings": tied, **SMALL, **mixture})
    reference = reference_model(model)
    assert num_parameters(model) == sum(weights.numel() for weights in reference.parameters())

    embedding = reference.get_input_embeddings().weight.numel()
    active = sum(weights.numel() for weights in reference.parameters()) - (0 if tied else embedding)
    if mixture:
        unused = (MIXTURE["num_experts"] - MIXTURE["num_experts_per_token"]) * 3 * 48 * 24 * SMALL["num_layers"]
        active -= unused
    assert num_active_parameters(model) == active


@pytest.mark.parametrize("name", KNOWN)
def test_real_presets_have_the_size_that_they_are_known_for(name: str) -> None:
    model = preset(name)
    assert num_parameters(model) == sum(weights.numel() for weights in reference_model(model).parameters())
    assert num_parameters(model) == KNOWN[name]


def test_every_preset_can_be_counted() -> None:
    sizes = {name: num_parameters(preset(name)) for name in preset_names()}
    assert min(sizes.values()) == sizes["tiny"]
    mixture = preset("qwen3_30b_a3b")
    assert 3.3e9 < num_active_parameters(mixture) + 151936 * 2048 < 3.4e9, "3.3 billion are active, its makers say"


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_are_those_that_torch_counts(family: str) -> None:
    """Both passes of a real model, counted by torch, which counts masked scores too: the context is the length."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    torch.set_num_threads(1)
    mixture = MIXTURE if family == "qwen3_moe" else {}
    keys = {"family": family, "vocab_size": 97, "tie_embeddings": False, **SMALL, **mixture}
    model = ModelConfig.model_validate(keys)
    reference = reference_model(model).to_empty(device="cpu")
    for weights in reference.parameters():
        torch.nn.init.normal_(weights, std=0.02)
    reference.set_attn_implementation("eager")
    if mixture:
        reference.set_experts_implementation("eager")  # torch does not count grouped products
    length = 64
    tokens = torch.arange(length).reshape(1, length)
    counter = FlopCounterMode(display=False)
    embedded = reference.get_input_embeddings()(tokens).detach().requires_grad_()
    with counter:
        reference(inputs_embeds=embedded, labels=tokens).loss.backward()
    counted = counter.get_total_flops() / length
    assert flops_per_token(model, length) == pytest.approx(counted, rel=0.02)


def test_attention_grows_with_the_context() -> None:
    model = preset("qwen3_1_7b")
    assert flops_per_token(model, 0) == 6 * num_active_parameters(model)
    assert flops_per_token(model, 1000) - flops_per_token(model, 0) == 12 * 28 * 16 * 128 * 1000
    with pytest.raises(ConfigError) as caught:
        flops_per_token(model, -1)
    assert (caught.value.path, caught.value.value, caught.value.rule) == ("context", -1, "0 or more")
    assert caught.value.repair == "pass mean_context(lengths)"


def test_a_mean_context_is_that_of_the_tokens() -> None:
    assert mean_context([1]) == 1.0
    assert mean_context([3]) == 2.0
    assert mean_context([1, 3]) == (1 + 1 + 2 + 3) / 4
    assert mean_context([]) == 0.0


REQUIRED = ["family", "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"]


@pytest.mark.parametrize("key", [*REQUIRED, "vocab_size", "tie_embeddings"])
def test_a_size_that_is_missing_is_named(key: str) -> None:
    keys = preset("tiny").model_dump() | {key: None}
    with pytest.raises(ConfigError) as caught:
        num_parameters(ModelConfig.model_validate(keys))
    assert caught.value.path == f"model.{key}"
    assert caught.value.value is None
    assert caught.value.rule == "needed to count parameters and operations"
    assert caught.value.repair == "set it, or name a preset in model.preset"


def test_utilization_is_the_part_of_the_peak() -> None:
    known = {"flops_per_token": 2e9, "peak_flops": 1e14}
    assert model_flops_utilization(20_000.0, **known, num_devices=2) == pytest.approx(0.2)
    assert model_flops_utilization(None, **known) is None
    assert model_flops_utilization(1.0, flops_per_token=2e9, peak_flops=None) is None
