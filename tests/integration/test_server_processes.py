"""Servers of other projects as processes: started, shared, watched, replaced, and gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from forge import Fault, Observation, Task
from forge.envs.check import check_env
from forge.envs.environment import episode_from_env
from forge.envs.external import processes
from forge.envs.external.processes import Server, ServerSpec, close_servers, least_used, pool_of
from forge.errors import LaunchError
from leftovers import is_running

SCRIPT = Path(__file__).parents[1] / "support" / "foreign_server.py"
pytestmark = pytest.mark.usefixtures("leaves_nothing")


def spec(*words: str, **changes: Any) -> ServerSpec:
    return ServerSpec(("{python}", "-I", str(SCRIPT), "{port}", *words), **changes)


def run(body: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(600):
            try:
                await body
            finally:
                await close_servers()

    asyncio.run(limited())


async def get(server: Server | str, path: str) -> str:
    url = server if isinstance(server, str) else server.url
    async with aiohttp.ClientSession() as http, http.get(url + path) as response:
        return await response.text()


async def until(holds: Any) -> None:
    while not holds():  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.01)


def test_the_server_with_the_fewest_users_is_borrowed() -> None:
    async def body() -> None:
        pool = pool_of(spec(instances=2))
        assert pool is pool_of(spec(instances=2))
        async with pool.borrow():
            await until(lambda: all(each.url for each in pool.servers))
        async with pool.borrow() as first, pool.borrow() as second, pool.borrow() as third:
            assert len({first.url, second.url}) == 2
            assert third in (first, second)
            assert third.num_users == 2
            assert await get(first, "/health") != await get(second, "/health")
        assert [each.num_users for each in pool.servers] == [0, 0]
        assert [each.num_starts for each in pool.servers] == [1, 1]

    run(body())


def test_a_server_that_dies_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.01)

    async def body() -> None:
        pool = pool_of(spec())
        async with pool.borrow() as server:
            first = await get(server, "/pid")
            with pytest.raises(aiohttp.ClientError):
                await get(server, "/die")
            pool.doubt(server)
        async with pool.borrow() as server:  # waits until it is there again
            assert await get(server, "/pid") != first
            assert server.num_starts == 2

    run(body())


def test_a_server_that_is_doubted_without_reason_stays() -> None:
    async def body() -> None:
        pool = pool_of(spec())
        async with pool.borrow() as server:
            pool.doubt(server)
            assert not server.url
        async with pool.borrow() as server:
            assert server.num_starts == 1

    run(body())


def test_a_server_that_stops_answering_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(processes, "PROBE_S", 0.3)

    async def body() -> None:
        pool = pool_of(spec())
        async with pool.borrow() as server:
            await get(server, "/stuck")
            await until(lambda: server.num_starts >= 2 and server.url)

    run(body())


def test_a_retired_server_goes_on_for_its_users_and_another_takes_its_place() -> None:
    async def body() -> None:
        pool = pool_of(spec())
        async with pool.borrow() as old:
            process = psutil.Process(int(await get(old, "/pid")))
            pool.retire(old)
            pool.retire(old)
            async with pool.borrow() as new:
                assert new.url != old.url
            assert process.is_running()
            assert [old, new] != pool.servers == [new]
        await until(lambda: not is_running(process))

    run(body())


def test_users_wait_for_a_place() -> None:
    async def body() -> None:
        pool = pool_of(spec(max_users=1))
        async with pool.borrow() as server:
            with pytest.raises(Fault, match=r"was not free within 0\.05 s") as fault:
                async with pool.borrow(0.05):
                    pytest.fail("there is no place")
            assert fault.value.kind == "server"
            waiting = asyncio.create_task(pool.borrow(60).__aenter__())
            await asyncio.sleep(0)
            assert not waiting.done()
        assert await waiting is server

    run(body())


def test_a_command_that_does_not_work_is_named_with_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.01)

    async def fails(spec: ServerSpec, words: str) -> None:
        with pytest.raises(LaunchError, match=words) as error:
            async with pool_of(spec).borrow():
                pytest.fail("it does not run")
        assert error.value.path == "server"

    run(fails(spec("broken"), "failed to start 3 times in a row.*\nthere is no such game"))
    run(fails(ServerSpec(("/no/such/program",)), "/no/such/program cannot be started: .*No such file"))
    run(fails(spec(cwd="/no/such/folder"), "failed to start 3 times in a row"))
    run(fails(spec(health="/nothing", start_limit_s=0.01), "was not ready within 0.01 s"))


def test_output_is_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LOG_BYTES", 20_000)

    async def body() -> None:
        async with pool_of(spec()).borrow() as server:
            await get(server, "/flood")
            await until(lambda: server.output().endswith("the last line"))
            assert "line 199999" in server.output()
            sizes = [path.stat().st_size for path in server.log.parent.iterdir()]
            assert 10_000 <= sum(sizes) <= 20_000
        await close_servers()
        assert not server.log.parent.exists()

    run(body())


def test_a_server_gets_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")

    async def body() -> None:
        async with pool_of(spec(env=(("GAME", "chess"),), folders=("/a", "/b"))).borrow() as server:
            names = (await get(server, "/env")).split()
            assert "WANDB_API_KEY" not in names
            assert {"PATH", "GAME", "PYTHONPATH"} <= set(names)

    run(body())


def test_what_a_server_started_ends_with_it() -> None:
    async def body() -> None:
        async with pool_of(spec()).borrow() as server:
            child = psutil.Process(int(await get(server, "/child")))
        await close_servers()
        assert not child.is_running()

    run(body())


def test_servers_end_with_the_event_loop() -> None:
    found, log = list[psutil.Process](), list[Path]()

    async def body() -> None:
        async with pool_of(spec()).borrow() as server:
            found.append(psutil.Process(int(await get(server, "/pid"))))
            log.append(server.log)

    asyncio.run(body())
    assert not found[0].is_running()
    assert not log[0].parent.exists()


class Served:
    """An environment on a server that all episodes share."""

    async def reset(self, task: Task) -> Observation:
        self._stack = contextlib.AsyncExitStack()
        self._server = await self._stack.enter_async_context(pool_of(spec()).borrow())
        return Observation([{"role": "user", "content": "Go."}])

    async def step(self, message: Any) -> Observation:
        await get(self._server, "/health")
        return Observation(reward=1.0, terminated=True)

    async def close(self) -> None:
        await self._stack.aclose()


def test_servers_that_episodes_share_are_no_leak() -> None:
    report = asyncio.run(check_env(episode_from_env(Served), [Task("a"), Task("b")]))
    assert report.is_ok, report.checks
    assert {each.name: each.status for each in report.checks}["leaks"] == "pass"


OWNER = """
import asyncio, sys
sys.path[:0] = {path!r}
from test_server_processes import get, spec
from forge.envs.external.processes import pool_of

async def main():
    async with pool_of(spec()).borrow() as server:
        print(await get(server, "/pid"), await get(server, "/child"), server.log, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_servers_end_with_an_owner_that_is_killed() -> None:
    code = OWNER.format(path=[str(Path(__file__).parent), *sys.path])
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        *pids, log = owner.stdout.readline().split()
    every = [psutil.Process(int(pid)) for pid in pids]
    assert len(every) == 2
    every.append(psutil.Process(every[0].ppid()))  # the guard
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    _, alive = psutil.wait_procs(every, timeout=60)
    assert alive == []
    assert not Path(log).parent.exists()


def test_episodes_are_spread_over_given_urls() -> None:
    with least_used(["http://a/", "http://b"]) as first, least_used(["http://a/", "http://b"]) as second:
        assert (first, second) == ("http://a", "http://b")
    with least_used(["http://a/", "http://b"]) as first:
        assert first == "http://a"
