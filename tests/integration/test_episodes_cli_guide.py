"""The commands of the guide on trying and checking episodes print what it shows."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from chat_templates import THINKING, chatml_folder
from forge.cli import main, make_parser
from forge.testing.generators import FakeGenerator
from openai_serving import serving

PAGE = (Path(__file__).resolve().parents[2] / "docs/guides/episodes_cli.md").read_text(encoding="utf-8")
SHOWN = [text.split("\n", 1) for text in re.findall(r"^```console\n\$ (.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
"""Each command and what it prints."""


def block(kind: str) -> str:
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the page speaks of."""
    (tmp_path / "my_module.py").write_text(block("python"))
    (tmp_path / "tasks.jsonl").write_text(block("json"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    for name in ("OPENAI_API_KEY", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def shown(start: str) -> tuple[list[str], list[str]]:
    """Return the words of the command that starts so, and the lines that the page shows for it."""
    ((command, text),) = [each for each in SHOWN if each[0].startswith(f"forge {start}")]
    return shlex.split(command)[1:], plain(text)


def plain(text: str) -> list[str]:
    """Return lines without times, whose width varies."""
    lines = (re.sub(r" *\d+\.\d+ *", " N ", line).strip() for line in text.splitlines())
    return [line for line in lines if line]


def test_the_check_of_an_environment(capsys: pytest.CaptureFixture[str]) -> None:
    words, lines = shown("env check")
    assert main(words) == 0
    assert plain(capsys.readouterr().out) == lines


def test_an_episode_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    words, lines = shown("episode try my_module:solve --task @tasks.jsonl:1")
    assert main(words) == 0
    found = plain(capsys.readouterr().out)
    answer = lines.index("assistant") + 1  # random weights: what they say is not the point
    assert found[:answer] == lines[:answer]
    assert found[-5:] == lines[-5:]


def test_an_episode_at_an_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    words, lines = shown("episode try my_module:solve --task @tasks.jsonl --endpoint")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
    with serving(FakeGenerator([call, "The answer is 42."], name="my-model")) as server:
        words[words.index("--endpoint") + 1] = server.base_url
        assert main(words) == 0
        text = capsys.readouterr().out.replace(server.base_url, "http://127.0.0.1:8000/v1")
    assert plain(text) == lines


def test_the_check_of_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    chatml_folder(Path("models/thinking"), THINKING)
    words, lines = shown("template check")
    assert main(words) == 0
    assert plain(capsys.readouterr().out) == lines


def test_all_commands_exist() -> None:
    assert len(SHOWN) == 5
    for command, _ in SHOWN:
        assert make_parser().parse_args(shlex.split(command)[1:]).handler is not None
