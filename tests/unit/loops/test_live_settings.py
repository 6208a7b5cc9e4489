"""Settings that change while a run runs: what is refused, what is recorded, and what a resume makes of it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge.config import GRPOConfig
from forge.config.problems import InvalidConfig
from forge.errors import ConfigError, ForgeError, OptionError, RecordError
from forge.loops.grpo_control import check_live, live_keys
from forge.loops.live_settings import LIVE_KEYS, LiveSettings
from forge.loops.planning import plan_run
from forge.loops.run_paths import run_dir
from forge.loops.runtime_changes import (
    FILE_NAME,
    RuntimeChange,
    begin_changes,
    changes_in_force,
    read_changes,
    record_change,
    record_changes,
)
from forge.losses import PolicyLoss
from grpo_runs import config

RATE, TEMPERATURE = "training.learning_rate", "generator.sampling.temperature"
STALENESS, BATCH_GROUPS = "rollout.staleness", "rollout.batch_groups"
CRITIC_RATE = "critic.training.learning_rate"
ME = "forge control"


def settings_of(chosen: GRPOConfig, *, source: object = None, **plan_fields: Any) -> LiveSettings[GRPOConfig]:
    """The settings of a run that begins, with the rules of a live run."""
    run_dir(chosen).mkdir(parents=True, exist_ok=True)
    plan = replace(plan_run(chosen), **plan_fields)
    source = SimpleNamespace(sample_at=None) if source is None else source
    return LiveSettings(
        plan.config,
        run_dir(chosen),
        keys=live_keys(plan.config),
        check=lambda config: check_live(plan, config, source=source),
    )


def begun(chosen: GRPOConfig, step: int, saved: dict[str, Any] | None = None) -> LiveSettings[GRPOConfig]:
    """The settings of a run that is resumed after a step."""
    settings = settings_of(chosen)
    settings.begin(step, is_resumed=True, saved=saved)
    return settings


# ---- What is refused


@pytest.mark.parametrize(
    ("overrides", "values", "path", "rule"),
    [
        (
            (),
            {"training.max_steps": 9},
            "training.max_steps",
            f"one of {RATE}, {TEMPERATURE}, {STALENESS}, {BATCH_GROUPS}",
        ),
        ((), {CRITIC_RATE: 1e-3}, CRITIC_RATE, "one of training.learning_rate, "),
        ((), {RATE: 0}, RATE, "must be greater than 0"),
        ((), {RATE: "fast"}, RATE, "must be a number"),
        ((), {RATE: None}, RATE, "must be a number"),
        ((), {RATE: float("nan")}, RATE, "finite number"),
        ((), {BATCH_GROUPS: 1.5}, BATCH_GROUPS, "whole number"),
        ((), {BATCH_GROUPS: 0}, BATCH_GROUPS, "greater than or equal to 1"),
        ((), {STALENESS: -1}, STALENESS, "greater than or equal to 0"),
        ((), {TEMPERATURE: 0}, TEMPERATURE, "more than 0 in reinforcement learning"),
        ((), {TEMPERATURE: 1e-45}, TEMPERATURE, "is 0, or at least"),
        (("placement=turns",), {STALENESS: 1}, STALENESS, "0 with placement `turns`"),
        (("placement=shared",), {STALENESS: 1}, STALENESS, "in a run that was started with 0"),
        (
            ("algorithm.preset=reinforce_pp", "rollout.group_size=1"),
            {BATCH_GROUPS: 1},
            BATCH_GROUPS,
            "at least 2 with rollout.group_size 1",
        ),
        (
            ("training.max_steps=null", "training.schedule=cosine"),
            {BATCH_GROUPS: 3},
            BATCH_GROUPS,
            "2 with the schedule `cosine` and without training.max_steps",
        ),
    ],
)
def test_values_that_a_run_cannot_take_on(
    tmp_path: Path, overrides: tuple[str, ...], values: dict[str, Any], path: str, rule: str
) -> None:
    settings = settings_of(config(tmp_path / "run", *overrides))
    with pytest.raises(ForgeError) as raised:
        settings.set({**values}, step=3, by=ME)
    error = raised.value
    assert error.path == path
    assert error.value == values[path] or error.value != error.value  # NaN
    assert rule in str(error.rule)
    assert error.repair
    assert not (run_dir(settings.config) / FILE_NAME).exists()
    assert settings.config == settings_of(settings.config).config


def test_all_keys_of_a_command_are_changed_or_none(tmp_path: Path) -> None:
    settings = settings_of(config(tmp_path / "run"))
    with pytest.raises(ConfigError):
        settings.set({RATE: 5e-4, BATCH_GROUPS: 0}, step=3, by=ME)
    assert settings.values[RATE] == 1e-3
    with pytest.raises(InvalidConfig, match=r"2 problems") as raised:
        settings.set({RATE: -1, BATCH_GROUPS: 0}, step=3, by=ME)
    assert [problem.path for problem in raised.value.problems] == [BATCH_GROUPS, RATE]
    with pytest.raises(OptionError, match="cannot be changed while the run runs") as other:
        settings.set({RATE: 5e-4, "training.learning_rat": 1.0}, step=3, by=ME)
    assert other.value.repair == "did you mean `training.learning_rate`?"
    with pytest.raises(OptionError) as fixed:
        settings.set({"training.max_steps": 9}, step=3, by=ME)
    assert fixed.value.repair == "stop the run, change its configuration, and continue it with --resume"
    assert settings.values[RATE] == 1e-3
    assert list(read_changes(run_dir(settings.config))) == []


def test_a_temperature_needs_a_loss_a_teacher_and_a_source_that_know_it(tmp_path: Path) -> None:
    class Own:
        """A loss that does not know of temperatures."""

    chosen = config(tmp_path / "run")
    own = settings_of(chosen, loss=Own(), own_loss=True)
    with pytest.raises(ConfigError, match="does not know the temperature") as raised:
        own.set({TEMPERATURE: 0.5}, step=1, by=ME)
    assert raised.value.path == TEMPERATURE
    settings_of(chosen, loss=PolicyLoss(), own_loss=True).set({TEMPERATURE: 0.5}, step=1, by=ME)
    fixed = settings_of(chosen, source=SimpleNamespace())
    with pytest.raises(OptionError, match="cannot change its temperature") as refused:
        fixed.set({TEMPERATURE: 0.5}, step=1, by=ME)
    assert (refused.value.path, refused.value.value) == (TEMPERATURE, 0.5)
    assert "sample_at" in str(refused.value.rule)
    assert "RolloutSource" in str(refused.value.repair)
    fixed.set({RATE: 5e-4}, step=1, by=ME)


def test_a_run_that_was_started_ahead_may_fall_back_and_run_ahead_again(tmp_path: Path) -> None:
    settings = settings_of(config(tmp_path / "run", "placement=shared", "rollout.staleness=1"))
    settings.set({STALENESS: 0}, step=1, by=ME)
    settings.set({STALENESS: 2}, step=2, by=ME)
    assert settings.values[STALENESS] == 2


def test_the_keys_of_each_run(tmp_path: Path) -> None:
    assert live_keys(config(tmp_path / "run")) == [RATE, TEMPERATURE, STALENESS, BATCH_GROUPS]
    assert live_keys(config(tmp_path / "ppo", "algorithm.preset=ppo")) == list(LIVE_KEYS)
    ppo = settings_of(config(tmp_path / "ppo", "algorithm.preset=ppo"))
    ppo.set({CRITIC_RATE: 2e-3}, step=1, by=ME)
    ppo.set({CRITIC_RATE: None}, step=2, by=ME)
    assert ppo.values[CRITIC_RATE] is None


# ---- What is recorded


def test_what_is_recorded_and_what_is_not(tmp_path: Path) -> None:
    settings = settings_of(config(tmp_path / "run"))
    changes = settings.set({RATE: 5e-4, TEMPERATURE: 1}, step=3, by="me")
    assert changes == [RuntimeChange(3, RATE, 1e-3, 1e-3, 5e-4, "me")], "the temperature is 1 already"
    assert list(read_changes(run_dir(settings.config))) == changes
    assert settings.set({RATE: 5e-4}, step=4, by="me") == []
    assert len(list(read_changes(run_dir(settings.config)))) == 1
    settings.set({RATE: 1e-3}, step=5, by="me")
    assert list(read_changes(run_dir(settings.config)))[-1] == RuntimeChange(5, RATE, 1e-3, 5e-4, 1e-3, "me")


def test_a_command_that_a_kill_cut_off_is_left_out_as_a_whole(tmp_path: Path) -> None:
    one = RuntimeChange(1, RATE, 1e-3, 1e-3, 2e-3, ME)
    two = [replace(one, step=2, after=3e-3), RuntimeChange(2, TEMPERATURE, 1.0, 1.0, 0.5, ME)]
    record_change(tmp_path, one)
    record_changes(tmp_path, two)
    path = tmp_path / FILE_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    assert [json.loads(line).get("num_left") for line in lines] == [None, 1, None]
    for cut in (lines[:2], [*lines[:2], lines[2][:20]], [*lines[:1], lines[1][:20]]):
        path.write_bytes(b"".join(cut))
        assert list(read_changes(tmp_path)) == [one]
    begin_changes(tmp_path, is_resumed=True)
    assert path.read_bytes() == lines[0], "what comes next must not be joined to it"
    record_changes(tmp_path, two)
    assert list(read_changes(tmp_path)) == [one, *two]
    begin_changes(tmp_path, is_resumed=False)
    assert list(read_changes(tmp_path)) == []
    assert (tmp_path / "runtime_changes.1.jsonl").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_change_that_cannot_be_recorded_is_not_made(tmp_path: Path) -> None:
    settings = settings_of(config(tmp_path / "run"))
    (run_dir(settings.config) / FILE_NAME).symlink_to("/dev/full")
    with pytest.raises(RecordError, match="cannot be recorded: No space left"):
        settings.set({RATE: 5e-4}, step=3, by=ME)
    assert settings.values[RATE] == 1e-3


# ---- What a resume makes of it


def test_a_resume_takes_on_the_values_of_its_step_and_makes_later_changes_again(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run")
    settings = settings_of(chosen)
    settings.set({RATE: 2e-3, STALENESS: 1}, step=2, by=ME)
    settings.set({RATE: 3e-3}, step=4, by=ME)
    for step, expected in {1: (1e-3, 0), 2: (2e-3, 1), 3: (2e-3, 1), 4: (3e-3, 1), 9: (3e-3, 1)}.items():
        resumed = begun(chosen, step)
        assert (resumed.values[RATE], resumed.values[STALENESS]) == expected
    resumed = begun(chosen, 1)
    assert [(change.step, change.key, change.after) for change in resumed.planned] == [
        (2, RATE, 2e-3),
        (2, STALENESS, 1),
        (4, RATE, 3e-3),
    ]
    assert resumed.advance(2) is True
    assert (resumed.values[RATE], resumed.values[STALENESS]) == (2e-3, 1)
    assert resumed.advance(3) is False
    assert resumed.advance(4) is True
    assert resumed.values[RATE] == 3e-3
    assert len(list(read_changes(run_dir(chosen)))) == 3


def test_a_new_change_takes_the_place_of_those_that_would_be_made_again(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run")
    settings_of(chosen).set({RATE: 3e-3, STALENESS: 1}, step=4, by=ME)
    resumed = begun(chosen, 2)
    resumed.set({RATE: 2e-3}, step=3, by=ME)
    assert [change.key for change in resumed.planned] == [STALENESS]
    for step in (3, 4, 9):
        assert begun(chosen, step).values[RATE] == 2e-3
    assert begun(chosen, 2).values[RATE] == 1e-3
    same = begun(chosen, 2)
    same.set({STALENESS: 0}, step=3, by=ME)  # as it is, but it is not to change after step 4
    assert begun(chosen, 9).values[STALENESS] == 0


def test_what_the_user_writes_later_wins(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run")
    settings_of(chosen).set({RATE: 2e-3}, step=2, by=ME)
    other = config(tmp_path / "run", f"{RATE}=7e-3")
    resumed = begun(other, 5, saved={RATE: 2e-3, TEMPERATURE: 1.0, STALENESS: 0, BATCH_GROUPS: 2})
    assert (resumed.values[RATE], resumed.planned) == (7e-3, ())
    assert list(read_changes(run_dir(chosen)))[-1] == RuntimeChange(5, RATE, 7e-3, 2e-3, 7e-3, "configuration")
    assert begun(other, 6, saved={RATE: 7e-3}).values[RATE] == 7e-3
    back = begun(chosen, 6, saved={RATE: 7e-3})
    assert back.values[RATE] == 1e-3, "written again after it was changed to something else"
    assert [change.step for change in read_changes(run_dir(chosen))] == [2, 5, 6]


def test_a_start_from_the_beginning_with_another_configuration_is_noted(tmp_path: Path) -> None:
    """After a crash before the first checkpoint. Only so does the file say which bound held in each step."""
    chosen = config(tmp_path / "run", f"{STALENESS}=1")
    settings_of(chosen).set({STALENESS: 0}, step=2, by=ME)
    again = begun(config(tmp_path / "run", f"{STALENESS}=2"), 0)
    assert (again.values[STALENESS], again.planned) == (2, ())
    line = RuntimeChange(0, STALENESS, 2, 1, 2, "configuration")
    assert list(read_changes(run_dir(chosen)))[1:] == [line]
    begun(config(tmp_path / "run", f"{STALENESS}=2"), 0)
    assert list(read_changes(run_dir(chosen)))[1:] == [line], "said once"


def test_changes_of_another_run_in_the_folder_are_moved_aside(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run")
    settings_of(chosen).set({RATE: 2e-3}, step=2, by=ME)
    fresh = settings_of(chosen)
    fresh.begin(0, is_resumed=False)
    assert (fresh.values[RATE], fresh.planned) == (1e-3, ())


def test_recorded_changes_that_do_not_fit_the_configuration_any_more(tmp_path: Path) -> None:
    settings_of(config(tmp_path / "run")).set({STALENESS: 1}, step=2, by=ME)
    for step in (1, 5):  # to be made again, or in force
        with pytest.raises(ConfigError, match="does not fit its configuration now") as raised:
            begun(config(tmp_path / "run", "placement=turns"), step)
        assert raised.value.path == str(tmp_path / "run" / FILE_NAME)
        assert raised.value.value == STALENESS
        assert "0 with placement `turns`" in str(raised.value.rule)
        assert f"another value of {STALENESS}" in str(raised.value.repair)


def test_which_changes_are_in_force() -> None:
    def change(step: int, after: float, configured: float = 1.0, key: str = "a.b") -> RuntimeChange:
        return RuntimeChange(step, key, configured, 0.0, after, ME)

    found = [change(2, 2.0), change(5, 5.0), change(3, 9.0, key="c"), change(4, 4.0), change(4, 4.5)]
    assert changes_in_force(found, "a.b", configured=1.0) == [found[0], found[4]]
    assert changes_in_force(found, "a.b", configured=3.0) == []
    assert changes_in_force([*found, change(6, 6.0, 3.0)], "a.b") == [found[0], found[4], change(6, 6.0, 3.0)]
    assert changes_in_force([*found, change(6, 6.0, 3.0)], "a.b", configured=1.0) == []
    assert changes_in_force([*found, change(6, 6.0, 3.0), change(7, 7.0)], "a.b", configured=1.0) == [change(7, 7.0)]
