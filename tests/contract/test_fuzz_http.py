"""Clients without the key gain nothing at `forge serve` and at the endpoints of episodes, and disrupt nothing."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientSession, web
from multidict import CIMultiDict

from forge.envs.chat_api.errors import RequestError
from forge.envs.endpoint_server import EndpointServer, shared_server
from forge.generator.openai.routes import _key_checker
from forge.runtime.accepting import MAX_WAITING
from forge.testing.generators import FakeGenerator
from fuzzing import inputs, num_descriptors, resident_bytes, send_and_leave, silent_connections
from openai_serving import serving

KEY, ADMIN_KEY = "sk-" + "k" * 32, "sk-" + "a" * 32
NUM_OVER_SOCKETS = 1500
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/stats", "/metrics", "/admin/update", "/x")


def raw_requests(key: str) -> list[bytes]:
    """Requests that would be accepted if their key were `key`."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    auth = f"Authorization: Bearer {key}\r\n".encode()
    return [
        head + auth + b"Content-Length: %d\r\n\r\n" % len(body) + body,
        head + auth + b"Content-Length: 1073741824\r\n\r\n" + body,
        head + auth + b"Transfer-Encoding: chunked\r\n\r\n40000000\r\n" + body,
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\n" + auth + b"\r\n",
    ]


def wrong_keys(seed: int, key: str) -> Iterator[str]:
    """Damaged keys, as the header of a request has them."""
    for data in inputs(seed, [f"Bearer {key}".encode(), f"bearer {key} ".encode()]):
        given = data.decode("latin-1")
        scheme, _, word = given.partition(" ")
        if not (scheme.lower() == "bearer" and word.strip() == key):
            yield given
        else:
            yield f"Bearer {key}x"


def with_header(path: str, given: str) -> Any:
    """Return what the key checks look at of a request."""
    return SimpleNamespace(path=path, headers=CIMultiDict(Authorization=given), protocol=None)


def run_at_once(work: object) -> BaseException | None:
    """Run a coroutine that waits for nothing; return what it raised."""
    try:
        work.send(None)  # type: ignore[attr-defined]
    except StopIteration:
        return None
    except RequestError as error:
        return error
    raise AssertionError("it waits for something")


async def never(request: web.Request) -> web.StreamResponse:
    raise AssertionError("a request without the key reached its handler")


def test_no_key_but_the_right_one_is_accepted_by_serve() -> None:
    check = _key_checker(KEY, ADMIN_KEY)
    before = resident_bytes()
    for number, given in enumerate(wrong_keys(21, KEY)):
        error = run_at_once(check(with_header(PATHS[number % len(PATHS)], given), never))
        assert isinstance(error, RequestError), given
        assert error.status == 401
        assert KEY not in error.message
    assert resident_bytes() - before < 32 << 20


def test_no_key_but_the_right_one_is_accepted_by_an_endpoint() -> None:
    server = EndpointServer(1, lambda: None)  # type: ignore[arg-type,return-value]
    key = server.open(None)  # type: ignore[arg-type]
    closed = server.open(None)  # type: ignore[arg-type]
    server.close(closed)
    before = resident_bytes()
    for given in wrong_keys(22, key):
        with pytest.raises(RequestError) as caught:
            server.handler_of(with_header(PATHS[0], given))
        assert caught.value.status == 401
        assert key not in caught.value.message
    with pytest.raises(RequestError) as caught:
        server.handler_of(with_header(PATHS[0], f"Bearer {closed}"))
    assert caught.value.status == 410
    assert resident_bytes() - before < 32 << 20


def flood(place: tuple[str, int], key: str, seed: int) -> Iterator[int]:
    """Send damaged requests, on top of more silent connections than may wait; yield now and then."""
    silent = silent_connections(place, 2 * MAX_WAITING)
    yield 0
    wrong = raw_requests(key[:-1] + "?")
    for number, data in enumerate([*wrong, *inputs(seed, wrong, NUM_OVER_SOCKETS)]):
        said = send_and_leave(place, data)
        assert not said.startswith(b"HTTP/1.1 2"), data
        assert key.encode() not in said
        if number % 300 == 0:
            yield number
    for sock in silent:
        sock.close()


async def status_of(url: str, key: str) -> int:
    async with ClientSession() as http, http.get(url, headers={"Authorization": f"Bearer {key}"}) as response:
        return response.status


def test_a_flood_disrupts_serve_in_nothing() -> None:
    service = FakeGenerator()
    with serving(service, api_key=KEY, admin_key=ADMIN_KEY) as server:
        url = f"{server.base_url}/models"
        assert asyncio.run(status_of(url, KEY)) == 200
        before, num_before = resident_bytes(), num_descriptors()
        for _ in flood((server.host, server.port), KEY, 23):
            assert asyncio.run(status_of(url, KEY)) == 200
        assert asyncio.run(status_of(url, KEY)) == 200
        assert asyncio.run(status_of(url, "other")) == 401
        assert resident_bytes() - before < 64 << 20
        assert num_descriptors() <= num_before + 2 * MAX_WAITING


class Handler:
    """Answers the requests of an episode."""

    async def complete(self, request: web.Request, *, is_responses: bool = False) -> web.StreamResponse:
        raise AssertionError("a request without the key reached its handler")


@contextmanager
def endpoint() -> Iterator[tuple[str, str]]:
    """Yield the URL and the key of an endpoint, whose server runs on another thread."""
    loop, started, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[str] = []

    async def serve() -> None:
        server = await shared_server()
        found.extend((server.base_url, server.open(Handler())))
        started.set()
        await ended.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(600)
    try:
        yield found[0], found[1]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(600)
        assert not thread.is_alive()


def test_a_flood_disrupts_an_endpoint_in_nothing() -> None:
    with endpoint() as (base_url, key):
        place = urlsplit(base_url)
        assert asyncio.run(status_of(f"{base_url}/models", key)) == 200
        before = resident_bytes()
        for _ in flood((place.hostname or "", place.port or 0), key, 24):
            assert asyncio.run(status_of(f"{base_url}/models", key)) == 200
        assert asyncio.run(status_of(f"{base_url}/models", key)) == 200
        assert resident_bytes() - before < 64 << 20
