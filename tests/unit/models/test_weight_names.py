"""Names, plans and refusals of weights that come in and go out, in one process with plain tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forge.config import ModelConfig
from forge.errors import CheckpointError, ConfigError, ForgeError, ModelError
from forge.models.weight_names import hf_views, plain_name, weight_map
from forge.models.weights import load_hf, shard_range
from forge.models.weights_out import TensorPlan, export_hf, plan_files, replace_folder
from hf_state import to_ours
from parameter_tree import tree

FACTS = {"num_layers": 2, "hidden_size": 12, "num_heads": 3, "num_kv_heads": 1, "head_dim": 6, "vocab_size": 17}
CONFIGS = {
    "llama": ModelConfig(family="llama", intermediate_size=20, tie_embeddings=False, **FACTS),
    "qwen2": ModelConfig(family="qwen2", intermediate_size=20, tie_embeddings=True, **FACTS),
    "qwen3": ModelConfig(family="qwen3", intermediate_size=20, tie_embeddings=True, **FACTS),
    "qwen3_moe": ModelConfig(
        family="qwen3_moe",
        tie_embeddings=False,
        num_experts=4,
        num_experts_per_token=2,
        expert_intermediate_size=10,
        **FACTS,
    ),
}
EVERY = pytest.mark.parametrize("family", list(CONFIGS))


def random_state(config: ModelConfig, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {slot.name: torch.randn(slot.shape, generator=generator).to(dtype) for slot in weight_map(config)}


def saved(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Random weights, and a folder that holds them."""
    state = random_state(config)
    folder.mkdir(exist_ok=True)
    save_file({name: view.contiguous() for name, view in hf_views(state, config)}, folder / "model.safetensors")
    return state


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def holds(module: nn.Module, state: dict[str, Tensor]) -> bool:
    parameters = dict(module.named_parameters())
    return parameters.keys() == state.keys() and all(torch.equal(parameters[name], state[name]) for name in state)


def refusal(folder: Path, config: ModelConfig, module: nn.Module | None = None) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load_hf([tree(config) if module is None else module], folder, config)
    assert caught.value.path
    assert caught.value.rule
    assert caught.value.repair
    return caught.value


def test_the_map_names_each_tensor_of_a_layer() -> None:
    names = {slot.name: slot.hf_names for slot in weight_map(CONFIGS["qwen3_moe"])}
    assert names["layers.1.attention.qkv_linear.wk.weight"] == ("model.layers.1.self_attn.k_proj.weight",)
    assert names["layers.1.ffn_norm.weight"] == ("model.layers.1.post_attention_layernorm.weight",)
    assert names["layers.0.moe.routed_experts.inner_experts.w2_EDF"] == tuple(
        f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in range(4)
    )


def test_only_qwen_has_norms_of_queries_and_keys() -> None:
    assert not any("q_norm" in slot.name for slot in weight_map(CONFIGS["llama"]))
    assert sum("q_norm" in slot.name for slot in weight_map(CONFIGS["qwen3"])) == 2


def test_a_tied_output_layer_has_no_slot() -> None:
    assert "lm_head.weight" not in {slot.name for slot in weight_map(CONFIGS["qwen3"])}
    assert "lm_head.weight" in {slot.name for slot in weight_map(CONFIGS["llama"])}


def test_an_incomplete_description_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        weight_map(CONFIGS["llama"].model_copy(update={"intermediate_size": None}))
    assert caught.value.path == "model.intermediate_size"


def test_wrappers_leave_no_trace_in_names() -> None:
    wrapped = "_orig_mod.layers.0._checkpoint_wrapped_module._orig_mod.attention.wo.weight"
    assert plain_name(wrapped) == "layers.0.attention.wo.weight"


@EVERY
def test_views_are_views_and_go_back(family: str) -> None:
    config = CONFIGS[family]
    state = random_state(config)
    views = dict(hf_views(state, config))
    memory = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    assert {view.untyped_storage().data_ptr() for view in views.values()} == memory
    back = to_ours(views, config)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_views_leave_a_tied_output_layer_out() -> None:
    config = CONFIGS["qwen3"]
    embedding = torch.ones(17, 12)
    views = dict(hf_views({"tok_embeddings.weight": embedding, "lm_head.weight": embedding}, config))
    assert list(views) == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("name", ["layers.9.attention.wo.weight", "norm.weight"])
def test_views_refuse_what_is_not_of_the_model(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        list(hf_views({name: torch.ones(3)}, CONFIGS["qwen3"]))
    assert caught.value.path == name


@pytest.mark.parametrize("size", [0, 1, 3, 5, 9, 16])
@pytest.mark.parametrize("counts", [(2,), (4, 2), (2, 4), (3, 2, 2)])
def test_ranges_are_those_of_chunks_of_chunks(size: int, counts: tuple[int, ...]) -> None:
    whole = torch.arange(size)
    for chunks in torch.cartesian_prod(*map(torch.arange, counts)).reshape(-1, len(counts)).tolist():
        expected = whole
        for count, chunk in zip(counts, chunks, strict=True):
            parts = expected.chunk(count) if len(expected) else ()
            expected = parts[chunk] if chunk < len(parts) else whole[:0]
        start, end = shard_range(size, list(zip(counts, chunks, strict=True)))
        assert whole[start:end].tolist() == expected.tolist()


@EVERY
def test_weights_come_in(family: str, tmp_path: Path) -> None:
    config = CONFIGS[family]
    state = saved(tmp_path, config)
    module = tree(config)
    report = load_hf([module], tmp_path, config)
    assert holds(module, state)
    assert report.num_bytes == sum(tensor.numel() * 4 for tensor in state.values())


def test_weights_come_in_by_pieces_of_bounded_size(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    state = saved(tmp_path, config)
    module = tree(config)
    assert load_hf([module], tmp_path, config, max_read_bytes=200).largest_bytes <= 200
    assert holds(module, state)


def test_fused_experts_come_in(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_moe"]
    state = saved(tmp_path, config)

    def fuse(tensors: dict[str, Tensor]) -> None:
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts"
            parts = {
                kind: torch.stack([tensors.pop(f"{prefix}.{expert}.{kind}_proj.weight") for expert in range(4)])
                for kind in ("gate", "up", "down")
            }
            tensors[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
            tensors[f"{prefix}.down_proj"] = parts["down"]

    changed(tmp_path, fuse)
    module = tree(config)
    load_hf([module], tmp_path, config)
    assert holds(module, state)
    ours = to_ours(load_file(tmp_path / "model.safetensors"), config)
    assert all(torch.equal(ours[name], state[name]) for name in state)


def test_numbers_are_converted_on_the_way(tmp_path: Path) -> None:
    config = CONFIGS["qwen3"]
    state = saved(tmp_path, config)
    module = tree(config, dtype=torch.bfloat16)
    load_hf([module], tmp_path, config)
    assert holds(module, {name: tensor.bfloat16() for name, tensor in state.items()})


def test_a_part_of_the_model_takes_its_own_tensors(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    state = saved(tmp_path, config)
    stage = tree(config)
    del stage.tok_embeddings
    del stage.layers.get_submodule("0").attention
    load_hf([stage], tmp_path, config)
    assert holds(stage, {n: t for n, t in state.items() if not n.startswith(("tok_", "layers.0.attention."))})


def test_a_tied_output_layer_apart_is_filled_from_the_embedding(tmp_path: Path) -> None:
    config = CONFIGS["qwen3"]
    state = saved(tmp_path, config)
    stage = nn.ModuleDict({"lm_head": nn.Linear(12, 17, bias=False)})
    load_hf([stage], tmp_path, config)
    assert torch.equal(stage["lm_head"].weight, state["tok_embeddings.weight"])


def test_a_needless_copy_of_the_embedding_is_compared(tmp_path: Path) -> None:
    config = CONFIGS["qwen3"]
    state = saved(tmp_path, config)
    changed(tmp_path, lambda tensors: tensors.update({"lm_head.weight": state["tok_embeddings.weight"]}))
    load_hf([tree(config)], tmp_path, config)
    other = state["tok_embeddings.weight"].clone()
    other[-1, -1] += 1
    changed(tmp_path, lambda tensors: tensors.update({"lm_head.weight": other}))
    assert "tie_embeddings" in str(refusal(tmp_path, config).repair)


def test_frequencies_of_the_rotary_embedding_are_harmless(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    saved(tmp_path, config)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    changed(tmp_path, lambda tensors: tensors.update(extra))
    load_hf([tree(config)], tmp_path, config)


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_moe"]
    saved(tmp_path, config)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    changed(tmp_path, lambda tensors: tensors.pop(name))
    assert refusal(tmp_path, config).path == f"{tmp_path}:{name}"


def test_a_tensor_that_nothing_takes_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    saved(tmp_path, config)
    name = "model.layers.0.self_attn.q_proj.bias"
    changed(tmp_path, lambda tensors: tensors.update({name: torch.ones(18)}))
    assert refusal(tmp_path, config).path == f"{tmp_path / 'model.safetensors'}:{name}"


def test_another_shape_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    saved(tmp_path, config)
    changed(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(16, 12)}))
    module = tree(config)
    error = refusal(tmp_path, config, module)
    assert error.path == f"{tmp_path / 'model.safetensors'}:lm_head.weight"
    assert error.value == (16, 12)
    assert not any(parameter.any() for parameter in module.parameters())


def test_a_quantised_tensor_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    saved(tmp_path, config)
    changed(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(17, 12, dtype=torch.int8)}))
    assert refusal(tmp_path, config).value == "I8"


@pytest.mark.parametrize("damage", [lambda data: data[:-5], lambda data: data[:6], lambda data: b"x" * len(data)])
def test_a_damaged_file_is_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    saved(tmp_path, config)
    file = tmp_path / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert refusal(tmp_path, config).path == str(file)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    assert "Give the folder" in str(refusal(tmp_path / "absent", config).repair)
    assert "Download" in str(refusal(tmp_path, config).repair)
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    assert "Convert" in str(refusal(tmp_path, config).repair)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        '{"weight_map": {}}',
        '{"weight_map": {"lm_head.weight": 3}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
    ],
)
def test_a_bad_index_is_refused(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert refusal(tmp_path, CONFIGS["llama"]).path == str(tmp_path / "model.safetensors.index.json")


def test_a_file_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "a.safetensors"}}')
    assert refusal(tmp_path, CONFIGS["llama"]).path == str(tmp_path / "a.safetensors")


def test_a_model_of_another_configuration_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, CONFIGS["llama"])
    error = refusal(tmp_path, CONFIGS["llama"], tree(CONFIGS["qwen3"]))
    assert "q_norm" in str(error.path)
    wider = CONFIGS["llama"].model_copy(update={"vocab_size": 18})
    assert refusal(tmp_path, CONFIGS["llama"], tree(wider)).value == (18, 12)


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, CONFIGS["llama"])
    assert "to_empty" in str(refusal(tmp_path, CONFIGS["llama"], tree(CONFIGS["llama"]).to("meta")).repair)


def test_files_are_planned_by_size_and_writer() -> None:
    tensors = [TensorPlan(f"t{n}", "BF16", (5,), writer) for n, writer in enumerate([0, 0, 1, 0, 1, 0])]
    tensors.append(TensorPlan("large", "F32", (30,), 1))
    files = plan_files(tensors, max_shard_bytes=30)
    assert [(file.writer, [tensor.hf_name for tensor in file.tensors]) for file in files] == [
        (0, ["t0", "t1", "t3"]),
        (1, ["t2", "t4"]),
        (0, ["t5"]),
        (1, ["large"]),
    ]
    assert [file.name for file in files] == [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]


def test_wider_numbers_come_first_in_a_file() -> None:
    tensors = [TensorPlan("a", "BF16", (3,), 0), TensorPlan("b", "F32", (2,), 0)]
    (file,) = plan_files(tensors, max_shard_bytes=100)
    assert file.name == "model.safetensors"
    assert file.offsets() == {"b": (0, 8), "a": (8, 14)}


@EVERY
def test_what_goes_out_comes_in_again(family: str, tmp_path: Path) -> None:
    config = CONFIGS[family]
    state = saved(tmp_path / "in", config)
    module = tree(config)
    load_hf([module], tmp_path / "in", config)
    export_hf([module], tmp_path / "out", config, max_shard_bytes=2000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * index["metadata"]["total_parameters"]
    for file in files:
        with safe_open(file, framework="pt") as handle:
            names = list(handle.keys())
            assert handle.metadata() == {"format": "pt"}
        assert names
        assert all(index["weight_map"][name] == file.name for name in names)
        assert file.stat().st_size < 2000 + 2000 or len(names) == 1
    again = tree(config)
    load_hf([again], tmp_path / "out", config)
    assert holds(again, state)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["in", "out"]


def test_one_file_needs_no_index_and_finish_adds_to_it(tmp_path: Path) -> None:
    config = CONFIGS["qwen3"]
    module = tree(config)
    module.norm.weight = nn.Parameter(torch.full((12,), 0.1, dtype=torch.float64))
    export_hf([module], tmp_path / "out", config, finish=lambda folder: (folder / "config.json").touch())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert tensors["model.norm.weight"].dtype == torch.float64
    assert torch.equal(tensors["model.norm.weight"], module.norm.weight)


def test_a_dtype_can_be_chosen(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_moe"]
    module = tree(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.1)
    export_hf([module], tmp_path / "out", config, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tenth = torch.tensor(0.1, dtype=torch.bfloat16)
    assert all(tensor.dtype == torch.bfloat16 and bool((tensor == tenth).all()) for tensor in tensors.values())


def test_a_folder_with_something_in_it_is_replaced_only_on_request(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    target = tmp_path / "out"
    target.mkdir()
    export_hf([tree(config)], target, config)
    (target / "mine").touch()
    with pytest.raises(CheckpointError) as caught:
        export_hf([tree(config)], target, config)
    assert caught.value.path == str(target)
    assert "overwrite" in str(caught.value.repair)
    assert (target / "mine").exists()
    export_hf([tree(config)], target, config, overwrite=True)
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_is_replaced_where_exchanging_is_not_possible(tmp_path: Path) -> None:
    for name in ("new", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replace_folder(tmp_path / "new", tmp_path / "out", exchange=lambda one, other: False)
    assert list(tmp_path.rglob("*")) == [tmp_path / "out", tmp_path / "out" / "new"]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(CheckpointError):
        export_hf([tree(CONFIGS["llama"])], tmp_path / "out", CONFIGS["llama"], overwrite=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_what_a_killed_export_left_is_cleared(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").touch()
    (tmp_path / ".out.replaced").mkdir()
    (tmp_path / ".out.replaced" / "old").touch()
    with pytest.raises(CheckpointError):  # the old folder is found again under its name
        export_hf([tree(config)], tmp_path / "out", config)
    assert (tmp_path / "out" / "old").exists()
    export_hf([tree(config)], tmp_path / "out", config, overwrite=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "model.safetensors"]


def test_a_failure_leaves_nothing_and_keeps_its_cause(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise KeyError(folder.name)

    with pytest.raises(CheckpointError) as caught:
        export_hf([tree(CONFIGS["llama"])], tmp_path / "out", CONFIGS["llama"], finish=fail)
    assert isinstance(caught.value.__cause__, KeyError)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_whole_is_not_written(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    module = tree(config)
    del module.norm
    with pytest.raises(ModelError) as caught:
        export_hf([module], tmp_path / "out", config)
    assert caught.value.path == "norm.weight"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"dtype": torch.int8}, {"max_shard_bytes": 0}])
def test_impossible_wishes_are_refused(wrong: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ForgeError) as caught:
        export_hf([tree(CONFIGS["llama"])], tmp_path / "out", CONFIGS["llama"], **wrong)  # type: ignore[arg-type]
    assert caught.value.rule
    assert list(tmp_path.iterdir()) == []
