"""The memory of drafts in the plan: a draft model, its cache, and the places that are sampled."""

from __future__ import annotations

from pathlib import Path

from forge.config import GenerationConfig, GRPOConfig, load
from forge.generator.native.cache_size import resolved_draft, step_work
from forge.memory import Card, Part, plan_memory, resolve_run
from forge.memory.constants import GIB
from forge.models.inference import page_bytes
from forge.models.sizes import num_parameters
from forge.models.tiny import make_tiny

CARD = Card(80 * GIB)
BASE = ("model.preset=qwen3_1_7b", "distributed.shard=1", "training.max_seq_len=1024", "generator.kv_cache_gb=4")


def parts(*words: str) -> dict[str, Part]:
    plan = plan_memory(resolve_run(load(GRPOConfig, overrides=[*BASE, *words]), card=CARD), card=CARD)
    fullest = max(plan.gpus[1].moments, key=lambda moment: moment.num_bytes)
    return {part.name: part for part in fullest.parts}


def test_a_draft_model_has_weights_recorded_steps_and_a_part_of_each_page(tmp_path: Path) -> None:
    make_tiny(tmp_path / "draft")
    section = f"generator.speculation={{model: {tmp_path / 'draft'}}}"
    plain, drafted = parts(), parts(section)
    draft = resolved_draft(GenerationConfig(speculation={"model": str(tmp_path / "draft")}))
    assert draft is not None
    graphs = step_work(draft.architecture, GenerationConfig(), item=2, on_gpu=True).graphs
    assert "draft model" not in plain
    assert drafted["draft model"].num_bytes == 2 * num_parameters(draft.architecture) + graphs
    run = resolve_run(load(GRPOConfig, overrides=list(BASE)), card=CARD)
    each = [page_bytes(facts, item_bytes=2) for facts in (run.facts, draft.architecture)]
    assert drafted["KV cache"].num_bytes == 4 * GIB // sum(each) * sum(each)
    assert plain["KV cache"].num_bytes == 4 * GIB // each[0] * each[0]


def test_drafts_are_sampled_at_as_many_places_again() -> None:
    plain, drafted = parts(), parts("generator.speculation={}")
    assert drafted["sampler"].num_bytes == 2 * plain["sampler"].num_bytes
    assert "draft model" not in drafted
