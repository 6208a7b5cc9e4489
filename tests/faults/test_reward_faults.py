"""Worker processes of rewards: whatever a function does costs one call, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge.config.rewards import RewardConfig, RewardsConfig
from forge.rollout.reward_actor import RewardActor
from forge.rollout.reward_workers import RewardFailed, RewardWorkers, pack
from forge.types import Completion, Task

pytestmark = pytest.mark.usefixtures("leaves_nothing")
LIMIT_S = 600


def completion(text: str = "2.5") -> Completion:
    return Completion((1,), (2, 3), (-0.1, -0.2), None, text, "stop")


def function(name: str, /, **args: Any) -> RewardConfig:
    return RewardConfig(kind=f"reward_functions:{name}", args=args)


def run(
    functions: list[RewardConfig], body: Callable[[RewardWorkers], Awaitable[None]], *, num_workers: int = 1
) -> None:
    async def inside() -> None:
        workers = RewardWorkers(functions, num_workers=num_workers)
        async with asyncio.timeout(LIMIT_S):
            await workers.start()
            try:
                await body(workers)
            finally:
                await workers.close()
            assert not any(psutil.pid_exists(pid) for pid in workers.pids)

    asyncio.run(inside())


async def ask(workers: RewardWorkers, index: int = 0, *, text: str = "2.5", timeout_s: float = LIMIT_S) -> float:
    return await workers.call(index, payload=pack(Task("p"), completion(text)), timeout_s=timeout_s)


async def failure(workers: RewardWorkers, index: int, **options: Any) -> str:
    with pytest.raises(RewardFailed) as caught:
        await ask(workers, index, **options)
    return caught.value.message


def test_what_functions_answer_and_how_they_fail() -> None:
    functions = [
        function("number_of"),
        function("raises"),
        function("exits"),
        *(function("answers", value=value) for value in ("text", "none", "nan", "infinity", "true")),
        function("prints"),
        function("fact", name="torch"),
        function("fact", name="threads"),
        function("own_pid"),
        RewardConfig(kind="exact"),
    ]

    async def body(workers: RewardWorkers) -> None:
        pid = await ask(workers, 11)
        assert [await ask(workers, text=text) for text in ("2.5", "-1e3", "7")] == [2.5, -1000.0, 7.0]
        assert (await failure(workers, 1)).startswith("KeyError: 'no such\\nword' (reward_functions.py:")
        assert (await failure(workers, 2)).startswith("SystemExit: 3")
        assert "returned str, which is not a number" in await failure(workers, 3)
        assert "returned NoneType, which is not a number" in await failure(workers, 4)
        assert "returned nan" in await failure(workers, 5)
        assert "returned -inf" in await failure(workers, 6)
        assert await ask(workers, 7) == 1.0
        assert await ask(workers, 8) == 1.0
        assert "could not convert" in await failure(workers, 0, text="x" * 3_000_000)
        assert (await ask(workers, 9), await ask(workers, 10)) == (0.0, 1.0)
        assert "has nothing to compare with" in await failure(workers, 12)
        assert await ask(workers, 11) == pid, "the worker was replaced for nothing"
        assert (workers.num_killed, workers.num_lost) == (0, 0)

    run(functions, body)


def living(pid: int) -> list[psutil.Process]:
    """The process, if it has not ended."""
    try:
        return [psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return []


@pytest.mark.alone
def test_a_call_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def body(workers: RewardWorkers) -> None:
        reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        others = [asyncio.create_task(ask(workers, 1)) for _ in range(20)]
        text = await failure(workers, 0, timeout_s=10.0)
        assert text == "it took longer than 10 s, and was killed"
        processes = [int(word) for word in os.read(reading, 100).split()]
        os.close(reading)
        assert len(processes) == 2
        gone = psutil.wait_procs([each for pid in processes for each in living(pid)], timeout=600)
        assert gone[1] == []
        assert await asyncio.gather(*others) == [2.5] * 20
        assert workers.num_killed == 1
        assert await asyncio.gather(*(ask(workers, 1) for _ in range(4))) == [2.5] * 4

    run([function("hangs", fifo=str(fifo)), function("number_of")], body, num_workers=2)


def test_a_worker_that_dies_fails_one_call() -> None:
    async def body(workers: RewardWorkers) -> None:
        results = await asyncio.gather(
            *(ask(workers, index) for index in (0, 3, 1, 3, 2, 3, 3)), return_exceptions=True
        )
        assert [result for result in results if isinstance(result, float)] == [2.5, 2.5, 1.0, 2.5, 2.5]
        assert str(results[0]) == "its process ended: signal 11 (SIGSEGV)"
        assert str(results[2]) == "its process ended: exit code 3"
        assert results[4] == 1.0
        assert await ask(workers, 3) == 2.5
        assert workers.num_lost >= 4  # each of the two was tried twice

    run(
        [function("segfaults"), function("ends_process"), function("forks"), function("number_of")], body, num_workers=2
    )


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_function_that_kills_its_parent_fails_its_own_call_only(name: str) -> None:
    async def body(workers: RewardWorkers) -> None:
        first = psutil.Process(workers.pids[0])
        assert await failure(workers, 0) == f"its process ended: signal {signal.Signals[name].value} ({name})"
        assert psutil.wait_procs([first], timeout=60)[1] == []
        assert await ask(workers, 1) == 2.5
        assert (workers.num_killed, workers.num_lost) == (0, 2)

    run([function("signals_parent", name=name), function("number_of")], body)


def test_a_function_that_stops_its_parent_is_ended_with_it() -> None:
    async def body(workers: RewardWorkers) -> None:
        guard = psutil.Process(int(await ask(workers)))
        assert guard.pid not in (os.getpid(), *workers.pids)
        worker = psutil.Process(workers.pids[0])
        await workers.close()
        assert psutil.wait_procs([guard, worker], timeout=60)[1] == []

    run([function("signals_parent", name="SIGSTOP")], body)


def test_a_function_that_kills_its_parent_does_not_reach_the_service(drive: Any) -> None:
    config = RewardsConfig(
        functions=(
            RewardConfig(kind="reward_functions:signals_parent", name="rogue", args={"name": "SIGKILL"}, timeout_s=100),
            RewardConfig(kind="reward_functions:number_of", name="number", timeout_s=100),
        ),
        num_workers=2,
    )

    async def body() -> None:
        rewards = await RewardActor.options(num_threads=1, max_restarts=0).as_service(config)
        pids = (await rewards.get_metrics()).replicas[0].pids
        for _ in range(3):
            scores = await rewards.score.route(Task("p"), [completion("1"), completion("2")])
            assert [score.reward for score in scores] == [1.0, 2.0]
            assert [score.failures for score in scores] == [{"rogue": "its process ended: signal 9 (SIGKILL)"}] * 2
        (replica,) = (await rewards.get_metrics()).replicas
        assert (replica.pids, replica.restarts, replica.health) == (pids, 0, "healthy")

    drive(body())


def test_a_worker_that_somebody_kills_costs_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    async def body(workers: RewardWorkers) -> None:
        asked = asyncio.create_task(ask(workers))
        pid = int(await asyncio.to_thread((tmp_path / "fifo").read_text))
        assert workers.pids == [pid]
        (tmp_path / "again").touch()
        os.kill(pid, signal.SIGKILL)
        assert await asked == 1.0
        assert (workers.num_killed, workers.num_lost) == (0, 1)

    run([function("waits_once", folder=str(tmp_path))], body)


def test_a_caller_that_leaves_frees_its_worker(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    async def body(workers: RewardWorkers) -> None:
        asked = asyncio.create_task(ask(workers))
        pid = int(await asyncio.to_thread((tmp_path / "fifo").read_text))
        (tmp_path / "again").touch()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert not psutil.pid_exists(pid)
        assert await ask(workers) == 1.0

    run([function("waits_once", folder=str(tmp_path))], body)


def test_closing_ends_calls_under_way_and_those_that_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    async def body(workers: RewardWorkers) -> None:
        asked = [asyncio.create_task(ask(workers)) for _ in range(3)]
        await asyncio.to_thread((tmp_path / "fifo").read_text)
        await workers.close()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(result) for result in results] == [RewardFailed] * 3

    run([function("waits_once", folder=str(tmp_path))], body)


def test_functions_that_cannot_be_imported_are_said_at_once() -> None:
    async def body() -> None:
        workers = RewardWorkers([function("no_such_function")], num_workers=2)
        with pytest.raises(RewardFailed, match="has no 'no_such_function'"):
            await workers.start()
        assert workers.pids == []

    asyncio.run(body())


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    """Also one that is in the middle of a call, when the parent is killed without warning."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = f"""
import asyncio, test_reward_faults as t
async def main():
    workers = t.RewardWorkers([t.function("waits_once", folder={str(tmp_path)!r})], num_workers=2)
    await workers.start()
    print(*workers.pids, flush=True)
    await t.ask(workers)
asyncio.run(main())
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        processes = [psutil.Process(pid) for pid in pids]
        assert int(fifo.read_text()) in pids
        parent.kill()
    assert psutil.wait_procs(processes, timeout=600)[1] == []
