"""Actors on real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from actors import Cleaner, DiesInSetup, Extended, FailsInInit, FailsInSetup, HangsInInit, TaskFailed, Worker
from forge import endpoint
from forge.errors import ActorFailure, LaunchError, OptionError, PlacementError, RemoteError

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_one_actor_answers_with_monarchs_verbs(drive):
    async def body():
        worker = await Worker.options(procs=2, env={"MARK": "here"}).as_actor("blue")
        assert dict(worker.sizes) == {"procs": 2}
        every = [value for _, value in (await worker.describe.call()).items()]
        assert [facts["RANK"] for facts in every] == ["0", "1"]
        assert {facts["tag"] for facts in every} == {"blue"}
        assert {facts["MARK"] for facts in every} == {"here"}
        assert all(facts["is_ready"] for facts in every)
        first = worker.slice(procs=0)
        assert await first.add.call_one(1, right=5) == 6
        assert await worker.add.choose(2) == 3
        assert sorted([await reply for reply in worker.pid.stream()]) == sorted(worker.pids)
        worker.open.broadcast("gate")
        assert await first.hold.call_one("gate") in worker.pids

    drive(body())


def test_ranks_get_what_torch_distributed_needs(drive):
    async def body():
        worker = await Worker.options(procs=2).as_actor()
        every = [value for _, value in (await worker.describe.call()).items()]
        assert [facts["WORLD_SIZE"] for facts in every] == ["2", "2"]
        assert [facts["LOCAL_RANK"] for facts in every] == ["0", "1"]
        assert len({(facts["MASTER_ADDR"], facts["MASTER_PORT"]) for facts in every}) == 1
        assert [total for _, total in (await worker.all_reduce.call()).items()] == [3.0, 3.0]

    drive(body())


def test_threads_do_not_oversubscribe_and_can_be_chosen(drive):
    async def body():
        plain, wide = await asyncio.gather(Worker.as_actor(), Worker.options(num_threads=2).as_actor())
        assert (await plain.describe.call_one())["OMP_NUM_THREADS"] == "1"
        assert (await wide.describe.call_one())["OMP_NUM_THREADS"] == "2"
        assert (await plain.describe.call_one())["cuda"] == "", "an actor without GPUs sees none"

    drive(body())


def test_the_users_exception_is_raised_as_itself(drive):
    async def body():
        worker = await Worker.as_actor()
        with pytest.raises(TaskFailed) as caught:
            await worker.fail.call_one(4)
        assert caught.value.code == 4
        assert "raise TaskFailed(code)" in caught.value.remote_traceback
        assert "raise TaskFailed(code)" in "".join(caught.value.__notes__)
        for how, name in (("not picklable", "actors.NotPicklable"), ("exit", "builtins.SystemExit")):
            with pytest.raises(RemoteError) as stand_in:
                await worker.fail_oddly.call_one(how)
            assert stand_in.value.type_name == name
        with pytest.raises(RuntimeError, match="StopIteration"):
            await worker.fail_oddly.call_one("stop iteration")
        assert worker.is_alive
        assert await worker.pid.call_one() == worker.pids[0]

    drive(body())


def test_a_blocking_get_works_outside_an_event_loop(drive):
    async def body():
        worker = await Worker.as_actor()
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, lambda: worker.add.call_one(1).get(60)) == 2

    drive(body())


def test_a_killed_rank_fails_the_whole_actor_at_once(drive):
    async def body():
        worker = await Worker.options(procs=2).as_actor()
        pending = asyncio.ensure_future(worker.hold.call("never"))
        other = os.pidfd_open(worker.pids[1])
        os.kill(worker.pids[0], signal.SIGKILL)
        with pytest.raises(ActorFailure, match="rank 0"):
            await pending
        with pytest.raises(ActorFailure):
            await worker.pid.call()
        await _ended(other)
        assert not worker.is_alive
        again = await Worker.as_actor()  # the controller is unharmed
        assert await again.add.call_one(1) == 2

    drive(body())


async def _ended(pidfd: int) -> None:
    done = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, done.set)
    await done.wait()
    asyncio.get_running_loop().remove_reader(pidfd)
    os.close(pidfd)


@pytest.mark.alone  # what does not stop within five seconds is killed
def test_stopping_gives_everything_back_and_runs_cleanup(drive, tmp_path):
    async def body():
        cleaner = await Cleaner.as_actor(str(tmp_path / "mark"))
        await cleaner.ping.call_one()
        pidfd = os.pidfd_open(cleaner.pids[0])
        await cleaner.stop()
        await _ended(pidfd)
        await cleaner.stop()  # a second time does nothing
        with pytest.raises(ActorFailure, match="stopped"):
            await cleaner.ping.call_one()

    drive(body())
    assert (tmp_path / "mark").read_text() == "clean"


def test_failures_at_the_start_say_what_failed(drive):
    async def body():
        with pytest.raises(LaunchError, match=r"(?s)FailsInInit failed in its setup.*failed with 7"):
            await FailsInInit.as_actor()
        with pytest.raises(TaskFailed) as caught:
            await FailsInSetup.as_actor()
        assert caught.value.code == 8
        with pytest.raises(LaunchError, match="DiesInSetup died in its setup"):
            await DiesInSetup.as_actor()
        with pytest.raises(LaunchError, match="did not finish its setup") as late:
            await HangsInInit.options(setup_timeout_s=0.5).as_actor()
        assert "setup_timeout_s" in late.value.repair

    drive(body())


def test_options_never_change_the_class_and_unknown_ones_raise():
    spawner = Worker.options(procs=2)
    other = spawner.options(procs=3)
    assert (spawner.chosen.procs, other.chosen.procs, Worker.options().chosen.procs) == (2, 3, 1)
    with pytest.raises(OptionError, match="did you mean 'procs'"):
        Worker.options(proc=2)
    with pytest.raises(OptionError):
        spawner.options(colour="blue")


def test_more_than_there_is_is_refused(drive, monkeypatch):
    async def body():
        with pytest.raises(PlacementError, match="asked for 2 host"):
            await Worker.options(hosts=2).as_actor()
        with pytest.raises(PlacementError) as caught:
            await Worker.options(procs=3, with_gpus=True).as_actor()
        assert "0 of 0 are free" in caught.value.message
        assert await (await Worker.as_actor()).add.call_one(1) == 2  # nothing was lost

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    drive(body())


def test_serial_endpoints_keep_their_order_and_sync_ones_leave_the_loop_free(drive, tmp_path):
    async def body():
        worker = await Worker.as_actor()
        gate = tmp_path / "go"
        busy = asyncio.ensure_future(worker.block_thread.call_one(str(gate)))
        behind = asyncio.ensure_future(worker.add.call_one(1))
        await worker.open.call_one("x")  # concurrent: answers while the thread is busy
        assert not behind.done(), "a serial endpoint waits for its turn"
        gate.touch()
        assert await busy == worker.pids[0]
        assert await behind == 2

    drive(body())


@pytest.mark.alone
def test_the_calling_thread_may_block_without_harm(drive):
    """Supervision has its own thread: a controller that blocks its loop neither loses nor suspects anybody."""

    async def body():
        service = await Worker.options(heartbeat_s=0.05, heartbeat_timeout_s=6.0).as_service()
        time.sleep(8.0)  # longer than the heartbeat's limit: that is the test
        assert (await service.get_metrics()).restarts == 0
        assert await service.add.route(1) == 2

    drive(body())


def test_misuse_of_a_handle_is_explained(drive):
    async def body():
        worker = await Worker.as_actor()
        with pytest.raises(AttributeError, match="has no endpoint 'pidd'; its class declares: add,"):
            _ = worker.pidd
        with pytest.raises(TypeError, match="choose how to call it"):
            worker.pid()

    drive(body())


def test_odd_exceptions_do_no_harm(drive):
    async def body():
        service = await Worker.as_service()
        with pytest.raises(RuntimeError, match="StopIteration"):
            await service.fail_in_thread.route()
        sizes = []
        for _ in range(3):
            with pytest.raises(TaskFailed) as caught:
                await service.fail_again.route()
            sizes.append(len(caught.value.remote_traceback))
            assert len(caught.value.__notes__) == 1
        assert len(set(sizes)) == 1, "the actor's own object must not grow"
        assert await service.add.route(1) == 2

    drive(body())


def test_endpoints_are_methods_inside_their_actor(drive):
    async def body():
        extended = await Extended.as_actor("base")
        assert await extended.call_own.call_one(1) == 3
        facts = await extended.describe.call_one()
        assert facts["is_ready"]
        assert facts["tag"] == "base+"

    drive(body())


@pytest.mark.parametrize("env", [{"A=B": "1"}, {"": "1"}, {"A": "x\0y"}, {"RANK": "3"}, {"A": 1}])
def test_odd_variables_are_refused(env):
    with pytest.raises(OptionError, match="'env'"):
        Worker.options(env=env)


def test_endpoint_names_that_handles_use_are_refused():
    class Bad(Worker):
        @endpoint
        async def slice(self) -> None: ...

    with pytest.raises(OptionError, match="cannot be named 'slice'"):
        Bad.options()
