"""A tool server on stdio that needs the standard library only, and so starts at once. Its argument says what is wrong
with it; `fine` is not."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

KIND = sys.argv[1]
TOOL = {"name": "trouble", "inputSchema": {"type": "object"}}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
if KIND == "bad_tool":
    TOOL = {"name": "trouble"}


def calculate(name: str, given: dict[str, Any]) -> dict[str, Any]:
    if name == "trouble":
        if given["kind"] == "crash":
            os._exit(3)
        while given["kind"] == "hang":
            time.sleep(60)
        return {"content": [{"type": "text", "text": "na " * 2_000_000}]}
    if name == "divide" and given["b"] == 0:
        return {"content": [{"type": "text", "text": "division by zero"}], "isError": True}
    value = given["a"] + given["b"] if name == "add" else given["a"] / given["b"]
    return {"content": [{"type": "text", "text": str(value)}]}


def send(message: Any) -> None:
    print(message if isinstance(message, str) else json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def answer(request: dict[str, Any]) -> Any:
    method = request["method"]
    if method == "initialize":
        if KIND == "prints":
            send("Welcome to this server!")
            send({"method": "notifications/message", "params": {}})
            send({"id": "p1", "method": "ping"})
            pong = json.loads(sys.stdin.readline())
            send({"id": "r1", "method": "roots/list"})
            roots = json.loads(sys.stdin.readline())
            sys.stderr.write(f"{pong} {roots}")
            if pong != {"jsonrpc": "2.0", "id": "p1", "result": {}} or roots["error"]["code"] != -32601:
                sys.exit(1)
        return {"result": {"protocolVersion": request["params"]["protocolVersion"], "capabilities": {}}}
    if method == "tools/list":
        if KIND == "refuses":
            return {"error": {"code": -32601, "message": "no tools here"}}
        if KIND == "fine":
            return {
                "result": {"tools": [TOOL, *({"name": each, "inputSchema": NUMBERS} for each in ("add", "divide"))]}
            }
        if KIND == "pages" and "cursor" not in request["params"]:
            return {"result": {"tools": [TOOL], "nextCursor": "2"}}
        name = "second/one" if KIND == "pages" else "trouble"
        return {"result": {"tools": [{**TOOL, "name": name}]}}
    if KIND == "fine":
        return {"result": calculate(request["params"]["name"], request["params"]["arguments"])}
    if KIND == "floods":
        while True:
            send({"method": "notifications/message", "params": {}})
    results = {
        "prints": {"content": [{"type": "resource", "resource": {"uri": "file:///a", "text": "fine"}}]},
        "pages": {"content": [], "structuredContent": {"page": 2}},
        "bad_result": {"content": "text"},
        "no_content": {},
    }
    return {"error": {"code": -32602, "message": "bad call"}} if KIND == "error" else {"result": results[KIND]}


if KIND == "exits":
    sys.exit("this server cannot start")
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        send({"id": asked["id"], **answer(asked)})
