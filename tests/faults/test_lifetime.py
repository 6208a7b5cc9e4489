"""However a controller ends, nothing of it stays: no process, no shared memory, no socket."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import forge
from actors import Worker
from signals import hear_ctrl_c

pytestmark = pytest.mark.alone

CONTROLLER = Path(__file__).parents[1] / "support" / "controller.py"
GRACE_S = 120
"""How long workers may take to end by themselves. Seen: well under a second."""


class Controllers:
    """Starts controllers, each in a process group of its own (as a terminal starts it), with a folder for what they
    leave that is nobody else's."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, how: str) -> tuple[subprocess.Popen[str], list[int]]:
        """A controller, and pidfds of its workers."""
        controller = subprocess.Popen(
            [sys.executable, str(CONTROLLER), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"TMPDIR": self.folder},
            preexec_fn=hear_ctrl_c,
        )
        self.started.append(controller)
        assert controller.stdin is not None
        assert controller.stdout is not None
        pids = json.loads(controller.stdout.readline())
        assert len(pids) == 4
        pidfds = [os.pidfd_open(pid) for pid in pids]
        controller.stdin.write("go on\n")
        controller.stdin.flush()
        return controller, pidfds

    def left(self) -> set[str]:
        """What a run could leave in the file system."""
        return set(os.listdir("/dev/shm")) | set(os.listdir(self.folder))


@pytest.fixture
def controllers() -> Iterator[Controllers]:
    with tempfile.TemporaryDirectory(prefix="forge-", dir="/tmp") as folder:  # short: it has room for socket names
        started = Controllers(folder)
        yield started
        for controller in started.started:
            controller.kill()
            controller.wait()


def still_running(pidfds: list[int], *, grace_s: float = GRACE_S) -> int:
    """How many of the processes have not ended within the grace time."""
    left = set(pidfds)
    while left:
        gone, _, _ = select.select(list(left), [], [], grace_s)
        if not gone:
            break
        left -= set(gone)
    for pidfd in pidfds:
        os.close(pidfd)
    return len(left)


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("exception", 1)])
def test_the_end_of_the_block_ends_everything(how, code, controllers):
    before = controllers.left()
    controller, workers = controllers.start(how)
    told, errors = controller.communicate(timeout=600)
    assert controller.returncode == code
    assert json.loads(told) == ["MainThread"]  # one that waited in Monarch's code could abort the process
    assert ("the user's own mistake" in errors) == (how == "exception")
    assert still_running(workers) == 0
    assert controllers.left() - before == set()


@pytest.mark.parametrize("whom", ["the whole group, as a terminal does", "the controller alone"])
def test_ctrl_c_ends_everything(whom, controllers):
    before = controllers.left()
    controller, workers = controllers.start("wait")
    if whom.startswith("the whole"):
        os.killpg(controller.pid, signal.SIGINT)
    else:
        controller.send_signal(signal.SIGINT)
    _, errors = controller.communicate(timeout=600)
    assert "KeyboardInterrupt" in errors
    assert errors.count("Traceback") <= 2, "workers must not answer Ctrl-C with tracebacks of their own:\n" + errors
    assert still_running(workers) == 0
    assert controllers.left() - before == set()


def test_workers_do_not_outlive_a_controller_that_is_killed(controllers):
    controller, workers = controllers.start("wait")
    controller.kill()
    controller.communicate(timeout=600)
    assert still_running(workers) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_controller_that_is_told_to_end_ends_in_order(controllers, number):
    before = controllers.left()
    controller, workers = controllers.start("wait")
    for worker in workers:  # as a scheduler does; it is the controller who ends them
        signal.pidfd_send_signal(worker, number)
    controller.send_signal(number)
    _, errors = controller.communicate(timeout=600)
    assert controller.returncode == 128 + number
    assert "Traceback" not in errors
    assert still_running(workers) == 0
    assert controllers.left() - before == set()


def test_a_program_that_just_ends_takes_its_processes_with_it(controllers):
    controller, workers = controllers.start("forget")
    told, errors = controller.communicate(timeout=600)
    assert controller.returncode == 0
    assert json.loads(told) == ["MainThread"]
    assert "was lost" not in errors
    assert still_running(workers) == 0


ENDS = """
import asyncio, atexit
from forge.runtime.backend import this_host
from monarch._src.actor import actor_mesh

this_host()  # registers Monarch's handler, which runs last
atexit.register(lambda: print("client stopped:", actor_mesh._shutdown_claimed))

import forge

async def main():
    async with forge.run():
        pass

asyncio.run(main())
"""


def test_monarch_has_nothing_left_to_stop_when_a_program_ends():
    """Its own handler waits one second, and prints a traceback on a busy machine."""
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert "client stopped: True" in ended.stdout


NESTED = """
import asyncio, sys
import forge
from pathlib import Path

FOLDER = Path(sys.argv[1])

class Inner(forge.ForgeActor):
    @forge.endpoint
    async def ping(self) -> None: ...

    async def __cleanup__(self, error):
        (FOLDER / "inner").touch()

class Outer(forge.ForgeActor):
    @forge.endpoint
    async def own(self) -> None:
        self.inner = await Inner.as_actor()

async def main():
    async with forge.run():
        outer = await Outer.as_actor()
        await outer.own.call_one()
        await outer.stop()

asyncio.run(main())
"""


def test_an_actor_that_owns_others_ends_without_starting_monarch_again(tmp_path):
    """A second client of Monarch, started only to stop what the actor owned, takes two seconds."""
    command = [sys.executable, "-c", NESTED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert "Monarch internal logs" not in ended.stdout + ended.stderr  # the controller shows its own in its log only
    assert (tmp_path / "inner").exists(), "the owned actor was stopped in order"


def test_shutdown_can_be_repeated_and_the_runtime_used_again():
    async def once() -> list[int]:
        await forge.shutdown()
        worker = await Worker.options(procs=2).as_actor()
        pidfds = [os.pidfd_open(pid) for pid in worker.pids]
        await forge.shutdown()
        await forge.shutdown()
        return pidfds

    pidfds = [pidfd for _ in range(2) for pidfd in asyncio.run(once())]
    assert still_running(pidfds, grace_s=0) == 0  # though their parent may still have to reap them


def test_a_cancelled_block_still_cleans_up():
    async def body() -> list[int]:
        started: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

        async def inside() -> None:
            async with forge.run():
                worker = await Worker.as_actor()
                started.set_result([os.pidfd_open(pid) for pid in worker.pids])
                await worker.hold.call_one("never")

        task = asyncio.create_task(inside())
        pidfds = await started
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pidfds

    assert still_running(asyncio.run(body()), grace_s=0) == 0


def test_kills_leak_nothing(drive):
    """Processes, file descriptors and threads return to what they were; memory stays within noise."""
    process = psutil.Process()

    def held() -> tuple[int, int, int]:
        gc.collect()
        return len(process.children(recursive=True)), process.num_fds(), process.memory_info().rss

    async def body() -> None:
        service = await Worker.options(num_replicas=2).as_service()
        counts = []
        for kill in range(14):
            if kill in (4, 13):
                counts.append(held())
            os.kill(await service.pid.route(), signal.SIGKILL)
            await service.wait_until(lambda metrics, kill=kill: metrics.restarts == kill + 1, timeout_s=600)
            assert await service.pid.route() > 0
        (children, fds, memory), (children_after, fds_after, memory_after) = counts
        assert children_after == children
        assert fds_after <= fds + 4
        assert memory_after - memory < 19 * 2**20, "9 restarts; Monarch itself keeps about 0.5 MB of each"

    drive(body())


def test_calls_leave_nothing_behind(drive):
    """A port of Monarch's for each call would keep about 1.2 kB of it: 24 MB here, gigabytes in a long run."""
    process = psutil.Process()

    async def body() -> None:
        service = await Worker.options(num_replicas=2).as_service()

        async def call(times: int) -> None:
            for _ in range(times):
                await service.pid.route()

        async def memory_after(times: int) -> int:
            await asyncio.gather(*(call(times // 64) for _ in range(64)))
            gc.collect()
            return process.memory_info().rss

        before = await memory_after(3_000)
        assert await memory_after(20_000) - before < 8 * 2**20

    drive(body())
