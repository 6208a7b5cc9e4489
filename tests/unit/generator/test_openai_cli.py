"""The command line of `forge serve`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from forge.cli import serve
from forge.config import PolicyConfig
from forge.errors import ConfigError

HELP = """
import argparse, sys
from forge.cli import serve
parser = argparse.ArgumentParser()
serve.add_parser(parser.add_subparsers())
try:
    parser.parse_args(["serve", "--help"])
except SystemExit:
    heavy = {"torch", "monarch", "pydantic", "aiohttp", "transformers", "yaml"} & set(sys.modules)
    sys.exit(f"loaded {heavy}" if heavy else 0)
"""


def configure(*words: str) -> PolicyConfig:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return serve.configure(parser.parse_args(["serve", *words]))


def test_options_and_overrides_may_stand_in_any_order(tmp_path: Path) -> None:
    record = str(tmp_path / "a: b.jsonl")
    config = configure(
        "models/qwen",
        "--port",
        "0",
        "generator.max_batch=3",
        "--api-key",
        "123",
        "--record",
        record,
        "--engine",
        "vllm",
        "--num-replicas",
        "2",
        "serve.model_name=mine",
        "--host",
        "::1",
    )
    assert config.model.path is not None
    assert str(config.model.path) == "models/qwen"
    assert (config.serve.host, config.serve.port, config.serve.api_key) == ("::1", 0, "123")
    assert (config.serve.record, config.serve.model_name) == (record, "mine")
    assert (config.generator.engine, config.generator.max_batch, config.generator.num_replicas) == ("vllm", 3, 2)


def test_overrides_win_over_options_and_options_over_files(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("model: {preset: tiny}\nserve: {port: 1, host: localhost}\ngenerator: {num_replicas: 5}\n")
    config = configure("--config", str(file), "--port", "2", "--num-replicas", "3", "generator.num_replicas=4")
    assert (config.serve.port, config.serve.host, config.generator.num_replicas) == (2, "localhost", 4)
    assert config.model.preset == "tiny"


@pytest.mark.parametrize("words", [(), ("one", "two")])
def test_one_model_is_served(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"forge serve model\.preset=tiny") as caught:
        configure(*words)
    assert (caught.value.path, caught.value.value) == ("MODEL_DIR", list(words))


def test_help_loads_nothing_heavy() -> None:
    ran = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "--record FILE" in ran.stdout


def test_a_folder_may_have_any_name() -> None:
    assert configure("models/😀 a: b", "--port", "0").model.path == "models/😀 a: b"


def test_of_a_runs_folder_the_model_that_it_wrote_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, written = tmp_path / "my run", tmp_path / "my run" / "checkpoints" / "hf"
    written.mkdir(parents=True)
    with pytest.raises(ConfigError, match="has not written a model") as caught:
        configure(str(run))
    assert (caught.value.path, caught.value.value) == ("MODEL_DIR", str(run))
    assert str(written) in str(caught.value.rule)
    (written / "config.json").write_text("{}")
    for given in (run, run / "checkpoints"):
        assert configure(str(given)).model.path == str(written)
        assert capsys.readouterr().err == f"{given} is the folder of a run: using its model, {written}\n"
    assert configure(str(written)).model.path == str(written)
    assert capsys.readouterr().err == ""
