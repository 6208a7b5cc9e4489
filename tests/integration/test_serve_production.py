"""`forge serve` with two replicas: one is killed, weights are updated, and the server is drained. Real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forge.models.tiny import make_tiny
from prometheus_text import parse

LIMIT_S = 600
pytestmark = pytest.mark.usefixtures("leaves_nothing")


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

    def __init__(self, url: str, *, number: int = 3) -> None:
        self._url = url
        self._ended = threading.Event()
        self.answers: list[tuple[int, Any, Any]] = []
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(number)]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int) -> None:
        while not self._ended.is_set():
            self.answers.append(complete(self._url, 60 + 30 * index, return_token_ids=True))

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


def test_two_replicas_in_production(tmp_path: Path) -> None:
    """A replica dies, the weights are updated twice, and the server is drained: no request fails."""
    run, log, access = tmp_path / "sums", tmp_path / "log", tmp_path / "access.jsonl"
    model = run / "checkpoints" / "hf"
    make_tiny(model, seed=0, num_layers=2)
    other = tmp_path / "other"
    make_tiny(other, seed=1, num_layers=2)
    words = ("--num-replicas", "2", "--access-log", str(access), "generator.max_seq_len=1024")
    with served(run, log, *words) as (running, url):
        assert ask(f"{url}/v1/models")[1]["data"][0]["id"] == "sums", "the run's name"
        assert ask(f"{url}/ready")[1] == {"status": "ready", "replicas": {"able": 2, "total": 2}}
        before = complete(url)
        assert before[2]["X-Forge-Weight-Version"] == "-1"

        clients = Clients(url)
        clients.wait_for(4)
        (victim, *_) = replica_pids(running.pid)
        os.kill(victim, signal.SIGKILL)
        clients.wait_for(6)
        assert ask(f"{url}/health")[0] == 200
        while metrics(url)["forge_replicas"]["healthy",] < 2:
            clients.wait_for(1)
        assert sum(metrics(url)["forge_replica_restarts_total"].values()) == 1

        status, outcome, _ = ask(f"{url}/admin/update", {"path": str(other)}, Authorization="Bearer admin")
        assert (status, outcome["version"], outcome["source"]) == (200, 0, str(other)), log.read_text()
        assert outcome["num_replicas"] == 2
        clients.wait_for(6)
        shutil.rmtree(model)
        shutil.copytree(other, model)
        running.send_signal(signal.SIGHUP)
        assert running.stdout is not None
        assert running.stdout.readline().startswith(f"Serving version 1 from {model} (2 replicas"), log.read_text()
        clients.wait_for(3)
        assert set(metrics(url)["forge_weight_version"].values()) == {1.0}
        answers = clients.end()
        assert {status for status, _, _ in answers} == {200}
        for _, answer, headers in answers:
            (choice,) = answer["choices"]
            assert len(choice["weight_versions"]) == 1, "one version made it"
            assert headers["X-Forge-Weight-Version"] == str(choice["weight_versions"][0]["version"])
        assert {headers["X-Forge-Weight-Version"] for _, _, headers in answers} == {"-1", "0", "1"}
        assert complete(url)[1]["choices"][0]["text"] != before[1]["choices"][0]["text"]

        last: list[Any] = []
        asking = threading.Thread(target=lambda: last.append(complete(url, 900)))
        asking.start()
        while not metrics(url)["forge_requests_in_flight"][()]:
            pass
        running.send_signal(signal.SIGTERM)
        asking.join(LIMIT_S)
        assert last[0][0] == 200
        assert len(last[0][1]["choices"][0]["text"]) > 0
        assert running.wait(LIMIT_S) == 0, log.read_text()
    lines = [json.loads(line) for line in access.read_text().splitlines()]
    assert sum(line["route"] == "/v1/completions" for line in lines) == len(answers) + 3
    assert {line["status"] for line in lines} == {200}


def replica_pids(parent: int) -> list[int]:
    """The processes of the generators, by their environment."""
    import psutil

    found = []
    for process in psutil.Process(parent).children(recursive=True):
        try:
            if process.environ().get("FORGE_REPLICA") is not None and not process.children():
                found.append(process.pid)
        except psutil.Error:
            continue
    assert found
    return found


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
    assert re.search("shut down before this answer was complete", str(found[1]))
