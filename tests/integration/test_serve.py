"""`forge serve` as a process, with a real model on the embedded engine and OpenAI's own client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from forge.config import ModelConfig
from forge.generator.openai import exchanges_to_samples, read_exchanges
from forge.models.locate import resolve
from forge.models.tokenizer import ChatTokenizer
from leftovers import processes_of

LIMIT_S = 600
SERVE = [sys.executable, "-m", "forge.cli", "serve"]

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "FORGE_API_KEY": "secret"}


@contextmanager
def process(words: list[str], log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the line that it prints when it is ready."""
    with (
        open(log, "w") as errors,
        subprocess.Popen(
            [*SERVE, *words], env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as running,
    ):
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            assert line, log.read_text()
            yield running, line
        finally:
            if running.poll() is None:  # the test failed
                running.send_signal(signal.SIGTERM)
                running.wait(LIMIT_S)


def refused(words: list[str]) -> str:
    ended = subprocess.run(
        [*SERVE, *words],
        env=environment() | {"FORGE_API_KEY": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    return ended.stderr


def talk(client: openai.OpenAI) -> list[Any]:
    """A conversation of two turns, the second of them streamed; the responses' token ids."""
    options: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 12,
        "seed": 3,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }
    create = client.chat.completions.create
    messages: list[Any] = [{"role": "user", "content": "What is the answer?"}]
    first = create(messages=messages, logprobs=True, **options)
    (choice,) = first.choices
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert all(token.logprob < 0 for token in choice.logprobs.content or ())
    assert choice.weight_versions == [{"version": -1, "start": 0, "end": 12}]
    repeated = create(messages=messages, **options).choices[0]
    assert repeated.token_ids == choice.token_ids, "the same seed draws the same tokens"
    messages += [{"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "Why?"}]
    chunks = list(create(messages=messages, stream=True, **options))
    second = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or ()]
    assert len(second) == 12
    return [first.prompt_token_ids, choice.token_ids, chunks[-1].prompt_token_ids, second, messages]


def send_too_much(client: openai.OpenAI, pid: int) -> None:
    """Megabytes of text are refused, and what they took is given back."""
    processes = [psutil.Process(pid), *processes_of(pid)]
    before = sum(process.memory_info().rss for process in processes)
    text = "Hello, world 12 " * 600_000
    for send in (
        lambda: client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}]),
        lambda: client.completions.create(model="tiny", prompt=text),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            send()
        assert caught.value.code == "context_length_exceeded"
        assert re.search(r"'96000\d\d characters, at least 7384\d\d tokens'", str(caught.value))
    assert sum(process.memory_info().rss for process in processes) - before < 300e6


def cancel(client: openai.OpenAI) -> None:
    """Go away in mid-answer: the engine stops."""

    def stats() -> dict[str, Any]:
        found: Any = client.get("/stats", cast_to=object)
        return found["replicas"][0]

    before = stats()
    stream = client.completions.create(
        model="tiny", prompt="On", stream=True, max_tokens=1900, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    while stats()["num_running"]:
        pass
    after = stats()
    assert after["num_aborted"] == before["num_aborted"] + 1
    assert after["num_tokens"] - before["num_tokens"] < 1900


def test_a_served_model(tmp_path: Path) -> None:
    record = tmp_path / "exchanges.jsonl"
    words = ["model.preset=tiny", "--port", "0", "--record", str(record), "generator.max_batch=2"]
    with process(words, tmp_path / "log") as (running, line):
        name, url = line.removeprefix("Serving ").split(" at ")
        assert name == "tiny"
        with openai.OpenAI(
            base_url=url.strip(),
            api_key="secret",
            max_retries=0,
            timeout=LIMIT_S,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client:
            assert client.get(f"{url.strip().removesuffix('/v1')}/health", cast_to=object) == {
                "status": "ok",
                "weight_version": -1,
            }
            first_prompt, first, second_prompt, second, messages = talk(client)
            many = client.completions.create(model="tiny", prompt=["On", "Off"], n=2, max_tokens=3)
            assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model="tiny", prompt=[1] * 3000)
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match="vllm"):
                client.completions.create(
                    model="tiny", prompt="On", extra_body={"response_format": {"type": "json_object"}}
                )
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="guess").models.list()
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model="tiny", prompt="On", n=2000)
            assert caught.value.param == "n"
            long = client.completions.create(model="tiny", prompt="<|endoftext|>" * 2000, max_tokens=2)
            assert long.usage is not None
            assert long.usage.prompt_tokens == 2000, "a long text that fits"
            cancel(client)
            send_too_much(client, running.pid)
        running.send_signal(signal.SIGTERM)
        assert running.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()

    assert second_prompt[: len(first_prompt) + 12] == [*first_prompt, *first], "token by token"
    model = resolve(ModelConfig(preset="tiny"))
    assert model.folder is not None
    tokenizer = ChatTokenizer.load(model.folder)
    plain = tokenizer.encode_prompt(messages)
    assert second_prompt != plain, "this seed draws what no tokenizer makes"
    assert tokenizer.decode(second_prompt) == tokenizer.decode(plain)

    exchanges = list(read_exchanges(record))
    assert len(exchanges) == 3 + 4 + 1, "what the client did not wait for is not there"
    chat = [exchanges[1], exchanges[2]]
    assert chat[1].continues == chat[0].id
    (sample,) = exchanges_to_samples(chat)
    assert sample.token_ids.tolist() == [*second_prompt, *second]
    assert int(sample.loss_weights.sum()) == 24


def test_what_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    told = refused(["model.preset=tiny", "--host", "0.0.0.0"])
    assert "FORGE_API_KEY" in told
    told = refused(["model.preset=tiny", "--port", "0", "--record", str(tmp_path)])
    assert f"path:   serve.record\n  value:  '{tmp_path}'" in told
