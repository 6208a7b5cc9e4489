"""The programs of the guide on environments of other projects run, and its configurations are valid."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import yaml

from external_envs import Unavailable, venv_or_unavailable
from foreign_packages import GYMNASIUM, MCP, OPENENV, TEXTARENA, VERIFIERS
from forge.config import EpisodeConfig
from forge.envs.environment import load_program
from forge.envs.external.adapting import options_of
from forge.envs.external.gymnasium import GymnasiumOptions
from forge.envs.external.mcp import McpOptions
from forge.envs.external.processes import close_servers
from forge.envs.external.reasoning_gym import ReasoningGymOptions
from forge.envs.external.textarena import TextArenaOptions
from forge.envs.external.verifiers import VerifiersOptions

Drive = Callable[[Coroutine[Any, Any, Any]], Any]
PAGE = Path(__file__).resolve().parents[2] / "docs/guides/external_environments.md"
SECTIONS = dict(
    each.split("\n", 1) for each in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
)
NEEDED = {
    "Gymnasium": GYMNASIUM[0],
    "OpenEnv": OPENENV[0],
    "TextArena": TEXTARENA[0],
    "MCP": MCP[0],
    "verifiers": VERIFIERS[0],
}
OPTIONS = {
    "gymnasium": GymnasiumOptions,
    "textarena": TextArenaOptions,
    "verifiers": VerifiersOptions,
    "reasoning_gym": ReasoningGymOptions,
}
COMMON = "from forge import Task\nfrom forge.testing import play\n"


def blocks(section: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", SECTIONS[section], re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("section", NEEDED)
def test_the_programs_of_a_section_run(
    section: str,
    drive: Drive,
    leaves_nothing: None,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    try:
        venv_or_unavailable((NEEDED[section],))
    except Unavailable as reason:
        pytest.skip(str(reason))
    programs = blocks(section, "python")
    for file in blocks(section, "py"):
        (tmp_path / file.splitlines()[0].removeprefix("# ")).write_text(file)
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        names: dict[str, Any] = {"__name__": "page"}
        try:
            for program in (COMMON, *programs):
                code = compile(program, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
                running = eval(code, names)
                if inspect.iscoroutine(running):
                    await running
        finally:
            await close_servers()

    drive(scenario())
    expected = [line.rsplit("  # ", 1)[1] for program in programs for line in program.splitlines() if "print(" in line]
    assert expected
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize("section", ["Gymnasium", "TextArena", "verifiers", "reasoning-gym"])
def test_the_configurations_of_a_section_are_valid(section: str) -> None:
    found = [EpisodeConfig.model_validate(yaml.safe_load(each)["episode"]) for each in blocks(section, "yaml")]
    assert found
    for config in found:
        assert config.kind is not None
        options_of(OPTIONS[config.kind], load_program(config.kind, config.args).args)


def test_every_argument_of_mcp_is_named() -> None:
    assert [name for name in McpOptions.model_fields if not re.search(rf"\b{name}\b", SECTIONS["MCP"])] == []


def test_every_argument_of_gymnasium_is_listed() -> None:
    listed = {
        name
        for row in re.findall(r"^\| (`.*?) \|", SECTIONS["Gymnasium"], re.M)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert listed == set(GymnasiumOptions.model_fields)
