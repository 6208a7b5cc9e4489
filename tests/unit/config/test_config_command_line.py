"""A program's command line, and what a configuration says about workers."""

from __future__ import annotations

import pytest

from forge.config import ForgeConfig, GRPOConfig, ReplicatedWorkerConfig, WorkerConfig, from_command_line
from forge.runtime import ActorOptions
from forge.service import ServiceOptions


def test_files_and_overrides_in_any_order(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("run: {seed: 1, name: first}\n")
    second.write_text("run: {seed: 2}\n")
    config = from_command_line(ForgeConfig, ["--config", str(first), "run.name=mine", "--config", str(second)])
    assert (config.run.seed, config.run.name) == (2, "mine")
    assert from_command_line(ForgeConfig, []) == ForgeConfig()


def test_a_broken_rule_ends_the_program_with_code_2(capsys):
    with pytest.raises(SystemExit) as ended:
        from_command_line(ForgeConfig, ["run.sed=3"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "run.sed" in said
    assert "seed" in said


def test_a_configuration_of_another_kind_names_its_program(tmp_path, capsys):
    file = tmp_path / "a.yaml"
    file.write_text("data: {sources: [{path: train.jsonl}]}\nvalidation: {fraction: 0.1}\n")
    with pytest.raises(SystemExit):
        from_command_line(GRPOConfig, ["--config", str(file)])
    hint = capsys.readouterr().err.splitlines()[-1]
    assert hint == "SFTConfig has the keys data, validation, GRPOConfig does not. Is `forge run sft` the right program?"


@pytest.mark.parametrize("text", ["trainning: {max_steps: 1}\n", "rollout: {group_size: x}\n", "a: [1\n"])
def test_an_ordinary_mistake_names_no_other_program(text, tmp_path, capsys):
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit):
        from_command_line(GRPOConfig, ["--config", str(file)])
    assert "right program" not in capsys.readouterr().err


def test_a_worker_has_the_options_defaults_where_its_section_is_silent():
    assert ActorOptions.from_keywords(**WorkerConfig().options()) == ActorOptions()
    assert ServiceOptions.from_keywords(**ReplicatedWorkerConfig().options()) == ServiceOptions()
    chosen = ServiceOptions.from_keywords(**ReplicatedWorkerConfig(max_restarts=0, env={"A": "1"}).options())
    assert (chosen.max_restarts, chosen.env, chosen.setup_timeout_s) == (0, {"A": "1"}, 600.0)


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "*"])
def test_a_controller_names_an_address_that_can_be_reached(bind, capsys):
    with pytest.raises(SystemExit):
        from_command_line(ForgeConfig, [f"launcher.bind='{bind}'"])
    assert "launcher.bind" in capsys.readouterr().err
