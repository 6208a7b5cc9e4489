"""The registry of model families, and families from outside it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from forge.config import ModelConfig
from forge.errors import ModelError
from forge.models.architecture import complete, merge
from forge.models.families import FAMILIES, Family, family_of, find_family
from forge.models.families.llama import LLAMA
from forge.models.hf_config import read_hf_config
from forge.models.tiny import make_tiny
from forge.models.weight_names import weight_map

MISTRAL = dataclasses.replace(LLAMA, name="mistral", label="Mistral", architecture="MistralForCausalLM")
OUTSIDE = f"{__name__}:MISTRAL"
NOT_A_FAMILY = 7


@pytest.mark.parametrize("name", FAMILIES)
def test_a_registered_family_is_found_by_its_name(name: str) -> None:
    assert find_family(name) is FAMILIES[name]
    assert family_of(ModelConfig(family=name)).name == name


@pytest.mark.parametrize("name", FAMILIES)
def test_architectures_are_classes_of_transformers(name: str) -> None:
    import transformers

    assert getattr(transformers, FAMILIES[name].architecture).config_class.model_type == name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt2", "does not name"),
        ("no_such_module:FAMILY", "ModuleNotFoundError"),
        (f"{__name__}:NONE", "AttributeError"),
        (f"{__name__}:NOT_A_FAMILY", "does not name"),
    ],
)
def test_what_is_not_a_family_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        complete(ModelConfig(family=name))
    assert (caught.value.path, caught.value.value) == ("model.family", name)


def test_a_model_without_a_family_is_refused() -> None:
    with pytest.raises(ModelError, match="family") as caught:
        family_of(ModelConfig())
    assert caught.value.path == "model.family"


def test_a_family_from_outside_is_read_and_written(tmp_path: Path) -> None:
    made = make_tiny(tmp_path, family=OUTSIDE, num_layers=1)
    content = json.loads((tmp_path / "config.json").read_text())
    assert (content["architectures"], content["model_type"]) == (["MistralForCausalLM"], "mistral")
    facts = complete(merge(ModelConfig(family=OUTSIDE), read_hf_config(tmp_path, family=OUTSIDE)))
    assert isinstance(family_of(facts), Family)
    assert weight_map(facts) == weight_map(made)
    with pytest.raises(ModelError, match="MistralForCausalLM"):
        read_hf_config(tmp_path)
    content["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="is for MistralForCausalLM"):
        read_hf_config(tmp_path, family=OUTSIDE)
