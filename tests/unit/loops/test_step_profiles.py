"""Which steps are profiled, who is answered, and that nothing that goes wrong ends a run."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import pytest

from forge.config import GRPOConfig
from forge.config.record import ProfileConfig
from forge.errors import ConfigError
from forge.loops.live_settings import LiveSettings
from forge.loops.run_client import ProfiledStep, RunClient
from forge.loops.run_control import RunCommands, RunRefused, listening
from forge.loops.step_commands import StepCommands
from forge.loops.step_profiles import StepProfiles
from forge.loops.stopping import Stop
from live_commands import num_waiting

pytest.importorskip("torch")


def make(folder: Path, **section: object) -> tuple[StepCommands, StepProfiles]:
    commands = StepCommands(
        LiveSettings(GRPOConfig(), folder, keys=[]),
        stop=Stop(),
        step=lambda: 7,
        describe=lambda: {"kind": "a test", "max_steps": None, "waits_for": []},
    )
    return commands, StepProfiles(ProfileConfig(**section), folder, commands=commands, suffix="-here")  # type: ignore[arg-type]


async def take_steps(profiles: StepProfiles, *steps: int) -> None:
    import torch

    for step in steps:
        await profiles.begin(step)
        torch.ones(3).cumsum(0)
        await profiles.end()


def names(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}


def test_the_steps_of_the_configuration_are_profiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "forge.loops")
    _, profiles = make(tmp_path, steps=(2, 4))
    asyncio.run(take_steps(profiles, 1, 2, 3, 4, 5))
    files = sorted((tmp_path / "profiles").iterdir())
    assert [file.name for file in files] == [f"step-{step:08d}-controller-here.json.gz" for step in (2, 4)]
    assert "aten::cumsum" in names(files[0])
    assert f"step 2 is profiled: {files[0]}" in caplog.messages


def test_a_command_profiles_the_next_step_and_gets_its_files(tmp_path: Path) -> None:
    commands, profiles = make(tmp_path)

    async def body() -> ProfiledStep:
        async with listening(tmp_path, RunCommands(commands.handlers).answer):
            run = RunClient(tmp_path, timeout_s=600)
            await profiles.begin(8)  # nobody has asked
            asked = asyncio.create_task(asyncio.to_thread(run.profile))
            while await asyncio.to_thread(num_waiting, run) == 0:
                pass
            await profiles.end()
            assert not (tmp_path / "profiles").exists()
            await take_steps(profiles, 9, 10)
            return await asked

    found = asyncio.run(asyncio.wait_for(body(), 600))
    path = tmp_path / "profiles" / "step-00000009-controller-here.json.gz"
    assert found == ProfiledStep(9, (path,), {})
    assert "aten::cumsum" in names(path)
    assert len(list(path.parent.iterdir())) == 1


def test_the_end_of_the_run_refuses_a_profile(tmp_path: Path) -> None:
    commands, _ = make(tmp_path)

    async def body() -> None:
        async with listening(tmp_path, RunCommands(commands.handlers).answer):
            run = RunClient(tmp_path, timeout_s=600)
            asked = asyncio.create_task(asyncio.to_thread(run.profile))
            while not asked.done() and await asyncio.to_thread(num_waiting, run) == 0:
                pass
            commands.end()
            with pytest.raises(RunRefused, match="the run ended before this command was carried out"):
                await asked

    asyncio.run(asyncio.wait_for(body(), 600))


def test_a_profile_that_cannot_be_written_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profiles").write_text("not a folder")
    _, profiles = make(tmp_path, steps=(1, 2))
    asyncio.run(take_steps(profiles, 1, 2, 3))
    assert [record.message.partition(":")[0] for record in caplog.records] == ["step 1", "step 2"]


def test_an_error_of_the_profiler_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: object) -> bytes:
        raise AssertionError("the profiler has nothing")

    monkeypatch.setattr("forge.observe.torch_profile.TorchProfile._finish", fail)
    _, profiles = make(tmp_path, steps=(1,))
    asyncio.run(take_steps(profiles, 1, 2))
    assert caplog.messages == ["step 1: no profile of all: the profiler has nothing"]
    assert not (tmp_path / "profiles").exists()


@pytest.mark.parametrize(
    ("section", "key"), [({"steps": (0,)}, "steps"), ({"workers": ()}, "workers"), ({"max_seconds": 0}, "max_seconds")]
)
def test_a_wrong_section_says_what_is_allowed(section: dict[str, object], key: str) -> None:
    from forge.config import load

    with pytest.raises(ConfigError) as raised:
        load(GRPOConfig, defaults={"record": {"profile": section}})
    assert raised.value.path == f"record.profile.{key}"
    assert raised.value.repair
