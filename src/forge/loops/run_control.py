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

from forge.errors import ConfigError, ForgeError

_log = logging.getLogger("forge.loops")
SOCKET_NAME: Final = "control.sock"
_MAX_LINE: Final = 65_536
Answer = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


class RunRefused(ForgeError, RuntimeError):
    """A running run refused a command, or could not carry it out. `type_name` is the class of its own error."""

    def __init__(self, message: str, *, type_name: str = "", **fields: Any) -> None:
        super().__init__(message, **fields)
        self.type_name = type_name


@contextlib.contextmanager
def _in_folder(folder: Path) -> Iterator[str]:
    """Yield the socket's path by way of an open folder: a socket's path may have 107 bytes at most."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET_NAME}"
    finally:
        os.close(handle)


@contextlib.asynccontextmanager
async def listening(folder: Path, answer: Answer) -> AsyncIterator[None]:
    """Answer commands for the run in `folder`, whose lock this process holds, inside the block.

    On a file system without sockets there is a warning, and the run takes no commands.
    """
    try:
        listener = _bind(folder)
    except OSError as error:
        _log.warning("the run takes no commands: %s cannot be made: %s", folder / SOCKET_NAME, error.strerror)
        yield
        return

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _user_of(writer.get_extra_info("socket")) in (os.getuid(), 0):
                reply = await _answered(await reader.readline(), answer)
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError):
            pass  # the client has gone, or sent no request
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, sock=listener, limit=_MAX_LINE)
    try:
        yield
    finally:
        server.close()
        with contextlib.suppress(FileNotFoundError):
            (folder / SOCKET_NAME).unlink()


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


async def _answered(line: bytes, answer: Answer) -> Mapping[str, Any]:
    """Return the answer to a request, or the error that it raised as its fields."""
    request = json.loads(line)
    if not isinstance(request, dict):
        raise ValueError("a request is a JSON object")
    try:
        return {"ok": True, **await answer(request)}
    except ForgeError as error:
        fields = {name: getattr(error, name) for name in ("message", "path", "rule", "repair")}
        value = {} if isinstance(error.value, type(ForgeError("").value)) else {"value": error.value}
        return {"ok": False, "error": {"type_name": type(error).__name__, **fields, **value}}


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
            connection.sendall(json.dumps(dict(request)).encode() + b"\n")
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
        rule="a run of reinforcement learning that has begun and not ended, on this machine",
        repair="start or resume it; to change it for the next start, change its configuration",
    )
