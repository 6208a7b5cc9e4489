"""Imports of workers that begin before their run: the workers are forks of that server, and nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge import ForgeActor, Generator, endpoint
from forge.config import GeneratorConfig, GRPOConfig, SFTConfig
from forge.errors import DataError
from forge.loops.early_imports import early_imports
from forge.loops.sft import run_sft
from forge.runtime.forking import SCOPE, SWITCH, ForkServers, imported_early
from forge.runtime.import_environment import import_environment
from leftovers import has_ended

PRELOAD = ("decimal", "numpy")
ROOT = Path(__file__).parents[2]


class Child(ForgeActor):
    """Says which processes it descends from."""

    @endpoint
    async def parents(self) -> list[int]:
        return [parent.pid for parent in psutil.Process().parents()]


@pytest.fixture(autouse=True)
def _own_servers(monkeypatch: pytest.MonkeyPatch, leaves_nothing: None) -> None:
    monkeypatch.delenv(SCOPE, raising=False)
    monkeypatch.delenv(SWITCH, raising=False)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **import_environment(1), **more}


def servers(before: set[int]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.pid not in before and is_server(child)]


def is_server(process: psutil.Process) -> bool:
    try:
        return "forge.runtime.fork_server" in process.cmdline()
    except psutil.ZombieProcess:
        return False


def running() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_workers_are_forks_of_the_early_server_in_one_run_after_another(drive: Any) -> None:
    before = running()

    async def body() -> None:
        child = await Child.options(preload=PRELOAD).as_actor()
        assert early.pid in await child.parents.call_one()
        assert [server.pid for server in servers(before)] == [early.pid], "it needs no other"

    with imported_early(environment(), PRELOAD):
        (early,) = servers(before)
        drive(body())
        drive(body())
    assert has_ended(early.pid)


def test_workers_with_other_variables_have_a_server_of_their_own(drive: Any) -> None:
    before = running()

    async def body() -> None:
        child = await Child.options(preload=PRELOAD, num_threads=2).as_actor()
        (own,) = (server.pid for server in servers(before) if server.pid != early.pid)
        parents = await child.parents.call_one()
        assert own in parents
        assert early.pid not in parents

    with imported_early(environment(), PRELOAD):
        (early,) = servers(before)
        drive(body())
    assert has_ended(early.pid)


def test_a_server_that_fails_is_replaced(drive: Any) -> None:
    before = running()

    async def body() -> None:
        child = await Child.options(preload=PRELOAD).as_actor()
        (own,) = servers(before)
        assert own.pid in await child.parents.call_one()

    with imported_early(environment(), ("no_such_module",)):
        (early,) = running() - before
        assert has_ended(early), "an import that fails ends it"
        drive(body())


def test_an_error_before_the_run_ends_the_server() -> None:
    before, early = running(), []

    def fail() -> None:
        with imported_early(environment(), PRELOAD):
            early.extend(servers(before))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [has_ended(server.pid) for server in early] == [True]


@pytest.mark.parametrize("variables", [{SWITCH: "0"}, {SCOPE: "shared:1"}], ids=str)
def test_nothing_is_started_where_it_would_not_be_used(variables: dict[str, str]) -> None:
    before = running()
    with imported_early(environment(**variables), PRELOAD):
        assert servers(before) == []


def test_only_runs_of_this_host_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    before = running()
    with early_imports(GRPOConfig.model_validate({"launcher": {"kind": "slurm"}})):
        assert servers(before) == []
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    with early_imports(GRPOConfig()):
        assert servers(before) == []


def test_runs_at_the_same_time_share_the_server_until_the_last_one_ends() -> None:
    before = running()
    with contextlib.ExitStack() as second:
        with imported_early(environment(), PRELOAD):
            (early,) = servers(before)
            second.enter_context(imported_early(environment(), PRELOAD))
            assert servers(before) == [early]
        assert servers(before) == [early], "the second run may be asking it"
    assert has_ended(early.pid)


def test_a_server_that_refuses_is_not_replaced(drive: Any) -> None:
    """One of the run's own would import the same again, and refuse, too."""
    before = running()

    async def body() -> None:
        child = await Child.options(preload=("preloads",)).as_actor()
        assert [server.pid for server in servers(before)] == [early.pid]
        assert early.pid not in await child.parents.call_one()

    with imported_early(environment(), ("preloads",)):
        (early,) = servers(before)
        drive(body())


def test_an_interrupt_while_the_server_starts_is_not_for_it(drive: Any) -> None:
    before = running()

    async def body() -> None:
        child = await Child.options(preload=PRELOAD).as_actor()
        assert early.pid in await child.parents.call_one()

    with imported_early(environment(), PRELOAD):
        (early,) = servers(before)
        early.send_signal(signal.SIGINT)
        drive(body())


def test_a_run_continues_where_no_server_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    before = running()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with imported_early(environment(), PRELOAD):
        assert running() == before


LASTING = """
import os, sys, time
from forge.runtime.forking import imported_early
with imported_early({**os.environ, "PYTHONPATH": sys.argv[1]}, ("lasting",)):
    time.sleep(600)
"""


def test_a_server_ends_with_its_program_while_it_imports(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    (tmp_path / "lasting.py").write_text(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(600)\n")
    program = subprocess.Popen([sys.executable, "-c", LASTING, str(tmp_path)])
    try:
        begun.read_text()  # waits for the import
        (early,) = psutil.Process(program.pid).children()
    finally:
        program.kill()
        program.wait()
    try:
        early.wait(60)
    finally:
        if early.is_running():
            early.kill()


def test_what_is_imported_early_is_what_workers_need() -> None:
    before = running()
    chosen = GRPOConfig.model_validate({"workers": {"trainer": {"env": {"OMP_WAIT_POLICY": "passive"}}}})
    with early_imports(chosen):
        (early,) = servers(before)
        assert early.environ()["OMP_WAIT_POLICY"] == "passive"
    with early_imports(GRPOConfig.model_validate({"workers": {"trainer": {"env": {SWITCH: "0"}}}})):
        assert servers(before) == []
    made = GeneratorConfig.of(chosen.model, chosen.generator)
    assert Generator._forge_preload(chosen.generator) == Generator._forge_preload(made) != ()


def config(folder: Path, data: Path) -> SFTConfig:
    return SFTConfig.model_validate(
        {
            "run": {"output_dir": str(folder), "name": "run"},
            "model": {"preset": "tiny"},
            "training": {"max_steps": 1, "batch_size": 4, "max_seq_len": 128, "warmup_steps": 0},
            "data": {"sources": [{"path": str(data)}]},
            "checkpointing": {"export_hf": False},
            "metrics": {"tensorboard": False},
        }
    )


def test_a_run_starts_one_server_before_it_reads_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    plain = ForkServers._start

    def start(self: ForkServers, address: str, *rest: Any) -> None:
        plain(self, address, *rest)
        started.append(address)

    monkeypatch.setattr(ForkServers, "_start", start)
    assert asyncio.run(run_sft(config(tmp_path / "runs", ROOT / "apps" / "sft" / "sums.jsonl"))).step == 1
    assert len(started) == 1, "the trainer's variables are those that were expected"
    with pytest.raises(DataError):
        asyncio.run(run_sft(config(tmp_path / "more", tmp_path / "missing.jsonl")))
    assert len(started) == 2, "it was there before the data was found missing, and leaves nothing"
