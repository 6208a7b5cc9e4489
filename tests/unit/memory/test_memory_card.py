"""GPUs as the driver tells them, and sizes as people write them."""

from __future__ import annotations

import pytest

from forge.errors import ConfigError
from forge.memory import parse_size
from forge.memory.card import read_card
from forge.memory.constants import GIB, MIB

ANSWER = "143771, NVIDIA H200\n143771, NVIDIA H200\n24564, NVIDIA GeForce RTX 4090\n"


@pytest.mark.parametrize(("text", "gib"), [("80GB", 80), ("80", 80), ("40 gib", 40), ("141G", 141), ("7.5GB", 7.5)])
def test_sizes(text: str, gib: float) -> None:
    assert parse_size(text) == gib * GIB


@pytest.mark.parametrize("text", ["", "much", "0", "-3GB", "80MB", "80GBs"])
def test_sizes_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_size(text)
    assert refused.value.path == "--gpu-memory"
    assert refused.value.value == text
    assert refused.value.rule
    assert refused.value.repair


def test_the_smallest_gpu_counts() -> None:
    card = read_card(ANSWER, {})
    assert card is not None
    assert (card.num_bytes, card.num_gpus, card.name) == (24564 * MIB, 3, "NVIDIA GeForce RTX 4090")
    assert card.usable < card.num_bytes


def test_only_visible_gpus_count() -> None:
    card = read_card(ANSWER, {"CUDA_VISIBLE_DEVICES": "1"})
    assert card is not None
    assert (card.num_bytes, card.num_gpus) == (143771 * MIB, 1)
    assert read_card(ANSWER, {"CUDA_VISIBLE_DEVICES": ""}) is None


def test_no_answer_is_no_gpu() -> None:
    assert read_card("", {}) is None
    assert read_card("No devices were found\n", {}) is None
