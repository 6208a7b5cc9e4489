"""A tool server made with the package `mcp`: on stdio, or with a port on streamable HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Literal

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def divide(a: float, b: float) -> str:
    """Divide two numbers."""
    if b == 0:
        raise ToolError("division by zero")
    return str(a / b)


@server.tool()
def paint(colour: Literal["red", "blue"]) -> Image:
    """Paint a picture."""
    return Image(data=b"not really", format="png")


@server.tool()
def environment(name: str) -> str:
    """Return an environment variable."""
    return os.environ.get(name, "(unset)")


@server.tool()
async def trouble(kind: str) -> str:
    """Fail in some way."""
    if kind == "crash":
        os._exit(3)
    if kind == "hang":
        await asyncio.Event().wait()
    return "na " * 2_000_000 if kind == "flood" else "na " * 20_000


if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
