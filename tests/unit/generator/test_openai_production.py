"""What operators see of a server: probes, metrics, the access log, names, limits, draining and weight updates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import aiohttp
import pytest

from forge.cli.serve_weights import follow
from forge.config import ServeConfig
from forge.errors import ActorFailure, ConfigError, EngineDead, SyncError, WeightMismatch
from forge.generator.engine import EngineStats, UpdateReport
from forge.generator.openai import OpenAIServer, check_serving, serve_openai
from forge.generator.openai.prometheus import Counter, Gauge, Histogram, render
from forge.generator.openai.replicas import ServedPolicy
from forge.generator.openai.server_metrics import ServerMetrics
from forge.models.locate import readable_name
from forge.testing.generators import FakeGenerator, Routed
from openai_serving import LIMIT_S
from prometheus_text import parse

PLAIN = {"model": "fake", "prompt": "Hi"}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "My secret question"}]}
Body = Callable[[OpenAIServer, aiohttp.ClientSession], Awaitable[None]]


def serve(service: Any, body: Body, *, publisher: Any = None, drain_s: float | None = None, **config: Any) -> None:
    """Run a test's body with a server and a client on one event loop."""

    async def run() -> None:
        options = ServeConfig(port=0, **config)
        async with (
            aiohttp.ClientSession() as session,
            serve_openai(service, options, drain_s=drain_s, publisher=publisher) as server,
        ):
            await body(server, session)

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


async def post(session: aiohttp.ClientSession, url: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
    async with session.post(url, json=body, headers=headers) as response:
        text = await response.text()
        is_json = response.content_type == "application/json"
        return response.status, json.loads(text) if is_json else text, response.headers


async def get(session: aiohttp.ClientSession, url: str, **headers: str) -> tuple[int, str]:
    async with session.get(url, headers=headers) as response:
        return response.status, await response.text()


# ---- Metrics ---------------------------------------------------------------------------------------------------------


def test_the_text_format() -> None:
    counter = Counter("a_total", 'Back\\slash,\nline and "quote".', ("x",))
    counter.add(2, 'a"b\\c\nd')
    gauge = Gauge("g", "A gauge.")
    gauge.set(float("inf"))
    histogram = Histogram("h", "Seconds.", ("route",), bounds=(0.1, 1.0))
    for value in (0.1, 0.5, 7.0):
        histogram.observe(value, "/")
    text = render([counter, gauge, histogram])
    families = parse(text)
    assert families["a_total"].samples == {("a_total", (("x", 'a"b\\c\nd'),)): 2.0}
    assert families["g"].samples == {("g", ()): float("inf")}
    buckets = [value for (name, _), value in families["h"].samples.items() if name == "h_bucket"]
    assert buckets == [1, 2, 3], "a bound belongs to its bucket"
    assert families["h"].samples["h_sum", (("route", "/"),)] == pytest.approx(7.6)


@pytest.mark.parametrize("broken", ["a 1", "# HELP a b\n# TYPE a gauge\na{x=1} 1\n", "# TYPE a gauge\n", "a one\n"])
def test_the_reader_of_these_tests_is_strict(broken: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        parse(broken)


def test_metrics_count_what_happened() -> None:
    async def body(server: OpenAIServer, session: aiohttp.ClientSession) -> None:
        await post(session, f"{server.base_url}/completions", {**PLAIN, "n": 2})
        await post(session, f"{server.base_url}/chat/completions", {**CHAT, "stream": True})
        await post(session, f"{server.base_url}/completions", {**PLAIN, "max_tokens": -1})
        await get(session, f"{server.url}/nowhere/else")
        async with session.get(f"{server.url}/metrics") as response:
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            found = parse(await response.text())
        requests = {
            tuple(dict(labels).values()): value for (_, labels), value in found["forge_requests_total"].samples.items()
        }
        assert requests == {
            ("/v1/completions", "200"): 1,
            ("/v1/chat/completions", "200"): 1,
            ("/v1/completions", "400"): 1,
            ("unknown", "404"): 1,
        }

        def value(name: str, **labels: str) -> float:
            family = next(key for key in found if name.startswith(key))
            return found[family].samples[name, tuple(labels.items())]

        assert value("forge_prompt_tokens_total") == 2 + len("user: My secret question\nassistant: ")
        assert value("forge_generation_tokens_total") == 3 * len("Fine.")
        assert value("forge_time_to_first_token_seconds_count") == 1, "of streams"
        assert value("forge_time_per_output_token_seconds_count") == 1
        assert value("forge_request_duration_seconds_count", route="/v1/completions") == 2
        assert value("forge_replicas", health="healthy") == 1
        assert value("forge_weight_version", replica="0") == 3
        assert value("forge_requests_in_flight") == 0

    policy = FakeGenerator(["Fine."])
    policy.version = 3
    serve(policy, body)


def test_prometheus_own_reader_agrees() -> None:
    reader = pytest.importorskip("prometheus_client.parser")

    async def body(server: OpenAIServer, session: aiohttp.ClientSession) -> None:
        await post(session, f"{server.base_url}/completions", {**PLAIN, "stream": True})
        _, text = await get(session, f"{server.url}/metrics")
        theirs = {family.name: family for family in reader.text_string_to_metric_families(text)}
        ours = parse(text)
        assert {name.removesuffix("_total") for name in ours} == set(theirs)
        for name, family in ours.items():
            samples = {
                (one.name, tuple(one.labels.items())): one.value for one in theirs[name.removesuffix("_total")].samples
            }
            assert samples == family.samples

    serve(FakeGenerator(), body)


# ---- Log, ids and versions -------------------------------------------------------------------------------------------


def test_the_access_log_has_a_line_for_every_request_and_no_text(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"

    async def body(server: OpenAIServer, session: aiohttp.ClientSession) -> None:
        key = {"Authorization": "Bearer hidden-key"}
        chat = f"{server.base_url}/chat/completions"
        _, _, headers = await post(session, chat, {**CHAT, "stream": True}, **key, **{"X-Request-Id": "mine-1"})
        assert (headers["X-Request-Id"], headers["X-Forge-Weight-Version"]) == ("mine-1", "7")
        _, _, headers = await post(session, chat, CHAT, **key, **{"X-Request-Id": "bad id\t"})
        assert len(headers["X-Request-Id"]) == 32, "what is not an id is replaced"
        assert headers["X-Forge-Weight-Version"] == "7"
        status, _, headers = await post(session, chat, CHAT, Authorization="Bearer other-key")
        assert status == 401
        assert "X-Forge-Weight-Version" not in headers
        log.rename(tmp_path / "rotated.jsonl")
        await get(session, f"{server.url}/health")

    policy = FakeGenerator(["A secret answer"])
    policy.version = 7
    serve(policy, body, api_key="hidden-key", access_log=str(log))
    text = (tmp_path / "rotated.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["route"], line["status"]) for line in lines] == [("/v1/chat/completions", 200)] * 2 + [
        ("/v1/chat/completions", 401)
    ]
    first = lines[0]
    names = "time request_id client route status model prompt_tokens completion_tokens seconds ttft versions error"
    assert " ".join(first) == names
    assert (first["request_id"], first["model"], first["client"]) == ("mine-1", "fake", "127.0.0.1")
    assert (first["completion_tokens"], first["versions"]) == (len("A secret answer"), [7])
    assert 0 < first["ttft"] <= first["seconds"]
    assert lines[1]["ttft"] is None
    for word in ("secret", "hidden-key", "other-key"):
        assert word not in text
    (last,) = log.read_text().splitlines()
    assert json.loads(last)["route"] == "/health", "a rotated file is opened anew"


def test_the_access_log_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(server: OpenAIServer, session: aiohttp.ClientSession) -> None:
        await get(session, f"{server.url}/ready")

    serve(FakeGenerator(), body, access_log="stdout")
    assert json.loads(capsys.readouterr().out)["route"] == "/ready"


def test_a_log_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        asyncio.run(check_serving(ServeConfig(port=0, access_log=str(tmp_path / "none" / "log"))))
    assert caught.value.path == "serve.access_log"


def test_a_client_that_goes_away_is_logged_with_499(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def body(server: OpenAIServer, session: aiohttp.ClientSession) -> None:
        asking = asyncio.ensure_future(session.post(f"{server.base_url}/completions", json=PLAIN))
        await policy.paused.wait()
        asking.cancel()
        while not log.read_text():  # noqa: ASYNC110 - what the server does on this loop
            await asyncio.sleep(0)

    policy = FakeGenerator(["one two three"], pause_after=1)
    serve(policy, body, access_log=str(log))
    assert json.loads(log.read_text())["status"] == 499


# ---- Names -----------------------------------------------------------------------------------------------------------


def test_several_names_for_one_model() -> None:
    async def body(server: OpenAIServer, session: aiohttp.ClientSession) -> None:
        _, text = await get(session, f"{server.base_url}/models")
        assert [model["id"] for model in json.loads(text)["data"]] == ["main", "gpt-4o", "small"]
        for name in ("main", "gpt-4o"):
            status, answer, _ = await post(session, f"{server.base_url}/completions", {**PLAIN, "model": name})
            assert (status, answer["model"]) == (200, "main")
        assert (await get(session, f"{server.base_url}/models/small"))[0] == 200
        status, answer, _ = await post(session, f"{server.base_url}/completions", PLAIN)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "'main', 'gpt-4o', 'small'" in answer["error"]["message"]

    serve(FakeGenerator(), body, model_name="main", model_aliases=["gpt-4o", "small", "main"])


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("models/qwen3-0.6b", "qwen3-0.6b"),
        ("runs/sums/checkpoints/hf", "sums"),
        ("elsewhere/hf", "elsewhere"),
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca", "Qwen/Qwen3-0.6B"),
    ],
)
def test_names_are_readable(folder: str, name: str, tmp_path: Path) -> None:
    assert readable_name(tmp_path / folder) == name


# ---- Probes ----------------------------------------------------------------------------------------------------------


class Reporting(FakeGenerator):
    """Its statistics are what the test says."""

    def __init__(self, stats: EngineStats | Exception) -> None:
        super().__init__()
        self.said = stats

    async def _stats(self) -> EngineStats:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


def test_ready_means_that_a_generator_accepts_requests() -> None:
    async def body(server: OpenAIServer, session: aiohttp.ClientSession) -> None:
        for stats, status in (
            (EngineStats(version=1), 200),
            (EngineStats(version=1, is_stopped=True), 503),
            (EngineStats(version=1, is_asleep=True), 503),
            (ActorFailure("it is gone"), 503),
            (EngineStats(version=2), 200),
        ):
            policy.said = stats
            assert (await get(session, f"{server.url}/ready"))[0] == status, stats
        assert (await get(session, f"{server.url}/metrics"))[0] == 401, "it needs the key"

    policy = Reporting(EngineStats(version=0))
    serve(policy, body, api_key="secret")


# ---- Limits and retries ----------------------------------------------------------------------------------------------


def test_too_many_requests_are_refused_with_429() -> None:
    async def body(server: OpenAIServer, session: aiohttp.ClientSession) -> None:
        url = f"{server.base_url}/completions"
        first = asyncio.ensure_future(post(session, url, PLAIN))
        await policy.paused.wait()
        status, answer, headers = await post(session, url, PLAIN)
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (429, "overloaded", "1")
        assert "serve.max_requests" in answer["error"]["message"]
        assert (await get(session, f"{server.url}/health"))[0] == 200
        assert 'rejected_total{reason="overloaded"} 1' in (await get(session, f"{server.url}/metrics"))[1]
        policy.resume()
        assert (await first)[0] == 200
        assert (await post(session, url, PLAIN))[0] == 200

    policy = FakeGenerator(["one two"], pause_after=1)
    serve(policy, body, max_requests=1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends_with_an_error(stream: bool) -> None:
    async def body(server: OpenAIServer, session: aiohttp.ClientSession) -> None:
        status, answer, _ = await post(session, f"{server.base_url}/completions", {**PLAIN, "stream": stream})
        if stream:
            assert status == 200
            assert "serve.request_timeout_s" in answer
            assert '"code": "timeout"' in answer
            assert "[DONE]" not in answer
        else:
            assert (status, answer["error"]["code"]) == (504, "timeout")
        text = (await get(session, f"{server.url}/metrics"))[1]
        assert 'forge_generation_errors_total{error="CallTimeout"} 1' in text

    policy = FakeGenerator(["one two three"], pause_after=1)
    serve(policy, body, request_timeout_s=1.0)  # far longer than it takes to begin
    assert policy.num_cancelled == 1


class Flaky(FakeGenerator):
    """The first calls fail: before anything was sampled, or after the first piece."""

    def __init__(self, errors: list[Exception], *, after: int = 0) -> None:
        super().__init__(["one two three"])
        self.errors, self._after = errors, after

    async def _deltas(self, *arguments: Any, **more: Any) -> Any:
        error = self.errors.pop(0) if self.errors else None
        number = 0
        async for delta in super()._deltas(*arguments, **more):
            if error is not None and number == self._after:
                raise error
            yield delta
            number += 1


def test_failures_of_one_replica_are_retried_until_something_was_streamed() -> None:
    async def read(policy: ServedPolicy, *, stream: bool) -> str:
        if not stream:
            (completion,) = await policy.generate.route(prompt="Hi")
            return completion.text
        return "".join([delta.text async for delta in policy.generate_stream.stream(prompt="Hi")])

    async def run() -> None:
        for stream in (False, True):
            metrics = ServerMetrics()
            policy = ServedPolicy(Flaky([EngineDead("gone"), SyncError("other weights")]), metrics)
            policy.num_replicas = 3
            assert await read(policy, stream=stream) == "one two three"
            assert metrics.num_retried == 2
            policy = ServedPolicy(Flaky([EngineDead("gone")] * 3), metrics)
            policy.num_replicas = 3
            with pytest.raises(EngineDead):
                await read(policy, stream=stream)
        begun = ServedPolicy(Flaky([EngineDead("gone")], after=1), ServerMetrics())
        begun.num_replicas = 3
        with pytest.raises(EngineDead):
            await read(begun, stream=True)

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


class Sticky:
    """Notes which sessions there are, and which calls belong to them."""

    def __init__(self) -> None:
        self.sessions: list[str] = []
        self.terminated: list[str] = []
        self.generate = self

    async def start_session(self) -> str:
        self.sessions.append(f"session {len(self.sessions)}")
        return self.sessions[-1]

    async def terminate_session(self, session: str) -> None:
        self.terminated.append(session)

    def options(self, *, session: str) -> str:
        return session


def test_named_conversations_stay_with_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge.generator.openai.replicas._MAX_SESSIONS", 2)
    service = Sticky()
    policy = ServedPolicy(service, ServerMetrics())

    async def run() -> None:
        assert await policy.endpoint("generate", "a") is service, "there is one replica"
        policy.num_replicas = 2
        assert await policy.endpoint("generate", None) is service
        found = [await policy.endpoint("generate", name) for name in "abacb"]
        assert found == ["session 0", "session 1", "session 0", "session 2", "session 3"]
        assert service.terminated == ["session 1", "session 0"], "the least recently used"

    asyncio.run(run())


# ---- Draining --------------------------------------------------------------------------------------------------------


def test_draining_finishes_what_is_open_and_refuses_what_comes() -> None:
    async def run() -> None:
        policy = FakeGenerator(["one two three"], pause_after=1)
        async with aiohttp.ClientSession() as session:
            context = serve_openai(policy, ServeConfig(port=0, drain_s=LIMIT_S))
            server = await context.__aenter__()
            url = f"{server.base_url}/completions"
            first = asyncio.ensure_future(post(session, url, {**PLAIN, "stream": True}))
            await policy.paused.wait()
            ending = asyncio.ensure_future(context.__aexit__(None, None, None))
            while (await get(session, f"{server.url}/ready"))[0] == 200:
                pass
            status, answer, headers = await post(session, url, PLAIN)
            assert (status, headers["Retry-After"], headers["Connection"]) == (503, "1", "close")
            assert "shutting down" in answer["error"]["message"]
            assert (await get(session, f"{server.url}/health"))[0] == 200
            assert not ending.done()
            policy.resume()
            status, text, _ = await first
            assert status == 200
            assert text.endswith("data: [DONE]\n\n")
            await ending
        assert policy.num_cancelled == 0

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_hurry_ends_draining_with_an_error_event() -> None:
    async def run() -> None:
        policy = FakeGenerator(["one two three"], pause_after=1)
        async with aiohttp.ClientSession() as session:
            async with serve_openai(policy, ServeConfig(port=0, drain_s=LIMIT_S)) as server:
                body = {**PLAIN, "stream": True}
                asking = asyncio.ensure_future(post(session, f"{server.base_url}/completions", body))
                await policy.paused.wait()
                server.hurry()
            status, text, _ = await asking
        assert status == 200
        assert "one" in text
        assert "shut down before this answer was complete" in text
        assert "[DONE]" not in text

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


# ---- Weight updates --------------------------------------------------------------------------------------------------


class Publisher:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def publish(self, folder: str | None, *, newer_than: int) -> tuple[int, str]:
        self.calls.append(folder)
        if folder == "nowhere":
            raise ConfigError("there are no weights", path="serve.update_from", value=folder)
        return newer_than + 1, folder or "usual"

    async def keep(self) -> None:
        self.calls.append("keep")

    async def withdraw(self) -> None:
        self.calls.append("withdraw")


class Updated(FakeGenerator):
    """It can be updated."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[str] = []
        self.error: Exception | None = None
        self.go = asyncio.Event()
        self.go.set()
        self.update_weights = Routed(self._update)

    async def _update(self, version: int, *, mode: Any) -> UpdateReport:
        await self.go.wait()
        if self.error is not None:
            raise self.error
        self.modes.append(mode)
        self.version = version
        return UpdateReport(version, mode, 0.0, 0.0)


def test_updates_need_the_admin_key_and_one_happens_at_a_time() -> None:
    publisher, policy = Publisher(), Updated()

    async def body(server: OpenAIServer, session: aiohttp.ClientSession) -> None:
        url, key = f"{server.url}/admin/update", {"Authorization": "Bearer admin"}
        assert (await post(session, url, {}, Authorization="Bearer client"))[0] == 401
        assert (await post(session, f"{server.base_url}/completions", PLAIN, **key))[0] == 401
        status, answer, _ = await post(session, url, {}, **key)
        assert (status, answer["version"], answer["source"]) == (200, 0, "usual")
        policy.go.clear()
        first = asyncio.ensure_future(post(session, url, {"path": "models/other"}, **key))
        while publisher.calls[-1] != "models/other":  # noqa: ASYNC110 - what the server does on this loop
            await asyncio.sleep(0)
        status, answer, _ = await post(session, url, {}, **key)
        assert (status, answer["error"]["code"]) == (409, "update_in_progress")
        policy.go.set()
        assert (await first)[1]["version"] == 1
        assert (await post(session, url, {"folder": "x"}, **key))[1]["error"]["param"] == "folder"
        assert (await post(session, url, {"path": 3}, **key))[1]["error"]["param"] == "path"
        status, answer, _ = await post(session, url, {"path": "nowhere"}, **key)
        assert (status, "there are no weights" in answer["error"]["message"]) == (400, True)
        policy.error = WeightMismatch("another shape", path="norm.weight")
        status, answer, _ = await post(session, url, {}, **key)
        assert (status, answer["error"]["code"]) == (400, "weight_mismatch")
        assert "another shape" in answer["error"]["message"]
        assert policy.version == 1, "the old weights are served"
        text = (await get(session, f"{server.url}/metrics", Authorization="Bearer client"))[1]
        assert 'forge_weight_updates_total{outcome="failed"} 2' in text

    serve(policy, body, publisher=publisher, api_key="client", admin_key="admin")
    assert publisher.calls == [None, "keep", "models/other", "keep", "nowhere", None, "withdraw"]
    assert policy.modes == ["drain", "drain"]


def test_without_an_admin_key_nobody_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    async def absent(server: OpenAIServer, session: aiohttp.ClientSession) -> None:
        key = {"Authorization": "Bearer from the environment"}
        assert (await post(session, f"{server.url}/admin/update", {}, **key))[0] == 404

    serve(Updated(), absent, publisher=Publisher())
    monkeypatch.setenv("FORGE_ADMIN_KEY", "from the environment")
    serve(Updated(), absent)

    async def present(server: OpenAIServer, session: aiohttp.ClientSession) -> None:
        assert (await post(session, f"{server.url}/admin/update", {}))[0] == 401

    serve(Updated(), present, publisher=Publisher())


def test_following_updates_once_for_all_that_is_new() -> None:
    stamps = ["served", "served", "new", "new", "newer", "newer"]
    updates: list[str] = []
    ended = asyncio.Event()
    current = ""

    class Source:
        def find(self) -> Any:
            nonlocal current
            if not stamps:
                ended.set()
                return SimpleNamespace(stamp=current)
            current = stamps.pop(0)
            return SimpleNamespace(stamp=current)

    class Server:
        async def update_weights(self) -> Any:
            updates.append(current)
            if current == "new":
                raise WeightMismatch("another shape")
            return SimpleNamespace(version=1, source="run", num_replicas=1, seconds=0.0)

    async def run() -> None:
        served: Any = SimpleNamespace(stamp="served")
        with mock.patch("forge.cli.serve_weights.find_weights", return_value=served):
            server: Any = Server()
            source: Any = Source()
            task = asyncio.ensure_future(follow(server, source, every_s=0.0, served="folder"))
            await ended.wait()
            task.cancel()
            await asyncio.wait([task])

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    assert updates == ["new", "newer"], "one that failed is not tried again"
