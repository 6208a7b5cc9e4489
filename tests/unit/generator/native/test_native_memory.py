"""Where weights and cache are: away and back at the same addresses, on a stand-in for the GPU's driver."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from forge.generator.native.memory import EngineMemory, FixedAddressMemory, carve, choose_memory
from forge.runtime.device_memory import DeviceMemory, OutOfDeviceMemory, Purpose
from stand_in_driver import STEP, HostMemory, StandIn, is_there

CPU = torch.device("cpu")
KEYS, VALUES = (5, 2, 16, 64), (5, 2, 16, 64)


@pytest.fixture
def gpu(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


def parameters() -> dict[str, nn.Parameter]:
    """Of two dtypes, and of sizes that are no multiple of anything."""
    torch.manual_seed(0)
    shapes = {"embedding": (301, 7), "norm": (7,), "head": (301, 7)}
    made = {name: nn.Parameter(torch.randn(shape), requires_grad=False) for name, shape in shapes.items()}
    made["half"] = nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16), requires_grad=False)
    return made


def settled(gpu: StandIn, weights: dict[str, nn.Parameter]) -> FixedAddressMemory:
    def make(num_bytes: int, purpose: Purpose) -> DeviceMemory:
        return HostMemory(gpu.driver(), num_bytes, purpose=purpose)

    return FixedAddressMemory(CPU, weights, make=make)


def filled(weights: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Load the weights, and say what was loaded."""
    values = {name: torch.randn(each.shape).to(each.dtype) for name, each in weights.items()}
    for name, value in values.items():
        weights[name].data.copy_(value)
    return values


def same(weights: dict[str, nn.Parameter], values: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(weights[name], value) for name, value in values.items())


def test_weights_come_back_to_their_addresses(gpu: StandIn) -> None:
    weights = parameters()
    forms = {name: (each.shape, each.dtype) for name, each in weights.items()}
    memory = settled(gpu, weights)
    assert {name: (each.shape, each.dtype) for name, each in weights.items()} == forms
    values = filled(weights)
    addresses = {name: each.data_ptr() for name, each in weights.items()}
    assert all(address % 512 == 0 for address in addresses.values())
    for _ in range(2):
        memory.release_weights()
        assert gpu.used == 0
        assert not any(is_there(address) for address in addresses.values())
        assert same(weights, values), "they are in host memory"
        memory.restore_weights()
        assert gpu.used == STEP
        assert {name: each.data_ptr() for name, each in weights.items()} == addresses
        assert same(weights, values)


def test_weights_that_change_while_they_are_away_come_back_changed(gpu: StandIn) -> None:
    weights = parameters()
    memory = settled(gpu, weights)
    filled(weights)
    memory.release_weights()
    values = filled(weights)
    memory.restore_weights()
    assert same(weights, values)


def test_weights_that_are_there_are_not_fetched_again(gpu: StandIn) -> None:
    weights = parameters()
    memory = settled(gpu, weights)
    memory.release_weights()
    memory.restore_weights()
    values = filled(weights)
    memory.restore_weights()
    assert same(weights, values)


def test_the_cache_comes_back_to_its_addresses(gpu: StandIn) -> None:
    memory = settled(gpu, {})
    first = memory.allocate_cache((KEYS, VALUES), num_layers=3, dtype=torch.float32)
    plain = EngineMemory(CPU, {}).allocate_cache((KEYS, VALUES), num_layers=3, dtype=torch.float32)
    forms = [[(each.shape, each.stride(), each.dtype) for each in pair] for pair in plain]
    assert [[(each.shape, each.stride(), each.dtype) for each in pair] for pair in first] == forms
    for place, pair in enumerate(first):
        for offset, tensor in enumerate(pair):
            tensor.fill_(2 * place + offset)
    assert [[float(each.mean()) for each in pair] for pair in first] == [[0, 1], [2, 3], [4, 5]], "none overlaps"
    addresses = [each.data_ptr() for pair in first for each in pair]
    memory.release_cache()
    assert gpu.used == 0
    again = memory.allocate_cache((KEYS, VALUES), num_layers=3, dtype=torch.float32)
    assert [each.data_ptr() for pair in again for each in pair] == addresses
    assert gpu.used == STEP


def test_too_little_memory_names_what_it_was_for_and_changes_nothing(gpu: StandIn) -> None:
    weights = parameters()
    memory = settled(gpu, weights)
    values = filled(weights)
    gpu.resize(STEP)
    with pytest.raises(OutOfDeviceMemory, match="the cache for keys and values") as caught:
        memory.allocate_cache((KEYS, VALUES), num_layers=3, dtype=torch.float32)
    assert caught.value.path == "generator.kv_cache_gb"
    assert "max_batch" in (caught.value.repair or "")
    memory.release_weights()
    gpu.resize(0)
    with pytest.raises(OutOfDeviceMemory, match="the generator's weights") as caught:
        memory.restore_weights()
    assert (caught.value.path, same(weights, values)) == ("model", True)
    gpu.resize(2 * STEP)
    memory.restore_weights()
    memory.allocate_cache((KEYS, VALUES), num_layers=3, dtype=torch.float32)
    assert (same(weights, values), gpu.used) == (True, 2 * STEP)


def test_a_cpu_has_nothing_to_give_back() -> None:
    weights = parameters()
    before = {name: each.data_ptr() for name, each in weights.items()}
    memory = choose_memory(CPU, weights)
    assert not memory.keeps_addresses
    memory.restore_weights()
    assert {name: each.data_ptr() for name, each in weights.items()} == before


def test_tensors_are_cut_one_after_the_other() -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    forms = [((3,), torch.float32), ((2, 2), torch.bfloat16), ((1,), torch.int64)]
    first, second, third = carve(memory, forms)
    assert [each.data_ptr() - memory.data_ptr() for each in (first, second, third)] == [0, 512, 1024]
    assert (second.shape, second.dtype, second.is_contiguous()) == ((2, 2), torch.bfloat16, True)
