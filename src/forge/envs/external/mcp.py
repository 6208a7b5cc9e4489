"""MCP: tool servers over stdio and streamable HTTP, whose tools the policy calls in an episode.

    async with mcp_tools(command=["{python}", "server.py"], requirements=["mcp==2.3.0"]) as tools:
        await agent.run_tools(task.messages, tools=tools)

The protocol is spoken directly: JSON-RPC over pipes or aiohttp, so no package is needed on our side, and the server's
process is supervised as all foreign processes are. What a tool reports as an error is text for the policy. A server
that cannot be reached, ends, is too slow or violates the protocol is a `Fault`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
from pydantic import Field, model_validator

from forge._version import __version__
from forge.config.base import ConfigModel
from forge.envs.external.adapting import cut_text, options_of
from forge.envs.external.processes import foreign_environment, guard_command
from forge.envs.external.schemas import SchemaTool, problem_in
from forge.envs.external.venvs import python_of
from forge.envs.limits import Fault
from forge.envs.tools import as_text
from forge.errors import OptionError

PROTOCOL: Final = "2025-11-25"
"""The newest revision that begins with `initialize`."""
_DAY_S: Final = 86_400.0
_CLOSE_S: Final = 2.0
_MOST_PAGES: Final = 100
_MOST_UNASKED: Final = 10_000
"""Messages that a server may send before its answer."""
_METHOD_NOT_FOUND: Final = -32601
_TOOL: Final = {
    "type": "object",
    "required": ["name", "inputSchema"],
    "properties": {
        "name": {"type": "string"},
        "description": {"type": ["string", "null"]},
        "inputSchema": {"type": "object"},
    },
}
_RESULT: Final = {
    "type": "object",
    "properties": {
        "content": {"type": "array", "items": {"type": "object", "required": ["type"]}},
        "isError": {"type": ["boolean", "null"]},
    },
}


class McpOptions(ConfigModel):
    """The arguments of `mcp_tools`."""

    command: tuple[str, ...] = Field(
        default=(),
        description="Starts a server on stdio, for this episode. `{python}` is the Python of `requirements`, or ours.",
    )
    requirements: tuple[str, ...] = Field(
        default=(), description="What pip installs into a venv of its own, once per machine, for `{python}`."
    )
    folders: tuple[str, ...] = Field(default=(), description="Where the server's Python finds modules of yours.")
    env: Mapping[str, str] = Field(default_factory=dict, description="Environment variables of the server.")
    cwd: str | None = Field(default=None, description="The server's working directory; null for ours.")
    url: str | None = Field(default=None, description="A server that runs already: streamable HTTP.")
    headers: Mapping[str, str] = Field(default_factory=dict, description="HTTP headers, such as Authorization.")
    only: tuple[str, ...] | None = Field(default=None, description="The tools to use; null for all.")
    prefix: str = Field(default="", description="What the tools' names begin with here, for several servers.")
    start_timeout_s: float = Field(default=60.0, gt=0, description="Seconds until the tools must be listed.")
    call_timeout_s: float = Field(default=60.0, gt=0, description="Seconds that a call may take.")
    timeout_is_fault: bool = Field(
        default=True, description="Whether a call that takes longer is a fault; otherwise the policy reads it."
    )
    max_message_bytes: int = Field(default=4 << 20, ge=1024, description="A longer message of the server is a fault.")
    max_chars: int = Field(default=32_768, ge=64, description="Longer results lose their middle.")

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError("give either command, to start a server, or url, of one that runs")
        return self

    @property
    def server(self) -> str:
        """What messages call the server."""
        return self.url or " ".join(self.command)


class McpToolError(Exception):
    """What a server reports as the error of a call, for the policy."""


def _fault(options: McpOptions, what: str, kind: str) -> Fault:
    return Fault(f"the MCP server {options.server} {what}", kind=f"mcp_{kind}", path=options.server)


def _parsed(text: bytes | str) -> dict[str, Any] | None:
    """Return a message, or None for what is not one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _reply_to(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return our answer to a request of the server: we are alive, and can do nothing else."""
    answer: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
    if message.get("method") == "ping":
        return {**answer, "result": {}}
    return {**answer, "error": {"code": _METHOD_NOT_FOUND, "message": "this client only calls tools"}}


class _Stdio:
    """A server in a process of its own, which ends with the episode."""

    def __init__(self, options: McpOptions) -> None:
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="forge-mcp-"))
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._lost: Fault | None = None

    async def start(self) -> None:
        options = self._options
        python = sys.executable
        if options.requirements:
            python = str(await asyncio.to_thread(python_of, options.requirements))
        words = [each.replace("{python}", python) for each in options.command]
        self._process = await asyncio.create_subprocess_exec(
            *guard_command(self._folder / "log", words, keeps_stdout=True),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=foreign_environment(options.folders, options.env),
            cwd=options.cwd,
            start_new_session=True,
            limit=options.max_message_bytes,
        )
        self._reader = asyncio.create_task(self._read(self._process))

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[message["id"]] = future
        try:
            await self.notify(message)
            return await future
        finally:
            self._waiting.pop(message["id"], None)

    async def notify(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if self._lost is not None:
            raise self._lost
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # the reader says what happened
            await self._process.stdin.drain()

    def use(self, version: str) -> None:
        """Do nothing: on pipes it is not repeated."""

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        num_unasked = 0
        while self._lost is None:
            try:
                line = await process.stdout.readline()
            except ValueError:
                most = self._options.max_message_bytes
                self._lost = _fault(self._options, f"sent a message of more than {most} bytes", "too_large")
                break
            message = _parsed(line)
            number = None if message is None or "method" in message else message.get("id")
            waiting = self._waiting.get(number) if isinstance(number, int) else None
            if not line:
                log = self._folder / "log"
                output = log.read_bytes()[-2000:].decode("utf-8", "replace").strip() if log.exists() else "(nothing)"
                self._lost = _fault(self._options, f"ended. The end of its output:\n{output}", "lost")
            elif waiting is not None and message is not None:
                num_unasked = 0
                if not waiting.done():
                    waiting.set_result(message)
            else:  # notifications, requests, and what some servers print
                num_unasked += 1
                if num_unasked > _MOST_UNASKED:
                    self._lost = _fault(self._options, "sends messages without being asked", "schema")
                elif message is not None and "method" in message and "id" in message:
                    await self.notify(_reply_to(message))
        for each in self._waiting.values():
            if not each.done():
                each.set_exception(self._lost)

    async def close(self) -> None:
        """End the server: its input closes, then it is terminated, then killed."""
        process, reader = self._process, self._reader
        try:
            if process is not None:
                assert process.stdin is not None
                process.stdin.close()
                with contextlib.suppress(TimeoutError):
                    if self._lost is None:
                        async with asyncio.timeout(_CLOSE_S):
                            await process.wait()
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(signal.SIGTERM)  # the guard ends the server
        finally:
            if process is not None:
                await asyncio.shield(process.wait())
            if reader is not None:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            if process is not None and process.stdout is not None:
                await process.stdout.read()  # what is left in the pipe, so that it closes
            shutil.rmtree(self._folder, ignore_errors=True)


class _Http:
    """A session on a server of streamable HTTP."""

    def __init__(self, options: McpOptions) -> None:
        assert options.url is not None
        self._options, self._url = options, options.url
        self._http = aiohttp.ClientSession(
            headers={**options.headers, "Accept": "application/json, text/event-stream"},
            timeout=aiohttp.ClientTimeout(total=None),
        )
        self._session: dict[str, str] = {}

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        async with self._post(message) as response:
            if "Mcp-Session-Id" in response.headers and message["method"] == "initialize":
                self._session["Mcp-Session-Id"] = response.headers["Mcp-Session-Id"]
            if response.content_type == "text/event-stream":
                found = await self._from_events(response, message["id"])
            else:
                body = await self._body(response)
                found = _parsed(body)
                if found is None or found.get("id") != message["id"]:
                    self._check_status(response.status, body)
        if found is None or found.get("id") != message["id"]:
            raise _fault(self._options, "did not answer a request with JSON-RPC", "schema")
        return found

    def use(self, version: str) -> None:
        """Name the revision that was agreed on in all further requests."""
        self._session["MCP-Protocol-Version"] = version if re.fullmatch(r"[0-9A-Za-z.-]{1,32}", version) else PROTOCOL

    async def notify(self, message: dict[str, Any]) -> None:
        async with self._post(message) as response:
            self._check_status(response.status, await self._body(response))

    async def close(self) -> None:
        try:
            if "Mcp-Session-Id" in self._session:
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):  # it expires there
                    async with asyncio.timeout(_CLOSE_S):
                        await (await self._http.delete(self._url, headers=self._session)).release()
        finally:
            await self._http.close()

    @contextlib.asynccontextmanager
    async def _post(self, message: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._http.post(self._url, json=message, headers=self._session) as response:
                yield response
        except (aiohttp.ClientError, OSError) as error:
            what = f"cannot be reached: {type(error).__name__}: {error}"
            raise _fault(self._options, what, "unreachable") from error

    def _check_status(self, status: int, body: bytes) -> None:
        if status >= 400:
            kind = "lost" if status == 404 and "Mcp-Session-Id" in self._session else "http"
            raise _fault(self._options, f"answered with status {status}: {body[:300].decode('utf-8', 'replace')}", kind)

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        found = b""
        async for part in response.content.iter_any():
            found += part
            self._check_size(len(found))
        return found

    async def _from_events(self, response: aiohttp.ClientResponse, number: int) -> dict[str, Any] | None:
        """Return the reply with this number from a stream of events."""
        data, rest, num_unasked = list[bytes](), b"", 0
        async for part in response.content.iter_any():
            lines = (rest + part).replace(b"\r\n", b"\n").split(b"\n")
            rest = lines.pop()
            for line in lines:
                if line.startswith(b"data:"):
                    data.append(line[5:].strip())
                elif not line and data:
                    message, data = _parsed(b"\n".join(data)), []
                    if message is not None and "method" not in message and message.get("id") == number:
                        return message
                    num_unasked += 1
                    if num_unasked > _MOST_UNASKED:
                        raise _fault(self._options, "sends messages without being asked", "schema")
                    if message is not None and "method" in message and "id" in message:
                        await self.notify(_reply_to(message))
            self._check_size(len(rest) + sum(map(len, data)))
        return None

    def _check_size(self, size: int) -> None:
        if size > (most := self._options.max_message_bytes):
            raise _fault(self._options, f"sent a message of more than {most} bytes", "too_large")


class _Client:
    """A session with a server."""

    def __init__(self, transport: _Stdio | _Http, options: McpOptions) -> None:
        self._transport, self._options = transport, options
        self._numbers = itertools.count(1)
        self._listed, self._missing = set[str](), set(options.only or ())

    async def ask(self, method: str, params: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a request and return its result. Raises `McpToolError` where the server refuses it."""
        number = next(self._numbers)
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._transport.request(message)
        except TimeoutError:
            raise _fault(self._options, f"took longer than {limit_s:g} s for {method}", "timeout") from None
        if isinstance(reply.get("error"), dict):
            raise McpToolError(str(reply["error"].get("message")))
        result = reply.get("result")
        if not isinstance(result, dict):
            raise self._violation("result: expected an object", reply)
        return result

    async def tools(self) -> list[SchemaTool]:
        """Begin the session and return the server's tools."""
        limit_s = self._options.start_timeout_s
        info = {"name": "torchforge", "version": __version__}
        found: list[SchemaTool] = []
        try:
            offer = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": info}
            self._transport.use(str((await self.ask("initialize", offer, limit_s)).get("protocolVersion")))
            await self._transport.notify({"jsonrpc": "2.0", "method": "notifications/initialized"})
            params: dict[str, Any] = {}
            for _ in range(_MOST_PAGES):
                page = await self.ask("tools/list", params, limit_s)
                if not isinstance(page.get("tools"), list):
                    raise self._violation("tools: expected an array", page)
                found.extend(map(self._tool, filter(self._is_wanted, page["tools"])))
                if not isinstance(page.get("nextCursor"), str):
                    break
                params = {"cursor": page["nextCursor"]}
        except McpToolError as error:
            raise _fault(self._options, f"cannot list its tools: {error}", "error") from None
        if self._missing:
            raise OptionError(
                "the MCP server does not have these tools",
                path="mcp_tools.only",
                value=sorted(self._missing),
                rule=f"tools of the server: {', '.join(sorted(self._listed)) or 'none'}",
                repair="correct the names, or leave only out",
            )
        return found

    def _is_wanted(self, listed: Any) -> bool:
        problem = problem_in(listed, _TOOL, "tools")
        if problem is not None:
            raise self._violation(problem, listed)
        self._listed.add(listed["name"])
        self._missing.discard(listed["name"])
        return self._options.only is None or listed["name"] in self._options.only

    def _tool(self, listed: Any) -> SchemaTool:
        name = listed["name"]

        async def call(arguments: dict[str, Any]) -> str:
            return await self._call(name, arguments)

        known = re.sub(r"[^A-Za-z0-9_.-]", "_", self._options.prefix + name)
        return SchemaTool(
            call,
            name=known if re.match(r"[A-Za-z_]", known) else f"_{known}",
            description=listed.get("description") or "",
            parameters=listed["inputSchema"],
            timeout_s=_DAY_S if self._options.timeout_is_fault else self._options.call_timeout_s,
        )

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        limit_s = self._options.call_timeout_s if self._options.timeout_is_fault else _DAY_S
        result = await self.ask("tools/call", {"name": name, "arguments": arguments}, limit_s)
        problem = problem_in(result, _RESULT, "result")
        if problem is not None or not ("content" in result or "structuredContent" in result):
            raise self._violation(problem or "result: it has no content", result)
        text = cut_text(_text_of(result), self._options.max_chars)
        if result.get("isError"):
            raise McpToolError(text)
        return text

    def _violation(self, problem: str, value: object) -> Fault:
        return _fault(self._options, f"violates the protocol: {problem}. It sent {as_text(value)[:200]}", "schema")


def _text_of(result: Mapping[str, Any]) -> str:
    """Return what the policy reads of a result: its texts; of everything else, what it is."""
    if not result.get("content") and "structuredContent" in result:
        return as_text(result["structuredContent"])
    return "\n".join(map(_block_text, result["content"]))


def _block_text(block: Mapping[str, Any]) -> str:
    kind, resource = block["type"], block.get("resource")
    if isinstance(block.get("text"), str):
        return str(block["text"])
    if isinstance(resource, Mapping):
        return str(resource["text"]) if isinstance(resource.get("text"), str) else f"[{kind} {resource.get('uri')}]"
    return f"[{kind} {block.get('uri') or block.get('mimeType') or ''}".rstrip() + "]"


@contextlib.asynccontextmanager
async def mcp_tools(
    *, command: Sequence[str] = (), url: str | None = None, **options: Any
) -> AsyncIterator[list[SchemaTool]]:
    """Connect to a tool server and yield its tools; further options as `McpOptions`.

    With `command`, a server is started on stdio, and ends with the block. With `url`, a session on a server of
    streamable HTTP is opened.
    """
    given = options_of(McpOptions, {"command": tuple(command), "url": url, **options}, "mcp_tools")
    transport: _Stdio | _Http = _Stdio(given) if given.url is None else _Http(given)
    try:
        if isinstance(transport, _Stdio):
            await transport.start()
        yield await _Client(transport, given).tools()
    finally:
        await transport.close()
