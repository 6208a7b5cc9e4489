"""What the guide on environments of other projects says is so."""

from __future__ import annotations

import asyncio
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from external_envs import Unavailable
from forge.config import GRPOConfig, load
from forge.envs.external.openenv import OpenEnvOptions, OpenEnvServer
from forge.envs.external.processes import close_servers
from forge.loops.planning import plan_run
from openenv_envs import openenv_python

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "guides" / "external_environments.md").read_text(encoding="utf-8")


def block(kind: str, containing: str) -> str:
    found: list[str] = [
        text for text in re.findall(rf"^```{kind}\n(.*?)^```$", GUIDE, re.M | re.S) if containing in text
    ]
    assert len(found) == 1
    return found[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "number_game.py").write_text(block("python", "# number_game.py"))
    (tmp_path / "number_game.yaml").write_text(block("yaml", "# number_game.yaml"))
    record = '{"messages": [{"role": "user", "content": "Play."}], "seed": 7}\n'
    (tmp_path / "tasks.jsonl").write_text(record * 8)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_configuration_can_be_run(folder: Path) -> None:
    plan = plan_run(load(GRPOConfig, files=["number_game.yaml"]))
    assert plan.program is not None


@pytest.mark.usefixtures("leaves_nothing")
def test_the_game_is_played_as_the_guide_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        openenv_python()
    except Unavailable as reason:
        pytest.skip(str(reason))
    program = block("python", "run = await play")
    expected = [line.split("# ", 1)[1] for line in program.splitlines() if "# " in line]
    names: dict[str, Any] = {}
    exec(f"async def main():\n{textwrap.indent(program, '    ')}", names)

    async def body() -> None:
        try:
            await names["main"]()
        finally:
            await close_servers()

    asyncio.run(body())
    assert capsys.readouterr().out.splitlines() == expected


def test_the_table_of_arguments_is_complete() -> None:
    found = re.findall(
        r"^\| `([a-z_.]+)` \| (.*?) \| (.*?) \|$", GUIDE.split("All arguments, with their defaults")[1], re.M
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
