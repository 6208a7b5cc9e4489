"""A conversation with a policy, line by line, independent of terminals: `forge chat` adds screen and keyboard."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

from forge.config import Sampling
from forge.errors import ForgeError, PromptError
from forge.types import INITIAL_VERSION, Completion, Delta

TokenText: TypeAlias = Callable[[int], str]
"""The text of one token."""

_RESET_HINT: Final = "/reset starts a new conversation"


class Screen(Protocol):
    """Where a session shows its output."""

    def show(self, text: str) -> None:
        """Show a part of an answer at once."""
        ...

    def end(self, summary: str | None) -> None:
        """End an answer; `summary` is None where it failed."""
        ...

    def note(self, text: str) -> None:
        """Show a reply to a command."""
        ...

    def problem(self, text: str) -> None:
        """Show an error."""
        ...


@dataclass
class _Answer:
    """An answer as it grows."""

    began_s: float
    text: str = ""
    num_tokens: int = 0
    versions: list[int] = field(default_factory=list)
    completion: Completion | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.num_tokens += len(delta.token_ids)
        if delta.token_ids and delta.version not in self.versions:
            self.versions.append(delta.version)
        if delta.completion is not None:
            self.completion = delta.completion

    def summary(self, now_s: float) -> str:
        """Return tokens, rate, reason and versions on one line. The rate counts from the question on."""
        seconds = now_s - self.began_s
        rate = f"{self.num_tokens / seconds:.1f}" if seconds > 0 else "-"
        reason = "stopped" if self.completion is None else self.completion.finish_reason
        made_by = " and ".join(_name_of(version) for version in self.versions) or "no weights"
        tokens = "1 token" if self.num_tokens == 1 else f"{self.num_tokens} tokens"
        return f"{rate} tokens/s, {tokens}, {reason}, {made_by}"


class ChatSession:
    """The history and the settings of one conversation. One line at a time: `handle` it, and `stop` its answer.

    What cannot be done (a value out of range, a file that cannot be written, a question that the service refuses) is a
    problem on the screen, and the session continues. A question without an answer is not kept; one whose answer was
    stopped is, with what there was of the answer.

    Attributes:
        messages: the conversation so far, without the system message.
        system: the system message; None for none.
    """

    def __init__(
        self,
        service: Any,
        screen: Screen,
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        max_seq_len: int | None = None,
        load_token_text: Callable[[], Awaitable[TokenText]] | None = None,
    ) -> None:
        """`service` is a service of `Generator`, or a fake of one. `sampling` is its configuration's, `max_seq_len` its
        context. `load_token_text` gives what `/logprobs` shows tokens with; without it they are numbers."""
        self.messages: list[dict[str, str]] = []
        self.system = system or None
        self.clock: Callable[[], float] = time.perf_counter
        self._service, self._screen = service, screen
        self._sampling, self._changes = sampling or Sampling(), dict[str, Any]()
        self._max_seq_len = max_seq_len
        self._load_token_text = load_token_text
        self._token_text: TokenText = "token {}".format
        self._shows_logprobs = self._is_over = False
        self._answering: asyncio.Task[None] | None = None

    async def handle(self, line: str) -> bool:
        """Carry out a command or answer a question; False when the line ends the session. Empty lines do nothing."""
        if not line.startswith("/"):
            if question := line.strip():
                await self._ask(question)
            return True
        name, _, value = line[1:].strip().partition(" ")
        command = _COMMANDS.get(name)
        if command is None:
            known = ", ".join(f"/{other}" for other in _COMMANDS)
            self._screen.problem(f"There is no command /{name}. There are {known}.")
            return True
        try:
            await command.run(self, value.strip())
        except ForgeError as error:
            self._screen.problem(str(error))
        return not self._is_over

    def stop(self) -> bool:
        """End the answer under way; its request is cancelled. False when there is none."""
        return self._answering is not None and self._answering.cancel()

    def _whole(self) -> list[dict[str, str]]:
        """Return the conversation with its system message."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.messages]

    # ---- questions

    async def _ask(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})
        answer = _Answer(self.clock())
        self._answering = asyncio.create_task(self._stream(answer))
        try:
            await self._answering
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if this is not None and this.cancelling():
                raise  # it is the whole session that ends
            self._conclude(answer)
        except ForgeError as error:
            self.messages.pop()
            self._screen.end(None)
            self._screen.problem(_refusal(error, is_first=not self.messages))
        else:
            self._conclude(answer)
        finally:
            self._answering = None

    async def _stream(self, answer: _Answer) -> None:
        deltas = self._service.generate_stream.stream(messages=self._whole(), sampling=dict(self._changes), n=1)
        async with aclosing(deltas):
            async for delta in deltas:
                answer.add(delta)
                shown = self._with_logprobs(delta) if self._shows_logprobs else delta.text
                if shown:
                    self._screen.show(shown)
                await asyncio.sleep(0)  # a stream that is faster than the screen never waits, and `stop` must be heard

    def _conclude(self, answer: _Answer) -> None:
        """Keep an answer, whole or stopped, and show its summary."""
        self._screen.end(answer.summary(self.clock()))
        completion = answer.completion
        if not answer.text:
            self.messages.pop()  # an empty answer cannot be continued, nor trained on
            what = "The answer is empty" if completion is not None else "Stopped before the answer began"
            self._screen.note(f"{what}; the question was not kept.")
            return
        self.messages.append({"role": "assistant", "content": answer.text})
        if completion is None or completion.finish_reason != "length" or self._max_seq_len is None:
            return
        if len(completion.prompt_ids) + len(completion) >= self._max_seq_len:
            self._screen.note(f"The context of {self._max_seq_len} tokens is full: {_RESET_HINT}.")

    def _with_logprobs(self, delta: Delta) -> str:
        return "".join(
            f"{logprob:9.4f}  {_name_of(delta.version)}  {self._token_text(token)!r}\n"
            for token, logprob in zip(delta.token_ids, delta.logprobs, strict=True)
        )

    # ---- commands

    async def _set_system(self, text: str) -> None:
        self.system = text or None
        self._screen.note("The system message is set." if text else "There is no system message now.")

    async def _set_temperature(self, text: str) -> None:
        try:
            temperature = float(text)
        except ValueError:
            temperature = math.nan
        if not 0 <= temperature < math.inf:
            now = self._changes.get("temperature", self._sampling.temperature)
            self._screen.problem(
                f"The temperature must be a finite number from 0 up, as in /temperature 0.7; it stays {now:g}."
            )
            return
        self._changes["temperature"] = temperature
        self._screen.note(f"The temperature is {temperature:g}.")

    async def _toggle_logprobs(self, text: str) -> None:
        if text:
            self._screen.problem("/logprobs takes no value: it turns logprobs on, or off again.")
            return
        if not self._shows_logprobs and self._load_token_text is not None:
            self._token_text, self._load_token_text = await self._load_token_text(), None
        self._shows_logprobs = not self._shows_logprobs
        if self._shows_logprobs:
            self._screen.note("Each token is shown with its logprob and the weights that made it.")
        else:
            self._screen.note("Answers are shown as text.")

    async def _reset(self, text: str) -> None:
        self.messages.clear()
        self._screen.note("A new conversation." + (" The system message stays." if self.system else ""))

    async def _save(self, text: str) -> None:
        if not text or not self.messages:
            missing = "a file, as in /save talk.jsonl" if not text else "a conversation: ask something first"
            self._screen.problem(f"/save needs {missing}.")
            return
        try:
            path = _append_line(text, json.dumps({"messages": self._whole()}, ensure_ascii=False))
        except OSError as error:
            self._screen.problem(f"{error.filename or text} cannot be written: {error.strerror}. Name another file.")
        else:
            self._screen.note(f"The conversation was added to {path}.")

    async def _help(self, text: str) -> None:
        width = max(len(command.usage) for command in _COMMANDS.values())
        lines = [f"{command.usage:<{width}}  {command.meaning}" for command in _COMMANDS.values()]
        ending = "Ctrl-C stops an answer; at the prompt it ends the session, as Ctrl-D does."
        self._screen.note("\n".join([*lines, ending, "Put a space before a question that begins with a slash."]))

    async def _quit(self, text: str) -> None:
        self._is_over = True


@dataclass(frozen=True)
class _Command:
    usage: str
    meaning: str
    run: Callable[[ChatSession, str], Awaitable[None]]


_COMMANDS: Final = {
    "system": _Command("/system TEXT", "set the system message; without TEXT, have none", ChatSession._set_system),
    "temperature": _Command("/temperature X", "sample at temperature X; 0 is greedy", ChatSession._set_temperature),
    "logprobs": _Command("/logprobs", "show each token with its logprob, or text again", ChatSession._toggle_logprobs),
    "reset": _Command("/reset", "forget the conversation", ChatSession._reset),
    "save": _Command("/save FILE", "add the conversation to a JSONL file, as SFT reads it", ChatSession._save),
    "help": _Command("/help", "show this list", ChatSession._help),
    "quit": _Command("/quit", "end the session", ChatSession._quit),
}


def _name_of(version: int) -> str:
    return "initial weights" if version == INITIAL_VERSION else f"version {version}"


def _refusal(error: ForgeError, *, is_first: bool) -> str:
    """Return the message about a question that was not answered."""
    if not isinstance(error, PromptError):
        return f"{error}\nThe question was not kept."
    return f"{error}\nThe question was not kept: {'ask a shorter one' if is_first else _RESET_HINT}."


def _append_line(name: str, line: str) -> str:
    """Add a line to a file and return the file's path. A file is never replaced: it may hold other conversations."""
    path = os.path.expanduser(name)
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")
    return path
