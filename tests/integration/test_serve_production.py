"""`forge serve` with two replicas: one is killed, weights are updated, and the server is drained. Real processes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge.config import DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.models.tiny import make_tiny
from forge.trainer.actor import Trainer
from leftovers import processes_of
from prometheus_text import parse

LIMIT_S = 600
pytestmark = pytest.mark.usefixtures("leaves_nothing", "one_thread")


@contextmanager
def served(folder: Path, log: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and its address once it is ready."""
    command = [sys.executable, "-m", "forge.cli", "serve", str(folder), "--port", "0", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FORGE_ADMIN_KEY": "admin", "FORGE_API_KEY": ""}
    with (
        open(log, "w") as errors,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as running,
    ):
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            assert line.startswith("Serving "), log.read_text()
            yield running, line.split(" at ")[1].strip().removesuffix("/v1")
        finally:
            if running.poll() is None:  # the test failed
                running.send_signal(signal.SIGTERM)
                running.wait(LIMIT_S)


def ask(url: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """Status, body and headers of one request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json", **headers})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=LIMIT_S) as answer:
            text = answer.read().decode()
            is_json = answer.headers.get_content_type() == "application/json"
            return answer.status, json.loads(text) if is_json else text, answer.headers
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read()), error.headers


def complete(url: str, tokens: int = 4, **more: Any) -> tuple[int, Any, Any]:
    body = {"model": "sums", "prompt": "On", "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **more}
    return ask(f"{url}/v1/completions", body)


def metrics(url: str) -> dict[str, Any]:
    return {
        name: {tuple(dict(labels).values()): value for (_, labels), value in family.samples.items()}
        for name, family in parse(ask(f"{url}/metrics")[1]).items()
    }


class Clients:
    """Ask again and again on threads, until `end`, and keep what was answered."""

    def __init__(self, url: str, *, number: int = 2) -> None:
        self._url = url
        self._ended = threading.Event()
        self.answers: list[tuple[int, Any, Any]] = []
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(number)]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int) -> None:
        while not self._ended.wait(0.5):  # they leave some of the machine to those who start
            self.answers.append(complete(self._url, 40 + 60 * index, return_token_ids=True))

    def wait_for(self, number: int) -> None:
        """Wait until so many more have been answered."""
        most = len(self.answers) + number
        while len(self.answers) < most:
            self._ended.wait(0.01)

    def end(self) -> list[tuple[int, Any, Any]]:
        self._ended.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
        return self.answers


class Stream:
    """A long completion that is read on a thread; its first piece is there."""

    def __init__(self, url: str) -> None:
        body = {"model": "sums", "prompt": "On", "max_tokens": 2000, "n": 4, "ignore_eos": True, "stream": True}
        parts = urllib.parse.urlsplit(url)
        self._line = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=LIMIT_S)
        self._line.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self._answer = self._line.getresponse()
        self.version = self._answer.headers["X-Forge-Weight-Version"]
        self._answer.readline()

    def end(self) -> str:
        """Return the last event."""
        with contextlib.closing(self._line):
            return self._answer.read().decode().strip().rpartition("\n\n")[2]


def kill_one_of_two(url: str, parent: int) -> None:
    """Streams that have begun on the replica end with an error, and everything else goes on."""
    victim, other = (replica_pid(parent, index) for index in range(2))  # it takes a while to look at every process
    streams = [Stream(url), Stream(url)]
    for pid in (victim, other):
        os.kill(pid, signal.SIGSTOP)  # no stream ends before there is a request of every kind
    clients = [threading.Thread(target=lambda: answers.append(complete(url, 900))) for _ in range(2)]
    answers: list[Any] = []
    for client in clients:
        client.start()
    while metrics(url)["forge_requests_in_flight"][()] < 4:
        pass
    os.kill(victim, signal.SIGKILL)
    os.kill(other, signal.SIGCONT)
    ends = sorted(stream.end() for stream in streams)
    for client in clients:
        client.join(LIMIT_S)
    assert [status for status, _, _ in answers] == [200, 200], "sent again"
    assert ends[0] == "data: [DONE]"
    error = json.loads(ends[1].removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("unavailable", "server_error")
    found = metrics(url)
    assert found["forge_request_retries_total"][()] == 1
    assert ask(f"{url}/health")[1]["status"] == "ok"
    assert ask(f"{url}/ready")[0] == 200


def replica_pid(parent: int, index: int) -> int:
    """The process of a generator."""
    for process in processes_of(parent):
        try:
            if process.environ().get("FORGE_REPLICA") == str(index):
                return int(process.pid)
        except psutil.Error:
            continue
    raise AssertionError(f"replica {index} has no process")


def save_checkpoint(folder: Path, model: Path, *, step: int) -> None:
    """Save a model's weights as a run does."""
    layout = DistributedConfig(with_gpus=False)
    training = TrainingConfig(schedule="constant", warmup_steps=0)
    config = TrainerConfig(
        model=ModelConfig(path=str(model)), distributed=layout, training=training, checkpoint_dir=folder
    )

    async def save() -> None:
        trainer = Trainer(config)
        await trainer.setup()
        trainer.engine.step = step
        await trainer.save()
        await trainer.close()

    asyncio.run(save())


def test_two_replicas_in_production(tmp_path: Path) -> None:
    """A replica dies, the weights are updated twice, and the server is drained: no request fails."""
    run, log, access = tmp_path / "sums", tmp_path / "log", tmp_path / "access.jsonl"
    make_tiny(run / "checkpoints" / "hf", seed=0, num_layers=2)
    others = [tmp_path / "second", tmp_path / "third"]
    for seed, folder in enumerate(others, start=1):
        make_tiny(folder, seed=seed, num_layers=2)
    words = ("--num-replicas", "2", "--access-log", str(access), "generator.max_seq_len=2048", "serve.drain_s=600")
    with served(run, log, *words) as (running, url):
        assert ask(f"{url}/v1/models")[1]["data"][0]["id"] == "sums", "the run's name"
        assert ask(f"{url}/ready")[1] == {"status": "ready", "replicas": {"able": 2, "total": 2}}
        kill_one_of_two(url, running.pid)

        clients = Clients(url)
        clients.wait_for(1)  # of the first weights
        while metrics(url)["forge_replicas"]["healthy",] < 2:
            clients.wait_for(1)
        assert metrics(url)["forge_replica_restarts_total"]["0",] == 1
        status, outcome, _ = ask(f"{url}/admin/update", {"path": str(others[0])}, Authorization="Bearer admin")
        assert status == 200, (outcome, log.read_text())
        assert (outcome["version"], outcome["source"], outcome["num_replicas"]) == (0, str(others[0]), 2)
        make_tiny(tmp_path / "larger", seed=0, num_layers=3)
        body = {"path": str(tmp_path / "larger")}
        status, refused, _ = ask(f"{url}/admin/update", body, Authorization="Bearer admin")
        assert (status, refused["error"]["code"]) == (400, "weight_mismatch")
        assert set(metrics(url)["forge_weight_version"].values()) == {0.0}, "as before"
        clients.wait_for(3)  # two may have been under way
        save_checkpoint(run / "checkpoints", others[1], step=12)
        running.send_signal(signal.SIGHUP)
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line.startswith("Serving version 12 from "), log.read_text()
        assert "checkpoints/step-00000012 (2 replicas" in line
        clients.wait_for(3)
        assert set(metrics(url)["forge_weight_version"].values()) == {12.0}
        answers = clients.end()
        assert {status for status, _, _ in answers} == {200}
        for _, answer, headers in answers:
            (choice,) = answer["choices"]
            assert len(choice["weight_versions"]) == 1, "one version made it"
            assert headers["X-Forge-Weight-Version"] == str(choice["weight_versions"][0]["version"])
        assert {headers["X-Forge-Weight-Version"] for _, _, headers in answers} == {"-1", "0", "12"}

        open_stream = Stream(url)
        running.send_signal(signal.SIGTERM)
        assert open_stream.end() == "data: [DONE]", "it was finished"
        assert open_stream.version == "12"
        assert running.wait(LIMIT_S) == 0, log.read_text()
    lines = [json.loads(line) for line in access.read_text().splitlines()]
    assert sum(line["route"] == "/v1/completions" for line in lines) == len(answers) + 2 + 3
    assert {line["route"] for line in lines if line["status"] != 200} == {"/admin/update"}
    assert [line["error"] for line in lines if line["error"] is not None] == ["ActorFailure"], "of the stream"


def test_a_second_signal_cuts_what_is_open(tmp_path: Path) -> None:
    model, log = tmp_path / "sums", tmp_path / "log"
    make_tiny(model, seed=0, num_layers=2)
    with served(model, log, "serve.drain_s=3600", "generator.max_seq_len=2000") as (running, url):
        got: list[Any] = []
        asking = threading.Thread(target=lambda: got.append(complete(url, 1990, stream=True, n=16)))
        asking.start()
        while not metrics(url)["forge_requests_in_flight"][()]:
            pass
        running.send_signal(signal.SIGTERM)
        while ask(f"{url}/ready")[0] == 200:
            pass
        status, answer, headers = complete(url)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "shutting down" in answer["error"]["message"]
        running.send_signal(signal.SIGTERM)
        assert running.wait(LIMIT_S) == 0, log.read_text()
        asking.join(LIMIT_S)
    (found,) = got
    is_event = found[0] == 200 and '"error"' in found[1] and "[DONE]" not in found[1]
    assert is_event or found[0] == 503, found
    assert "shut down before this answer was complete" in str(found[1])
