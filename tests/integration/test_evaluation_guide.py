"""The commands and programs of the guide on evaluation do what it shows."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import forge
from answering_endpoint import AnsweringEndpoint, answering, digits_of
from forge.cli import main, make_parser
from forge.config import EvalConfig, load
from local_services import services_here

PAGE = (Path(__file__).resolve().parents[2] / "docs/guides/evaluation.md").read_text(encoding="utf-8")
URL = "http://127.0.0.1:8000/v1"
RIGHT = {"17 + 25": 42, "8 + 6": 14, "31 - 12": 19, "9 * 7": 63, "50 - 8": 42, "12 * 12": 144}


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def answer(body: Mapping[str, Any]) -> str:
    """Answer by the question, the seed and the model: the large one is right more often."""
    text = body["messages"][-1]["content"]
    number = next(value for words, value in RIGHT.items() if words in text)
    is_right = (digits_of(text) + body["seed"]) % 7 < (5 if body["model"] == "big" else 3)
    return f"The answer is {number if is_right else number + 1}."


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AnsweringEndpoint]:
    """The files that the page speaks of, and a server."""
    (tmp_path / "tasks.jsonl").write_text(blocks("json")[0])
    (tmp_path / "eval.yaml").write_text(blocks("yaml")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with services_here(), answering(answer) as endpoint:
        yield endpoint


def shown(start: str) -> tuple[list[str], str]:
    """Return the words of the command that starts so, and what the page shows for it."""
    (found,) = [block for block in blocks("console") if block.startswith(f"$ forge eval {start}")]
    command, _, text = found.removeprefix("$ ").partition("\n")
    return shlex.split(command)[1:], text


def test_the_commands_print_what_the_page_shows(server: AnsweringEndpoint, capsys: pytest.CaptureFixture[str]) -> None:
    words, text = shown("--endpoint")
    words[words.index(URL)] = server.url
    assert main(words) == 0
    assert capsys.readouterr().out == text
    larger = [word.replace("small", "big") for word in words]
    assert main(larger) == 0
    capsys.readouterr()
    for start in ("show", "compare"):
        words, text = shown(start)
        assert main(words) == 0
        assert capsys.readouterr().out == text


def test_changed_settings_are_refused_as_the_page_shows(
    server: AnsweringEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    words, _ = shown("--endpoint")
    words[words.index(URL)] = server.url
    assert main(words) == 0
    capsys.readouterr()
    words[words.index("-n") + 1] = "8"
    assert main([*words, "--temperature", "0.5"]) == 2
    assert capsys.readouterr().err == blocks("text")[0]


def test_the_program_of_the_page(server: AnsweringEndpoint, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = blocks("python")
    body = "".join(f"    {line}\n" for line in program.replace(URL, server.url).splitlines())
    names: dict[str, Any] = {}
    exec(f"async def run():\n{body}", names)
    asyncio.run(names["run"]())
    first, second = capsys.readouterr().out.splitlines()
    assert first == "6 0"
    assert 0 < float(second.split()[1]) < float(second.split()[0])


def test_all_commands_and_keys_exist() -> None:
    commands = [line for block in blocks("console") for line in block.splitlines() if line.startswith("$ forge eval")]
    assert len(commands) == 7
    for command in commands:
        assert make_parser().parse_args(shlex.split(command)[2:]).handler is not None
    for key in re.findall(r"`eval\.(\w+)`", PAGE):
        assert key in EvalConfig.model_fields["eval"].annotation.model_fields  # type: ignore[union-attr]
    assert forge.evaluate is not None
    assert load(EvalConfig).run.name == "eval"
