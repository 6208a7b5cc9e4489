"""What every engine that serves LoRA adapters does alike. transformers, with the adapters merged, is the judge."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapter_folders import make_adapter
from forge.config import ModelConfig
from forge.errors import ForgeError, ModelError, OptionError, PromptError
from generator_bench import request


@contextlib.contextmanager
def merged(judge: Any, folder: Path | None) -> Iterator[Any]:
    """A model of transformers with an adapter added to its weights while the block runs; None for none."""
    added: dict[str, torch.Tensor] = {}
    if folder is not None:
        tensors = load_file(folder / "adapter_model.safetensors")
        said = json.loads((folder / "adapter_config.json").read_text())
        for name, down in tensors.items():
            if name.endswith(".lora_A.weight"):
                up = tensors[name.replace("lora_A", "lora_B")]
                plain = name.removeprefix("base_model.model.").replace(".lora_A", "")
                added[plain] = said["lora_alpha"] / said["r"] * (up @ down)
    parameters = dict(judge.named_parameters())
    before = {name: parameters[name].detach().clone() for name in added}
    with torch.no_grad():
        for name, part in added.items():
            parameters[name] += part
        try:
            yield judge
        finally:
            for name, tensor in before.items():
                parameters[name].copy_(tensor)


def judged(judge: Any, folder: Path | None, ids: tuple[int, ...], tokens: tuple[int, ...]) -> list[float]:
    with merged(judge, folder) as model, torch.no_grad():
        table = model(torch.tensor([[*ids, *tokens]])).logits[0].double().log_softmax(-1)
    return [float(table[len(ids) + place - 1, token]) for place, token in enumerate(tokens)]


async def refusal(call: Any) -> ForgeError:
    with pytest.raises(ForgeError) as raised:
        await call
    return raised.value


async def check_adapters(engine: Any, judge: Any, facts: ModelConfig, place: Path, *, tolerance: float) -> None:
    """Requests of several adapters at once, replaced, unloaded and refused ones."""
    q_and_v = ("q_proj", "v_proj")
    folders = {
        "one": make_adapter(place / "one", facts, seed=1, rank=4, alpha=16.0, targets=q_and_v),
        "two": make_adapter(place / "two", facts, seed=2, rank=2, alpha=6.0, targets=("o_proj", "down_proj")),
    }
    for name, folder in folders.items():
        await engine.load_adapter(name, str(folder))
    prompts = [tuple(range(40 + number, 60 + 7 * number)) for number in range(6)]
    names = (None, "one", "two") * 2
    asked = [request(ids, adapter=name, max_tokens=10) for ids, name in zip(prompts, names, strict=True)]
    found = await asyncio.gather(*map(engine.generate, asked))
    for ids, name, (completion,) in zip(prompts, names, found, strict=True):
        expected = judged(judge, folders.get(str(name)), ids, completion.token_ids)
        assert completion.logprobs == pytest.approx(expected, abs=tolerance)
        if name is not None:
            plain = judged(judge, None, ids, completion.token_ids)
            assert max(abs(a - b) for a, b in zip(expected, plain, strict=True)) > 100 * tolerance
    ids = tuple(range(30, 180))
    await engine.generate(request(ids, adapter="one", max_tokens=2))
    other = make_adapter(place / "other", facts, seed=3, rank=4, targets=q_and_v)
    await engine.load_adapter("one", str(other))
    (completion,) = await engine.generate(request(ids, adapter="one", max_tokens=4))
    assert completion.num_shared == 0, "what another adapter computed is of no use"
    assert completion.logprobs == pytest.approx(judged(judge, other, ids, completion.token_ids), abs=tolerance)
    for name in folders:
        await engine.unload_adapter(name)
    refused = [
        (engine.generate(request(ids, adapter="one")), PromptError, "sampling.adapter", "one"),
        (engine.unload_adapter("one"), OptionError, "unload_adapter(name)", "one"),
        (engine.load_adapter("", str(other)), OptionError, "load_adapter(name)", ""),
        (engine.load_adapter("one", str(place)), ModelError, "load_adapter(path)", str(place)),
    ]
    for call, kind, path, value in refused:
        error = await refusal(call)
        assert (type(error), error.path, error.value) == (kind, path, value)
        assert error.rule
    (completion,) = await engine.generate(request(ids, max_tokens=4))
    assert completion.logprobs == pytest.approx(judged(judge, None, ids, completion.token_ids), abs=tolerance)
