"""The contract of generation engines, on a GPU: the same tests as on the CPU, in float32, with published weights on the
GPU. vLLM's workers open them by CUDA IPC; the embedded engine finds them in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import forge
import generator_bench
from forge.generator.native.engine import NativeEngine
from generator_bench import MAX_BATCH, MAX_QUEUE, Bench, make_engine, native_engine
from generator_models import FIRST, SECOND, config, folder

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible here"),
]

EMBEDDED = "native on a GPU"
"""Its tests ask for the same bits only of the engine that is called `native`: on a GPU they depend on the batch."""

TOLERANCE = {EMBEDDED: 1e-3, "vllm": 2e-2}
"""Of a logprob, against transformers on the CPU. Logits reach 40; vLLM's attention multiplies in TF32."""


def load_suite() -> ModuleType:
    """The contract's own module, once more and under another name, so that its bounds here are not those there."""
    path = Path(__file__).parents[1] / "contract" / "test_generators.py"
    spec = importlib.util.spec_from_file_location("generators_contract_cuda", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TOLERANCE = TOLERANCE  # type: ignore[attr-defined]
    return module


globals().update({name: value for name, value in vars(load_suite()).items() if name.startswith("test_")})


class GpuBench(Bench):
    """An engine on the GPU, and weights that are published from there."""

    device = "cuda"

    async def open(self, **settings: Any) -> None:
        is_embedded = self.name == EMBEDDED
        fields: dict[str, Any] = {
            "engine": "native" if is_embedded else "vllm",
            "max_seq_len": 2048,
            "max_batch": MAX_BATCH,
            "max_queue": MAX_QUEUE,
            "kv_cache_gb": 0.25,
            "gpu_memory_share": 0.2,
            "with_gpus": True,
            "precision": "float32",
            "cuda_graphs": is_embedded,  # vLLM would compile for longer than all tests take
        }
        made_from = config(FIRST, **fields | settings)
        if is_embedded:
            self.engine: Any = native_engine(made_from)
            assert isinstance(self.engine, NativeEngine)
        else:
            self.engine = make_engine(made_from)
        await self.engine.start()


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    EMBEDDED: (EMBEDDED, {}),
    f"{EMBEDDED}, lookup": (EMBEDDED, {"speculation": {"ngram": 1}}),
    f"{EMBEDDED}, draft model": (EMBEDDED, {"speculation": {"model": str(folder(SECOND)), "num_tokens": 3}}),
    "vllm": ("vllm", {}),
}


@pytest.fixture(scope="module", params=SETTINGS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    torch.backends.cuda.matmul.allow_tf32 = False
    with asyncio.Runner() as runner:
        name, settings = SETTINGS[request.param]
        made, around = GpuBench(name, runner), contextlib.AsyncExitStack()
        made.weights = generator_bench.Weights("policy", keep=3, rank=0, world_size=1, on="cuda")
        try:
            made.run(around.enter_async_context(forge.run()))
            made.run(made.open(**settings))
            around.push_async_callback(made.engine.close)
            yield made
        finally:
            made.run(around.aclose())
