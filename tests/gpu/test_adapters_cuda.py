"""Several adapters in one engine on a GPU: mixed steps are not replayed, steps of the live weights are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

import generator_models as models
from adapter_folders import make_adapter
from forge.types import Completion
from generator_bench import native_engine, request
from generator_models import FIRST, prompt

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible here"),
]
SHAPES: dict[str, dict[str, Any]] = {
    "wide": {"seed": 1, "rank": 8},
    "thin": {"seed": 2, "rank": 2, "targets": ("q_proj", "down_proj")},
}


def test_a_mixed_batch_is_close_to_one_adapter_at_a_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        options = {"with_gpus": True, "precision": "float32", "max_seq_len": 256, "kv_cache_gb": 0.2}
        engine = native_engine(models.config(FIRST, **options))
        await engine.start()
        try:
            for name, shape in SHAPES.items():
                await engine.load_adapter(name, str(make_adapter(tmp_path / name, engine.model.architecture, **shape)))
            assert engine.thread.serving().runner.has_recorded_steps
            mix = [request(prompt(5 + 9 * number), adapter=(None, *SHAPES)[number % 3]) for number in range(6)]
            mix = [request(each.prompt_ids, adapter=each.sampling.adapter, max_tokens=20) for each in mix]
            alone = [(await engine.generate(each))[0] for each in mix]
            for _ in range(2):
                together = [each[0] for each in await asyncio.gather(*map(engine.generate, mix))]
                check(together, alone)
                await engine.sleep()  # adapters leave the GPU, and come back
                await engine.wake()
        finally:
            await engine.close()

    def check(found: list[Completion], expected: list[Completion]) -> None:
        for one, other in zip(found, expected, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)

    asyncio.run(scenario())
