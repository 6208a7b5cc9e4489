"""Pinned versions of the policy in the plan: in the store, and in generators."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapter_folders import make_adapter
from forge.config import GRPOConfig, load
from forge.generator.native.cache_size import step_work
from forge.memory import Card, MemoryPlan, plan_memory, resolve_run
from forge.memory.constants import GIB

CARD = Card(80 * GIB)
BASE = ("model.preset=qwen3_1_7b", "distributed.shard=1", "distributed.precision=bfloat16", "training.max_seq_len=1536")
AGENTS = "episode={kind: 'own_games:pennies', agents: {column: {version: 0}, row: {version: 7}}}"


def planned(*words: str, card: Card | None = CARD) -> MemoryPlan:
    return plan_memory(resolve_run(load(GRPOConfig, overrides=[*BASE, *words]), card=card), card=card)


def parts(plan: MemoryPlan, device: int | None) -> dict[str, int]:
    """The parts of the fullest moment of a GPU, or of the host, by name; alike ones added up."""
    chosen = plan.host if device is None else plan.gpus[device]
    found: dict[str, int] = {}
    for part in max(chosen.moments, key=lambda moment: moment.num_bytes).parts:
        found[part.name] = found.get(part.name, 0) + part.num_bytes
    return found


def test_a_gpu_has_room_for_each_version_and_its_recorded_steps() -> None:
    plain, bound = planned(), planned(AGENTS)
    config = load(GRPOConfig, overrides=list(BASE))
    graphs = step_work(resolve_run(config, card=CARD).facts, config.generator, item=2, on_gpu=True).graphs
    count = plain.num_parameters
    assert "pinned versions" not in parts(plain, 1)
    assert parts(bound, 1)["pinned versions"] == 2 * (2 * count + graphs) > 4 * count
    assert parts(planned(AGENTS, "generator.pinned_versions=1"), 1)["pinned versions"] == 2 * count + graphs
    assert parts(bound, None)["pinned versions"] == 2 * 2 * count  # in the store, in bfloat16
    assert parts(bound, 0) == parts(plain, 0)  # nothing of it is on the trainer's GPU


def test_versions_of_an_adapter_share_the_weights_below_it() -> None:
    words = ("adapter={rank: 8}", "placement=shared", "rollout.staleness=0", AGENTS)
    config = load(GRPOConfig, overrides=[*BASE, *words])
    run = resolve_run(config, card=CARD)
    graphs = step_work(run.facts, config.generator, item=2, on_gpu=True).graphs
    assert run.adapter_parameters is not None
    found = parts(plan_memory(run, card=CARD), 0)
    assert found["pinned versions"] == 2 * (2 * run.adapter_parameters + graphs)


def test_adapters_that_requests_select_have_memory_beside_the_cache(tmp_path: Path) -> None:
    facts = resolve_run(load(GRPOConfig, overrides=list(BASE)), card=CARD).facts
    one = make_adapter(tmp_path / "one", facts, seed=0, rank=2, targets=("q_proj",))
    num = 28 * 2 * (facts.hidden_size + facts.num_heads * facts.head_dim)
    small = Card(16 * GIB)
    named = planned(f"generator.adapters={{one: {one}, two: {one}}}", card=small)
    assert parts(named, 1)["adapters"] == 2 * 2 * num
    bounded = planned(f"generator={{adapters: {{one: {one}}}, max_adapter_gb: 2}}", card=small)
    assert parts(bounded, 1)["adapters"] == 2 * GIB
    assert parts(bounded, 1)["KV cache"] < parts(planned(card=small), 1)["KV cache"]
    assert sum(parts(bounded, 1).values()) <= small.usable


def test_the_cache_leaves_them_room() -> None:
    small = Card(16 * GIB)
    plain, bound = (parts(planned(*words, card=small), 1) for words in ((), (AGENTS,)))
    assert bound["KV cache"] < plain["KV cache"]
    assert sum(bound.values()) <= small.usable


def test_on_a_cpu_they_are_read_in_the_store() -> None:
    plain, bound = planned(card=None), planned(AGENTS, card=None)
    count = plain.num_parameters
    difference = parts(bound, None)["pinned versions"]
    assert difference == 2 * 4 * count
    assert sum(parts(bound, None).values()) - sum(parts(plain, None).values()) == pytest.approx(difference, rel=1e-3)


def test_a_trainer_that_generates_publishes_what_is_pinned() -> None:
    shared = planned(AGENTS, "placement=shared", "rollout.staleness=0", card=None)
    found, count = parts(shared, None), shared.num_parameters
    assert (found["pinned versions"], found["published weights"]) == (2 * 4 * count, 2 * 4 * count)
    league = planned("episode={kind: 'own_games:pennies', league: {max_members: 3}}", "placement=shared", card=None)
    assert (parts(league, None)["league"], parts(league, None)["published weights"]) == (3 * 4 * count, 2 * 4 * count)
    assert "published weights" not in parts(planned("placement=shared", "rollout.staleness=0", card=None), None)


def test_an_engine_that_serves_one_version_is_noted() -> None:
    plan = planned(AGENTS, "generator.engine=vllm")
    assert "pinned versions" not in parts(plan, 1)
    assert any("generators for the versions of agents are not planned" in note for note in plan.notes)
