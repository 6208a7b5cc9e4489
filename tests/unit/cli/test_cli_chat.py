"""The command line, the screen and the keyboard of `forge chat`, without a terminal."""

from __future__ import annotations

import argparse
import asyncio
import io
import os
from pathlib import Path

import pytest

from forge.cli.chat import add_parser, configure
from forge.cli.chat_terminal import Keyboard, TerminalScreen, piped_lines, talk
from forge.config import PolicyConfig, Sampling
from forge.errors import ActorFailure, ConfigError
from forge.generator.chat_session import ChatSession
from forge.testing.generators import FakeGenerator

# ---- the screen and the keyboard


def test_a_pipe_gets_answers_alone_each_with_its_newline() -> None:
    answers, notes = io.StringIO(), io.StringIO()
    screen = TerminalScreen(answers, notes, is_terminal=False)
    policy = FakeGenerator(["Four.\x1b[31m", ActorFailure("lost"), "\n"])
    keyboard = Keyboard(iter(["2+2?", "/temperature hot", "gone?", "/reset", "line?", None]).__next__)
    asyncio.run(talk(ChatSession(policy, screen), keyboard))
    assert answers.getvalue() == "Four.\x1b[31m\n\n\n"
    assert notes.getvalue().splitlines()[0].startswith("The temperature must be a finite number")
    assert notes.getvalue().splitlines()[1:] == ["lost", "The question was not kept.", "A new conversation."]
    assert screen.num_problems == 2


def test_a_terminal_gets_all_and_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    answers, notes = io.StringIO(), io.StringIO()
    screen = TerminalScreen(answers, notes, is_terminal=True)
    screen.show("red \x1b[31m\x9b1m\tand\r on")
    screen.end("3 tokens")
    screen.show("a line\n")
    screen.end(None)
    screen.note("A note.")
    assert answers.getvalue() == "red �[31m�1m\tand� on\n\x1b[2m3 tokens\x1b[0m\na line\nA note.\n"
    assert notes.getvalue() == ""


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_terminals_that_cannot_dim_get_plain_text(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    answers = io.StringIO()
    TerminalScreen(answers, io.StringIO(), is_terminal=True).end("3 tokens")
    assert answers.getvalue() == "3 tokens\n"


def test_every_piece_is_flushed_when_it_comes() -> None:
    seen: list[str] = []

    class Stream(io.StringIO):
        def flush(self) -> None:
            seen.append(self.getvalue())

    screen = TerminalScreen(Stream(), io.StringIO(), is_terminal=False)
    screen.show("one")
    screen.show(" two")
    screen.end("2 tokens")
    assert seen == ["one", "one two", "one two\n"]


def test_lines_of_a_pipe_come_one_by_one_as_they_are_written() -> None:
    reading, writing = os.pipe()
    lines = piped_lines(reading)
    os.write(writing, "ä\nb".encode())
    assert next(lines) == "ä"
    os.write(writing, "c ü".encode()[:-1])
    os.write(writing, b"\xbc\r\n\n\xff")
    os.close(writing)
    assert list(lines) == ["bc ü\r", "", "�"]
    os.close(reading)


def test_who_waits_for_a_line_that_never_comes_can_be_told_to_stop() -> None:
    reading, writing = os.pipe()
    lines = piped_lines(reading)

    async def wait() -> list[str | None]:
        keyboard = Keyboard(lambda: next(lines, None))
        waiting = asyncio.create_task(keyboard.line())
        await asyncio.sleep(0)
        keyboard.end()
        return [await waiting, await keyboard.line()]

    assert asyncio.run(asyncio.wait_for(wait(), 600)) == [None, None]
    os.close(writing)


def test_a_keyboard_that_fails_says_so() -> None:
    def fail() -> str:
        raise OSError("unplugged")

    with pytest.raises(OSError, match="unplugged"):
        asyncio.run(Keyboard(fail).line())


# ---- the command line


def configured(*words: str) -> PolicyConfig:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return configure(parser.parse_args(["chat", *words]))


def test_options_are_keys_of_the_configuration(tmp_path: Path) -> None:
    text = 'Say "yes": #1\n\x7f🙂'
    options = ["--engine", "vllm", "--system", text, "--temperature", "0.5", "--max-tokens", "7", "--seed", "3"]
    config = configured("models/a b", *options, "generator.max_batch=2", "generator.num_replicas=2")
    assert (config.model.path, config.system_prompt) == ("models/a b", text)
    assert (config.generator.engine, config.generator.max_batch, config.generator.num_replicas) == ("vllm", 2, 2)
    assert config.generator.sampling == Sampling(temperature=0.5, max_tokens=7, seed=3)


def test_overrides_win_over_options_and_options_over_files(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model: {path: a}\ngenerator: {max_batch: 2, sampling: {temperature: 0.1, top_k: 4}}\n")
    config = configured("--config", str(file), "b", "--temperature", "0.2", "generator.sampling.top_k=5")
    assert (config.model.path, config.generator.max_batch) == ("b", 2)
    assert config.generator.sampling == Sampling(temperature=0.2, top_k=5)
    assert configured("--temperature", "0.2", "a", "generator.sampling.temperature=0.3").generator.sampling == Sampling(
        temperature=0.3
    )
    assert configured("model.preset=tiny").model.num_layers == 4


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ([], "MODEL_DIR", []),
        (["a", "b"], "MODEL_DIR", ["a", "b"]),
        (["a", "--temperature", "hot"], "generator.sampling.temperature", "hot"),
        (["a", "--temperature", "-1"], "generator.sampling.temperature", -1),
        (["a", "--max-tokens", "0"], "generator.sampling.max_tokens", 0),
        (["~/a"], "model.path", "~/a"),
        (["a", "generator.sampling.temprature=1"], "generator.sampling.temprature", 1),
    ],
)
def test_wrong_words_are_refused(words: list[str], path: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(*words)
    assert (refused.value.path, refused.value.value) == (path, value)
    assert refused.value.rule
    assert refused.value.repair
