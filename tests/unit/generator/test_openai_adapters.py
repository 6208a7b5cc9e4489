"""LoRA adapters over HTTP: the name of an adapter is the name of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from adapter_folders import make_adapter
from forge.config import ModelConfig
from forge.errors import ConfigError
from forge.generator.openai import OpenAIServer
from forge.models.locate import resolve
from forge.models.peft_files import adapter_digest
from tiny_serving import with_tiny_served


async def post(session: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with session.post(url, json=body) as answer:
        return answer.status, await answer.json()


def test_a_model_name_selects_an_adapter(tmp_path: Path) -> None:
    facts = resolve(ModelConfig(preset="tiny")).architecture
    digests = {}
    for seed, name in enumerate(("terse", "kind")):
        digests[name] = adapter_digest(make_adapter(tmp_path / name, facts, seed=seed, alpha=64.0))

    async def body(server: OpenAIServer) -> None:
        async with aiohttp.ClientSession() as session:
            url, own = f"{server.base_url}/completions", server.model_name
            asked: dict[str, Any] = {"prompt": "Once", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
            found = {}
            for model in (own, "terse", "kind"):
                status, answer = await post(session, url, model=model, **asked)
                assert (status, answer["model"]) == (200, model)
                found[model] = answer["choices"][0]
            assert len({str(each["token_ids"]) for each in found.values()}) == 3
            assert "adapter" not in found[own]
            assert found["kind"]["adapter"] == {"name": "kind", "digest": digests["kind"]}
            status, answer = await post(session, url, model=own, adapter="kind", **asked)
            assert (answer["model"], answer["choices"][0]["token_ids"]) == ("kind", found["kind"]["token_ids"])
            status, answer = await post(session, url, model="terse", adapter="kind", **asked)
            assert (status, answer["error"]["param"]) == (400, "adapter")
            status, answer = await post(session, url, model="terse", **asked, echo=True, logprobs=0)
            assert (status, answer["error"]["param"]) == (400, "echo")
            status, answer = await post(session, url, model="rude", **asked)
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
            assert f"'{own}', 'kind', 'terse'" in answer["error"]["message"]
            async with session.get(f"{server.base_url}/models") as listed:
                models = (await listed.json())["data"]
            assert [each["id"] for each in models] == [own, "kind", "terse"]
            assert (models[1]["parent"], models[1]["adapter_digest"]) == (own, digests["kind"])
            async with session.get(f"{server.base_url}/models/terse") as one:
                assert (await one.json())["adapter_digest"] == digests["terse"]

    overrides = [f"generator.adapters.{name}={tmp_path / name}" for name in digests]
    with_tiny_served(body, *overrides, "generator.max_seq_len=128")
    with pytest.raises(ConfigError) as raised:
        with_tiny_served(body, f"generator.adapters.tiny={tmp_path / 'kind'}", "generator.max_seq_len=128")
    assert (raised.value.path, raised.value.value) == ("serve.model_name", "tiny")
