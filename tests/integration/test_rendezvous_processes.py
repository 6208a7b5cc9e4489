"""Every process of a run finds its root, and no other run's."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_hosts import workers  # noqa: F401 - a fixture

import forge
import registries
from forge.errors import OptionError
from forge.runtime import rendezvous
from forge.runtime.rendezvous import ConnectionFailure, connect
from rendezvous_clients import Client

PROGRAM = Path(__file__).parents[1] / "support" / "rendezvous_clients.py"


def run_program(*words: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(PROGRAM), *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_ranks_their_programs_and_nested_actors_reach_the_root(drive, leaves_nothing):
    async def body() -> None:
        actor = await Client.options(procs=2).as_actor()
        facts = [fact for _, fact in (await actor.facts.call()).items()]
        nested = [fact for _, fact in (await actor.facts_of_child.call()).items()]
        for fact in facts + nested:
            assert fact["run"] == fact["line_run"] == rendezvous.run_id()
            assert fact["who"] == fact["pid"]
            assert fact["host"] == rendezvous.host_id()
            assert not fact["has_point"], "there is one for each run"
            assert fact["addresses"].split()[0].startswith("unix:@")
            assert "tcp:" not in fact["addresses"]
        assert len({fact["pid"] for fact in facts + nested} | {os.getpid()}) == 5
        programs = [said for _, said in (await actor.of_subprocess.call()).items()]
        for _, pid, run in programs:
            assert run == rendezvous.run_id()
            assert int(pid) not in {fact["pid"] for fact in facts}
        assert connect("test").call("who")[1] == os.getpid(), "the root has a line like everyone"

    drive(body())


def test_a_rank_that_is_killed_leaves_and_what_it_held_is_cancelled(drive):
    async def body() -> None:
        actor = await Client.as_actor()
        await actor.hold.call_one()
        desk = registries.opened[-1]
        pid = (await actor.facts.call_one())["pid"]
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(desk.until, ("left", pid))
        assert [entry for entry in desk.log if entry[0] in ("cancelled", "left")] == [
            ("cancelled", str(pid)),
            ("left", pid),
        ]

    drive(body())


def test_one_run_after_the_other_in_one_process(drive):
    seen = []

    async def body() -> None:
        actor = await Client.as_actor()
        assert (await actor.call.call_one("who"))[1] != os.getpid()
        await actor.shutdown.call_one()
        seen.append((rendezvous.run_id(), rendezvous.run_secret(), connect("test"), registries.opened[-1]))
        assert connect("test").call("num_sessions") == 2, "nobody of an earlier run"

    for _ in range(2):
        drive(body())
    for _, _, line, desk in seen:
        assert not line.is_open
        assert desk.log[-1] == "closed"
        assert desk.sessions == {}
        assert any(entry[0] == "last words" for entry in desk.log)
        with pytest.raises(ConnectionFailure, match="the run has ended"):
            line.call("echo")
    (first, secret, *_), (second, other_secret, *_) = seen
    assert first != second
    assert secret != other_secret


def test_two_runs_at_once_do_not_meet(leaves_nothing):
    command = [sys.executable, str(PROGRAM), "local", "wait"]
    runs = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        said = [json.loads(run.stdout.readline()) for run in runs]
        ended = [json.loads(run.communicate(timeout=600)[0].splitlines()[-1]) for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    assert said[0]["run"] != said[1]["run"]
    assert said[0]["facts"]["addresses"] != said[1]["facts"]["addresses"]
    for mine, facts in zip(said, ended, strict=True):
        assert mine["facts"]["run"] == mine["run"]
        assert [pid for what, pid in facts["log"] if what == "joined"] == [mine["facts"]["pid"]]


@pytest.mark.alone
def test_hosts_meet_the_root_over_tcp(workers):  # noqa: F811
    said = run_program("pair", *workers.addresses)
    facts = said["facts"] + said["children"]
    assert len({fact["pid"] for fact in facts}) == 4
    for fact in facts:
        assert fact["run"] == fact["line_run"] == said["run"]
        assert fact["who"] == fact["pid"]
        assert fact["addresses"].split()[0].startswith("tcp:127.0.0.1:")


def test_a_plain_script_meets_at_its_own_point_and_starts_anew_after_a_shutdown(leaves_nothing):
    said = run_program("alone")
    assert said["first"][0] == said["first"][1] == said["child"][2]
    assert said["second"][0] == said["second"][1] != said["first"][0]
    assert said["ended"]
    assert said["closed"]


def test_a_forked_child_belongs_to_the_run(leaves_nothing):
    assert run_program("fork") == {"child": 0, "after": True}


@pytest.mark.parametrize("name", [rendezvous.RENDEZVOUS, rendezvous.SECRET, rendezvous.RUN])
def test_the_run_of_a_rank_cannot_be_chosen_by_the_user(name):
    with pytest.raises(OptionError, match="env") as caught:
        Client.options(env={name: "other"})
    assert caught.value.value == [name]


@pytest.mark.alone
def test_the_secret_is_in_no_log(drive):
    """Monarch logs the environment that it starts processes with, for everyone on the machine to read."""
    log = Path("/tmp", getpass.getuser(), "monarch_log.log")
    start = log.stat().st_size if log.exists() else 0
    secret = []

    async def body() -> None:
        actor = await Client.as_actor()
        await actor.facts.call_one()
        secret.append((rendezvous.run_secret().hex().encode(), rendezvous.run_id().encode()))

    drive(body())
    with log.open("rb") as file:
        file.seek(start)
        written = file.read()
    assert secret[0][1] in written, "this is where the environment would be"
    assert secret[0][0] not in written


def test_a_launch_that_fails_leaves_no_meeting_point():
    from forge.config import LauncherConfig
    from forge.errors import ForgeError

    async def fail() -> None:
        hosts = LauncherConfig(kind="hosts", hosts=("tcp://127.0.0.1:1",), bind="192.0.2.1", insecure=True)
        async with forge.run(hosts):
            pass

    with pytest.raises(ForgeError, match="cannot listen"):
        asyncio.run(fail())
    assert not rendezvous.is_server_open()
