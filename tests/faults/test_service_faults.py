"""What a service survives: kills under load, hangs, lost ranks, crash loops. Real processes, real signals."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest

from actors import Caller, DiesSoon, DiesWhenRestarted, Holder, Owner, SlowToStart, Worker
from forge.errors import ActorFailure, LaunchError, ServiceStopped

pytestmark = pytest.mark.usefixtures("leaves_nothing")
NUM_CALLERS = 64


async def ended(pidfd: int) -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, done.set)
    await done.wait()
    loop.remove_reader(pidfd)
    os.close(pidfd)


async def recovered(service, *, restarts: int) -> None:
    await service.wait_until(
        lambda metrics: metrics.restarts >= restarts and metrics.num_healthy == len(metrics.replicas), timeout_s=600
    )


def test_kill_under_load_loses_no_call_that_may_be_retried(drive):
    async def body():
        service = await Worker.options(num_replicas=3).as_service()
        kills_left, served = 3, 0
        stop = asyncio.Event()

        async def caller() -> int:
            count = 0
            while not stop.is_set():
                assert await service.nap.route(0.005) > 0
                count += 1
            return count

        callers = [asyncio.create_task(caller()) for _ in range(NUM_CALLERS)]
        for kill in range(kills_left):
            victim = (await service.get_metrics()).replicas[kill]
            os.kill(victim.pids[0], signal.SIGKILL)
            await recovered(service, restarts=kill + 1)
        stop.set()
        served = sum(await asyncio.gather(*callers))
        metrics = await service.get_metrics()
        assert metrics.restarts == 3
        assert metrics.num_retried >= 1, "no call was in flight at any kill: the test shows nothing"
        assert served == sum(replica.num_ok for replica in metrics.replicas)
        assert {facts["is_ready"] for facts in await service.describe.fanout()} == {True}, "setup ran again"

    drive(body())


def test_kill_under_load_raises_for_calls_that_may_not_be_retried(drive):
    async def body():
        service = await Worker.options(num_replicas=2).as_service()
        victim, other = (replica.pids[0] for replica in (await service.get_metrics()).replicas)
        calls = [asyncio.ensure_future(service.hold.route("gate")) for _ in range(NUM_CALLERS)]
        await _all_arrived(service, NUM_CALLERS)
        os.kill(victim, signal.SIGKILL)
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert await service.pid.route() > 0, "calls to the others go on meanwhile"
        await service.open.fanout("gate")
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        lost = [outcome for outcome in outcomes if isinstance(outcome, ActorFailure)]
        assert len(lost) == NUM_CALLERS // 2
        assert all("was lost" in str(failure) for failure in lost)
        assert {outcome for outcome in outcomes if outcome not in lost} == {other}
        await recovered(service, restarts=1)

    drive(body())


async def _all_arrived(service, count: int) -> None:
    while sum(len(log) for log in await service.read_log.fanout()) < count:
        pass


def test_a_call_that_kills_its_replica_is_retried_elsewhere(drive, tmp_path):
    async def body():
        service = await Worker.options(num_replicas=2).as_service()
        assert await service.die_in.route(str(tmp_path)) in await service.pid.fanout()
        await recovered(service, restarts=1)
        with pytest.raises(ActorFailure):
            await service.die.route()
        await recovered(service, restarts=2)

    drive(body())


def test_calls_wait_while_the_only_replica_restarts(drive):
    async def body():
        service = await Worker.as_service()
        first = await service.pid.route()
        os.kill(first, signal.SIGKILL)
        answers = await asyncio.gather(*(service.pid.route() for _ in range(NUM_CALLERS)))
        assert first not in answers
        assert len(set(answers)) == 1

    drive(body())


@pytest.mark.alone
@pytest.mark.parametrize("fault", ["blocked event loop", "SIGSTOP"])
def test_a_hung_replica_is_found_by_its_heartbeat(drive, fault):
    async def body():
        service = await Worker.options(num_replicas=2, heartbeat_s=0.1, heartbeat_timeout_s=4.0).as_service()
        victim = (await service.get_metrics()).replicas[0].pids[0]
        pidfd = os.pidfd_open(victim)
        calls = [asyncio.ensure_future(service.hold.route("never")) for _ in range(2)]
        await _all_arrived(service, 2)
        if fault == "SIGSTOP":
            os.kill(victim, signal.SIGSTOP)
        else:
            calls.append(asyncio.ensure_future(service.block_loop.route(1000)))
        failed, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        with pytest.raises(ActorFailure, match="no heartbeat"):
            failed.pop().result()
        for call in waiting:
            call.cancel()
        await ended(pidfd)
        await recovered(service, restarts=1)
        assert victim not in await service.pid.fanout()

    drive(body())


@pytest.mark.alone
def test_a_busy_replica_is_not_taken_for_hung(drive, tmp_path):
    async def body():
        service = await Worker.options(heartbeat_s=0.05, heartbeat_timeout_s=6.0).as_service()
        gate = tmp_path / "go"
        busy = asyncio.ensure_future(service.block_thread.route(str(gate)))
        done, _ = await asyncio.wait({busy}, timeout=15.0)  # more than twice the limit, in a plain `def` endpoint
        assert not done
        gate.touch()
        assert await busy == await service.pid.route()
        assert (await service.get_metrics()).restarts == 0

    drive(body())


def test_one_lost_rank_replaces_the_whole_replica(drive):
    async def body():
        service = await Worker.options(num_replicas=2, procs=2).as_service()
        before = (await service.get_metrics()).replicas[0]
        survivor = os.pidfd_open(before.pids[0])
        os.kill(before.pids[1], signal.SIGKILL)
        await recovered(service, restarts=1)
        await ended(survivor)
        after = (await service.get_metrics()).replicas[0]
        assert len(after.pids) == 2
        assert not set(after.pids) & set(before.pids)
        assert await service.all_reduce.options(all_ranks=True).route() == (3.0, 3.0)

    drive(body())


def test_a_replica_that_keeps_dying_is_given_up(drive, tmp_path, caplog):
    async def body():
        options = DiesWhenRestarted.options(num_replicas=2, max_restarts=2, restart_backoff_s=0.01)
        service = await options.as_service(str(tmp_path))
        first, second = (replica.pids[0] for replica in (await service.get_metrics()).replicas)
        os.kill(first, signal.SIGKILL)
        metrics = await service.wait_until(lambda metrics: metrics.replicas[0].health == "given_up", timeout_s=600)
        assert metrics.num_healthy == 1
        assert "failed with 5" in metrics.replicas[0].last_failure
        assert {await service.pid.route() for _ in range(4)} == {second}
        os.kill(second, signal.SIGKILL)
        with pytest.raises(ServiceStopped, match="all were dropped") as caught:
            await _until_stopped(service)
        assert "failed with 5" in str(caught.value)

    with caplog.at_level(logging.WARNING, logger="forge.service"):
        drive(body())
    said = [
        record.getMessage() for record in caplog.records if "dropped after 2 failed restarts" in record.getMessage()
    ]
    assert len(said) == 2


async def _until_stopped(service) -> None:
    """A first call may still meet the dying replica; one that comes later must be told that nobody is left."""
    while True:
        try:
            await service.pid.route()
        except ActorFailure:
            continue


def test_the_first_restart_is_at_once_and_later_ones_back_off(drive, tmp_path):
    """Checked on the supervisor's own waits, not on the clock."""

    async def body():
        from forge.runtime.control import control
        from forge.service.supervisor import Supervisor

        service = await Worker.options(restart_backoff_s=0.25, max_backoff_s=1.0).as_service()
        waits: list[float] = []

        class Recorded(Supervisor):
            async def sleep(self, seconds: float) -> None:
                waits.append(seconds)

        supervisor = Recorded(service._supervisor.spec, service._options, service._table)
        for tries in range(5):
            await control().submit(supervisor._back_off(tries))
        assert waits == [0.25, 0.5, 1.0, 1.0]

    drive(body())


@pytest.mark.parametrize("what", ["service", "actor"])
def test_stopping_under_load_leaves_the_controller_alone(drive, what):
    """Messages that reach a rank which has just stopped in order come back to the controller: that is no fault."""

    async def body():
        for _ in range(3):
            if what == "service":
                victim = await Worker.options(num_replicas=2).as_service()
                call, stop = victim.pid.route, victim.shutdown
            else:
                victim = await Worker.as_actor()
                call, stop = victim.pid.call_one, victim.stop

            async def caller(call=call) -> None:
                while True:
                    await call()

            callers = [asyncio.create_task(caller()) for _ in range(NUM_CALLERS)]
            await asyncio.gather(*(call() for _ in range(NUM_CALLERS)))
            await stop()
            outcomes = await asyncio.gather(*callers, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} <= {ActorFailure, ServiceStopped}
        assert await (await Worker.as_service()).add.route(1) == 2

    drive(body())


def test_a_replica_that_comes_up_and_never_serves_is_given_up(drive):
    async def body():
        service = await DiesSoon.options(
            max_restarts=2, restart_backoff_s=0.01, stable_s=60, heartbeat_s=0.02
        ).as_service()
        metrics = await service.wait_until(lambda metrics: metrics.replicas[0].health == "given_up", timeout_s=600)
        assert metrics.restarts == 2, "its setup does not count as having served"

    drive(body())


def make_pipe(folder: Path) -> str:
    """A named pipe through which processes say that they have started."""
    path = str(folder / "pids")
    os.mkfifo(path)
    return path


async def started(path: str, count: int) -> list[int]:
    """Pidfds of the first `count` processes that wrote their pid into the pipe."""
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    loop, complete, said = asyncio.get_running_loop(), asyncio.Event(), bytearray()

    def read() -> None:
        said.extend(os.read(pipe, 1024))
        if said.count(b"\n") >= count:
            complete.set()

    loop.add_reader(pipe, read)
    await complete.wait()
    loop.remove_reader(pipe)
    os.close(pipe)
    return [os.pidfd_open(int(line)) for line in said.split()]


def test_a_cancelled_start_leaves_nothing(drive, tmp_path):
    async def body():
        pipe = make_pipe(tmp_path)
        start = asyncio.ensure_future(SlowToStart.options(num_replicas=2).as_service(pipe))
        one = asyncio.ensure_future(SlowToStart.as_actor(pipe))
        pidfds = await started(pipe, 3)
        for task in (start, one):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        for pidfd in pidfds:
            await ended(pidfd)

    drive(body())


def test_the_end_of_a_block_ends_what_is_still_starting(tmp_path):
    import forge

    async def body():
        async with forge.run():
            pipe = make_pipe(tmp_path)
            start = asyncio.ensure_future(SlowToStart.options(num_replicas=2).as_service(pipe))
            pidfds = await started(pipe, 2)
        for pidfd in pidfds:
            await ended(pidfd)
        with pytest.raises((ServiceStopped, LaunchError, asyncio.CancelledError)):
            await start

    asyncio.run(body())


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_can_be_lost_while_it_boots(drive, sent):
    """Before it can say who it is: the start fails, or is stopped, and the process is gone."""

    async def body():
        from forge.runtime.process_watch import find_ranks

        start = asyncio.ensure_future(Worker.options(mesh_name=f"boot{sent}", spawn_timeout_s=5).as_actor())
        found: list[int] = []
        while not found:
            await asyncio.sleep(0)
            found = [pid for pid in _children() if f"boot{sent}" in _group_of(pid)]
        pidfd = os.pidfd_open(found[0])  # before the signal: the parent reaps a dead process at once
        os.kill(found[0], sent)
        with pytest.raises(LaunchError):
            await start
        await ended(pidfd)
        assert find_ranks("nobody") == {}

    drive(body())


def _children() -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process().children()]


def _group_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return ""
    return next((word.decode() for word in words if word.startswith(b"FORGE_GROUP=")), "")


def test_ranks_are_known_whatever_the_users_code_does_to_the_environment(drive):
    async def body():
        service = await Worker.options(procs=2, heartbeat_s=0.1, heartbeat_timeout_s=30.0).as_service()
        for value in ("0", None):
            await service.change_rank.route(value)
            assert len(await service.pid.options(all_ranks=True).route()) == 2
        assert (await service.get_metrics()).restarts == 0

    drive(body())


@pytest.mark.alone
def test_a_handle_elsewhere_hears_of_the_end_of_its_service(drive):
    async def body():
        service = await Worker.options(heartbeat_s=0.1, heartbeat_timeout_s=4.0).as_service()
        used, unused = await asyncio.gather(*(Caller.as_actor(service) for _ in range(2)))
        assert len(await used.call.call_one(1)) == 1
        pending = asyncio.ensure_future(used.hold.call_one("never"))
        while not (await service.read_log.fanout())[0]:
            pass
        await service.shutdown()
        with pytest.raises((ActorFailure, ServiceStopped)):
            await pending
        for caller in (used, unused):
            with pytest.raises(ServiceStopped):
                await caller.call.call_one(1)

    drive(body())


def test_a_handle_elsewhere_hears_of_the_death_of_its_owner(drive):
    async def body():
        owner = await Owner.as_actor(8)
        service = await owner.handle.call_one()
        assert len(await service.pid.fanout()) == 2
        pending = asyncio.ensure_future(service.hold.route("never"))
        while not any(await service.read_log.fanout()):
            pass
        os.kill(owner.pids[0], signal.SIGKILL)
        with pytest.raises((ActorFailure, ServiceStopped)):
            await pending
        with pytest.raises(ServiceStopped, match="shut down"):
            await service.pid.route()

    drive(body())


def test_groups_of_other_processes_are_never_taken_for_ones_own(drive):
    async def body():
        holders = await Holder.options(procs=3).as_actor()
        seen: set[int] = set()
        for believed, real in (await holders.believed_and_real.call()).values():
            assert believed == real
            assert not seen & set(real)
            seen |= set(real)

    drive(body())


@pytest.mark.parametrize("end", ["kill -9", "shutdown"])
def test_what_a_replica_has_started_ends_with_it(drive, tmp_path, end):
    async def body():
        service = await Worker.as_service()
        pipe = make_pipe(tmp_path)
        children = asyncio.ensure_future(started(pipe, 2))
        await service.start_children.route(pipe)
        pidfds = await children
        if end == "kill -9":
            os.kill(await service.pid.route(), signal.SIGKILL)
        else:
            await service.shutdown()
        for pidfd in pidfds:
            await ended(pidfd)

    drive(body())


def test_a_subprocess_during_boot_is_not_taken_for_the_rank(drive, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import subprocess\nsubprocess.run(['sleep', '0.3'])\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def body():
        service = await Worker.options(num_replicas=2).as_service()
        assert [replica.pids[0] for replica in (await service.get_metrics()).replicas] == await service.pid.fanout()

    drive(body())


def test_an_actor_that_fails_in_a_living_process_is_replaced(drive):
    """No pidfd sees it, and the heartbeat would take 30 s: Monarch's own word is the backstop."""

    async def body():
        service = await Worker.as_service()
        first = await service.pid.route()
        await service.cancel_everything.route()
        await service.wait_until(lambda metrics: metrics.restarts == 1, timeout_s=600)
        assert await service.pid.route() != first

    drive(body())


@pytest.mark.alone
def test_a_handle_elsewhere_recovers_from_a_stall_of_its_own_process(drive):
    async def body():
        service = await Worker.options(heartbeat_s=0.1, heartbeat_timeout_s=5.0).as_service()
        caller = await Caller.as_actor(service)
        pids = await caller.call.call_one(2)
        os.kill(caller.pids[0], signal.SIGSTOP)
        done, _ = await asyncio.wait({asyncio.ensure_future(service.hold.route("never"))}, timeout=12.0)
        assert not done
        os.kill(caller.pids[0], signal.SIGCONT)
        while True:
            try:
                assert await caller.call.call_one(2) == pids
                break
            except ServiceStopped:
                continue  # it has not heard the owner yet

    drive(body())
