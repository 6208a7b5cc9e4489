"""The tiny model: whole, the same every time, and what `transformers` loads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config.layers import read_preset
from forge.errors import ModelError
from forge.models.hf_config import read_hf_config
from forge.models.tiny import SPECIAL_TOKENS, TINY_FILES, VOCAB_SIZE, make_tiny

FAMILIES = ("qwen3", "qwen3_moe", "qwen2", "llama")
GOLDEN = {
    "chat_template.jinja": "48f0cc27a407d902",
    "config.json": "d753f705ad997eca",
    "generation_config.json": "b7e3fe7260da4dfe",
    "model.safetensors": "5dcca275b13a4e87",
    "tokenizer.json": "fd5b2b50fda753a1",
    "tokenizer_config.json": "0738b6f18ac7dc09",
}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    for family in FAMILIES:
        make_tiny(root / family, family=family)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="module")
def tokenizer(folders: dict[str, Path]) -> object:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folders["qwen3"] / "tokenizer.json"))


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_it(family: str, folders: dict[str, Path]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(folders[family], output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.float32
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (511, 509)
    tokenizer = AutoTokenizer.from_pretrained(folders[family])
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (512, 511, 509)
    ids = tokenizer("The answer is 42.")["input_ids"]
    assert tokenizer.decode(ids) == "The answer is 42."
    with torch.no_grad():
        loss = model(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    assert 5.5 < float(loss) < 7.0  # about ln 512: it knows nothing


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_are_one_and_the_rest_is_spread(family: str, folders: dict[str, Path]) -> None:
    from safetensors.numpy import load_file

    weights = load_file(folders[family] / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.ndim == 1 and not name.endswith(".bias"):
            assert (tensor == 1).all(), name
        else:
            assert 0.03 < tensor.std() < 0.05, name
            assert abs(tensor.mean()) < 0.1 * tensor.size**-0.5, name
    matrices = [tensor.tobytes() for tensor in weights.values() if tensor.ndim == 2]
    assert len(set(matrices)) == len(matrices)


def test_the_facts_are_those_of_the_preset(folders: dict[str, Path]) -> None:
    facts = read_hf_config(folders["qwen3"]).model_dump(exclude_defaults=True)
    assert facts == read_preset("tiny").data["model"]
    assert read_hf_config(folders["llama"]).rope_scaling is not None
    assert read_hf_config(folders["qwen3_moe"]).num_experts == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bytes_every_time(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    from forge.models import tiny

    tiny._learn_merges.cache_clear()
    make_tiny(tmp_path, family=family)
    assert sorted(digests(tmp_path)) == sorted(TINY_FILES)
    assert digests(tmp_path) == digests(folders[family])


def test_the_bytes_are_those_of_this_edition(folders: dict[str, Path]) -> None:
    """If this fails on purpose, raise the edition in `locate`, so that cached folders are made again."""
    found = {name: digest[:16] for name, digest in digests(folders["qwen3"]).items()}
    assert found == GOLDEN


def test_seed_and_shape(folders: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    first = load_file(folders["qwen3"] / "model.safetensors")
    facts = make_tiny(tmp_path / "fewer", num_layers=2)
    fewer = load_file(tmp_path / "fewer" / "model.safetensors")
    assert facts.num_layers == 2
    assert set(fewer) < set(first)
    assert all((fewer[name] == first[name]).all() for name in fewer)
    make_tiny(tmp_path / "other", seed=1, num_layers=2)
    other = load_file(tmp_path / "other" / "model.safetensors")
    assert all((other[name] != fewer[name]).any() for name in fewer if fewer[name].ndim == 2)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(max_size=60))
def test_any_text_comes_back(text: str, tokenizer: object) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text  # type: ignore[attr-defined]


def test_tokens(tokenizer: object) -> None:
    encode = tokenizer.encode  # type: ignore[attr-defined]
    assert tokenizer.get_vocab_size() == VOCAB_SIZE  # type: ignore[attr-defined]
    assert encode("1234 + 5678").tokens == [*"1234", "Ġ+", "Ġ", *"5678"]
    assert encode("The answer is 7.").tokens == ["The", "Ġanswer", "Ġis", "Ġ", "7", "."]
    assert encode("a<|im_start|>user\nb<|im_end|>").ids[1] == 510
    assert [encode(token).ids for token in SPECIAL_TOKENS] == [[509], [510], [511]]
    assert [encode(chr(byte)).ids for byte in b"a Z\n"] == [[97], [32], [90], [10]]


@pytest.mark.parametrize(
    ("shape", "path", "value", "rule"),
    [
        ({"family": "gpt2"}, "model.family", "gpt2", "qwen3, qwen3_moe, qwen2, llama"),
        ({"vocab_size": 100}, "model.vocab_size", 100, "at least 512"),
        ({"num_layers": 0}, "num_layers", 0, "greater than or equal to 1"),
        ({"layers": 3}, "layers", 3, "Extra inputs"),
        ({"num_kv_heads": 3}, "num_kv_heads", 3, "must divide num_heads"),
        ({"head_dim": 31}, "model.head_dim", 31, "even"),
    ],
)
def test_refusals(shape: dict[str, object], path: str, value: object, rule: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        make_tiny(tmp_path, **shape)  # type: ignore[arg-type]
    assert (caught.value.path, caught.value.value) == (path, value)
    assert rule in (caught.value.rule or "")
    assert caught.value.repair
    assert list(tmp_path.iterdir()) == []
