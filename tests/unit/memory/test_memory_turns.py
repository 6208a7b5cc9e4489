"""On one GPU the cache is there while the trainer rests, and gone while it works: the larger of both counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forge.config import GRPOConfig, load
from forge.generator.native.cache_size import CacheNeed, StepWork, graph_sizes, pages_in_turns, step_work
from forge.memory import Card, DevicePlan, plan_memory, resolve_run
from forge.memory.constants import CUDA_CONTEXT, GIB
from forge.memory.devices import generator_job
from forge.memory.generator import cache_need
from forge.models.architecture import complete

WORK = StepWork(prefill=GIB, sampler=GIB, graphs=2 * GIB)
NEED = CacheNeed(page_bytes=GIB, least=2, wanted=60)
BASE = (
    "model.preset=qwen3_1_7b",
    "distributed.shard=1",
    "distributed.precision=bfloat16",
    "training.max_seq_len=1536",
    "training.microbatch_tokens=8192",
    "generator.max_seq_len=1536",
    "generator.max_batch=256",
)


def config_of(*words: str) -> GRPOConfig:
    return load(GRPOConfig, overrides=[*BASE, *words])


def device(*words: str, size: int = 80) -> DevicePlan:
    card = Card(size * GIB, 1)
    return plan_memory(resolve_run(config_of(*words), card=card), card=card).gpus[0]


def parts(plan: DevicePlan, phase: Any) -> dict[str, int]:
    return {f"{part.owner}/{part.name}": part.num_bytes for part in plan.phase_peaks()[phase].parts}


def test_the_cache_is_what_is_wanted_where_there_is_room() -> None:
    assert pages_in_turns(NEED, free_bytes=80 * GIB, work=WORK) == NEED.wanted


def test_the_cache_leaves_what_a_step_takes_and_what_others_will_take() -> None:
    alone = pages_in_turns(NEED, free_bytes=54 * GIB, work=WORK)
    assert alone == int(50 * 0.92)
    assert pages_in_turns(NEED, free_bytes=54 * GIB, expected_bytes=10 * GIB, work=WORK) == int(40 * 0.92)


@pytest.mark.parametrize("free", [0, 3, 5])
def test_without_room_there_are_fewer_pages_than_the_least(free: int) -> None:
    assert 0 <= pages_in_turns(NEED, free_bytes=free * GIB, work=WORK) < NEED.least


def test_a_step_takes_more_for_more_sequences_and_records_none_on_a_cpu() -> None:
    facts, few, many = (
        complete(config_of().model),
        config_of("generator.max_batch=8").generator,
        config_of("generator.max_batch=512").generator,
    )
    small, large = (step_work(facts, each, item=2, on_gpu=True) for each in (few, many))
    assert small.sampler < large.sampler
    assert small.graphs < large.graphs
    assert small.num_bytes == small.prefill + small.sampler + small.graphs
    assert step_work(facts, many, item=4, on_gpu=False).graphs == 0
    assert step_work(facts, many.model_copy(update={"cuda_graphs": False}), item=2, on_gpu=True).graphs == 0


def test_steps_are_recorded_for_the_largest_batch_too() -> None:
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(300)[-3:] == (224, 256, 300)
    assert graph_sizes(512)[-3:] == (384, 448, 512)


@pytest.mark.parametrize("placement", ["shared", "turns"])
def test_the_cache_and_activations_do_not_count_together(placement: str) -> None:
    plan = device(f"placement={placement}")
    generating, training = parts(plan, "generating"), parts(plan, "training")
    assert generating["generator/KV cache"] > 30 * GIB
    assert "generator/KV cache" not in training
    assert training["trainer/activations"] > 15 * GIB
    assert "trainer/activations" not in generating
    assert "trainer/gradients" not in generating
    assert generating["trainer/optimizer states"] == training["trainer/optimizer states"]
    assert plan.fits
    sums = {phase: moment.num_bytes for phase, moment in plan.phase_peaks().items()}
    assert plan.peak.num_bytes == max(sums.values()) < sum(sums.values())


def test_beside_each_other_both_count() -> None:
    plan = device("placement=beside")
    assert parts(plan, "training")["generator/KV cache"] == parts(plan, "generating")["generator/KV cache"]


def test_an_engine_in_the_trainers_process_keeps_weights_and_recorded_steps_while_it_trains() -> None:
    shared, turns = parts(device("placement=shared"), "training"), parts(device("placement=turns"), "training")
    assert shared["generator/weights"] > 3 * GIB
    assert shared["generator/CUDA graphs"] == turns["generator/CUDA graphs"] > 0
    assert "generator/weights" not in turns  # they wait in the host's memory
    assert turns["generator/CUDA context"] == CUDA_CONTEXT
    assert "generator/sampler" not in shared


@pytest.mark.parametrize(("size", "is_wanted"), [(48, False), (80, True), (141, True)])
def test_the_plan_and_the_engine_choose_the_cache_with_one_function(size: int, is_wanted: bool) -> None:
    card = Card(size * GIB, 1)
    run = resolve_run(config_of("placement=shared"), card=card)
    held = parts(device("placement=shared", size=size), "generating")
    job = generator_job(run, card)
    assert job is not None
    need = cache_need(job)
    passing = ("/KV cache", "/prefill", "/sampler", "/CUDA graphs", "/allocator slack")
    others = sum(size for name, size in held.items() if not name.endswith(passing))
    pages = pages_in_turns(need, free_bytes=card.usable - others, work=job.work)
    assert held["generator/KV cache"] == pages * need.page_bytes
    assert (pages == need.wanted) is is_wanted


def test_a_cache_in_turns_always_leaves_room_to_generate() -> None:
    plan = device("placement=shared", "generator.max_batch=2048", size=80)
    assert plan.phase_peaks()["generating"].num_bytes < plan.capacity


def test_a_share_that_was_written_down_binds_in_turns_too() -> None:
    cache = parts(device("placement=shared", "generator.gpu_memory_share=0.1"), "generating")["generator/KV cache"]
    assert cache == pytest.approx(0.1 * Card(80 * GIB).usable, rel=0.01)


def test_several_generators_in_turns_divide_what_is_left() -> None:
    words = ("placement=turns", "generator.max_batch=1024")
    one, two = (parts(device(*words, f"generator.num_replicas={num}"), "generating") for num in (1, 2))
    assert two["generator 0/KV cache"] == two["generator 1/KV cache"]
    assert 2 * two["generator 0/KV cache"] < one["generator/KV cache"]
    assert device(*words, "generator.num_replicas=2").phase_peaks()["generating"].num_bytes < Card(80 * GIB).usable


def test_on_a_cpu_the_cache_stays() -> None:
    run = resolve_run(config_of("placement=shared", "distributed.with_gpus=false"), card=None)
    assert not run.takes_turns
    assert replace(run, generator_on_gpu=True).takes_turns
