"""The log files of a run, its start, and what of its processes reaches the console; and ranks that die."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import forge
from forge.errors import ActorFailure, LaunchError
from forge.observe.logs import current_folder, logging_to
from forge.observe.monitor import monitored
from forge.observe.phases import phase
from forge.runtime import MeshActor, endpoint
from grpo_runs import LIMIT_S, app_command

NUM_STEPS = 2


@dataclass
class Ran:
    """A run that has ended."""

    folder: Path
    out: list[str]
    err: list[str]

    def log(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.log").read_text()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run of two steps, whose output is no terminal."""
    folder = tmp_path_factory.mktemp("logs") / "run"
    command = app_command(
        folder,
        *(
            "rewards.functions.0.kind=talking_rewards:talking",
            f"training.max_steps={NUM_STEPS}",
            "rewards.num_workers=1",
        ),
        *(
            "record.trace=true",
            "evaluation.sources=[{task: arithmetic, num_prompts: 4, seed: 5}]",
            "evaluation.at_end=false",
        ),
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("FORGE_LOG", "TERM")}
    environ |= {"FORGE_LOG": "info,forge.trainer=debug"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return Ran(folder, ended.stdout.splitlines(), ended.stderr.splitlines())


def test_each_process_has_a_file_that_says_when_it_began_and_how_it_ended(ran: Ran) -> None:
    names = sorted(path.name for path in (ran.folder / "logs").iterdir())
    assert names == ["controller.log", "generator-0.log", "rewards-0.log", "trainer-0.log"]
    for name in names:
        lines = ran.log(name.removesuffix(".log")).splitlines()
        assert "): started ====" in lines[0]
        end = "ended" if name == "controller.log" else "(exit code 0|killed by SIGKILL)"  # that of a rank that is slow
        assert re.search(rf"\): {end} ====$", lines[-1])


def test_what_a_reward_prints_and_logs_is_in_its_file_and_on_the_console(ran: Ran) -> None:
    text = ran.log("rewards-0")
    for words in ("printed by a reward", "to standard error by a reward"):
        assert text.splitlines().count(words) == 1
    assert re.search(r"^\S+ \S+ INFO my\.rewards: logged by a reward$", text, re.MULTILINE)
    assert re.search(r"^\S+ \S+ WARNING my\.rewards: warned by a reward$", text, re.MULTILINE)
    assert "debugged" not in text
    assert ran.err.count("[rewards-0] printed by a reward") == 1
    assert ran.err.count("INFO rewards-0 my.rewards: logged by a reward") == 1
    assert ran.err.count("WARNING rewards-0 my.rewards: warned by a reward") == 1
    assert not any("to standard error by a reward" in line for line in ran.err)


def test_lines_fit_eighty_columns_and_say_which_step_of_how_many(ran: Ran) -> None:
    steps = [line for line in ran.out if line.startswith("Step ")]
    assert [line.partition(" | ")[0] for line in steps] == [f"Step {step}/{NUM_STEPS}" for step in (1, 2)]
    assert any(line.startswith(f"Evaluation at step 0/{NUM_STEPS} | reward ") for line in ran.out)
    told = [line for line in (*ran.out, *ran.err) if line.startswith(("Step ", "Start", "Evaluation "))]
    assert all(len(line) <= 80 for line in told)


def test_the_start_is_told_in_phases_and_ends_with_what_took_longest(ran: Ran) -> None:
    told = [re.sub(r"^Start \S+ \| ", "", line) for line in ran.err if line.startswith("Start ")]
    told = [line for line in told if " for " not in line]
    assert told[0] == "reading model and data"
    for each in ("trainer: starting", "generator: starting", "rewards: starting", "trainer: loading weights"):
        assert told.count(each) == 1
    order = ["first weight sync", "first evaluation", "first rollouts", "first step"]
    assert [line for line in told if line.startswith("first ")] == order
    (end,) = [line for line in ran.err if line.startswith("Started in ")]
    assert re.fullmatch(r"Started in [\d.]+ s: .+ [\d.]+ s", end)


def test_the_phases_are_in_a_file_in_the_trace_and_in_the_log(ran: Ran) -> None:
    found = json.loads((ran.folder / "startup.json").read_text())
    assert found["state"] == "done"
    phases = {(each["process"], each["phase"]): each for each in found["phases"]}
    assert {state for each in phases.values() if (state := each["state"])} == {"done"}
    for process in ("trainer-0", "generator-0"):
        for name in ("starting", "setting up", "building the model", "loading weights"):
            assert (process, name) in phases
        assert phases[process, "loading weights"]["total"] == phases[process, "loading weights"]["done"] > 0
    assert ("generator-0", "allocating the cache") in phases
    assert ("rewards-0", "setting up") in phases
    assert phases["controller", "first evaluation"]["total"] == 4
    assert phases["controller", "first rollouts"]["total"] == 2
    assert all(0 <= each["own_s"] <= each["seconds"] <= found["seconds"] + 0.01 for each in found["phases"])
    spans = {event["name"] for event in json.loads((ran.folder / "trace.json").read_text()) if event["ph"] == "X"}
    assert {"loading weights", "building the model", "first weight sync"} <= spans
    assert "INFO forge.startup: trainer-0: loading weights took " in ran.log("controller")
    assert not any("forge.startup" in line for line in ran.err)


# ---- Ranks that die


class Dying(MeshActor):
    """Prints, and dies as a test says."""

    @endpoint
    async def where(self) -> tuple[str, str]:
        return os.environ["FORGE_LOG_NAME"], os.environ["FORGE_LOG_FILE"]

    @endpoint
    async def die(self, words: str, code: int) -> None:
        os.write(2, f"{words}\n".encode())
        os._exit(code)


class DiesInSetup(MeshActor):
    @endpoint
    async def setup(self) -> None:
        os.write(1, b"its last words\n")
        os._exit(7)


class Parent(MeshActor):
    """Starts a process of its own."""

    @endpoint
    async def child(self) -> tuple[str, str]:
        child = await Dying.options(mesh_name="child").as_actor()
        found: tuple[str, str] = await child.where.call_one()
        return found


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Path]:
    with logging_to(tmp_path / "logs", max_bytes=1 << 20) as folder:
        assert folder is not None
        yield folder.path
    assert current_folder() is None


@pytest.mark.parametrize("fork", ["1", "0"])
def test_the_loss_of_a_rank_shows_its_log_and_its_last_words(
    fork: str, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the rank is a fork, which a stand-in speaks for, or was started by itself."""
    monkeypatch.setenv("FORGE_FORK", fork)

    async def body() -> None:
        async with forge.run():
            actor = await Dying.options(procs=2, mesh_name="trainer", preload=("json",)).as_actor()
            with pytest.raises(ActorFailure) as caught:
                await actor.slice(procs=1).die.call_one("a bad end", 3)
            path = str(logs / "trainer-rank-1.log")
            message = caught.value.message
            assert re.fullmatch(rf"trainer was lost: rank 1 \(process \d+\) ended; log: {re.escape(path)}", message)
            assert caught.value.log is not None
            assert caught.value.log[0] == path
            *_, words, end = caught.value.log[1]
            assert (words, end.endswith("exit code 3 ====")) == ("a bad end", True)
            assert f"  log:    {path}, which ends with\n    | ====" in str(caught.value)
            await actor.stop()
            again = await Dying.options(procs=2, mesh_name="trainer", preload=("json",)).as_actor()
            found = await again.slice(procs=0).where.call_one()
            assert found == ("trainer-rank-0", str(logs / "trainer-rank-0.log"))

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))
    text = (logs / "trainer-rank-0.log").read_text()
    assert text.count("): started ====") == 2, "a process that takes another's place continues its file"


def test_a_rank_that_dies_in_its_setup_says_why(logs: Path) -> None:
    async def body() -> LaunchError:
        async with forge.run():
            with pytest.raises(LaunchError) as caught:
                await DiesInSetup.options(mesh_name="reward model").as_actor()
            return caught.value

    with monitored(progress=False) as monitor, phase("starting the test"):
        error = asyncio.run(asyncio.wait_for(body(), LIMIT_S))
        states = {(each.process, each.name): each.state for each in monitor.startup.phases}
    assert error.message.startswith("reward model died in its setup: reward model was lost: rank 0 (process ")
    assert error.log is not None
    assert error.log[0] == str(logs / "reward-model.log")
    assert "its last words" in error.log[1]
    assert states["reward-model", "starting"] == "done"
    assert states["reward-model", "setting up"] == "failed"


def test_processes_of_processes_have_files_in_the_same_folder(logs: Path) -> None:
    async def body() -> tuple[str, str]:
        async with forge.run():
            parent = await Parent.options(mesh_name="rewards").as_actor()
            found: tuple[str, str] = await parent.child.call_one()
            return found

    name, path = asyncio.run(asyncio.wait_for(body(), LIMIT_S))
    assert (name, path) == ("rewards.child", str(logs / "rewards.child.log"))
    assert sorted(each.name for each in logs.iterdir()) == ["controller.log", "rewards.child.log", "rewards.log"]


def test_without_a_folder_ranks_print_where_the_program_does(capfd: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        async with forge.run():
            actor = await Dying.as_actor()
            with pytest.raises(ActorFailure) as caught:
                await actor.die.call_one("a bad end", 3)
            assert caught.value.log is None

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))
    assert "a bad end" in capfd.readouterr().err
