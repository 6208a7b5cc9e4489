"""How large the cache is where nobody said it: plain numbers in, pages out."""

from __future__ import annotations

import pytest

from forge.generator.native.cache_size import CacheNeed, pages_on_cpu, pages_on_gpu

GIB = 1 << 30
# Qwen3-1.7B: 28 layers x 8 heads x 128 x 2, in bfloat16, 16 tokens a page; 64 sequences of 1536 tokens.
NEED = CacheNeed(page_bytes=16 * 28 * 8 * 128 * 2 * 2, least=97, wanted=97 + 64 * 96)


def gib(pages: int) -> float:
    return pages * NEED.page_bytes / GIB


def test_a_gpu_of_its_own_is_used_up_to_four_times_the_need() -> None:
    assert pages_on_gpu(NEED, free_bytes=138 * GIB, total_bytes=140 * GIB) == 4 * NEED.wanted
    assert gib(pages_on_gpu(NEED, free_bytes=20 * GIB, total_bytes=140 * GIB)) == pytest.approx(16.0, abs=0.01)


@pytest.mark.parametrize("free", [20, 60, 130])
def test_beside_a_trainer_the_cache_is_what_is_needed_and_no_more(free: int) -> None:
    """However much is free now: the trainer has not taken its first step."""
    found = pages_on_gpu(NEED, free_bytes=free * GIB, total_bytes=140 * GIB, share=0.35)
    assert found == NEED.wanted
    assert gib(found) < 11


def test_beside_a_trainer_the_cache_stays_within_its_share_and_what_is_free() -> None:
    many = CacheNeed(NEED.page_bytes, NEED.least, NEED.wanted * 40)
    asked = {"total_bytes": 140 * GIB, "share": 0.35}
    assert gib(pages_on_gpu(many, free_bytes=130 * GIB, **asked)) == pytest.approx(49.0, abs=0.01)
    assert gib(pages_on_gpu(many, free_bytes=100 * GIB, **asked)) == pytest.approx(49.0, abs=0.01)
    assert gib(pages_on_gpu(many, free_bytes=10 * GIB, **asked)) == pytest.approx(8.0, abs=0.01)


def test_where_there_is_no_room_fewer_than_the_least_come_out() -> None:
    assert pages_on_gpu(NEED, free_bytes=GIB // 10, total_bytes=140 * GIB) < NEED.least
    assert pages_on_gpu(NEED, free_bytes=GIB // 10, total_bytes=140 * GIB, share=0.35) < NEED.least


def test_on_a_cpu_a_quarter_is_the_most_and_one_sequence_the_least() -> None:
    assert pages_on_cpu(NEED, free_bytes=100 * GIB) == NEED.wanted
    assert gib(pages_on_cpu(NEED, free_bytes=8 * GIB)) == pytest.approx(2.0, abs=0.01)
    assert pages_on_cpu(NEED, free_bytes=0) == NEED.least
