"""Memory that comes and goes behind addresses that stay, on a stand-in for the GPU's driver."""

from __future__ import annotations

import ctypes
import gc
import pickle
import threading
import weakref
from pathlib import Path

import pytest

from forge.runtime.device_memory import (
    CudaDriver,
    DeviceMemory,
    DeviceMemoryError,
    OutOfDeviceMemory,
    open_driver,
    release_dropped,
)
from stand_in_driver import PURPOSE, STEP, HostMemory, StandIn, is_there


@pytest.fixture
def gpu(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


def make(gpu: StandIn, num_bytes: int = STEP, **options: object) -> HostMemory:
    return HostMemory(gpu.driver(), num_bytes, purpose=PURPOSE, **options)  # type: ignore[arg-type]


def test_memory_comes_back_to_its_address(gpu: StandIn) -> None:
    memory = make(gpu, 2 * STEP)
    address = memory.address
    assert not memory.is_held
    assert gpu.used == 0
    memory.restore()
    whole = memory.tensor()
    assert (gpu.used, whole.data_ptr(), len(whole)) == (2 * STEP, address, 2 * STEP)
    whole.fill_(7)
    memory.release()
    assert (gpu.used, memory.is_held, is_there(address)) == (0, False, False)
    memory.restore()
    assert (gpu.used, memory.address, is_there(address)) == (2 * STEP, address, True)
    assert int(whole.max()) == 0, "it is other memory"
    whole.fill_(9)
    assert int(memory.tensor()[-1]) == 9


def test_taking_and_giving_back_twice_is_once(gpu: StandIn) -> None:
    memory = make(gpu)
    memory.release()
    memory.restore()
    memory.restore()
    assert gpu.used == STEP
    memory.release()
    memory.release()
    assert gpu.used == 0


@pytest.mark.parametrize(("asked", "given"), [(0, 1), (1, 1), (STEP, 1), (STEP + 1, 2)])
def test_sizes_are_what_a_driver_maps_at_once(gpu: StandIn, asked: int, given: int) -> None:
    assert make(gpu, asked).num_bytes == given * STEP


def test_the_device_is_waited_for_before_memory_goes(gpu: StandIn) -> None:
    memory = make(gpu)
    memory.restore()
    before = gpu.num_waits
    memory.release()
    assert gpu.num_waits == before + 1


def test_every_thread_has_the_context_while_it_calls_and_no_longer(gpu: StandIn) -> None:
    memory = make(gpu)
    thread = threading.Thread(target=memory.restore)
    thread.start()
    thread.join(600)
    assert memory.is_held
    gpu.driver().synchronize()
    assert gpu.depth == 0


def test_too_little_memory_is_told_with_sizes(gpu: StandIn) -> None:
    gpu.resize(3 * STEP)
    first = make(gpu, 2 * STEP)
    first.restore()
    second = make(gpu, 2 * STEP)
    with pytest.raises(OutOfDeviceMemory) as caught:
        second.restore()
    error = caught.value
    assert "GPU 0 has no room for a test" in str(error)
    assert (error.path, error.value, error.repair, error.code) == ("test.size", "0.003906 GiB", "ask for less", 2)
    assert "0.001953 GiB of 0.005859" in (error.rule or "")
    assert isinstance(error, MemoryError)
    assert pickle.loads(pickle.dumps(error)).code == 2
    assert (second.is_held, gpu.used, gpu.depth) == (False, 2 * STEP, 0)
    first.release()
    second.restore()
    assert second.is_held


def test_what_can_be_spared_is_freed_when_there_is_too_little(gpu: StandIn) -> None:
    gpu.resize(3 * STEP)
    idle = make(gpu, 2 * STEP)
    idle.restore()
    calls: list[str] = []

    def spare() -> None:
        calls.append("spared")
        idle.release()

    small, large = make(gpu, STEP, spare=spare), make(gpu, 2 * STEP, spare=spare)
    small.restore()
    assert calls == [], "there was enough"
    large.restore()
    assert calls == ["spared"]


@pytest.mark.parametrize("name", ["cuMemMap", "cuMemSetAccess"])
def test_what_fails_half_way_leaves_nothing_behind(gpu: StandIn, name: str) -> None:
    memory = make(gpu)
    gpu.fail(name, 1)
    with pytest.raises(DeviceMemoryError, match=f"refused {name}: CUDA_ERROR_INVALID_VALUE") as caught:
        memory.restore()
    assert (caught.value.path, caught.value.code) == ("GPU 0", 1)
    assert (memory.is_held, gpu.used, gpu.depth, is_there(memory.address)) == (False, 0, 0, False)
    gpu.fail(name, 0)
    memory.restore()
    assert is_there(memory.address)


@pytest.mark.parametrize("name", ["cuCtxSynchronize", "cuMemUnmap"])
def test_memory_that_a_driver_keeps_is_still_known(gpu: StandIn, name: str) -> None:
    memory = HostMemory(gpu.driver(), STEP, purpose=PURPOSE)
    memory.restore()
    for refused in (memory.release, memory.close):
        gpu.fail(name, 1)
        with pytest.raises(DeviceMemoryError, match=f"refused {name}"):
            refused()
        gpu.fail("", 0)
        assert (memory.is_held, gpu.used) == (True, STEP)
    memory.release()
    assert (memory.is_held, gpu.used) == (False, 0)
    memory.restore()
    assert gpu.used == STEP


def test_an_error_without_a_name_is_told_by_its_number(gpu: StandIn) -> None:
    gpu.fail("cuMemAddressReserve", 4711)
    with pytest.raises(DeviceMemoryError, match="an error without a name") as caught:
        make(gpu)
    assert caught.value.value == "cuMemAddressReserve = 4711 (an error without a name)"


def test_memory_that_is_not_there_is_refused(gpu: StandIn) -> None:
    memory = DeviceMemory(gpu.driver(), STEP, purpose=PURPOSE)
    with pytest.raises(DeviceMemoryError, match="there is no memory behind the addresses") as caught:
        memory.tensor()
    assert caught.value.path == "test.size"
    memory.restore()
    memory.close()
    assert gpu.used == 0
    with pytest.raises(DeviceMemoryError, match="the range was closed") as caught:
        memory.restore()
    assert "between `restore` and `release`" in (caught.value.rule or "")


def test_torch_is_told_where_memory_is(gpu: StandIn) -> None:
    memory = make(gpu)
    told = memory.__cuda_array_interface__
    assert told == {"shape": (STEP,), "typestr": "|u1", "data": (memory.address, False), "version": 3, "strides": None}


def test_memory_goes_with_its_last_tensor(gpu: StandIn) -> None:
    memory = make(gpu)
    memory.restore()
    address, gone, part = memory.address, weakref.ref(memory), memory.tensor()[5:9]
    del memory
    gc.collect()
    assert gone() is not None, "the tensor keeps it"
    assert is_there(address)
    del part
    gc.collect()
    assert gone() is None
    assert gpu.used == STEP, "the driver is left alone: somebody may be recording"
    release_dropped()
    assert (gpu.used, is_there(address)) == (0, False)


def test_what_was_dropped_makes_room_for_the_next(gpu: StandIn) -> None:
    gpu.resize(STEP)
    make(gpu).restore()
    gc.collect()
    make(gpu).restore()
    assert gpu.used == STEP


def test_a_driver_that_cannot_is_done_without(gpu: StandIn, tmp_path: Path) -> None:
    assert open_driver(0, library=str(tmp_path / "no_such_library.so")) is None
    assert open_driver(0, library="libc.so.6") is None, "it lacks the calls"
    assert isinstance(open_driver(0, library=gpu.path), CudaDriver)
    gpu.map_nothing()
    assert open_driver(0, library=gpu.path) is None


def test_a_driver_in_disorder_is_told(gpu: StandIn) -> None:
    gpu.fail("cuInit", 2)
    with pytest.raises(DeviceMemoryError, match="refused cuInit"):
        open_driver(0, library=gpu.path)
    gpu.fail("cuInit", 0)
    with pytest.raises(DeviceMemoryError, match="refused cuDeviceGet"):
        CudaDriver(ctypes.CDLL(gpu.path), 3)
