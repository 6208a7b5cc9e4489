"""Ranks that are forks of a fork server: they must not differ from ranks that were started by themselves."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from forge import ForgeActor, Generator, GeneratorConfig, Trainer, endpoint
from forge.runtime.fork_server import ForkServer
from forge.runtime.forking import SCOPE, SWITCH, ForkServers
from forge.runtime.process_watch import find_marked
from leftovers import has_ended

PRELOAD = ("decimal", "numpy")


class Looker(ForgeActor):
    """Says what its process looks like from inside."""

    @endpoint
    async def look(self) -> dict[str, Any]:
        own = Path("/proc/self")
        return {
            "pid": os.getpid(),
            "parents": [parent.cmdline() for parent in psutil.Process().parents()],
            "cmdline": own.joinpath("cmdline").read_bytes().rstrip(b"\0").decode().split("\0"),
            "environ": own.joinpath("environ").read_bytes().rstrip(b"\0").decode().split("\0"),
            "variables": dict(os.environ),
            "folder": os.getcwd(),
            "path": [*sys.path],
            "random": (random.random(), float(np.random.rand())),
            "signals": [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGCHLD, signal.SIGUSR1)],
            "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
            "descriptors": [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)],
        }

    @endpoint
    async def shell(self) -> str:
        """Return what a program that the rank starts sees of a variable."""
        process = await asyncio.create_subprocess_exec("printenv", "MARK", stdout=asyncio.subprocess.PIPE)
        return (await process.communicate())[0].decode().strip()


@pytest.fixture(autouse=True)
def _own_servers(monkeypatch: pytest.MonkeyPatch, leaves_nothing: None) -> Iterator[None]:
    """Every test has servers of its own, which end with its run."""
    monkeypatch.delenv(SCOPE, raising=False)
    monkeypatch.delenv(SWITCH, raising=False)
    _shared.update(server.pid for server in servers())
    yield
    _shared.clear()


_shared: set[int] = set()
"""Servers that all tests share, which others have started."""


def servers() -> list[psutil.Process]:
    children = [child for child in psutil.Process().children() if child.pid not in _shared]
    return [child for child in children if is_server(child)]


def is_server(process: psutil.Process) -> bool:
    try:
        return "forge.runtime.fork_server" in process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def is_fork(seen: dict[str, Any]) -> bool:
    return any("forge.runtime.fork_server" in parent for parent in seen["parents"])


def test_a_fork_is_like_a_process_of_its_own(drive):
    async def body():
        options = Looker.options(procs=2, env={"MARK": "here"})
        forked, alone = await asyncio.gather(
            options.options(preload=PRELOAD).as_actor(), options.options(preload=()).as_actor()
        )
        forks = [seen for _, seen in (await forked.look.call()).items()]
        others = [seen for _, seen in (await alone.look.call()).items()]
        assert all(map(is_fork, forks))
        assert not any(map(is_fork, others))
        assert [server.ppid() for server in servers()] == [os.getpid()]
        assert "MARK" not in servers()[0].environ(), "it is not one of the ranks"
        for fork, other in zip(forks, others, strict=True):
            for same in ("cmdline", "folder", "path", "signals"):
                assert fork[same] == other[same], same
            assert {*fork["variables"]} == {*other["variables"]}
            changed = {name for name, value in fork["variables"].items() if other["variables"].get(name) != value}
            assert {name.partition("_")[0] for name in changed} <= {"FORGE", "HYPERACTOR", "MASTER", "BOOTSTRAP"}
            shown = dict(word.partition("=")[::2] for word in fork["environ"])
            assert shown["MARK"] == "here"
            assert shown["RANK"] == fork["variables"]["RANK"]
            assert find_marked(shown["FORGE_GROUP"]).keys() == set(forked.pids)
        assert len({seen["random"] for seen in forks}) == len({seen["random"][1] for seen in forks}) == 2
        assert {seen["pid"] for seen in forks} == set(forked.pids)
        assert await forked.slice(procs=0).shell.call_one() == "here"

    drive(body())


def test_a_rank_that_dies_is_a_fork_again_and_its_stand_in_ends(drive):
    async def body():
        service = await Looker.options(num_replicas=1, preload=PRELOAD).as_service()
        first = (await service.get_metrics()).replicas[0].pids[0]
        (stand_in,) = stand_ins()
        os.kill(first, signal.SIGKILL)
        await service.wait_until(lambda now: now.replicas[0].restarts == 1 and now.replicas[0].health == "healthy")
        assert is_fork(await service.look.route())
        assert has_ended(stand_in.pid)

    drive(body())


@pytest.mark.parametrize("ended", ["stand-in", "keeper"])
def test_a_rank_ends_with_its_stand_in_and_its_keeper(drive, ended):
    async def body():
        service = await Looker.options(num_replicas=1, preload=PRELOAD).as_service()
        first = (await service.get_metrics()).replicas[0].pids[0]
        (stand_in,), keeper = stand_ins(), psutil.Process(psutil.Process(first).ppid())
        os.kill(first, signal.SIGSTOP)  # a rank that could not end by itself
        {"stand-in": stand_in, "keeper": keeper}[ended].kill()
        assert has_ended(first)
        assert has_ended(stand_in.pid)
        assert has_ended(keeper.pid)
        await service.wait_until(lambda now: now.replicas[0].restarts == 1 and now.replicas[0].health == "healthy")

    drive(body())


def stand_ins() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.cmdline()[:1] == ["forge-rank-stand-in"]]


def test_ranks_outlive_their_server_and_new_ones_get_another(drive):
    async def body():
        service = await Looker.options(num_replicas=2, preload=PRELOAD).as_service()
        before = [replica.pids for replica in (await service.get_metrics()).replicas]
        (server,) = servers()
        server.kill()
        assert has_ended(server.pid)
        assert [(each["pid"],) for each in await service.look.fanout()] == before
        os.kill(before[0][0], signal.SIGKILL)
        await service.wait_until(lambda now: now.replicas[0].restarts == 1 and now.replicas[0].health == "healthy")
        assert [is_fork(each) for each in await service.look.fanout()] == [True, False]
        assert len(servers()) == 1

    drive(body())


@pytest.mark.parametrize(
    ("preload", "reason"),
    [
        (("preloads",), "has started 1 threads"),
        (("no_such_module",), "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_ranks_that_cannot_be_forks_start_by_themselves(drive, caplog, preload, reason):
    async def body():
        actor = await Looker.options(preload=preload).as_actor()
        assert not is_fork(await actor.look.call_one())

    with caplog.at_level(logging.INFO, logger="forge.runtime"):
        drive(body())
    assert reason in caplog.text


def test_a_package_that_lies_elsewhere_is_imported_by_the_rank_itself(drive, monkeypatch, tmp_path, caplog):
    async def body():
        plain = await Looker.options(preload=PRELOAD).as_actor()
        assert is_fork(await plain.look.call_one())
        (tmp_path / "decimal.py").write_text("from _decimal import *")
        monkeypatch.syspath_prepend(tmp_path)
        actor = await Looker.options(preload=PRELOAD).as_actor()
        assert not is_fork(await actor.look.call_one())

    with caplog.at_level(logging.INFO, logger="forge.runtime"):
        drive(body())
    assert "decimal would be imported from another folder" in caplog.text


OF_A_RANK = ("FORGE", "RANK", "WORLD", "LOCAL", "MASTER")

IMPORTS = f"""
import os, sys
read = set()
class Environment(type(os.environ)):
    def __getitem__(self, name):
        read.add(name)
        return super().__getitem__(name)
os.environ.__class__ = Environment
from importlib import import_module
for name in sys.argv[1:]:
    import_module(name)
    print(*sorted(name for name in read if name.startswith({OF_A_RANK})))
"""


def test_what_is_preloaded_reads_no_variable_of_a_rank():
    """A fork has the values of its server of whatever was read while a module was loaded."""
    preload = [*Generator._forge_preload(GeneratorConfig()), *Trainer._forge_preload()]
    # A library that looks for its own variables reads all that are set: only what is looked up by name counts.
    bare = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_RANK)}
    words = [sys.executable, "-c", IMPORTS, *preload]
    ended = subprocess.run(words, env=bare, capture_output=True, text=True, timeout=600, check=True)
    assert set(ended.stdout.split()) <= {"FORGE_AMX", "FORGE_TRACE"}  # which `_become` reads again


def test_variables_that_libraries_read_when_loaded_get_another_server(drive, monkeypatch, tmp_path):
    async def body():
        plain = await Looker.options(preload=PRELOAD).as_actor()
        monkeypatch.syspath_prepend(tmp_path)
        other, alone = await asyncio.gather(*(Looker.options(preload=chosen).as_actor() for chosen in (PRELOAD, ())))
        seen = await other.look.call_one()
        assert is_fork(seen)
        assert str(tmp_path) in seen["path"]
        assert seen["path"] == (await alone.look.call_one())["path"]
        assert len(servers()) == 1
        wide = await Looker.options(preload=PRELOAD, num_threads=2).as_actor()
        assert is_fork(await plain.look.call_one())
        assert is_fork(await wide.look.call_one())
        assert len(servers()) == 2
        monkeypatch.setenv(SWITCH, "0")
        alone = await Looker.options(preload=PRELOAD).as_actor()
        assert not is_fork(await alone.look.call_one())

    drive(body())


def test_other_limits_get_another_server(drive):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = limits[0] - 1, limits[1]

    async def body():
        plain = await Looker.options(preload=PRELOAD).as_actor()
        resource.setrlimit(resource.RLIMIT_NOFILE, lower)
        try:
            other = await Looker.options(preload=PRELOAD).as_actor()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        seen = [await each.look.call_one() for each in (plain, other)]
        assert all(map(is_fork, seen))
        assert [each["limits"] for each in seen] == [limits, lower]
        assert len(servers()) == 2

    drive(body())


def test_a_server_refuses_ranks_that_live_elsewhere():
    owned = ForkServers()
    try:
        point = asyncio.run(owned.find({}, PRELOAD))
        assert point is not None
        command = [sys.executable, "-c", ASKS, point.address, *PRELOAD]
        same, lower = (
            subprocess.run([*command, by], capture_output=True, text=True, timeout=600, check=True).stdout.strip()
            for by in ("0", "1")
        )
    finally:
        owned.close()
    assert (same, lower) == ("", "it would differ in the resource limits")


ASKS = """
import os, resource, socket, sys
from forge.runtime.rank_stub import request
_, address, *preload, lowered = sys.argv
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft - int(lowered), hard))
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect("\\0" + address)
    connection.sendall(request(os.environ, preload))
    print(connection.makefile().read())
"""


def test_a_program_in_another_namespace_has_no_fork_of_this_one(drive, scope, tmp_path):
    """Its files are other ones: what it writes must not be written here."""

    async def body():
        await Looker.options(preload=PRELOAD).as_actor()

    drive(body())
    assert servers()
    drive_command = [sys.executable, "-c", ELSEWHERE, str(tmp_path)]
    try:
        tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, timeout=600)
    except FileNotFoundError:
        pytest.skip("there is no `unshare` here")
    if tried.returncode:
        pytest.skip(f"no namespaces: {tried.stderr.strip()}")
    script = f"mount -t tmpfs none {shlex.quote(str(tmp_path))} && {shlex.join(drive_command)}"
    ended = subprocess.run([*UNSHARE, "sh", "-c", script], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert list(tmp_path.iterdir()) == []


UNSHARE = ("unshare", "--user", "--map-root-user", "--mount")
ELSEWHERE = """
import asyncio, sys
from pathlib import Path
import forge

class Writer(forge.ForgeActor):
    @forge.endpoint
    async def write(self, folder: str) -> None:
        Path(folder, "found").touch()

async def main():
    async with forge.run():
        writer = await Writer.options(preload=("decimal", "numpy")).as_actor()
        await writer.write.call_one(sys.argv[1])
    assert Path(sys.argv[1], "found").exists()

asyncio.run(main())
"""


@pytest.fixture
def scope(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(SCOPE, f"test-{os.getpid()}:{os.getpid()}")
    shared = left_servers()
    yield
    for server in {*servers(), *left_servers()} - {*shared}:
        server.kill()
        server.wait()


def left_servers(owner: int | None = None) -> list[psutil.Process]:
    """Return the servers that programs have left to the scope of an owner; default: this process."""
    wanted = str(owner or os.getpid())
    found = [each for each in psutil.process_iter() if is_server(each) and each.cmdline()[-1] == wanted]
    return [each for each in found if each.ppid() != os.getpid()]


def test_runs_of_a_scope_share_servers(drive, scope):
    async def body():
        actor = await Looker.options(preload=PRELOAD).as_actor()
        return (await actor.look.call_one())["parents"][1]

    first, second = drive(body()), drive(body())
    assert first == second
    assert [server.cmdline() for server in servers()] == [first]


def test_programs_of_a_scope_share_a_server_that_holds_nothing_of_them(scope, tmp_path):
    """It stays when the first program has ended, which its reader sees, and has none of its variables."""
    before, seen = {*left_servers()}, []
    for number in ("1", "2"):
        variables = {**os.environ, "MARK": number, "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-c", ELSEWHERE, str(tmp_path)]
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0, ended.stderr
        seen.append([each for each in left_servers() if each not in before])
    ((first,), second) = seen
    assert second == [first]
    assert "MARK" not in first.environ()
    assert first.environ()["HF_HOME"] == str(tmp_path)
    assert os.getsid(first.pid) == first.pid, "signals for the program's group are not for the server"


def test_a_program_outside_the_scope_starts_servers_of_its_own(tmp_path):
    other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        variables = {**os.environ, SCOPE: f"other-{os.getpid()}:{other.pid}"}
        command = [sys.executable, "-c", ELSEWHERE, str(tmp_path)]
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0, ended.stderr
        assert left_servers(other.pid) == []
    finally:
        other.communicate()


def test_a_server_that_is_left_ends_when_nobody_uses_it():
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0forge-idle-{os.getpid()}")
        listener.listen()
        server = ForkServer(listener, os.getpid(), 0.01)
        assert server.serve() is None
        os.close(server._owner)
