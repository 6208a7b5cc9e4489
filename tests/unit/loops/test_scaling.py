"""Scaling a run: the rule, `forge scale` on a live run, and what a resume continues with."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors import Patient
from forge.cli import main
from forge.config import AutoscaleConfig, GRPOConfig
from forge.loops.planning import plan_run
from forge.loops.run_control import RunCommands, listening
from forge.loops.run_paths import run_dir
from forge.loops.runtime_changes import RuntimeChange, read_changes, record_change, with_changes
from forge.loops.scaling import RunScaling, ScalingLoad, scaling_rule
from forge.loops.workers import Workers
from forge.rollout.buffer import ReplayBuffer
from grpo_runs import config, train_here, train_watched, weights_digest
from local_services import services_here

RULE = AutoscaleConfig(min=1, max=4, patience=2)
STARVED, IDLE, FINE = ScalingLoad(0, 0.8, 0.8), ScalingLoad(1, 0.3, 0.0), ScalingLoad(0, 0.8, 0.2)


# ---- the rule


@pytest.mark.parametrize(
    ("loads", "replicas", "wanted"),
    [
        ([STARVED, STARVED], 2, 3),
        ([STARVED], 2, 2),  # not yet
        ([FINE, STARVED], 2, 2),
        ([FINE, STARVED, STARVED], 2, 3),
        ([STARVED, STARVED], 4, 4),  # no more than max
        ([IDLE, IDLE], 2, 1),
        ([IDLE, STARVED], 2, 2),
        ([IDLE, IDLE], 1, 1),  # no fewer than min
        ([ScalingLoad(1, 0.5, 0.0)] * 2, 2, 2),  # one alone would be busy all the time
        ([ScalingLoad(2, 0.8, 0.8)] * 2, 2, 2),  # groups are left over
        ([ScalingLoad(0, 0.1, 0.8)] * 2, 2, 2),  # something else than generation takes the time
        ([], 7, 4),
    ],
)
def test_the_rule(loads: list[ScalingLoad], replicas: int, wanted: int) -> None:
    assert scaling_rule(loads, replicas, RULE) == wanted


def test_every_key_of_the_rule_counts() -> None:
    loads = [ScalingLoad(0, 0.4, 0.4)] * 3
    assert scaling_rule(loads, 2, RULE) == 3
    assert scaling_rule(loads, 2, RULE.model_copy(update={"grow_above": 0.5})) == 2
    assert scaling_rule(loads, 2, RULE.model_copy(update={"patience": 4})) == 2
    idle = [ScalingLoad(0, 0.1, 0.04)] * 3
    assert scaling_rule(idle, 2, RULE) == 1
    assert scaling_rule(idle, 2, RULE.model_copy(update={"shrink_below": 0.01})) == 2
    assert scaling_rule(idle, 2, RULE.model_copy(update={"min": 2})) == 2


@pytest.mark.parametrize(
    ("override", "path", "rule"),
    [
        ("generator.autoscale={min: 3, max: 2}", "generator.autoscale.max", "at least min, which is 3"),
        ("generator.autoscale={max: 2, shrink_below: 0.3}", "generator.autoscale.shrink_below", "below grow_above"),
        ("generator.autoscale={min: 2, max: 3}", "generator.num_replicas", "from 2 to 3, as autoscale says"),
    ],
)
def test_a_rule_that_makes_no_sense(tmp_path: Path, override: str, path: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule) as raised:
        config(tmp_path / "run", override)
    assert path in str(raised.value)


def test_generators_on_the_trainers_device_have_no_rule(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="null with placement `shared`"):
        config(tmp_path / "run", "generator.autoscale={max: 2}", "placement=shared")


# ---- a live service


def test_the_rule_scales_a_live_service_and_admission_follows(drive: Callable[[Any], Any], tmp_path: Path) -> None:
    chosen = config(tmp_path / "run", "generator.autoscale={max: 2, patience: 1}", "generator.max_queue=8")
    run_dir(chosen).mkdir(parents=True)
    plan = plan_run(chosen)
    buffer = ReplayBuffer(plan.rollout)

    async def body() -> None:
        service = await Patient.as_service()
        workers: Any = SimpleNamespace(
            policy=SimpleNamespace(service=service), rewards=None, reference=None, episodes=None
        )
        scaling = RunScaling(plan, workers, buffer, step=lambda: 3)
        before = buffer._max_in_flight
        async with scaling.open():
            scaling.after_step({"time/step": 1.0, "time/generating": 0.8, "time/waiting": 0.1}, generating_s=0.9)
            metrics = await service.wait_until(lambda metrics: metrics.num_healthy == 2)
            assert len(metrics.replicas) == 2
            assert scaling._task is not None
            await scaling._task
            assert scaling.numbers == {"generators": 2}
            assert before is not None
            assert buffer._max_in_flight == 2 * before
            scaling.after_step({"time/step": 1.0, "time/generating": 0.0, "time/waiting": 0.0}, generating_s=1.0)
            await scaling._task
            assert len((await service.get_metrics()).replicas) == 1

    drive(body())
    key = "generator.num_replicas"
    assert list(read_changes(run_dir(chosen))) == [
        RuntimeChange(3, key, 1, 1, 2, "generator.autoscale"),
        RuntimeChange(3, key, 1, 2, 1, "generator.autoscale"),
    ]


# ---- `forge scale`


def test_a_live_run_is_scaled_and_its_resume_continues_with_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen, plain = config(tmp_path / "scaled"), config(tmp_path / "plain", "training.max_steps=4")
    folder, seen = run_dir(chosen), []

    async def scale(workers: Workers, version: int) -> None:
        if version == 1:
            seen.append(stat.S_IMODE(os.stat(folder / "control.sock").st_mode))
            seen.append(await asyncio.to_thread(main, ["scale", str(folder), "generators=2"]))

    with services_here():
        train_watched(config(tmp_path / "scaled", "training.max_steps=3"), scale)
    assert seen == [0o600, 0]
    (change,) = read_changes(folder)
    assert change == RuntimeChange(1, "generator.num_replicas", 1, 1, 2, "forge scale")
    assert "generators=2, rewards=1" in capsys.readouterr().out
    resumed = config(tmp_path / "scaled", "training.max_steps=4", "checkpointing.resume=must")
    train_here(resumed)
    assert "num_replicas: 2" in (folder / "config.yaml").read_text()
    train_here(plain)
    assert weights_digest(resumed) == weights_digest(plain)
    other = with_changes(config(tmp_path / "scaled", "generator.num_replicas=3"), folder)
    assert other.generator.num_replicas == 3  # what the user writes later wins
    assert main(["scale", str(folder)]) == 2
    assert "the run is not active" in capsys.readouterr().err


def asked(folder: Path, scaling: RunScaling, *words: str) -> int:
    """Run `forge scale` against a run that is open here."""

    async def body() -> int:
        async with listening(folder, RunCommands(scaling.handlers).answer), scaling.open():
            return await asyncio.to_thread(main, ["scale", str(folder), *words])

    return asyncio.run(asyncio.wait_for(body(), 600))


@pytest.fixture
def live(tmp_path: Path) -> Callable[..., tuple[Path, RunScaling]]:
    def make(*overrides: str) -> tuple[Path, RunScaling]:
        chosen: GRPOConfig = config(tmp_path / "run", *overrides)
        run_dir(chosen).mkdir(parents=True, exist_ok=True)
        plan = plan_run(chosen)
        service = SimpleNamespace(resize=None)
        workers: Any = SimpleNamespace(
            policy=SimpleNamespace(service=service), rewards=service, reference=None, episodes=None
        )
        return run_dir(chosen), RunScaling(plan, workers, ReplayBuffer(plan.rollout), step=lambda: 7)

    return make


def test_the_numbers_are_shown(live: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, scaling = live()
    assert asked(folder, scaling) == 0
    assert capsys.readouterr().out == "after step 7: generators=1, rewards=1\n"
    assert asked(folder, scaling, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"step": 7, "workers": {"generators": 1, "rewards": 1}}
    assert not (folder / "control.sock").exists()


@pytest.mark.parametrize(
    ("overrides", "word", "lines"),
    [
        ((), "trainer=2", ["path:   trainer", "repair: stop the run, and resume it with another section distributed"]),
        ((), "generator=2", ["rule:   one of generators, rewards", "repair: did you mean `generators`?"]),
        ((), "reference=2", ["this run has no workers `reference`", "repair: name one of these"]),
        (("placement=shared",), "generators=2", ["path:   placement", "repair: resume the run with placement: apart"]),
        (("generator.autoscale={max: 3}",), "generators=4", ["rule:   from 1 to 3 (generator.autoscale)"]),
    ],
)
def test_what_a_run_refuses(
    live: Any, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], word: str, lines: list[str]
) -> None:
    folder, scaling = live(*overrides)
    assert asked(folder, scaling, word) == 2
    printed = capsys.readouterr().err
    assert [line for line in lines if line not in printed] == []
    assert not (folder / "runtime_changes.jsonl").exists()


@pytest.mark.parametrize("word", ["generators", "generators=x", "generators=0", "generators=-1", "generators=1000000"])
def test_what_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert main(["scale", str(tmp_path), word]) == 2
    printed = capsys.readouterr().err
    assert "path:   KIND=N" in printed
    assert "repair: write it like generators=4" in printed


def test_runs_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", str(tmp_path / "none"), "generators=2"]) == 2
    assert "there is no such run" in capsys.readouterr().err
    assert main(["scale", str(tmp_path), "generators=2"]) == 2
    assert "the run is not active" in capsys.readouterr().err

    async def killed() -> None:  # a run that was killed leaves its socket
        async with listening(tmp_path, None):  # type: ignore[arg-type]
            os.link(tmp_path / "control.sock", tmp_path / "kept")
        (tmp_path / "kept").rename(tmp_path / "control.sock")

    asyncio.run(killed())
    assert main(["scale", str(tmp_path)]) == 2
    assert "value:  'Connection refused'" in capsys.readouterr().err


def test_a_run_without_a_socket_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "control.sock").mkdir()

    async def body() -> None:
        async with listening(tmp_path, None):  # type: ignore[arg-type]
            pass

    asyncio.run(body())
    assert "the run takes no commands" in caplog.text


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    change = RuntimeChange(1, "generator.num_replicas", 1, 1, 2, "forge scale")
    record_change(tmp_path, change)
    with (tmp_path / "runtime_changes.jsonl").open("a") as file:
        file.write('{"time": ')
    assert list(read_changes(tmp_path)) == [change]
