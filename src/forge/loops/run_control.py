"""A running run takes commands: over a Unix socket in its folder, which only its user can open.

One request for each connection: a line of JSON, answered with a line of JSON. `ask_run` is the client's side, and
imports neither torch nor Monarch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from forge.errors import MISSING, ConfigError, ForgeError, OptionError

_log = logging.getLogger("forge.loops")
SOCKET_NAME: Final = "control.sock"
_MAX_LINE: Final = 65_536
_MAX_REPLY: Final = 1 << 22
_LAST_ANSWERS_S: Final = 5.0
"""How long a run that ends gives the commands that it has just answered to send their answers."""
Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Carries out a request, and returns the fields of its answer."""


class RunRefused(ForgeError, RuntimeError):
    """A running run refused a command, or could not carry it out. `type_name` is the class of its own error."""

    def __init__(self, message: str, *, type_name: str = "", **fields: Any) -> None:
        super().__init__(message, **fields)
        self.type_name = type_name

    def __str__(self) -> str:
        return self.message if self.type_name == "InvalidConfig" else super().__str__()  # which names all problems


class RunCommands:
    """The commands that a live run takes. Each is carried out by the part of the run that knows it.

    Args:
        parts: handlers by the names of their commands.
    """

    def __init__(self, *parts: Mapping[str, Handler]) -> None:
        self._handlers = {name: handler for part in parts for name, handler in part.items()}

    async def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Carry a request out. Raise `OptionError` for a command that there is not."""
        name = request.get("command")
        handler = self._handlers.get(name) if isinstance(name, str) else None
        if handler is None:
            raise OptionError(
                "this run takes no such command",
                path="command",
                value=name,
                rule=f"one of {', '.join(self._handlers)}",
                repair="runs of reinforcement learning take all commands; others have no workers to scale",
            )
        return await handler(request)


@contextlib.contextmanager
def _in_folder(folder: Path) -> Iterator[str]:
    """Yield the socket's path by way of an open folder: a socket's path may have 107 bytes at most."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET_NAME}"
    finally:
        os.close(handle)


@contextlib.asynccontextmanager
async def listening(folder: Path, answer: Handler) -> AsyncIterator[None]:
    """Answer commands for the run in `folder`, whose lock this process holds, inside the block.

    On a file system without sockets there is a warning, and the run takes no commands.
    """
    try:
        listener = _bind(folder)
    except OSError as error:
        _log.warning("the run takes no commands: %s cannot be made: %s", folder / SOCKET_NAME, error.strerror)
        yield
        return

    answering: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if _user_of(writer.get_extra_info("socket")) in (os.getuid(), 0):
                line = await reader.readline()
                answering.add(task)
                reply = await _answered(line, answer)
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError, RecursionError) as error:  # the client has gone, or sent no request
            _log.debug("a command was not answered: %s", error)
        finally:
            answering.discard(task)
            writer.close()

    server = await asyncio.start_unix_server(serve, sock=listener, limit=_MAX_LINE)
    try:
        yield
    finally:
        server.close()
        with contextlib.suppress(FileNotFoundError):
            (folder / SOCKET_NAME).unlink()
        if answering:
            _, slow = await asyncio.wait(answering, timeout=_LAST_ANSWERS_S)
            for task in slow:
                task.cancel()


def _bind(folder: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        os.fchmod(listener.fileno(), 0o600)  # before the file appears
        with _in_folder(folder) as path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of a run that was killed
            listener.bind(path)
    except BaseException:
        listener.close()
        raise
    return listener


def _user_of(connection: Any) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


async def _answered(line: bytes, answer: Handler) -> Mapping[str, Any]:
    """Return the answer to a request, or the error that it raised as its fields."""
    request = json.loads(line)
    if not isinstance(request, dict):
        raise ValueError("a request is a JSON object")
    try:
        return {"ok": True, **await answer(request)}
    except ForgeError as error:
        fields = {name: getattr(error, name) for name in ("message", "path", "rule", "repair")}
        value = {} if error.value is MISSING else {"value": _plain(error.value)}
        return {"ok": False, "error": {"type_name": type(error).__name__, **fields, **value}}


def _plain(value: object) -> object:
    """Return a value as JSON holds it, or as text."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)
    return value


def ask_run(folder: Path, request: Mapping[str, Any], *, timeout_s: float | None = None) -> Mapping[str, Any]:
    """Send a command to the run in `folder` and return its answer. Raise `RunRefused` with the run's own error."""
    if not folder.is_dir():
        raise ConfigError(
            "there is no such run",
            path="RUN",
            value=str(folder),
            rule="the folder of a run, such as runs/first",
            repair="check the path; it is relative to the working directory",
        )
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, _in_folder(folder) as path:
            connection.settimeout(timeout_s)
            connection.connect(path)
            connection.sendall(_encoded(request))
            line = connection.makefile("rb").readline()
    except TimeoutError:
        raise RunRefused(
            "the run has not answered in time; it may still carry the command out",
            path="--timeout",
            value=timeout_s,
            rule="an answer within this time",
            repair="ask again, or raise it",
        ) from None
    except OSError as error:
        raise _not_active(folder, error) from None
    return _reply(folder, line)


async def ask_run_soon(folder: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Do what `ask_run` does without blocking the event loop. When it is cancelled, the run carries the command out all
    the same."""
    try:
        with _in_folder(folder) as path:
            reader, writer = await asyncio.open_unix_connection(path, limit=_MAX_REPLY)
        try:
            writer.write(_encoded(request))
            await writer.drain()
            line = await reader.readline()
        finally:
            writer.close()
    except OSError as error:
        raise _not_active(folder, error) from None
    return _reply(folder, line)


def _encoded(request: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(request)).encode() + b"\n"


def _reply(folder: Path, line: bytes) -> Mapping[str, Any]:
    if not line:
        raise _not_active(folder, None)
    reply: Mapping[str, Any] = json.loads(line)
    if not reply["ok"]:
        fields = dict(reply["error"])
        raise RunRefused(fields.pop("message"), **fields)
    return reply


def _not_active(folder: Path, error: OSError | None) -> ConfigError:
    if isinstance(error, PermissionError):
        return ConfigError(
            "this run belongs to another user",
            path=str(folder / SOCKET_NAME),
            value=f"user {os.getuid()}",
            rule="only the user of a run can change it",
            repair="run the command as that user",
        )
    return ConfigError(
        "the run is not active",
        path=str(folder / SOCKET_NAME),
        value="no answer" if error is None else error.strerror,
        rule="a run that has begun its first step and not ended, on this machine",
        repair="start or resume it; to change it for the next start, change its configuration",
    )
