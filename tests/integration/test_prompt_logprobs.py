"""`echo` with logprobs on `/v1/completions`: a prompt's logprobs are the model's, as evaluations by likelihood need."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from forge.generator.openai import OpenAIServer
from forge.models.tokenizer import ChatTokenizer
from tiny_serving import LIMIT_S, tiny, with_tiny_served

Post = Callable[[dict[str, Any]], Awaitable[httpx.Response]]


def served(body: Callable[[Post], Awaitable[None]], *overrides: str) -> None:
    """Run `body` with what posts to the completions of a server."""

    async def run(server: OpenAIServer) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
            await body(lambda fields: client.post(f"{server.base_url}/completions", json=fields))

    with_tiny_served(run, *overrides)


def expected(ids: list[int]) -> tuple[list[float], list[int]]:
    """The logprobs of tokens, and the likeliest ones, as transformers computes them."""
    model = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), -1)
    return table[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist(), table.argmax(-1).tolist()


def test_a_prompts_logprobs_are_those_of_the_model() -> None:
    tokenizer = ChatTokenizer.load(tiny())
    ids = tokenizer.encode_rendered("Question: what is 17 + 25? Answer: 42")

    async def body(post: Post) -> None:
        fields = {"model": "tiny", "prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        (choice,) = (await post({**fields, "seed": 1234})).raise_for_status().json()["choices"]
        found = choice["logprobs"]
        logprobs, likeliest = expected(ids)
        assert found["token_logprobs"][0] is None
        assert found["token_logprobs"][1:-1] == pytest.approx(logprobs, abs=1e-4)
        assert len(found["tokens"]) == len(found["top_logprobs"]) == len(found["text_offset"]) == len(ids) + 1
        assert found["top_logprobs"][0] is None
        for place, best in enumerate(likeliest, 1):
            top, own = found["top_logprobs"][place], found["token_logprobs"][place]
            assert max(top, key=top.__getitem__) == tokenizer.decode([best])
            assert (own == max(top.values())) == (best == ids[place])  # as lm-eval decides what is greedy
        assert choice["text"].startswith("Question: what is 17 + 25? Answer: 42")
        assert "".join(found["tokens"][:-1]) == "Question: what is 17 + 25? Answer: 42"

        # What the model would say next is greedy all along.
        longer = await post(
            {"model": "tiny", "prompt": ids, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        )
        greedy = longer.raise_for_status().json()["choices"][0]["token_ids"]
        (choice,) = (await post({**fields, "prompt": [*ids, *greedy]})).raise_for_status().json()["choices"]
        pairs = zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True)
        assert all(own == max(top.values()) for own, top in list(pairs)[len(ids) :])

    served(body, "generator.prefill_chunk_tokens=16")


def test_prompts_alone_texts_several_and_several_choices() -> None:
    async def body(post: Post) -> None:
        fields = {"model": "tiny", "prompt": ["Hello there", "Good day"], "echo": True, "logprobs": 1, "max_tokens": 0}
        answer = (await post(fields)).raise_for_status().json()
        assert [choice["text"] for choice in answer["choices"]] == ["Hello there", "Good day"]
        for choice in answer["choices"]:
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert answer["usage"]["completion_tokens"] == 0
        fields = {"model": "tiny", "prompt": "Hello", "echo": True, "max_tokens": 3, "n": 2, "seed": 1}
        answer = (await post({**fields, "logprobs": 0})).raise_for_status().json()
        assert [choice["text"][:5] for choice in answer["choices"]] == ["Hello", "Hello"]
        first, second = (choice["logprobs"] for choice in answer["choices"])
        assert first["top_logprobs"] is None
        assert first["token_logprobs"][1:-3] == second["token_logprobs"][1:-3]
        assert first["tokens"] != second["tokens"]
        plain = (await post(fields)).raise_for_status().json()["choices"]
        assert [choice["text"] for choice in plain] == [choice["text"] for choice in answer["choices"]]
        assert plain[0]["logprobs"] is None

    served(body)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "stream": True}, "echo"),
        ({"echo": "yes"}, "echo"),
        ({"echo": True, "logprobs": 1, "temperature": 1}, "logprobs"),
        ({"echo": True, "logprobs": 2, "temperature": 0}, "logprobs"),
        ({"echo": True, "logprobs": True, "temperature": 0}, "logprobs"),
        ({"logprobs": 1, "temperature": 0}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_echoed_is_refused(fields: dict[str, Any], param: str) -> None:
    async def body(post: Post) -> None:
        response = await post({"model": "tiny", "prompt": "Hello", **fields})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param

    served(body)
