"""Layouts: what the model and the number of ranks admit is resolved; all else is refused with a repair that works."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config.schema import ModelConfig
from forge.config.training import DistributedConfig, TrainingConfig
from forge.errors import ConfigError, LayoutError
from forge.trainer.layout import Layout, check_layout, proposals

DENSE = ModelConfig(
    family="qwen3",
    num_layers=4,
    hidden_size=128,
    intermediate_size=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    vocab_size=512,
    tie_embeddings=False,
    max_seq_len=2048,
)
TIED = DENSE.model_copy(update={"tie_embeddings": True})
MIXTURE = DENSE.model_copy(
    update={"family": "qwen3_moe", "num_experts": 8, "num_experts_per_token": 2, "expert_intermediate_size": 64}
)


def layout_of(
    model: ModelConfig = DENSE, *, ranks: int, training: dict[str, Any] | None = None, **degrees: Any
) -> Layout:
    return check_layout(DistributedConfig(**degrees), model, TrainingConfig(**training or {}), num_ranks=ranks)


def refusal(
    model: ModelConfig = DENSE, *, ranks: int, training: dict[str, Any] | None = None, **degrees: Any
) -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        layout_of(model, ranks=ranks, training=training, **degrees)
    error = caught.value
    assert isinstance(error, ConfigError)
    assert error.path
    assert error.rule
    assert error.repair
    for said in (error.path, error.rule, error.repair):
        assert said in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    return error


@pytest.mark.parametrize(
    ("ranks", "degrees", "replicate", "shard"),
    [
        (1, {}, 1, 1),
        (8, {}, 1, 8),
        (8, {"tensor": 2}, 1, 4),
        (8, {"tensor": 2, "replicate": 2}, 2, 2),
        (8, {"pipeline": 2, "tensor": 2, "shard": 2}, 1, 2),
        (8, {"replicate": 8, "shard": 1}, 8, 1),
        (2, {"strategy": "none", "tensor": 2}, 1, 1),
        (8, {"strategy": "replicate"}, 8, 1),
        (8, {"strategy": "replicate", "tensor": 2}, 4, 1),
        (8, {"strategy": "replicate", "replicate": 8}, 8, 1),
        (8, {"strategy": "fsdp", "tensor": 4}, 1, 2),
        (1, {"strategy": "fsdp"}, 1, 1),
        (8, {"strategy": "hsdp", "replicate": 2}, 2, 4),
    ],
)
def test_data_parallel_degrees_are_resolved(ranks: int, degrees: dict[str, Any], replicate: int, shard: int) -> None:
    layout = layout_of(ranks=ranks, **degrees)
    assert (layout.replicate, layout.shard) == (replicate, shard)
    assert layout.data_parallel == replicate * shard
    assert layout.num_ranks == ranks


def test_neighbours_in_tensor_and_pipeline_take_the_same_part_of_a_batch() -> None:
    layout = layout_of(ranks=8, pipeline=2, tensor=2)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("model", "degrees", "multiple"),
    [
        (DENSE, {"tensor": 4}, 4),
        (DENSE, {"tensor": 4, "sequence_parallel": False}, 1),
        (MIXTURE, {"tensor": 4, "expert": 2}, 4),
        (MIXTURE, {"expert": 4}, 1),
    ],
)
def test_rows_are_padded_where_tensor_ranks_split_them(
    model: ModelConfig, degrees: dict[str, Any], multiple: int
) -> None:
    assert layout_of(model, ranks=4, **degrees).row_multiple == multiple


def test_shapes_are_fixed_for_a_pipeline_alone() -> None:
    assert not layout_of(ranks=2, tensor=2).fixed_shape
    assert layout_of(ranks=2, pipeline=2).fixed_shape
    assert not layout_of(ranks=2, training={"compile": True}).fixed_shape


@pytest.mark.parametrize(
    ("degrees", "stages", "microbatches"),
    [
        ({"pipeline": 2}, 2, 4),
        ({"pipeline": 4, "pipeline_microbatches": 4}, 4, 4),
        ({"pipeline": 2, "pipeline_schedule": "Interleaved1F1B"}, 4, 8),
        ({"pipeline": 2, "pipeline_schedule": "GPipe", "pipeline_microbatches": 1}, 2, 1),
        ({"tensor": 4, "pipeline_microbatches": 7}, 1, 1),
    ],
)
def test_stages_and_rows_of_a_pipeline(degrees: dict[str, Any], stages: int, microbatches: int) -> None:
    layout = layout_of(ranks=4, **degrees)
    assert (layout.num_stages, layout.pipeline_microbatches) == (stages, microbatches)


@pytest.mark.parametrize(
    ("ranks", "degrees", "rule", "start"),
    [
        (
            4,
            {"shard": 2},
            "replicate × shard × tensor × pipeline must be the number of ranks, which is 4",
            "start 2 ranks",
        ),
        (2, {"shard": 4}, "must be the number of ranks, which is 2", "start 4 ranks"),
        (
            4,
            {"tensor": 3},
            "replicate × tensor × pipeline must divide the number of ranks, which is 4",
            "start 3 ranks",
        ),
        (2, {"tensor": 4}, "must divide the number of ranks, which is 2", "start 4 ranks"),
        (4, {"replicate": 3}, "must divide the number of ranks, which is 4", "start 3 ranks"),
        (4, {"strategy": "replicate", "replicate": 3}, "must divide the number of ranks, which is 4", "start 3 ranks"),
        (4, {"strategy": "none", "tensor": 2}, "tensor × pipeline must be the number of ranks", "start 2 ranks"),
        (1, {"tensor": 2}, "must divide the number of ranks, which is 1", "start 2 ranks"),
    ],
)
def test_degrees_that_do_not_make_the_number_of_ranks(
    ranks: int, degrees: dict[str, Any], rule: str, start: str
) -> None:
    error = refusal(ranks=ranks, **degrees)
    assert error.path == "distributed"
    assert rule in str(error.rule)
    assert str(error.repair).startswith(start)
    assert f"fit: shard {ranks}" in str(error.repair)


def test_the_repair_of_a_product_names_the_simplest_layouts() -> None:
    error = refusal(ranks=4, shard=2, tensor=4)
    assert error.value == {"replicate": 1, "shard": 2, "tensor": 4, "pipeline": 1}
    assert error.repair == (
        "start 8 ranks, or use degrees that fit: shard 4; shard 2, tensor 2; tensor 4; shard 2, pipeline 2"
    )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_heads": 6, "num_kv_heads": 3}, "num_heads"),
        ({"num_kv_heads": 2}, "num_kv_heads"),
        ({"vocab_size": 510}, "vocab_size"),
        ({"intermediate_size": 254}, "intermediate_size"),
    ],
)
def test_what_tensor_ranks_split_must_be_divisible(change: dict[str, int], name: str) -> None:
    error = refusal(DENSE.model_copy(update=change), ranks=4, tensor=4)
    assert (error.path, error.value) == ("distributed.tensor", 4)
    assert error.rule == f"must divide model.{name}, which is {change[name]}"
    tensor = "1" if name == "num_heads" else "1 or 2"
    assert str(error.repair).startswith(f"set distributed.tensor to {tensor}; 4 ranks can be used as: shard 4")


def test_a_width_that_is_not_split_may_be_of_any_size() -> None:
    experts_apart = MIXTURE.model_copy(update={"expert_intermediate_size": 66, "intermediate_size": 254})
    assert layout_of(experts_apart, ranks=4, tensor=4, expert=4).tensor == 4


@pytest.mark.parametrize(
    ("num_experts", "repair"),
    [(8, "set distributed.expert to 2 or 4, or distributed.tensor to 1"), (5, "set distributed.tensor to 1")],
)
def test_tensor_ranks_do_not_slice_experts(num_experts: int, repair: str) -> None:
    error = refusal(MIXTURE.model_copy(update={"num_experts": num_experts}), ranks=4, tensor=2)
    assert (error.path, error.value) == ("distributed.expert", 1)
    assert "more than 1 for a mixture on tensor parallel ranks" in str(error.rule)
    assert error.repair == repair


def test_a_tied_model_has_no_pipeline() -> None:
    error = refusal(TIED, ranks=4, pipeline=2)
    assert (error.path, error.value) == ("distributed.pipeline", 2)
    assert "must be 1 where model.tie_embeddings is true" in str(error.rule)
    assert error.repair == (
        "set distributed.pipeline to 1; 4 ranks can be used as: shard 4; shard 2, tensor 2; tensor 4"
    )


@pytest.mark.parametrize(
    ("ranks", "degrees", "each", "repair"),
    [
        (8, {"pipeline": 8}, "1F1B has 1 stage on", "set distributed.pipeline to 1, 2 or 4;"),
        (
            4,
            {"pipeline": 4, "pipeline_schedule": "Interleaved1F1B"},
            "Interleaved1F1B has 2 stages on",
            "set distributed.pipeline to 1 or 2, or distributed.pipeline_schedule to 1F1B;",
        ),
    ],
)
def test_more_stages_than_layers(ranks: int, degrees: dict[str, Any], each: str, repair: str) -> None:
    error = refusal(ranks=ranks, **degrees)
    assert (error.path, error.value) == ("distributed.pipeline", degrees["pipeline"])
    assert str(error.rule).startswith(each)
    assert "model.num_layers of them, which is 4" in str(error.rule)
    assert str(error.repair).startswith(repair)


@pytest.mark.parametrize(
    ("degrees", "rule", "repair"),
    [
        ({"pipeline_microbatches": 3}, "at least the number of stages, which is 4", "set it to 8"),
        (
            {"pipeline": 2, "pipeline_schedule": "Interleaved1F1B", "pipeline_microbatches": 5},
            "a multiple of its whole rounds over 2 pipeline ranks, which are 2",
            "set it to 8",
        ),
    ],
)
def test_rows_that_a_schedule_cannot_take(degrees: dict[str, Any], rule: str, repair: str) -> None:
    error = refusal(ranks=4, **{"pipeline": 4, **degrees})
    assert (error.path, error.value) == ("distributed.pipeline_microbatches", degrees["pipeline_microbatches"])
    assert rule in str(error.rule)
    assert repair in str(error.repair)
    repaired = {"pipeline": 4, **degrees, "pipeline_microbatches": 8}
    assert layout_of(ranks=4, **repaired).pipeline_microbatches == 8


@pytest.mark.parametrize(
    ("model", "ranks", "degrees", "rule", "repair"),
    [
        (DENSE, 4, {"expert": 2}, "must be 1 for a dense model", "set distributed.expert to 1"),
        (MIXTURE, 6, {"expert": 3}, "must divide model.num_experts, which is 8", "set distributed.expert to 1 or 2"),
        (
            MIXTURE,
            8,
            {"replicate": 4, "expert": 4},
            "must divide shard × tensor, which is 2 × 1",
            "set distributed.expert to 1 or 2",
        ),
        (
            MIXTURE,
            8,
            {"pipeline": 4, "expert": 4},
            "must divide shard × tensor, which is 2 × 1",
            "set distributed.expert to 1 or 2",
        ),
    ],
)
def test_experts(model: ModelConfig, ranks: int, degrees: dict[str, Any], rule: str, repair: str) -> None:
    error = refusal(model, ranks=ranks, **degrees)
    assert (error.path, error.value) == ("distributed.expert", degrees["expert"])
    assert rule in str(error.rule)
    assert error.repair == repair


@pytest.mark.parametrize(
    ("training", "degrees", "path", "rule", "repair"),
    [
        ({"max_seq_len": 4096}, {}, "training.max_seq_len", "which is 2048", "lower it to 2048"),
        (
            {"activation_offload": True},
            {"with_gpus": False},
            "training.activation_offload",
            "only for ranks with GPUs",
            "set it to false",
        ),
        ({"compile": True}, {"pipeline": 2}, "training.compile", "distributed.pipeline is over 1", "set it to false"),
    ],
)
def test_training_that_the_layout_does_not_admit(
    training: dict[str, Any], degrees: dict[str, Any], path: str, rule: str, repair: str
) -> None:
    error = refusal(ranks=2, training=training, **degrees)
    assert (error.path, error.value) == (path, next(iter(training.values())))
    assert rule in str(error.rule)
    assert repair in str(error.repair)


def test_offload_is_admitted_where_there_may_be_gpus() -> None:
    assert layout_of(ranks=2, training={"activation_offload": True, "max_seq_len": 2048}).shard == 2


def test_copies_of_shards_need_ranks_to_share_a_copy() -> None:
    error = refusal(ranks=2, strategy="hsdp", replicate=2)
    assert (error.path, error.value) == ("distributed.strategy", "hsdp")
    assert "needs a shard of at least 2; 2 ranks leave 1" in str(error.rule)


def test_no_ranks() -> None:
    error = refusal(ranks=0)
    assert (error.path, error.value, error.rule) == ("num_ranks", 0, "at least 1")


@pytest.mark.parametrize("name", ["num_kv_heads", "intermediate_size", "tie_embeddings"])
def test_a_fact_that_is_missing(name: str) -> None:
    error = refusal(DENSE.model_copy(update={name: None}), ranks=1)
    assert (error.path, error.rule) == (f"model.{name}", "must be known")


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    num_ranks=st.integers(1, 32),
    layers=st.integers(1, 6),
    kv_heads=st.integers(1, 8),
    tied=st.booleans(),
    experts=st.sampled_from([None, 4, 6, 8]),
)
def test_every_proposal_is_admitted(
    num_ranks: int, layers: int, kv_heads: int, tied: bool, experts: int | None
) -> None:
    model = DENSE.model_copy(
        update={
            "num_layers": layers,
            "num_kv_heads": kv_heads,
            "num_heads": 2 * kv_heads,
            "tie_embeddings": tied,
            "num_experts": experts,
            "expert_intermediate_size": 64,
        }
    )
    offered = proposals(model, num_ranks)
    assert offered[0] == Layout(shard=num_ranks)
    for layout in offered:
        degrees = {name: getattr(layout, name) for name in ("shard", "tensor", "pipeline", "expert")}
        assert layout_of(model, ranks=num_ranks, **degrees) == layout


def test_a_layout_reads_as_its_degrees() -> None:
    assert str(Layout()) == "shard 1"
    assert str(Layout(shard=2, tensor=4, expert=8)) == "shard 2, tensor 4, expert 8"
