"""Services on real processes: routing, sessions, limits, batching, errors, handles in other processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter

import pytest

from actors import Caller, FailsInSetup, Owner, Scorer, TaskFailed, Worker
from forge.errors import ActorFailure, CallTimeout, FanoutError, OptionError, Overloaded, ServiceStopped
from forge.service import Outcome

pytestmark = pytest.mark.usefixtures("leaves_nothing")


async def settle() -> None:
    """Let every task that can run without the network run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def log_of(service, pid: int) -> list[str]:
    pids = await service.pid.fanout()
    return (await service.read_log.fanout())[pids.index(pid)]


def test_round_robin_is_fair(drive):
    async def body():
        service = await Worker.options(num_replicas=3).as_service("green")
        assert sorted(Counter([await service.pid.route() for _ in range(6)]).values()) == [2, 2, 2]
        assert sorted(Counter(await asyncio.gather(*(service.pid.route() for _ in range(6)))).values()) == [2, 2, 2]
        every = await service.describe.fanout()
        assert [facts["replica"] for facts in every] == ["0", "1", "2"]
        assert all(facts["is_ready"] and facts["tag"] == "green" for facts in every)

    drive(body())


def test_least_loaded_avoids_the_busy_replica(drive):
    async def body():
        service = await Worker.options(num_replicas=2, routing="least_loaded").as_service()
        held = asyncio.ensure_future(service.hold.route("gate"))
        await settle()
        busy = next(replica for replica in (await service.get_metrics()).replicas if replica.in_flight)
        assert busy.pids[0] not in {await service.pid.route() for _ in range(4)}
        await service.open.fanout("gate")
        assert await held == busy.pids[0]

    drive(body())


def test_a_users_router_chooses(drive):
    seen = []

    def last(states, request):
        seen.append((tuple(state.index for state in states), request.endpoint, request.attempt))
        return states[-1].index

    async def body():
        service = await Worker.options(num_replicas=3, routing=last).as_service()
        third = (await service.get_metrics()).replicas[2].pids[0]
        assert {await service.pid.route() for _ in range(4)} == {third}
        assert seen == [((0, 1, 2), "pid", 0)] * 4
        wrong = await Worker.options(num_replicas=2, routing=lambda states, request: 7).as_service()
        with pytest.raises(OptionError, match="did not choose one of the replicas"):
            await wrong.pid.route()

    drive(body())


def test_sessions_stick_and_belong_to_one_service(drive):
    async def body():
        service, other = await asyncio.gather(*(Worker.options(num_replicas=2).as_service() for _ in range(2)))
        async with service.session():
            mine = {await service.pid.route() for _ in range(4)}
            assert len(mine) == 1
            child = await asyncio.gather(*(asyncio.create_task(service.pid.route()) for _ in range(4)))
            assert set(child) == mine, "tasks that the session's task starts belong to it"
            assert len({await other.pid.route() for _ in range(4)}) == 2, "another service is not affected"
        assert len({await service.pid.route() for _ in range(4)}) == 2
        name = await service.start_session()
        pinned = service.pid.options(session=name)
        assert len({await pinned.route() for _ in range(4)}) == 1
        assert (await service.get_metrics()).num_sessions == 1
        await service.terminate_session(name)
        with pytest.raises(OptionError, match="has no session"):
            service.pid.options(session=name)
        with pytest.raises(OptionError, match="has no session"):
            await service.terminate_session(name)

    drive(body())


def test_hundreds_of_sessions_at_once_stay_balanced_and_leave_nothing(drive):
    async def body():
        service = await Worker.options(num_replicas=2, routing="least_loaded").as_service()
        started, looked_at = asyncio.Barrier(301), asyncio.Event()

        async def conversation(number):
            async with service.session():
                first = await service.pid.route()
                await started.wait()
                await looked_at.wait()
                if number % 10 == 0:
                    raise asyncio.CancelledError
                assert {await service.pid.route() for _ in range(2)} == {first}
                return first

        tasks = [asyncio.ensure_future(conversation(number)) for number in range(300)]
        await started.wait()
        metrics = await service.get_metrics()
        assert metrics.num_sessions == 300
        assert [replica.num_sessions for replica in metrics.replicas] == [150, 150]
        looked_at.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(each, asyncio.CancelledError) for each in found) == 30
        metrics = await service.get_metrics()
        assert (metrics.num_sessions, [replica.num_sessions for replica in metrics.replicas]) == (0, [0, 0])

    drive(body())


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
def test_a_session_moves_when_its_replica_is_lost(drive, routing):
    async def body():
        service = await Worker.options(num_replicas=2, routing=routing).as_service()
        async with service.session():
            first = await service.pid.route()
            pending = asyncio.ensure_future(service.hold.route("never"))
            await settle()
            os.kill(first, signal.SIGKILL)
            with pytest.raises(ActorFailure):
                await pending
            after = {await service.pid.route() for _ in range(4)}
            assert len(after) == 1
            assert first not in after

    drive(body())


def test_limits_queue_and_push_back(drive):
    async def body():
        service = await Worker.options(num_replicas=2, max_concurrency=1, max_queue=1).as_service()
        held = [asyncio.ensure_future(service.hold.route("gate")) for _ in range(2)]
        await settle()
        queued = asyncio.ensure_future(service.pid.route())
        await settle()
        metrics = await service.get_metrics()
        assert [replica.in_flight for replica in metrics.replicas] == [1, 1]
        assert metrics.num_waiting == 1
        with pytest.raises(Overloaded) as full:
            await service.pid.route()
        assert "max_queue" in full.value.repair
        await service.open.fanout("gate")  # a fanout is not held up by the limit
        assert len(set(await asyncio.gather(*held))) == 2
        assert await queued > 0
        metrics = await service.get_metrics()
        assert (metrics.num_waiting, metrics.num_rejected) == (0, 1)
        assert [replica.in_flight for replica in metrics.replicas] == [0, 0]

    drive(body())


def test_many_calls_through_few_slots_all_arrive(drive):
    async def body():
        service = await Worker.options(num_replicas=2, max_concurrency=2).as_service()
        pids = await asyncio.gather(*(service.nap.route(0.001) for _ in range(200)))
        assert sorted(Counter(pids).values())[0] > 0
        assert len(pids) == 200

    drive(body())


def test_a_time_out_cancels_the_request_and_frees_the_slot(drive):
    async def body():
        service = await Worker.options(max_concurrency=1, call_timeout_s=5.0).as_service()
        with pytest.raises(CallTimeout) as late:
            await service.hold.route("a")
        assert isinstance(late.value, TimeoutError)
        assert "call_timeout_s" in late.value.repair
        held = asyncio.ensure_future(service.hold.options(timeout_s=600).route("b"))
        await settle()
        with pytest.raises(CallTimeout, match="free slot"):
            await service.pid.route()
        await service.open.options(timeout_s=600).fanout("b")
        pid = await held
        assert await service.pid.options(timeout_s=600).route() == pid
        assert await service.read_log.options(timeout_s=600).fanout() == [["hold a", "cancelled a", "hold b"]]
        metrics = await service.get_metrics()
        assert (metrics.restarts, metrics.num_timeouts, metrics.replicas[0].in_flight) == (0, 2, 0)

    drive(body())


def test_cancelling_a_caller_cancels_the_request_never_the_replica(drive):
    async def body():
        service = await Worker.options(max_concurrency=1).as_service()
        caller = asyncio.ensure_future(service.hold_serial.route("a"))
        while not (await service.read_log.fanout())[0]:  # until the call has arrived
            pass
        waiting = asyncio.ensure_future(service.pid.route())
        await settle()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        pid = await waiting  # the slot was freed, and the serial endpoint's turn with it
        assert await log_of(service, pid) == ["hold a", "cancelled a"]
        assert (await service.get_metrics()).restarts == 0

    drive(body())


def test_cancelling_a_caller_that_waits_leaves_the_queue_intact(drive):
    async def body():
        service = await Worker.options(max_concurrency=1).as_service()
        held = asyncio.ensure_future(service.hold.route("a"))
        await settle()
        queue = [asyncio.ensure_future(service.pid.route()) for _ in range(3)]
        await settle()
        queue[0].cancel()
        await service.open.fanout("a")
        pid = await held
        assert await asyncio.gather(*queue[1:]) == [pid, pid]
        assert (await service.get_metrics()).num_waiting == 0

    drive(body())


def test_batches_fill_up_or_time_out(drive):
    async def body():
        service = await Scorer.as_service()
        answers = await asyncio.gather(*(service.double.route(item) for item in range(6)))
        assert answers == [0, 2, 4, 6, 8, 10]
        assert await service.read_sizes.route() == [4, 2]
        answers = await asyncio.gather(*(service.double.route(item) for item in (1, -2)), return_exceptions=True)
        assert answers[0] == 2
        assert isinstance(answers[1], TaskFailed), "an item's exception is its caller's alone"
        gone = asyncio.ensure_future(service.double.route(1))
        kept = asyncio.ensure_future(service.double.route(2))
        await asyncio.sleep(0)  # once: both are in the batch, and its time cannot be over in the same turn of the loop
        gone.cancel()
        assert await kept == 4
        assert (await service.read_sizes.route())[-1] == 1, "an item whose caller has gone is not sent"
        assert await service.double.fanout(5) == [10]

    drive(body())


def test_batches_refuse_what_cannot_be_batched(drive):
    async def body():
        service = await Scorer.as_service()
        with pytest.raises(OptionError, match="one item a call"):
            await service.double.route(1, 2)
        outcomes = await asyncio.gather(*(service.short.route(item) for item in range(2)), return_exceptions=True)
        assert all(isinstance(outcome, OptionError) and "1 answers" in str(outcome) for outcome in outcomes)

    drive(body())


def test_the_users_exception_reaches_the_caller_and_the_replica_stays(drive):
    async def body():
        service = await Worker.options(num_replicas=2).as_service()
        before = await service.pid.fanout()
        for code in range(4):
            with pytest.raises(TaskFailed) as caught:
                await service.fail.route(code)
            assert caught.value.code == code
            assert "raise TaskFailed(code)" in caught.value.remote_traceback
        with pytest.raises(TypeError, match="unexpected keyword"):
            await service.add.route(1, wrong=2)
        assert await service.pid.fanout() == before
        metrics = await service.get_metrics()
        assert metrics.restarts == 0
        assert sum(replica.num_errors for replica in metrics.replicas) == 5

    drive(body())


def test_fanout_never_hides_a_failure(drive):
    async def body():
        service = await Worker.options(num_replicas=3).as_service()
        pids = await service.pid.fanout()
        assert len(set(pids)) == 3
        with pytest.raises(FanoutError, match="1 of 3 replicas failed") as caught:
            await service.fail_on.fanout(pids[1])
        assert [outcome.ok for outcome in caught.value.outcomes] == [True, False, True]
        assert isinstance(caught.value.__cause__, TaskFailed)
        partial = await service.fail_on.options(partial=True).fanout(pids[1])
        assert partial[0] == Outcome(0, pids[0])
        assert isinstance(partial[1].error, TaskFailed)

    drive(body())


def test_two_services_of_one_class_are_independent(drive):
    async def body():
        one, two = await asyncio.gather(
            Worker.options(num_replicas=1, mesh_name="one").as_service("1"),
            Worker.options(num_replicas=2, mesh_name="two").as_service("2"),
        )
        assert {facts["tag"] for facts in await one.describe.fanout()} == {"1"}
        assert {facts["tag"] for facts in await two.describe.fanout()} == {"2"}
        await one.shutdown()
        with pytest.raises(ServiceStopped, match="one was shut down"):
            await one.pid.route()
        assert len(await two.pid.fanout()) == 2
        await one.shutdown()

    drive(body())


def test_a_replica_of_several_ranks_answers_as_one(drive):
    async def body():
        service = await Worker.options(num_replicas=2, procs=2).as_service()
        assert (await service.describe.route())["RANK"] == "0"
        ranks = await service.describe.options(all_ranks=True).route()
        assert [facts["RANK"] for facts in ranks] == ["0", "1"]
        assert len({pid for replica in (await service.get_metrics()).replicas for pid in replica.pids}) == 4

    drive(body())


def test_a_handle_works_in_other_processes(drive):
    async def body():
        service = await Worker.options(num_replicas=2, max_concurrency=8).as_service()
        caller = await Caller.as_actor(service)
        pids = await service.pid.fanout()
        assert Counter(await caller.call.call_one(4)) == Counter(pids * 2)
        assert await caller.same_service.call_one(service)
        pending = asyncio.ensure_future(caller.hold.call_one("never"))
        victim = await _holder(service)
        retried = [asyncio.ensure_future(caller.nap.call_one(0.2)) for _ in range(8)]
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(ActorFailure):
            await pending
        assert len(await asyncio.gather(*retried)) == 8
        await service.wait_until(lambda metrics: metrics.num_healthy == 2 and metrics.restarts == 1)
        fresh = await service.pid.fanout()
        assert victim not in fresh
        while set(await caller.call.call_one(2)) != set(fresh):
            pass  # the caller's own table hears of the restart a moment after the owner's
        assert Counter(await caller.call.call_one(4)) == Counter(fresh * 2)

    drive(body())


async def _holder(service) -> int:
    """The replica that a call from elsewhere has reached."""
    while True:
        pids, logs = await service.pid.fanout(), await service.read_log.fanout()
        for pid, log in zip(pids, logs, strict=True):
            if log:
                return pid


def test_a_service_can_be_started_inside_an_actor(drive):
    async def body():
        owner = await Owner.as_actor()
        pids = await owner.call.call_one()
        assert len(set(pids)) == 2
        await owner.close.call_one()

    drive(body())


def test_a_service_ends_with_the_actor_that_started_it(drive):
    async def body():
        owner = await Owner.as_actor()
        inner = [os.pidfd_open(pid) for pid in await owner.call.call_one()]
        os.kill(owner.pids[0], signal.SIGKILL)
        for pidfd in inner:
            ended = asyncio.Event()
            asyncio.get_running_loop().add_reader(pidfd, ended.set)
            await ended.wait()
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    drive(body())


def test_a_service_that_cannot_start_leaves_nothing(drive):
    async def body():
        with pytest.raises(TaskFailed):
            await FailsInSetup.options(num_replicas=3).as_service()
        assert (await (await Worker.as_service()).add.route(1)) == 2

    drive(body())


def test_misuse_is_explained(drive):
    async def body():
        service = await Worker.as_service()
        with pytest.raises(TypeError, match=r"pid.route\(...\) or pid.fanout"):
            service.pid()
        with pytest.raises(AttributeError, match="has no endpoint 'pidd'"):
            _ = service.pidd
        with pytest.raises(OptionError, match="no 'time'"):
            service.pid.options(time=3)

    drive(body())
