"""GPUs and threads: who gets which, never twice, and what is said when there are too few."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.errors import PlacementError
from forge.runtime.group import GroupSpec, RankGroup
from forge.runtime.hosts import Host, HostFacts
from forge.runtime.membership import Membership
from forge.runtime.placement import GpuLease, GpuPool, ThreadLedger, count_cpus, rank_environment, visible_gpus

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2"


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("0,-1,2", ("0",)),
        ("3,1", ("3", "1")),
        ("1,3", ("1", "3")),
        ("2,2,1,2", ("2", "1")),
        ("2,02,2", ("2",)),
        ("4", ()),
        ("0,4,1", ("0",)),
        ("0,,1", ("0",)),
        (" 1 , 2 ", ("1", "2")),
        (UUID, (UUID,)),
        (f"{UUID},{UUID}", (UUID,)),
        (f"{MIG},1", (MIG, "1")),
        ("none", ()),
        ("0,NoDevFiles,1", ("0",)),
        ("--1", ()),
        ("0,1-2,3", ("0",)),
        ("1.5", ()),
        ("²", ()),
    ],
)
def test_the_devices_that_a_process_may_use(wish: str | None, expected: tuple[str, ...]) -> None:
    environ = {} if wish is None else {"CUDA_VISIBLE_DEVICES": wish}
    assert visible_gpus(environ, 4) == expected


@pytest.mark.parametrize("wish", [None, "", "0", "0,1"])
def test_a_machine_without_gpus_has_none(wish: str | None) -> None:
    assert visible_gpus({} if wish is None else {"CUDA_VISIBLE_DEVICES": wish}, 0) == ()


@given(wish=st.text(alphabet="0123456789,- GMPUI²x", max_size=20), num_present=st.integers(0, 8))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_whatever_the_variable_says_no_device_is_named_twice_or_made_up(wish: str, num_present: int) -> None:
    found = visible_gpus({"CUDA_VISIBLE_DEVICES": wish}, num_present)
    assert len(set(found)) == len(found)
    for device in found:
        assert device.startswith(("GPU-", "MIG-")) or 0 <= int(device) < num_present


def free(pool: GpuPool) -> list[str]:
    return list(pool.free)


def test_the_lowest_free_gpus_are_leased_and_come_back() -> None:
    pool = GpuPool("box", ["0", "1", "5", "7"])
    first = pool.take(2, holder="policy")
    assert first == GpuLease("policy", ("0", "1"))
    assert free(pool) == ["5", "7"]
    second = pool.take(1, holder="reward")
    assert second.devices == ("5",)
    pool.release(first)
    assert free(pool) == ["0", "1", "7"]
    assert pool.take(3, holder="policy").devices == ("0", "1", "7")


def test_a_device_that_is_listed_twice_is_one_device() -> None:
    assert GpuPool("box", ["0", "1", "0"]).free == ("0", "1")


def test_too_few_says_what_was_asked_what_is_free_and_who_holds_the_rest() -> None:
    pool = GpuPool("box", ["0", "1", "2", "3"])
    pool.take(2, holder="trainer")
    pool.take(1, holder="judge")
    with pytest.raises(PlacementError) as caught:
        pool.take(2, holder="policy[1]")
    error = caught.value
    assert error.message == "policy[1] asked for 2 GPU(s) on host box, where 1 of 4 are free"
    assert (error.path, error.value) == ("options(procs=, with_gpus=True)", 2)
    assert error.rule == "at most 1 GPU(s): free ['3']; judge holds 2; trainer holds 0, 1"
    assert error.repair is not None
    assert "CUDA_VISIBLE_DEVICES" in error.repair
    assert pool.free == ("3",)


def test_a_host_without_gpus_says_so() -> None:
    with pytest.raises(PlacementError) as caught:
        GpuPool("box", []).take(1, holder="policy")
    assert caught.value.rule == "at most 0 GPU(s): free none; none is held"


def test_giving_back_twice_does_nothing() -> None:
    pool = GpuPool("box", ["0", "1"])
    lease = pool.take(1, holder="policy")
    pool.release(lease)
    pool.release(lease)
    assert free(pool) == ["0", "1"]
    pool.take(1, holder="judge")
    pool.release(lease)
    assert free(pool) == ["1"]


def test_an_old_lease_of_the_same_holder_frees_nothing() -> None:
    """Two actors of one class have the same label."""
    pool = GpuPool("box", ["0", "1"])
    old = pool.take(1, holder="Worker")
    pool.release(old)
    new = pool.take(1, holder="Worker")
    assert new.devices == old.devices
    pool.release(old)
    assert pool.free == ("1",)


Moves = st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.sampled_from(["a", "b"])), max_size=40)


@given(moves=Moves, num_gpus=st.integers(0, 4))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_no_gpu_ever_has_two_holders(moves: list[tuple[bool, int, str]], num_gpus: int) -> None:
    pool = GpuPool("box", [str(index) for index in range(num_gpus)])
    held: list[GpuLease] = []
    returned: list[GpuLease] = []
    for is_take, number, holder in moves:
        if is_take:
            num_free = num_gpus - sum(len(lease.devices) for lease in held)
            if number <= num_free:
                held.append(pool.take(number, holder=holder))
            else:
                with pytest.raises(PlacementError, match=f"where {num_free} of {num_gpus} are free"):
                    pool.take(number, holder=holder)
        elif number % 2 and returned:
            pool.release(returned[number % len(returned)])  # a second time
        elif held:
            returned.append(held.pop(number % len(held)))
            pool.release(returned[-1])
        taken = [device for lease in held for device in lease.devices]
        assert len(taken) == len(set(taken))
        assert sorted([*taken, *pool.free]) == sorted(pool.devices)


class RestlessName(str):
    """A device whose every look-up lets another thread run: what is not guarded is torn apart."""

    __slots__ = ()

    def __hash__(self) -> int:
        time.sleep(0)
        return super().__hash__()


def test_threads_that_take_and_give_back_never_share_a_gpu() -> None:
    pool = GpuPool("box", [RestlessName(index) for index in range(5)])
    in_use: dict[str, int] = {}
    guard = threading.Lock()
    start = threading.Barrier(4)

    def work(number: int) -> int:
        served = 0
        start.wait()
        for turn in range(100):
            try:
                lease = pool.take(1 + (turn + number) % 2, holder="same label")
            except PlacementError:
                continue
            with guard:
                for device in lease.devices:
                    assert in_use.setdefault(device, number) == number
            served += 1
            with guard:
                for device in lease.devices:
                    del in_use[device]
            pool.release(lease)
        return served

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(work, range(4))) > 0
    assert pool.free == pool.devices


# ---- threads of the CPU


def test_each_process_gets_one_thread_unless_more_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    ledger = ThreadLedger("box", 4)
    assert [ledger.claim(8, None), ledger.claim(2, 3)] == [1, 3]
    assert ledger.num_claimed == 14
    ledger.release(8, 1)
    ledger.release(2, 3)
    assert ledger.num_claimed == 0


def test_over_subscription_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    ledger = ThreadLedger("box", 4)
    with caplog.at_level(logging.WARNING, "forge.runtime"):
        ledger.claim(2, 2)
        assert caplog.messages == []
        ledger.claim(1, 1)
        ledger.claim(1, 1)
    assert len(caplog.messages) == 1
    assert "host box: 5 threads were asked for on 4 cores" in caplog.messages[0]


def test_the_default_of_one_thread_is_nothing_to_warn_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "forge.runtime"):
        ThreadLedger("box", 1).claim(8, None)
    assert caplog.messages == []


def test_this_process_may_use_a_core() -> None:
    assert count_cpus() >= 1


def test_ranks_are_numbered_as_torch_distributed_expects() -> None:
    expected = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    assert rank_environment(rank=5, local_rank=1, world_size=8, local_world_size=4) == expected


# ---- groups on hosts: placement runs for real, nothing is spawned


def make_host(name: str = "box", *, num_gpus: int = 4) -> Host:
    gpus = tuple(str(index) for index in range(num_gpus))
    return Host(name, None, address="127.0.0.1", facts=HostFacts(name, 8, gpus, pid=1))


def spec(label: str = "policy", *, procs: int = 1, with_gpus: bool = True, threads: int | None = None) -> GroupSpec:
    return GroupSpec(object, (), {}, label, num_procs=procs, with_gpus=with_gpus, num_threads=threads)


def devices_of(group: RankGroup) -> list[tuple[str, ...]]:
    return [lease.devices for _, lease in group._leases]


def test_two_groups_get_different_gpus_and_return_everything() -> None:
    host = make_host()
    first, second = RankGroup(spec(procs=2, threads=2), [host]), RankGroup(spec(procs=2), [host])
    first._place()
    second._place()
    assert devices_of(first) + devices_of(second) == [("0", "1"), ("2", "3")]
    assert (host.num_groups, host.threads.num_claimed) == (2, 6)
    first._return_everything()
    first._return_everything()
    assert host.gpus.free == ("0", "1")
    assert (host.num_groups, host.threads.num_claimed) == (1, 2)
    second._return_everything()
    assert (host.gpus.free, host.num_groups, host.threads.num_claimed) == (host.gpus.devices, 0, 0)


def test_a_group_without_gpus_takes_none() -> None:
    host = make_host()
    group = RankGroup(spec(with_gpus=False), [host])
    group._place()
    assert (devices_of(group), host.gpus.free) == ([], host.gpus.devices)


def test_a_group_that_does_not_fit_on_its_second_host_keeps_nothing_of_the_first() -> None:
    async def body() -> None:
        roomy, full = make_host("roomy"), make_host("full", num_gpus=1)
        group = RankGroup(spec(procs=2), [roomy, full])
        with pytest.raises(PlacementError, match=r"asked for 2 GPU.* on host full, where 1 of 1 are free"):
            await group.start()
        assert group.released.is_set()
        assert roomy.gpus.free == roomy.gpus.devices
        assert [(host.num_groups, host.threads.num_claimed) for host in (roomy, full)] == [(0, 0), (0, 0)]

    asyncio.run(body())


def test_every_rank_gets_its_numbers_the_meeting_point_and_its_threads() -> None:
    hosts = [make_host("one"), make_host("two")]
    group = RankGroup(spec(procs=2, threads=3), hosts)
    group._place()
    env = group._environment(3, 4711)
    assert {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")} == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
    }
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "4711")
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "3"


def test_groups_go_to_the_host_that_carries_the_fewest() -> None:
    one, two = make_host("one"), make_host("two")
    members = Membership((one, two))
    chosen = []
    for _ in range(4):
        hosts = members.pick(1, spec=spec(with_gpus=False))
        RankGroup(spec(with_gpus=False), hosts)._place()
        chosen.append(hosts[0].name)
    assert chosen == ["one", "two", "one", "two"]


def test_a_host_with_enough_gpus_is_preferred_to_an_idle_one_without() -> None:
    bare, busy = make_host("bare", num_gpus=1), make_host("busy")
    busy.num_groups = 9
    members = Membership((bare, busy))
    assert members.pick(1, spec=spec(procs=2)) == (busy,)
    assert members.pick(1, spec=spec(procs=2, with_gpus=False)) == (bare,)


def test_more_hosts_than_can_be_used_are_refused() -> None:
    hosts = [make_host(name) for name in ("one", "two", "three")]
    hosts[1].is_lost = True
    with pytest.raises(PlacementError) as caught:
        Membership(hosts).pick(3, spec=spec("policy"))
    error = caught.value
    assert error.message == "policy asked for 3 host(s), and 2 of 3 can be used"
    assert (error.path, error.value) == ("options(hosts=)", 3)
    assert error.rule == "at most 2: ['one', 'three']; lost: ['two']"
    assert error.repair
    assert Membership(hosts).pick(2, spec=spec("policy")) == (hosts[0], hosts[2])
