"""Secrets of a configuration do not reach trackers or errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from forge.config import SFTConfig
from forge.observe import make_sinks
from forge.observe.secrets import is_secret, without_passwords, without_secrets


@pytest.mark.parametrize("name", ["api_key", "serve.api_key", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"])
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["eos_token", "max_tokens", "num_key_value_heads", "api_key_env", "tls_key", "tls_secret_name", "keyboard"]
)
def test_other_names_are_not_taken_for_secrets(name: str) -> None:
    assert not is_secret(name)


def test_secrets_are_hidden_wherever_they_are() -> None:
    given = {
        "env": {"HF_TOKEN": "hf_abc", "OMP_NUM_THREADS": "1", "EMPTY_TOKEN": ""},
        "sinks": [{"kind": "mlflow", "args": {"tracking_uri": "https://me:pw@host:5000/x", "password": "pw"}}],
        "api_key": None,
        "steps": 3,
    }
    assert without_secrets(given) == {
        "env": {"HF_TOKEN": "***", "OMP_NUM_THREADS": "1", "EMPTY_TOKEN": ""},
        "sinks": [{"kind": "mlflow", "args": {"tracking_uri": "https://***@host:5000/x", "password": "***"}}],
        "api_key": None,
        "steps": 3,
    }
    assert without_passwords("at http://a:b@c/ and user@host") == "at http://***@c/ and user@host"


class Kept:
    """A tracker that keeps what it is given."""

    configs: ClassVar[list[Mapping[str, Any]]] = []

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.configs.append(config)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Nothing is kept of a step."""

    def close(self) -> None:
        """Nothing is open."""


def test_trackers_get_the_configuration_without_secrets(tmp_path: Path) -> None:
    sinks = [{"kind": f"{__name__}:Kept", "args": {}}]
    config = SFTConfig.model_validate(
        {
            "run": {"output_dir": str(tmp_path)},
            "model": {"preset": "tiny"},
            "workers": {"trainer": {"env": {"HF_TOKEN": "hf_abc", "LANG": "C"}}},
            "metrics": {"sinks": sinks, "tensorboard": False},
        }
    )
    make_sinks(config.metrics, folder=tmp_path, run=config).close()
    (kept,) = Kept.configs
    assert (kept["workers.trainer.env.HF_TOKEN"], kept["workers.trainer.env.LANG"]) == ("***", "C")
    assert "hf_abc" not in str(kept)
    assert "pw" not in str(kept)
