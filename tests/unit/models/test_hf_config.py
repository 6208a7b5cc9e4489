"""A config.json and the facts say the same, against the configuration classes of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge.config import ModelConfig, preset_names
from forge.config.layers import read_preset
from forge.errors import ModelError
from forge.models.architecture import ARCHITECTURE_KEYS, complete, merge
from forge.models.hf_config import SpecialIds, read_hf_config, write_hf_config
from forge.models.tiny import make_tiny

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 1000,
}
MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
LLAMA = {key: value for key, value in QWEN3.items() if "window" not in key and key != "head_dim"} | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "mlp_bias": False,
    "rope_scaling": {"rope_type": "llama3", **SCALING},
}
WINDOW = {"use_sliding_window": True, "sliding_window": 9}
QWEN2 = {key: value for key, value in QWEN3.items() if key not in ("head_dim", "attention_bias")} | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
}
FAMILIES = {"qwen3": QWEN3, "qwen2": QWEN2, "qwen3_moe": MOE, "llama": LLAMA}


def folder_with(tmp_path: Path, content: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return tmp_path


def facts_of(model: ModelConfig) -> dict[str, Any]:
    return {key: getattr(model, key) for key in ARCHITECTURE_KEYS}


def by_transformers(folder: Path) -> dict[str, Any]:
    """What `transformers` understands, in our words."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    rope = config.rope_parameters
    scaling = None
    if rope["rope_type"] == "llama3":
        scaling = {key: rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor")}
        scaling["original_max_seq_len"] = rope["original_max_position_embeddings"]
    is_mixture = config.model_type == "qwen3_moe"
    return {
        "family": config.model_type,
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "tie_embeddings": config.tie_word_embeddings,
        "max_seq_len": config.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "norm_eps": config.rms_norm_eps,
        "num_experts": config.num_experts if is_mixture else None,
        "num_experts_per_token": config.num_experts_per_tok if is_mixture else None,
        "expert_intermediate_size": config.moe_intermediate_size if is_mixture else None,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_agrees_with_transformers(family: str, tmp_path: Path) -> None:
    model = read_hf_config(folder_with(tmp_path, FAMILIES[family]))
    assert model.model_dump(include=set(ARCHITECTURE_KEYS)) == by_transformers(tmp_path)
    assert (model.family, model.path, model.name, model.preset) == (family, None, None, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_is_read_alike(family: str, tmp_path: Path) -> None:
    """It writes `rope_parameters`, `num_local_experts`, `layer_types`; and no architecture, for want of a model."""
    from transformers import AutoConfig

    before = read_hf_config(folder_with(tmp_path, FAMILIES[family]))
    config = AutoConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text(encoding="utf-8"))
    assert "rope_parameters" in saved
    assert "rope_theta" not in saved
    assert read_hf_config(tmp_path / "saved") == before
    config.architectures = None
    config.save_pretrained(tmp_path / "bare")
    assert read_hf_config(tmp_path / "bare") == before


@pytest.mark.parametrize(
    "key", ["head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_key_means_what_it_means_to_transformers(family: str, key: str, tmp_path: Path) -> None:
    content = FAMILIES[family] | {"num_attention_heads": 32, "hidden_size": 64 * 32}
    content = {name: value for name, value in content.items() if name != key}
    model = read_hf_config(folder_with(tmp_path, content))
    assert model.model_dump(include=set(ARCHITECTURE_KEYS)) == by_transformers(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_scaling": None},
        {"rope_scaling": {"type": "llama3", **SCALING}, "rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "llama3", **SCALING, "original_max_position_embeddings": None}},
        {"num_key_value_heads": None},
        {"head_dim": None},
    ],
)
def test_ways_to_write_the_same(change: dict[str, Any], tmp_path: Path) -> None:
    content = LLAMA | change
    if content["rope_scaling"] and content["rope_scaling"].get("original_max_position_embeddings", 1) is None:
        del content["rope_scaling"]["original_max_position_embeddings"]
    model = read_hf_config(folder_with(tmp_path, content))
    assert model.model_dump(include=set(ARCHITECTURE_KEYS)) == by_transformers(tmp_path)


def test_a_window_that_no_layer_uses_is_read(tmp_path: Path) -> None:
    off = QWEN3 | {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 3}
    assert read_hf_config(folder_with(tmp_path, off)).num_layers == 3
    from transformers import AutoConfig

    assert set(AutoConfig.from_pretrained(tmp_path).layer_types) == {"full_attention"}


@pytest.mark.parametrize(
    ("base", "change", "key", "value", "rule"),
    [
        (QWEN3, {"architectures": ["MistralForCausalLM"]}, "architectures", "MistralForCausalLM", "Qwen3-MoE"),
        (QWEN3, {"architectures": ["Qwen3Model"]}, "architectures", "Qwen3Model", "Llama 3.x"),
        (QWEN3, {"architectures": None, "model_type": "gpt2"}, "model_type", "gpt2", "supported are Qwen3"),
        (QWEN3, {"attention_bias": True}, "attention_bias", True, "only false"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias", True, "only false"),
        (QWEN3, {"hidden_act": "gelu"}, "hidden_act", "gelu", '"silu"'),
        (QWEN3, {"attention_dropout": 0.1}, "attention_dropout", 0.1, "only 0"),
        (QWEN3, {"quantization_config": {"bits": 4}}, "quantization_config", {"bits": 4}, "only null"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor", 0.5, "only 1"),
        (QWEN2, WINDOW | {"max_window_layers": 2}, "use_sliding_window", True, ""),
        (QWEN3, WINDOW | {"max_window_layers": 2}, "use_sliding_window", True, ""),
        (MOE, WINDOW | {"max_window_layers": 9}, "use_sliding_window", True, ""),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "sliding_attention", "full"),
        (MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step", 2, "only 1"),
        (MOE, {"mlp_only_layers": [0]}, "mlp_only_layers", [0], "only []"),
        (MOE, {"norm_topk_prob": False}, "norm_topk_prob", False, "only true"),
        (MOE, {"norm_topk_prob": None}, "norm_topk_prob", None, "only true"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type", "yarn", "llama3"),
        (LLAMA, {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
         "rope_parameters.rope_type", "linear", "default and llama3"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": "x"}}, "rope_scaling.factor", "x", "a number"),
        (LLAMA, {"rope_scaling": {"full_attention": {}}}, "rope_scaling", {"full_attention": {}}, "one object"),
        (QWEN3, {"hidden_size": "64"}, "hidden_size", "64", "a whole number"),
        (QWEN3, {"num_hidden_layers": 0}, "num_hidden_layers", 0, "above 0"),
        (QWEN3, {"vocab_size": True}, "vocab_size", True, "a whole number"),
        (QWEN3, {"tie_word_embeddings": "yes"}, "tie_word_embeddings", "yes", "true or false"),
        (QWEN3, {"num_key_value_heads": 3}, "num_kv_heads", 3, "must divide num_heads"),
    ],
)  # fmt: skip
def test_refusals(
    base: dict[str, Any], change: dict[str, Any], key: str, value: object, rule: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        read_hf_config(folder_with(tmp_path, base | change))
    error = caught.value
    assert (error.path, error.value) == (f"{tmp_path / 'config.json'}: {key}", value)
    assert rule in (error.rule or "")
    assert error.repair


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file") as caught:
        read_hf_config(tmp_path)
    assert (caught.value.path, "forge download" in str(caught.value)) == (str(tmp_path / "config.json"), True)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(ModelError, match="a JSON object"):
            read_hf_config(tmp_path)


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_is_written_as_transformers_reads_it(preset: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    model = complete(ModelConfig.model_validate(read_preset(preset).data["model"]))
    write_hf_config(model, tmp_path, dtype="bfloat16", special_ids=SpecialIds(bos=None, eos=(5, 6), pad=7))
    assert by_transformers(tmp_path) == model.model_dump(include=set(ARCHITECTURE_KEYS))
    assert facts_of(read_hf_config(tmp_path)) == facts_of(model)
    config = AutoConfig.from_pretrained(tmp_path)
    assert str(config.dtype) == "torch.bfloat16"
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, [5, 6], 7)
    assert read_hf_config(tmp_path).family in config.architectures[0].lower().replace("moe", "_moe")


def test_a_source_is_kept_but_for_the_dtype(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    facts = make_tiny(source, num_layers=1)
    for name in (
        "LICENSE",
        "NOTICE.txt",
        "merges.txt",
        "README.md",
        "model-00001-of-2.safetensors",
        "x.bin",
        ".hidden",
    ):
        (source / name).write_text(name, encoding="utf-8")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("t", encoding="utf-8")
    content = json.loads((source / "config.json").read_text(encoding="utf-8")) | {"their_own": [1, {"key": "ü"}]}
    folder_with(source, content)
    write_hf_config(facts, target, source=source, dtype="bfloat16", special_ids=SpecialIds(eos=1))
    written = json.loads((target / "config.json").read_text(encoding="utf-8"))
    assert written == content | {"torch_dtype": "bfloat16"}
    assert sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()) == [
        "LICENSE",
        "NOTICE.txt",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    write_hf_config(facts, source, source=source, dtype="float16")
    assert json.loads((source / "config.json").read_text(encoding="utf-8"))["torch_dtype"] == "float16"


def test_the_newer_key_of_the_dtype_is_kept_too(tmp_path: Path) -> None:
    newer = {key: value for key, value in QWEN3.items() if key != "torch_dtype"} | {"dtype": "bfloat16"}
    facts = read_hf_config(folder_with(tmp_path, newer))
    write_hf_config(facts, tmp_path / "out", source=tmp_path, dtype="float32")
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8")) == newer | {"dtype": "float32"}


def test_a_source_of_another_model_is_refused(tmp_path: Path) -> None:
    facts = read_hf_config(folder_with(tmp_path, QWEN3))
    folder_with(tmp_path, QWEN3 | {"vocab_size": 1001})
    with pytest.raises(ModelError, match="another model") as caught:
        write_hf_config(facts, tmp_path / "out", source=tmp_path)
    assert (caught.value.value, caught.value.rule) == (
        {"vocab_size": 1001},
        "the model that is written has vocab_size 1000",
    )
    with pytest.raises(ModelError, match="dtype") as caught:
        write_hf_config(facts, tmp_path / "out", dtype="int8")
    assert (caught.value.value, caught.value.path) == ("int8", "dtype")


def test_the_folder_wins_over_the_preset(tmp_path: Path) -> None:
    folder = read_hf_config(folder_with(tmp_path, LLAMA))
    preset = read_preset("llama3_1_8b").data["model"]
    model = ModelConfig.model_validate({**preset, "preset": "llama3_1_8b", "path": str(tmp_path), "name": "mine"})
    merged = merge(model, folder)
    assert facts_of(merged) == facts_of(folder)
    assert (merged.name, merged.path, merged.hf_repo) == ("mine", str(tmp_path), "meta-llama/Llama-3.1-8B")
    assert facts_of(complete(merged)) == facts_of(folder)
    by_name = model.model_copy(update={"preset": None, "name": "meta-llama/Llama-3.1-8B"})
    assert facts_of(merge(by_name, folder)) == facts_of(folder)


def test_a_user_who_contradicts_the_folder_is_told(tmp_path: Path) -> None:
    folder = read_hf_config(folder_with(tmp_path, QWEN3))
    assert facts_of(merge(ModelConfig(num_layers=3), folder)) == facts_of(folder)
    with pytest.raises(ModelError, match="contradicts") as caught:
        merge(ModelConfig(num_layers=2, path="some/where"), folder)
    assert (caught.value.path, caught.value.value) == ("model.num_layers", 2)
    assert "some/where says 3" in (caught.value.rule or "")
    with pytest.raises(ModelError, match=r"training\.max_seq_len"):
        merge(ModelConfig(max_seq_len=100), folder)
    with pytest.raises(ModelError, match="contradicts"):
        merge(ModelConfig(preset="tiny", num_layers=2), folder)


def test_complete(tmp_path: Path) -> None:
    assert complete(ModelConfig(preset="tiny")).num_layers == 4
    assert complete(ModelConfig(preset="tiny", num_layers=2)).num_layers == 2
    assert complete(ModelConfig(name="Qwen/Qwen3-0.6B")).hidden_size == 1024
    assert complete(ModelConfig(preset="llama3_1_8b", rope_scaling=None)).rope_scaling is None
    with pytest.raises(ModelError, match="not described completely") as caught:
        complete(ModelConfig())
    assert caught.value.path == "model"
    assert "tiny" in (caught.value.repair or "")
    whole = read_hf_config(folder_with(tmp_path, MOE))
    with pytest.raises(ModelError) as caught:
        complete(whole.model_copy(update={"num_experts": None, "norm_eps": None}))
    assert caught.value.path == "model.norm_eps, model.num_experts"
    with pytest.raises(ModelError, match="no experts") as caught:
        complete(whole.model_copy(update={"family": "qwen3"}))
    assert (caught.value.path, caught.value.value) == ("model.num_experts", 8)
    with pytest.raises(ModelError, match="must be even"):
        complete(whole.model_copy(update={"head_dim": 7}))
