"""What the endpoint refuses, in OpenAI's own form, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest

from forge.config import ServeConfig
from forge.errors import (
    ActorFailure,
    CallTimeout,
    ConfigError,
    EngineDead,
    ForgeError,
    ModelError,
    Overloaded,
    PromptError,
    ServiceStopped,
    SyncError,
)
from forge.generator.engine import EngineStats
from forge.generator.openai import OpenAIServer, check_serving, serve_openai
from forge.testing.generators import FakeGenerator
from openai_serving import LIMIT_S, client_of, serving

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
PLAIN = {"model": "fake", "prompt": "Hi"}


class NativeFake(FakeGenerator):
    """It says that it is the embedded engine."""

    async def _card(self) -> dict[str, Any]:
        return {**await super()._card(), "capabilities": {"structured_output": False}}


@pytest.fixture(scope="module")
def server() -> Iterator[OpenAIServer]:
    with serving(NativeFake(), max_body_mb=0.01) as server:
        yield server


def post(server: OpenAIServer, path: str, data: bytes | Any, **headers: str) -> tuple[int, Any, dict[str, str]]:
    """Status, body and headers of a request that no client of OpenAI's would send."""

    async def send() -> tuple[int, Any, dict[str, str]]:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                server.url + path, data=body, headers={"Content-Type": "application/json", **headers}
            ) as response,
        ):
            return response.status, await response.json(), dict(response.headers)

    return asyncio.run(asyncio.wait_for(send(), LIMIT_S))


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "0.5"}, "temperature", "must be a number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": True}, "n", "must be a whole number"),
        ({"max_tokens": 1.5}, "max_tokens", "must be a whole number"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "at most max_tokens"),
        ({"stop": [""]}, "stop", "not empty"),
        ({"stop": 3}, "stop", "must be a list"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": []}, "stream_options", "must be an object"),
        ({"temprature": 1}, "temprature", "did you mean `temperature`?"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "generator.engine=vllm"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"metadata": {"conversation": "a\nb"}}, "metadata.conversation", "printable"),
    ],
)
def test_bad_values_are_named(server: OpenAIServer, change: dict[str, Any], param: str, words: str) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)):
        status, answer, _ = post(server, path, {**body, **change})
        assert status == 400
        error = answer["error"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert words in error["message"]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": []}, "messages", "at least one"),
        ({"messages": ["Hi"]}, "messages[0]", "with a role"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "one of system, developer, user"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "at least one part"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages", "every message is empty"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "list of parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", '"text"'),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]", "function.name"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages[0].tool_calls", "a list"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]", "function"),
        ({"tools": {}}, "tools", "a list"),
        ({"tool_choice": "required"}, "tool_choice", "cannot be forced"),
        ({"tool_choice": "auto"}, "tool_choice", "tools are given"),
        ({"top_logprobs": 5, "logprobs": True}, "top_logprobs", "may only be 0 or null"),
        ({"logprobs": 1}, "logprobs", "true or false"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"stream_options": {"include_usge": True}}, "stream_options.include_usge", "include_usage"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "'tools'"),
    ],
)
def test_bad_conversations_are_named(server: OpenAIServer, change: dict[str, Any], param: str, words: str) -> None:
    status, answer, _ = post(server, "/v1/chat/completions", {**CHAT, **change})
    assert (status, answer["error"]["param"]) == (400, param)
    assert words in answer["error"]["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 33, "n": 2}, "prompt"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"logprobs": 2}, "logprobs"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_bad_prompts_are_named(server: OpenAIServer, change: dict[str, Any], param: str) -> None:
    status, answer, _ = post(server, "/v1/completions", {**PLAIN, **change})
    assert (status, answer["error"]["param"]) == (400, param)


def test_more_completions_than_can_ever_be_open_are_the_clients_fault(server: OpenAIServer) -> None:
    """A client would repeat a request with the status 429 for ever."""
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)):
        status, answer, _ = post(server, path, {**body, "n": 65})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "n", "invalid_value")
        assert "at most 64" in answer["error"]["message"]
        assert post(server, path, {**body, "n": 64, "max_tokens": 1})[0] == 200
    assert post(server, "/v1/completions", {**PLAIN, "prompt": ["a"] * 32, "n": 2})[0] == 200
    with serving(FakeGenerator([ConfigError("too many", path="sampling.n", value=99)])) as other:
        status, answer, _ = post(other, "/v1/completions", PLAIN)
    assert (status, answer["error"]["param"]) == (400, "n"), "as the service says it"


def test_prompts_that_do_not_fit_are_not_sent(server: OpenAIServer) -> None:
    policy = FakeGenerator(max_seq_len=8)
    with serving(policy) as small:
        for prompt in ([1] * 8, [[1], [1] * 8]):
            status, answer, _ = post(small, "/v1/completions", {**PLAIN, "prompt": prompt})
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert answer["error"]["param"] == "prompt"
        assert policy.requests == []
        assert post(small, "/v1/completions", {**PLAIN, "prompt": [65] * 7})[0] == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"HELLO\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: many\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nmany\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nzzzz",
    ],
    ids=["no HTTP", "long header", "length", "chunks", "gzip"],
)
def test_what_is_not_http_gets_an_error_of_the_same_form(server: OpenAIServer, request_bytes: bytes) -> None:
    with socket.create_connection((server.host, server.port), timeout=LIMIT_S) as line:
        line.sendall(request_bytes)
        answer = http.client.HTTPResponse(line)
        answer.begin()
        error = json.loads(answer.read())["error"]
    assert (answer.status, answer.headers.get_content_type()) == (400, "application/json")
    assert sorted(error) == ["code", "message", "param", "type"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
    assert error["message"].startswith("The request is not valid HTTP: ")


def test_a_body_that_is_announced_as_too_large_is_not_waited_for(server: OpenAIServer) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    with socket.create_connection((server.host, server.port), timeout=LIMIT_S) as line:
        line.sendall(head.format(10**11).encode())
        answer = http.client.HTTPResponse(line)
        answer.begin()
        error = json.loads(answer.read())["error"]
    assert answer.status == 413
    assert "serve.max_body_mb" in error["message"]


def test_bodies_that_are_no_request(server: OpenAIServer) -> None:
    path = "/v1/chat/completions"
    for body in (b"{", b"[]", b'{"model": "fake", "temperature": NaN}', b'{"a": "\\ud800"}', b"[" * 9000):
        status, answer, _ = post(server, path, body)
        assert (status, answer["error"]["code"]) == (400, "invalid_json"), body
    status, answer, _ = post(server, path, {"messages": CHAT["messages"]})
    assert (status, answer["error"]["param"]) == (400, "model")
    status, answer, _ = post(server, path, b"x" * 20_000)
    assert status == 413
    assert "serve.max_body_mb" in answer["error"]["message"]
    status, answer, _ = post(server, path, CHAT, **{"Content-Type": "text/plain"})
    assert status == 415
    status, answer, _ = post(server, "/v1/embeddings", CHAT)
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    status, answer, _ = post(server, "/v1/models", CHAT)
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")


def test_another_model_is_not_found(server: OpenAIServer) -> None:
    with client_of(server) as client, pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**{**CHAT, "model": "gpt"})
    assert caught.value.code == "model_not_found"
    assert "this server has 'fake'" in str(caught.value)


def test_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeGenerator(), api_key="right") as server:
        with client_of(server, api_key="right") as client:
            assert client.chat.completions.create(**CHAT).choices[0].message.content == "Fine."
        for key in ("wrong", "righ", "", "ä"):
            status, answer, headers = post(server, "/v1/completions", PLAIN, Authorization=f"Bearer {key}")
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert headers["WWW-Authenticate"] == "Bearer"
        assert post(server, "/v1/completions", PLAIN, Authorization="Basic right")[0] == 401
        assert post(server, "/health", PLAIN)[0] == 405, "health needs no key"
    monkeypatch.setenv("FORGE_API_KEY", "from the environment")
    with serving(FakeGenerator()) as server, client_of(server) as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PromptError("the prompt is longer than the context", path="messages"), 400, "context_length_exceeded"),
        (PromptError("the prompt is empty", path="prompt"), 400, "invalid_value"),
        (ModelError("The tokenizer has no chat template."), 400, "invalid_value"),
        (Overloaded("the queue is full"), 429, "overloaded"),
        (EngineDead("the engine ended"), 503, "unavailable"),
        (ActorFailure("the replica was lost"), 503, "unavailable"),
        (ServiceStopped("it is over"), 503, "unavailable"),
        (SyncError("other weights"), 503, "unavailable"),
        (CallTimeout("too late"), 504, "timeout"),
        (ForgeError("strange"), 500, "internal_error"),
        (OSError("the disk is gone"), 500, "internal_error"),
    ],
)
def test_errors_of_the_service_have_their_status(error: Exception, status: int, code: str) -> None:
    with serving(FakeGenerator([error])) as server:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {**PLAIN, "prompt": ["a", "b"]})):
            for stream in (False, True):
                found, answer, headers = post(server, path, {**body, "stream": stream})
                assert (found, answer["error"]["code"]) == (status, code)
                assert str(error.args[0]) in answer["error"]["message"]
                assert headers.get("Retry-After") == ("1" if status == 429 else None)


class Elsewhere(FakeGenerator):
    """Its engine gave its memory back, or is gone."""

    def __init__(self, stats: EngineStats | Exception) -> None:
        super().__init__()
        self._said = stats

    async def _stats(self) -> EngineStats:
        if isinstance(self._said, Exception):
            raise self._said
        return self._said


@pytest.mark.parametrize(
    ("stats", "status", "body"),
    [
        (EngineStats(version=4, is_asleep=True), 200, {"status": "asleep", "weight_version": 4}),
        (EngineStats(version=4), 200, {"status": "ok", "weight_version": 4}),
        (ActorFailure("the replica was lost"), 200, {"status": "degraded", "weight_version": None}),
        (ServiceStopped("no replica is left"), 503, None),
    ],
)
def test_health_is_that_of_the_server(stats: EngineStats | Exception, status: int, body: Any) -> None:
    async def ask(url: str) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
            return response.status, await response.json()

    with serving(Elsewhere(stats)) as server:
        found, answer = asyncio.run(asyncio.wait_for(ask(server.url), LIMIT_S))
    assert found == status
    assert answer == body or answer["error"]["code"] == "unavailable"


class Stumbling(FakeGenerator):
    """It fails after the first delta."""

    async def _deltas(self, *arguments: Any, **more: Any) -> Any:
        async for delta in super()._deltas(*arguments, **more):
            yield delta
            raise EngineDead("the engine ended in mid-sentence")


def text_of(chunk: Any) -> str | None:
    (choice,) = chunk.choices
    return choice.text if hasattr(choice, "text") else choice.delta.content


def test_an_error_in_mid_stream_is_an_event() -> None:
    with serving(Stumbling(["one two three"])) as server, client_of(server) as client:
        for stream in (
            client.chat.completions.create(**CHAT, stream=True),
            client.completions.create(**{**PLAIN, "prompt": ["a", "b"]}, stream=True),
        ):
            texts: list[str | None] = []
            with pytest.raises(openai.APIError, match="mid-sentence") as caught:
                texts.extend(text_of(chunk) for chunk in stream)
            assert "one" in texts
            assert caught.value.code == "unavailable"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/chat/completions", CHAT), ("/completions", {**PLAIN, "prompt": ["a", "b"]})]
)
def test_a_client_that_goes_away_cancels_its_request(path: str, body: dict[str, Any], stream: bool) -> None:
    async def go_away() -> None:
        policy = FakeGenerator(["one two three"], pause_after=1)
        async with serve_openai(policy, ServeConfig(port=0)) as server, aiohttp.ClientSession() as session:
            request = session.post(server.base_url + path, json={**body, "stream": stream})
            asking = asyncio.ensure_future(request)
            if stream:
                response = await asking
                assert await response.content.readline()
            await policy.paused.wait()
            before = await policy.stats.route()
            assert before.num_running > 0
            if stream:
                response.close()
            else:
                asking.cancel()
            while (await policy.stats.route()).num_running:
                await (await session.get(f"{server.url}/health")).read()
            assert policy.num_cancelled == before.num_running

    asyncio.run(asyncio.wait_for(go_away(), LIMIT_S))


def test_the_end_of_a_server_cancels_what_is_under_way() -> None:
    async def end() -> int:
        policy = FakeGenerator(["one two three"], pause_after=1)
        async with aiohttp.ClientSession() as session:
            async with serve_openai(policy, ServeConfig(port=0), drain_s=0.01) as server:
                asking = asyncio.ensure_future(session.post(f"{server.base_url}/completions", json=PLAIN))
                await policy.paused.wait()
            answer = await asking
            assert answer.status == 503
            assert "shut down before this answer was complete" in (await answer.json())["error"]["message"]
        return policy.num_cancelled

    assert asyncio.run(asyncio.wait_for(end(), LIMIT_S)) == 1


def refused(config: ServeConfig) -> ConfigError:
    async def serve() -> None:
        async with serve_openai(FakeGenerator(), config):
            pass

    with pytest.raises(ConfigError) as caught:
        asyncio.run(check_serving(config))
    with pytest.raises(ConfigError) as again:
        asyncio.run(serve())
    assert str(again.value) == str(caught.value)
    return caught.value


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.invalid"])
def test_other_addresses_than_loopback_need_a_key(host: str) -> None:
    error = refused(ServeConfig(host=host, port=0))
    assert (error.path, error.value) == ("serve.host", host)
    assert "FORGE_API_KEY" in str(error.repair)


def test_an_address_that_cannot_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refused(ServeConfig(port=port))
    assert (error.path, error.value) == ("serve.port", port)
    error = refused(ServeConfig(host="192.0.2.1", port=0, api_key="key"))
    assert (error.path, error.value) == ("serve.host", "192.0.2.1")


def test_the_url_of_every_kind_of_address() -> None:
    def url(host: str) -> str:
        return OpenAIServer(host=host, port=80, model_name="m").base_url

    assert url("127.0.0.1") == "http://127.0.0.1:80/v1"
    assert url("::1") == "http://[::1]:80/v1"
    assert url("0.0.0.0") == "http://127.0.0.1:80/v1"
    assert url("::") == "http://[::1]:80/v1"
