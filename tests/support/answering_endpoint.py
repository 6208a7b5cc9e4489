"""An OpenAI-compatible endpoint in a thread of this process, whose answers a function gives."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[Mapping[str, Any]], str | int]
"""From a request's body to the answer's text, or to the status of a refusal."""


class AnsweringEndpoint:
    """What a server was asked, and where it is.

    Attributes:
        url: the address, which ends in /v1.
        requests: the bodies of all requests, in the order of arrival; `paths` where they went.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self._guard = threading.Lock()

    def add(self, path: str, body: dict[str, Any], key: str | None) -> None:
        with self._guard:
            self.requests.append(body)
            self.paths.append(path)
            self.keys.append(key)


@contextmanager
def answering(answer: Answer) -> Iterator[AnsweringEndpoint]:
    """Serve until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": [{"id": "stand-in", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.add(self.path, body, self.headers.get("Authorization"))
            text = answer(body)
            if isinstance(text, int):
                self._send(text, {"error": {"message": f"refused with {text}"}})
                return
            choice = {"index": 0, "finish_reason": "stop"}
            choice |= {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
            usage = {"prompt_tokens": 5, "completion_tokens": len(text.split())}
            self._send(200, {"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage})

        def _send(self, status: int, content: Mapping[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 1024  # connections that arrive at once are not refused

    server = Server(("127.0.0.1", 0), Handler)
    endpoint = AnsweringEndpoint(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def digits_of(text: str) -> int:
    """A number that depends on a text alone, the same in every process."""
    return sum((place + 1) * ord(character) for place, character in enumerate(text))
