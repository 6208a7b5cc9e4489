"""Commands of a live run: who answers them, when, and what becomes of those that the run's end overtakes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forge.cli import main
from forge.config import GRPOConfig
from forge.errors import CheckpointError, ConfigError, OptionError
from forge.loops.live_settings import LiveSettings
from forge.loops.run_client import RunClient
from forge.loops.run_control import RunCommands, RunRefused, listening
from forge.loops.runtime_changes import read_changes
from forge.loops.step_commands import StepCommands
from forge.loops.stopping import Stop
from forge.loops.waits import Waits
from live_commands import num_waiting

RATE, STALENESS = "training.learning_rate", "rollout.staleness"


class Run:
    """What a loop does with its commands, step by step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stop, self.step = folder, Stop(), 7
        self.waits = Waits(self.stop, report_s=600, step=lambda: self.step)
        self.settings = LiveSettings(GRPOConfig(), folder, keys=[RATE, STALENESS])
        self.commands = StepCommands(
            self.settings,
            stop=self.stop,
            step=lambda: self.step,
            describe=lambda: {"kind": "a test", "max_steps": None, "waits_for": list(self.waits.current)},
        )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunClient]:
        async with listening(self.folder, RunCommands(self.commands.handlers).answer):
            try:
                yield RunClient(self.folder, timeout_s=600)
            finally:
                self.commands.end()

    async def asked(self, ask: Callable[..., Any], *arguments: Any) -> asyncio.Task[Any]:
        """Ask from a thread; returns when the run knows of it."""
        live = RunClient(self.folder, timeout_s=600)
        before = await asyncio.to_thread(num_waiting, live)
        task = asyncio.create_task(asyncio.to_thread(ask, *arguments))
        while not task.done() and await asyncio.to_thread(num_waiting, live) == before:
            pass
        return task


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def go(body: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(body(), 600))  # type: ignore[arg-type]


def test_settings_change_when_the_loop_says_so_and_in_the_order_of_the_commands(run: Run) -> None:
    async def body() -> None:
        async with run.open() as live:
            first = await run.asked(live.set, {RATE: 2e-5, STALENESS: 1})
            second = await run.asked(live.set, {RATE: 3e-5})
            assert run.settings.values == {RATE: 1e-5, STALENESS: 0}
            status = await asyncio.to_thread(live.show)
            assert status.commands == {"set": 2}
            assert status.settings[RATE].value == status.settings[RATE].configured == 1e-5
            assert run.commands.change() is True
            assert run.commands.change() is False
            assert [each.after for each in (await first).changes] == [2e-5, 1]
            assert (await second).changes[0].before == 2e-5
            assert (await second).from_step == 8
            assert run.settings.values == {RATE: 3e-5, STALENESS: 1}
            assert [each.after for each in read_changes(run.folder)] == [2e-5, 1, 3e-5]

    go(body)


def test_what_cannot_be_is_refused_at_once_and_again_when_it_is_carried_out(run: Run) -> None:
    async def body() -> None:
        async with run.open() as live:
            with pytest.raises(RunRefused) as raised:
                await asyncio.to_thread(live.set, {RATE: -1})
            assert (raised.value.type_name, raised.value.path, raised.value.value) == ("ConfigError", RATE, -1)
            with pytest.raises(RunRefused, match="2 problems") as several:
                await asyncio.to_thread(live.set, {RATE: -1, STALENESS: -1})
            assert str(several.value).count(RATE) == 1, "each problem is named once"
            asked = await run.asked(live.set, {RATE: 2e-5})
            run.settings._check = refuse  # what another command has changed meanwhile
            assert run.commands.change() is False
            with pytest.raises(RunRefused, match="not now"):
                await asked

    def refuse(config: GRPOConfig) -> None:
        raise ConfigError("not now", path=RATE)

    go(body)


def test_evaluations_and_saves_are_done_once_for_all_who_asked(run: Run) -> None:
    done = []

    async def save() -> dict[str, Any]:
        done.append(run.step)
        return {"checkpoint": f"step-{run.step}"}

    async def evaluate() -> dict[str, Any]:
        return {"evaluation": None}

    async def body() -> None:
        async with run.open() as live:
            saves = [await run.asked(live.save) for _ in range(3)]
            await run.commands.carry_out("evaluate", evaluate)
            await run.commands.carry_out("save", save)
            await run.commands.carry_out("save", save)
            assert [(await each).path for each in saves] == [Path("step-7")] * 3
            assert done == [7]
            cut = await run.asked(live.evaluate)
            await run.commands.carry_out("evaluate", evaluate)
            with pytest.raises(RunRefused, match="asked to stop during the evaluation"):
                await cut

    go(body)


def test_what_fails_ends_the_run_and_is_told(run: Run) -> None:
    async def fail() -> dict[str, Any]:
        raise CheckpointError("no room", path="disk")

    async def crash() -> dict[str, Any]:
        raise ZeroDivisionError("by nothing")

    async def body() -> None:
        async with run.open() as live:
            asked = await run.asked(live.save)
            with pytest.raises(CheckpointError):
                await run.commands.carry_out("save", fail)
            with pytest.raises(RunRefused, match="no room") as raised:
                await asked
            assert (raised.value.type_name, raised.value.path) == ("CheckpointError", "disk")
            asked = await run.asked(live.save)
            with pytest.raises(ZeroDivisionError):
                await run.commands.carry_out("save", crash)
            with pytest.raises(RunRefused, match="ZeroDivisionError"):
                await asked

    go(body)


def test_commands_that_the_end_overtakes_are_answered(run: Run) -> None:
    async def body() -> list[Any]:
        async with run.open() as live:
            asked = [await run.asked(live.set, {RATE: 2e-5}), await run.asked(live.save)]
        return await asyncio.gather(*asked, return_exceptions=True)

    for error in go(body):
        assert isinstance(error, RunRefused)
        assert "the run ended before this command was carried out" in str(error)
        assert "resume the run" in str(error.repair)
    assert list(read_changes(run.folder)) == []


def test_stop_is_the_first_ctrl_c(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with run.open() as live:
            assert await asyncio.to_thread(live.stop) == 130
            assert (run.stop.is_asked, run.stop.exit_code) == (True, 130)
            assert await asyncio.to_thread(live.stop) == 130
            assert (await asyncio.to_thread(live.show)).is_stopping

    go(body)
    assert caplog.text.count("stopping on command: this step is finished and saved") == 1


def test_what_the_run_does_is_shown_while_it_does_it(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        async with run.open():
            assert await asyncio.to_thread(main, ["control", str(run.folder)]) == 0
            with run.waits.shown("the trainer learns"), run.waits.shown(lambda: f"version {run.step}"):
                assert await asyncio.to_thread(main, ["control", str(run.folder), "show"]) == 0
                assert await asyncio.to_thread(main, ["control", str(run.folder), "--json"]) == 0

    go(body)
    _, first, second = capsys.readouterr().out.split("after step 7: ")
    assert first == f"between two steps\n  {RATE}  1e-05\n  {STALENESS}       0\n"
    assert second.startswith(f"the trainer learns; version 7\n  {RATE}  1e-05\n")
    shown = json.loads(second[second.index("{") :])
    assert shown["waits_for"] == ["the trainer learns", "version 7"]
    assert shown["settings"][RATE]["meaning"] == "the highest rate of the schedule"
    assert "ok" not in shown


def test_a_command_that_there_is_not(run: Run) -> None:
    async def body() -> None:
        async with run.open() as live:
            for command in ("scale", "explode"):
                with pytest.raises(RunRefused) as raised:
                    await asyncio.to_thread(live.ask, command)
                assert (raised.value.path, raised.value.value) == ("command", command)
                assert raised.value.rule == "one of show, stop, set, evaluate, save, profile"
                assert "have no workers to scale" in str(raised.value.repair)
            with pytest.raises(RunRefused, match="names at least one") as empty:
                await asyncio.to_thread(live.set, {})
            assert (empty.value.path, empty.value.type_name) == ("values", "OptionError")

    go(body)


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["set"], "KEY=VALUE", ""),
        (["set", RATE], "KEY=VALUE", RATE),
        (["set", f"~{RATE}"], "KEY=VALUE", f"~{RATE}"),
        (["set", "=3"], "KEY=VALUE", "=3"),
        (["save", f"{RATE}=1"], "KEY=VALUE", f"{RATE}=1"),
    ],
)
def test_what_the_command_line_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], path: str, value: str
) -> None:
    assert main(["control", str(tmp_path), *words]) == 2
    printed = capsys.readouterr().err
    assert f"path:   {path}" in printed
    assert f"value:  {value!r}" in printed
    assert "repair: write it like" in printed


def test_exit_codes_say_whose_fault_it_is(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        async with run.open():
            assert await asyncio.to_thread(main, ["control", str(run.folder), "set", f"{RATE}=-1"]) == 2
            assert "rule:   must be greater than 0" in capsys.readouterr().err
            words = ["control", str(run.folder), "set", f"{RATE}=1e-4", f"{STALENESS}=2", "--json"]
            asked = await run.asked(main, words)
            run.commands.change()
            assert await asked == 0
            changes = [{"key": RATE, "before": 1e-5, "after": 1e-4}, {"key": STALENESS, "before": 0, "after": 2}]
            assert json.loads(capsys.readouterr().out) == {"step": 7, "from_step": 8, "changes": changes}
            asked = await run.asked(main, ["control", str(run.folder), "set", f"{RATE}=1e-4"])
            run.commands.change()
            assert await asked == 0
            assert capsys.readouterr().out == "from step 8 on: nothing changes\n"
            assert await asyncio.to_thread(main, ["control", str(run.folder), "save", "--timeout", "0.05"]) == 1
            assert "the run has not answered in time" in capsys.readouterr().err

    go(body)
    assert main(["control", str(run.folder)]) == 2
    assert "the run is not active" in capsys.readouterr().err


def test_an_error_whose_value_is_no_json_reaches_the_client(tmp_path: Path) -> None:
    async def answer(request: Any) -> Any:
        raise OptionError("odd", path="here", value=Path("/x"))

    async def body() -> None:
        async with listening(tmp_path, answer):
            with pytest.raises(RunRefused, match="odd") as raised:
                await asyncio.to_thread(RunClient(tmp_path).ask, "any")
            assert raised.value.value == repr(Path("/x"))

    go(body)
