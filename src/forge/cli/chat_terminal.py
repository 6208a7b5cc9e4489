"""The keyboard and the screen of `forge chat`: a terminal, or a pipe at either end."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TextIO

from forge.errors import ModelError
from forge.generator.actor import start_policy
from forge.generator.chat_session import ChatSession, TokenText
from forge.types import INITIAL_VERSION

if TYPE_CHECKING:
    from forge.config import PolicyConfig

PROMPT: Final = "> "
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class TerminalScreen:
    """Answers go to `answers`. All else goes there too on a terminal, and otherwise to `notes`, without summaries.

    On a terminal the control characters of an answer are shown as �, so that no model moves the cursor.

    Attributes:
        num_problems: how many things could not be done.
    """

    def __init__(self, answers: TextIO, notes: TextIO, *, is_terminal: bool) -> None:
        self.num_problems = 0
        self._answers, self._notes, self._is_terminal = answers, notes, is_terminal
        self._can_dim = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._is_in_line = False

    def show(self, text: str) -> None:
        self._answers.write(_CONTROL.sub("�", text) if self._is_terminal else text)
        self._answers.flush()
        self._is_in_line = not text.endswith("\n")

    def end(self, summary: str | None) -> None:
        if self._is_in_line or (summary is not None and not self._is_terminal):
            print(file=self._answers, flush=True)
        self._is_in_line = False
        if summary is not None and self._is_terminal:
            print(f"\x1b[2m{summary}\x1b[0m" if self._can_dim else summary, file=self._answers, flush=True)

    def note(self, text: str) -> None:
        print(text, file=self._answers if self._is_terminal else self._notes, flush=True)

    def problem(self, text: str) -> None:
        self.num_problems += 1
        self.note(text)


class Keyboard:
    """Lines, each read on a thread of its own, so the event loop keeps running. None: no more lines."""

    def __init__(self, read_line: Callable[[], str | None]) -> None:
        self._read_line = read_line
        self._waiting: asyncio.Future[str | None] | None = None
        self._is_over = False

    async def line(self) -> str | None:
        """The next line."""
        if self._is_over:
            return None
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        # A daemon thread, not one of asyncio's: a read that never returns must not keep the program alive.
        threading.Thread(target=self._read, args=(loop, self._waiting), name="keyboard", daemon=True).start()
        return await self._waiting

    def end(self) -> None:
        """No more lines: who waits for one gets None, and the one that is being typed is dropped."""
        self._is_over = True
        if self._waiting is not None:
            _settle(self._waiting, None)

    def _read(self, loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[str | None]) -> None:
        result: str | Exception | None
        try:
            result = self._read_line()
        except Exception as error:  # noqa: BLE001 - it is raised where the line is awaited
            result = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the line is not needed
            loop.call_soon_threadsafe(_settle, waiting, result)


def _settle(waiting: asyncio.Future[str | None], result: str | Exception | None) -> None:
    if waiting.done():
        return
    if isinstance(result, Exception):
        waiting.set_exception(result)
    else:
        waiting.set_result(result)


def typed_line() -> str | None:
    """A line from the terminal, behind the prompt; None after Ctrl-D. With `readline`, where there is one, it can be
    edited and earlier ones come back."""
    try:
        return _valid(input(PROMPT))
    except EOFError:
        return None


def piped_lines(descriptor: int) -> Iterator[str]:
    """The lines of a pipe or a file, each as soon as it is there.

    The descriptor is read as it is: a thread that waits inside `sys.stdin` would hold a lock that Python's end needs.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    while chunk := os.read(descriptor, 65536):
        *lines, rest = (rest + decoder.decode(chunk)).split("\n")
        yield from lines
    if rest := rest + decoder.decode(b"", final=True):
        yield rest


def _valid(text: str) -> str:
    """Bytes that were no UTF-8 arrive as halves of surrogate pairs, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


async def talk(session: ChatSession, keyboard: Keyboard) -> None:
    """Handle line after line until there are no more, or one ends the session."""
    while (line := await keyboard.line()) is not None:
        if not await session.handle(line):
            return


async def talk_on_terminal(session: ChatSession, keyboard: Keyboard, screen: TerminalScreen) -> None:
    """As `talk`, and Ctrl-C stops the answer under way, or ends the session where there is none."""

    def interrupt() -> None:
        if not session.stop():
            keyboard.end()
            screen.note("")

    loop = asyncio.get_running_loop()
    with _terminal_restored(sys.stdin.fileno()):
        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            await talk(session, keyboard)
        finally:
            loop.remove_signal_handler(signal.SIGINT)


@contextlib.contextmanager
def _terminal_restored(descriptor: int) -> Iterator[None]:
    """A line that is still being typed has the terminal in readline's own mode; give it back as it was."""
    import termios

    before = termios.tcgetattr(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def converse(config: PolicyConfig) -> int:
    """Start the generators of a configuration, talk, and return the exit code that `chat` documents."""
    import forge

    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what the terminal's encoding does not
    screen = TerminalScreen(sys.stdout, sys.stderr, is_terminal=is_terminal)
    async with forge.run(config.launcher):
        service = await start_policy(config)
        card = await service.card.route()
        _check_template(card)
        session = ChatSession(
            service,
            screen,
            system=config.system_prompt,
            sampling=config.generator.sampling,
            max_seq_len=card["max_seq_len"],
            load_token_text=lambda: asyncio.to_thread(_load_token_text, card["folder"]),
        )
        if is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - `input` uses it once it is there
            screen.note(_greeting(card))
            await talk_on_terminal(session, Keyboard(typed_line), screen)
            return 0
        lines = piped_lines(sys.stdin.fileno())
        await talk(session, Keyboard(lambda: next(lines, None)))
        return 1 if screen.num_problems else 0


def _greeting(card: Mapping[str, Any]) -> str:
    version = "" if card["version"] == INITIAL_VERSION else f", version {card['version']}"
    about = f"{card['name']} on the {card['engine']} engine{version}, up to {card['max_seq_len']} tokens."
    return f"{about} /help lists the commands, Ctrl-D ends."


def _check_template(card: Mapping[str, Any]) -> None:
    if not card["has_chat_template"]:
        raise ModelError(
            "The model has no chat template to turn a conversation into a prompt.",
            path="generator.chat_template",
            value=None,
            rule="a file with a Jinja template, if the tokenizer has none",
            repair="set generator.chat_template=FILE, or use the chat version of the model",
        )


def _load_token_text(folder: str) -> TokenText:
    """What shows single tokens as text. The tokenizer is loaded only for this: answers come with their text.

    Most folders have a tokenizer.json, for which `tokenizers` alone is enough; `transformers` would take seconds.
    """
    file = os.path.join(folder, "tokenizer.json")
    if os.path.isfile(file):
        from tokenizers import Tokenizer

        plain = Tokenizer.from_file(file)
        return lambda token: str(plain.decode([token], skip_special_tokens=False))
    from forge.models.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer.load(folder)
    return lambda token: tokenizer.decode([token])
