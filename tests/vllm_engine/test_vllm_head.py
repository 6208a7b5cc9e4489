"""`model.head_precision: float32` in vLLM: logits that bfloat16 does not round, after an update too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge import _amx
from forge.config import GeneratorConfig, ModelConfig
from forge.models.locate import resolve
from forge.models.tiny import make_tiny
from forge.store import Weights
from generator_bench import make_engine
from hf_state import to_ours

IDS = tuple(range(5, 45))
ROUNDED = 0.012
"""The mean error of a logprob where logits of 30 are rounded to bfloat16 is above it."""


def write(folder: Path, *, seed: int) -> dict[str, torch.Tensor]:
    """A model whose logits are about 30, as those of trained models are."""
    make_tiny(folder, seed=seed, tie_embeddings=False)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] += 0.1
    tensors["lm_head.weight"] += 30 / tensors["lm_head.weight"].shape[1]
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


@torch.no_grad()
def judged(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    ids = torch.tensor(IDS)
    logprobs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, ids[1:, None])[:, 0]


@pytest.mark.skipif(
    _amx.verdict() == "traps", reason="AMX traps on this machine, and vLLM's kernels for bfloat16 use it"
)
def test_logits_are_not_rounded(tmp_path: Path, on_loop: Callable[[Awaitable[Any]], Any]) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    tensors = [write(folder, seed=seed) for seed, folder in enumerate(folders)]
    model = ModelConfig(path=str(folders[0]), head_precision="float32")
    fields = {"max_seq_len": 256, "max_batch": 4, "kv_cache_gb": 0.05, "weights": "loud"}
    engine = make_engine(GeneratorConfig(engine="vllm", model=model, precision="bfloat16", **fields))

    async def error(folder: Path) -> float:
        (scores,) = await engine.score([IDS])
        right = await asyncio.to_thread(judged, folder)
        return float((torch.tensor(scores[1:]) - right).abs().mean())

    async def body() -> None:
        await engine.start()
        try:
            assert await error(folders[0]) < 0.6 * ROUNDED
            theirs = to_ours(tensors[1], resolve(model).architecture)
            await Weights("loud", rank=0, world_size=1).publish(theirs, version=1)
            await engine.update_weights(1, "drain")
            assert await error(folders[0]) > 10 * ROUNDED
            assert await error(folders[1]) < 0.6 * ROUNDED
        finally:
            await engine.close()

    on_loop(body())
