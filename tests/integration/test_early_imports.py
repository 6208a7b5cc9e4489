"""Imports of workers that begin before their run: the workers are forks of that server, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge import ForgeActor, endpoint
from forge.config import GRPOConfig, SFTConfig
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
