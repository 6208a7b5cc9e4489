"""The configuration of the guide on OpenEnv can be run, and its table of arguments is complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from forge.config import GRPOConfig, load
from forge.envs.external.openenv import OpenEnvOptions, OpenEnvServer
from forge.loops.planning import plan_run

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/external_environments.md"
SECTION = PAGE.read_text(encoding="utf-8").split("\n## OpenEnv\n")[1].split("\n## ")[0]


def test_the_configuration_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (config,) = re.findall(r"^```yaml\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
    (tmp_path / "number_game.yaml").write_text(config)
    record = '{"messages": [{"role": "user", "content": "Play."}], "seed": 7}\n'
    (tmp_path / "tasks.jsonl").write_text(record * 8)
    monkeypatch.chdir(tmp_path)
    plan = plan_run(load(GRPOConfig, files=["number_game.yaml"]))
    assert plan.program is not None
    assert plan.program.name == "openenv_episode"


def test_the_table_of_arguments_is_complete() -> None:
    found = re.findall(
        r"^\| `([a-z_.]+)` \| (.*?) \| (.*?) \|$", SECTION.split("All arguments, with their defaults")[1], re.M
    )
    expected = []
    for prefix, model in (("", OpenEnvOptions), ("server.", OpenEnvServer)):
        for name, entry in model.model_fields.items():
            default = entry.get_default(call_default_factory=True)
            shown = "required" if entry.is_required() else "null" if default is None else f"`{_plain(default)}`"
            expected.append((f"{prefix}{name}", shown, entry.description))
    assert found == expected


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
