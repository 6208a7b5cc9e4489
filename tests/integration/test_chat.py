"""Talking to a real policy: through pipes, and on a pseudo-terminal with its keys."""

from __future__ import annotations

import fcntl
import os
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from signals import hear_ctrl_c

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
APP = [sys.executable, "-m", "apps.vllm.main", "--config", "apps/vllm/tiny.yaml"]
SMALL = ["generator.max_batch=2", "generator.sampling.seed=1"]
FAKE = """
import asyncio, sys
from forge.cli.chat_terminal import Keyboard, TerminalScreen, talk_on_terminal, typed_line
from forge.generator.chat_session import ChatSession
from forge.testing.generators import FakeGenerator
import readline

screen = TerminalScreen(sys.stdout, sys.stderr, is_terminal=True)
session = ChatSession(FakeGenerator(["Fine."]), screen)
asyncio.run(talk_on_terminal(session, Keyboard(typed_line), screen))
print("ended in order")
"""

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "NO_COLOR": "1"}


def test_piped_questions_get_answers_alone() -> None:
    questions = "2+2?\n\n/temperature 0\nhello\n/reset\nhello\n/reset\nhello"
    ended = subprocess.run(
        [*APP, *SMALL, "generator.sampling.max_tokens=8", "generator.sampling.ignore_eos=true"],
        input=questions,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "\x1b" not in ended.stdout
    assert "> " not in ended.stdout
    assert "tokens/s" not in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    notes = ["The temperature is 0.", "A new conversation.", "A new conversation."]
    assert [line for line in ended.stderr.splitlines() if line in notes] == notes
    assert not set(notes) & set(ended.stdout.splitlines())
    # the same question in two new conversations, greedily
    assert re.search(r"\n(?P<answer>.+)\n(?P=answer)\n\Z", ended.stdout, re.DOTALL), ended.stdout


class Terminal:
    """A program on a pseudo-terminal of its own, as a person has it."""

    def __init__(self, command: list[str]) -> None:
        self._screen, self.keyboard = os.openpty()
        self.modes = termios.tcgetattr(self.keyboard)  # before the program can change them
        self.seen = ""
        self.program = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdin=self.keyboard,
            stdout=self.keyboard,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_own_the_terminal,
        )

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Read the screen until the pattern is there; what was before it, and it, are then read."""
        deadline = time.monotonic() + LIMIT_S
        while (found := re.search(pattern, self.seen)) is None:
            ready, _, _ = select.select([self._screen], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not come; there is {self.seen!r}"
            self.seen += os.read(self._screen, 1024).decode(errors="replace")
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def end(self) -> int:
        """Wait for the program's end, while its output is read; then the exit code."""
        _, errors = self.program.communicate(timeout=LIMIT_S)
        assert "Traceback" not in errors, errors
        return self.program.returncode

    def close(self) -> None:
        if self.program.poll() is None:
            self.program.terminate()
            self.program.communicate(timeout=LIMIT_S)
        os.close(self.keyboard)
        os.close(self._screen)


def _own_the_terminal() -> None:
    hear_ctrl_c()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(command: list[str]) -> Iterator[Terminal]:
    opened = Terminal(command)
    try:
        yield opened
    finally:
        opened.close()


def test_a_session_on_a_terminal(tmp_path: Path) -> None:
    long = ["generator.sampling.max_tokens=1800", "generator.sampling.ignore_eos=true"]
    with terminal([*APP, *SMALL, *long]) as person:
        assert "tiny on the native engine, up to 2048 tokens." in person.wait_for("> ")
        person.type("/temperature hot\n")
        assert "it stays 0.8." in person.wait_for("\n> ")
        person.type("/temperature 0.5\n")
        assert "The temperature is 0.5." in person.wait_for("\n> ")
        person.type("/logprobs\n")
        assert "Each token is shown" in person.wait_for("\n> ")
        person.type("hello\n")
        person.wait_for(r"(-?\d+\.\d{4}  initial weights  ['\"].*['\"]\r\n\s*){20}")
        person.type("\x03")
        said = person.wait_for("\n> ")
        count = re.search(r"tokens/s, (\d+) tokens?, stopped, initial weights\r\n> $", said)
        assert count is not None, said
        assert 20 <= int(count[1]) < 1800
        person.type(f"/save {tmp_path / 'talk.jsonl'}\n")
        assert "The conversation was added to" in person.wait_for("\n> ")
        person.type("/quit\n")
        assert person.end() == 0
    [line] = (tmp_path / "talk.jsonl").read_text(encoding="utf-8").splitlines()
    assert '"content": "hello"}, {"role": "assistant", "content": "' in line


@pytest.mark.parametrize("key", ["\x03", "\x04"], ids=["Ctrl-C", "Ctrl-D"])
def test_keys_at_the_prompt_end_the_session_and_leave_the_terminal_as_it_was(key: str) -> None:
    with terminal([sys.executable, "-c", FAKE]) as person:
        person.wait_for("> ")
        person.type("hi\n")
        assert re.search(r"Fine\.\r\n[\d.]+ tokens/s, 5 tokens, stop, initial weights", person.wait_for("\n> "))
        assert termios.tcgetattr(person.keyboard) != person.modes  # readline has it
        person.type(key)
        person.wait_for("ended in order")
        assert person.end() == 0
        assert termios.tcgetattr(person.keyboard) == person.modes


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["model.path=no/such/folder"], ["model.path", "no/such/folder", "forge download"]),
        (["generator.tensor_parallel=2"], ["generator.tensor_parallel", "engine: vllm"]),
    ],
)
def test_what_cannot_be_started_is_refused(words: list[str], parts: list[str]) -> None:
    ended = subprocess.run(
        [*APP, *words],
        input="hello\n",
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert [part for part in parts if part not in ended.stderr] == [], ended.stderr
