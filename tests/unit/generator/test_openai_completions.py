"""/v1/completions, /v1/models, /v1/stats and /health through OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import openai
import pytest

from forge.testing.generators import FakeGenerator
from openai_serving import client_of, serving


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    policy = FakeGenerator(lambda request: f"after {request.text}")
    policy.version = 7
    with serving(policy, model_name="served/name") as server, client_of(server) as client:
        yield client


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a", ["after a"]),
        (["a", "b"], ["after a", "after b"]),
        ([97, 98], ["after ab"]),
        ([[97], [98, 99]], ["after a", "after bc"]),
    ],
)
def test_every_form_of_prompt(client: openai.OpenAI, prompt: Any, texts: list[str]) -> None:
    response = client.completions.create(model="served/name", prompt=prompt)
    assert [choice.text for choice in response.choices] == texts
    assert [choice.index for choice in response.choices] == list(range(len(texts)))
    assert response.usage is not None
    assert response.usage.completion_tokens == sum(map(len, texts))
    chunks = list(client.completions.create(model="served/name", prompt=prompt, stream=True))
    streamed = [""] * len(texts)
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    assert sum(chunk.choices[0].finish_reason == "stop" for chunk in chunks) == len(texts)


def test_n_for_each_prompt(client: openai.OpenAI) -> None:
    response = client.completions.create(model="served/name", prompt=["a", "b"], n=2)
    assert [(choice.index, choice.text[-1]) for choice in response.choices] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert response.usage is not None
    assert response.usage.prompt_tokens == 2
    stream = client.completions.create(
        model="served/name", prompt=["a", "b"], n=2, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1, 2, 3}
    assert last.usage == response.usage


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def test_logprobs_and_token_ids(client: openai.OpenAI) -> None:
    for stream in (False, True):
        response = client.completions.create(
            model="served/name", prompt="a", logprobs=0, stream=stream, extra_body={"return_token_ids": True}
        )
        choices = [chunk.choices[0] for chunk in response] if stream else response.choices
        tables = [choice.logprobs for choice in choices]
        assert joined(table.token_logprobs for table in tables) == [-0.01, -0.02, -0.03, -0.04, -0.05, -0.06, -0.07]
        tokens = joined(table.tokens for table in tables)
        assert tokens[:2] == ["token_id:97", "token_id:102"]
        assert joined(table.text_offset for table in tables)[:3] == [0, 11, 23]
        assert joined(choice.token_ids for choice in choices) == list(map(ord, "after a"))
        assert choices[-1].prompt_token_ids == [97]
        assert choices[-1].weight_versions == [{"version": 7, "start": 0, "end": 7}]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "served/name"
    assert (model.max_model_len, model.weight_version, model.engine) == (2048, 7, "fake")
    assert client.models.retrieve("served/name").id == "served/name"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_health_and_stats(client: openai.OpenAI) -> None:
    health = client.get(str(client.base_url).replace("/v1/", "/health"), cast_to=object)
    assert health == {"status": "ok", "weight_version": 7}
    stats: Any = client.get("/stats", cast_to=object)
    assert [replica["version"] for replica in stats["replicas"]] == [7]
