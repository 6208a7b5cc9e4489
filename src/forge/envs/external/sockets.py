"""Connections to servers of other projects: requests and replies, with every failure a `Fault`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

from forge.envs.limits import Fault

CLOSE_S: Final = 2.0
"""How long a server may take to end a session."""
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
_SMALL: Final = 16_384
"""Characters that fit into the buffers of a connection, whether they are read or not."""
_MAX_WAITING: Final = 2
"""Messages that may wait unread; a server that sends more is not answering requests."""


class MessageSocket:
    """A connection on which one request is answered by one reply.

    It is read all the time, so that pings of the server are answered while the policy generates, and it pings the
    server itself. After a fault it is of no further use: the session behind it is gone.

    Args:
        url: where to connect, `http://…`.
        name: what faults call the server, and what their kinds begin with: `openenv` makes `openenv_lost`.
        headers: HTTP headers of the connection.
        max_bytes: a longer message of the server is a fault.
        keep_alive_s: seconds between pings.
    """

    def __init__(self, url: str, *, name: str, headers: Mapping[str, str], max_bytes: int, keep_alive_s: float) -> None:
        self.url, self._name, self._max_bytes, self._keep_alive_s = url, name, max_bytes, keep_alive_s
        self._http = aiohttp.ClientSession(headers=dict(headers))
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._replies: deque[str] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._lost: Fault | None = None

    async def connect(self, limit_s: float) -> None:
        """Open the connection, with retries until `limit_s` have passed."""
        pause_s, problem = _FIRST_PAUSE_S, "no answer"
        limits = aiohttp.ClientWSTimeout(ws_close=CLOSE_S)
        try:
            async with asyncio.timeout(limit_s):
                while self._socket is None:
                    try:
                        self._socket = await self._http.ws_connect(
                            self.url, max_msg_size=self._max_bytes, timeout=limits
                        )
                    except (aiohttp.ClientError, OSError) as error:
                        problem = f"{type(error).__name__}: {error}"
                        await asyncio.sleep(pause_s)
                        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except TimeoutError:
            raise self.fault(f"cannot be reached within {limit_s:g} s: {problem}", "unreachable") from None
        self._tasks = [asyncio.create_task(self._read(self._socket)), asyncio.create_task(self._ping(self._socket))]

    async def ask(self, text: str, limit_s: float) -> str:
        """Send a request and return its reply."""
        assert self._socket is not None, "connect first"
        loop = asyncio.get_running_loop()
        expires = loop.call_later(limit_s, self._expire, limit_s)  # a third of the cost of asyncio.timeout
        try:
            if self._lost is None and not self._replies:
                with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # the reader says what happened
                    if len(text) < _SMALL:
                        await self._socket.send_str(text)
                    else:  # the server may not read it
                        await asyncio.wait_for(self._socket.send_str(text), limit_s)
            while not self._replies:
                if self._lost is not None:
                    raise self._lost
                self._waiting = loop.create_future()
                await self._waiting
        except TimeoutError:
            self._expire(limit_s)
            assert self._lost is not None
            raise self._lost from None
        finally:
            expires.cancel()
        return self._replies.popleft()

    def _expire(self, limit_s: float) -> None:
        self._lost = self._lost or self.fault(f"took longer than {limit_s:g} s to answer", "timeout")
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def close(self, farewell: str | None = None) -> None:
        """Close the connection. A server that gets a `farewell` closes it itself, when it has ended the session."""
        socket, tasks = self._socket, self._tasks
        self._socket, self._tasks = None, []
        try:
            if socket is not None and self._lost is None and farewell is not None:
                with contextlib.suppress(TimeoutError, ConnectionError, aiohttp.ClientError):
                    async with asyncio.timeout(CLOSE_S):
                        await socket.send_str(farewell)
                        await asyncio.wait(tasks[:1])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._http.close()

    def fault(self, what: str, kind: str) -> Fault:
        """Return a fault of this server."""
        return Fault(f"the server {self.url} {what}", kind=f"{self._name}_{kind}", path=self.url)

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while self._lost is None:
            message = await socket.receive()
            if message.type is aiohttp.WSMsgType.TEXT:
                self._replies.append(message.data)
                if len(self._replies) > _MAX_WAITING:
                    self._lost = self.fault("sends messages without being asked", "schema")
            elif message.type is aiohttp.WSMsgType.BINARY:
                self._lost = self.fault("sent bytes instead of text", "schema")
            elif socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
                self._lost = self.fault(f"sent a message of more than {self._max_bytes} bytes", "too_large")
            else:
                self._lost = self.fault(f"closed the connection (code {socket.close_code})", "lost")
            self._wake()

    async def _ping(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await asyncio.sleep(self._keep_alive_s)
            try:
                await socket.ping()
            except (ConnectionError, aiohttp.ClientError):
                return  # the reader says what happened


async def fetch_json(
    url: str, *, name: str, headers: Mapping[str, str], max_bytes: float, limit_s: float
) -> dict[str, Any]:
    """Return the JSON object at a URL. `name` is what kinds of faults begin with."""
    limits = aiohttp.ClientTimeout(total=limit_s)
    try:
        async with (
            aiohttp.ClientSession(headers=dict(headers), timeout=limits) as http,
            http.get(url) as response,
        ):
            response.raise_for_status()
            text = b""
            async for part in response.content.iter_any():
                text += part
                if len(text) > max_bytes:
                    raise Fault(f"{url} has more than {max_bytes} bytes", kind=f"{name}_too_large", path=url)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        message = f"{url} cannot be read: {type(error).__name__}: {error}"
        raise Fault(message, kind=f"{name}_unreachable", path=url) from error
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Fault(f"{url} is not a JSON object: {text[:200]!r}", kind=f"{name}_schema", path=url)
    return found
