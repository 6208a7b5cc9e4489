"""A program's command line, and what a configuration says about actors and services."""

from __future__ import annotations

import pytest

from forge.config import ActorConfig, ForgeConfig, GRPOConfig, ServiceConfig, from_command_line
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
    assert hint == (
        "SFTConfig has the keys data, validation, GRPOConfig does not. Is apps/sft/main.py the right program?"
    )


@pytest.mark.parametrize("text", ["trainning: {max_steps: 1}\n", "rollout: {group_size: x}\n", "a: [1\n"])
def test_an_ordinary_mistake_names_no_other_program(text, tmp_path, capsys):
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit):
        from_command_line(GRPOConfig, ["--config", str(file)])
    assert "right program" not in capsys.readouterr().err


def test_configured_actors_and_services_have_the_defaults_of_the_options():
    assert ActorOptions.from_keywords(**ActorConfig().options()) == ActorOptions()
    assert ServiceOptions.from_keywords(**ServiceConfig().options()) == ServiceOptions()
    chosen = ServiceOptions.from_keywords(**ServiceConfig(num_replicas=3, env={"A": "1"}, hosts=2).options())
    assert (chosen.num_replicas, chosen.env, chosen.hosts) == (3, {"A": "1"}, 2)


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "*"])
def test_a_controller_names_an_address_that_can_be_reached(bind, capsys):
    with pytest.raises(SystemExit):
        from_command_line(ForgeConfig, [f"launcher.bind='{bind}'"])
    assert "launcher.bind" in capsys.readouterr().err
