"""The embedded engine on a GPU: what it computes, with and without recorded steps, and what it gives back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.config import GeneratorConfig, ModelConfig, Sampling
from forge.generator.engine import Request
from forge.generator.native.engine import NativeEngine
from forge.generator.native.thread import Change
from forge.models.locate import resolve
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer
from forge.types import Completion

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible here")

PROMPTS = [tuple((7 * place + 13 * number) % 500 + 3 for place in range(5 + 37 * number)) for number in range(6)]
GREEDY = Sampling(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    make_tiny(place, family=request.param)
    return place


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    make_tiny(place)
    return place


def with_engine(folder: Path, work: Callable[[NativeEngine], Awaitable[Any]], **settings: Any) -> Any:
    """Run `work` with an engine on the model of a folder; what it returns."""

    async def run() -> Any:
        model = resolve(ModelConfig(path=str(folder)))
        config = GeneratorConfig.model_validate(
            {
                "model": model.facts,
                "max_seq_len": 384,
                "max_batch": 16,
                "with_gpus": True,
                "kv_cache_gb": 0.25,
                **settings,
            }
        )
        engine = NativeEngine(config, model=model, tokenizer=ChatTokenizer.load(folder))
        await engine.start()
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


async def answers(engine: NativeEngine, sampling: Sampling = GREEDY) -> list[Completion]:
    found = await asyncio.gather(
        *(engine.generate(Request(str(number), ids, sampling)) for number, ids in enumerate(PROMPTS))
    )
    return [completion for each in found for completion in each]


def reference(folder: Path, completion: Completion) -> torch.Tensor:
    """The logprobs of a completion's tokens by transformers, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(completion.prompt_ids + completion.token_ids)
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
    start = len(completion.prompt_ids)
    return logprobs[start - 1 : -1].gather(1, ids[start:, None])[:, 0]


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_float32_is_transformers(folder: Path, cuda_graphs: bool) -> None:
    found = with_engine(folder, answers, precision="float32", cuda_graphs=cuda_graphs, prefill_chunk_tokens=48)
    for completion in found:
        difference = (torch.tensor(completion.full_logprobs) - reference(folder, completion)).abs().max()
        assert difference < 3e-4


def test_half_precision_is_near(folder: Path) -> None:
    found = with_engine(folder, answers)
    for completion in found:
        difference = (torch.tensor(completion.full_logprobs) - reference(folder, completion)).abs()
        assert difference.mean() < 0.02


def test_recorded_steps_compute_what_plain_ones_do(tiny: Path) -> None:
    recorded = with_engine(tiny, answers, precision="float32")
    plain = with_engine(tiny, answers, precision="float32", cuda_graphs=False)
    assert [each.token_ids for each in recorded] == [each.token_ids for each in plain]


def test_scores_are_those_of_the_completions(tiny: Path) -> None:
    async def work(engine: NativeEngine) -> tuple[Completion, list[float]]:
        (found,) = await engine.generate(Request("a", PROMPTS[2], Sampling(max_tokens=60, seed=3, ignore_eos=True)))
        (scores,) = await engine.score([found.prompt_ids + found.token_ids])
        return found, scores

    found, scores = with_engine(tiny, work, precision="float32")
    assert scores[len(found.prompt_ids) :] == pytest.approx(found.full_logprobs, abs=2e-5)


def test_a_seed_draws_the_same_tokens_amid_others(tiny: Path) -> None:
    async def work(engine: NativeEngine) -> tuple[list[Completion], list[Completion]]:
        chosen = Sampling(max_tokens=40, seed=11, n=3, top_p=0.9, top_k=50, repetition_penalty=1.1, ignore_eos=True)
        together = await answers(engine, chosen)
        alone = [each for ids in PROMPTS for each in await engine.generate(Request("x", ids, chosen))]
        return together, alone

    together, alone = with_engine(tiny, work, precision="float32")
    same = sum(one.token_ids == other.token_ids for one, other in zip(together, alone, strict=True))
    assert same >= len(alone) - 1  # a product of another shape may round a draw to the other side of a boundary


def test_weights_are_replaced_under_recorded_steps(tiny: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path, seed=5)

    async def work(engine: NativeEngine) -> tuple[list[Completion], list[Completion]]:
        before = await answers(engine)
        other = resolve(ModelConfig(path=str(tmp_path)))
        runner = engine.thread.serving().runner
        fresh = type(runner)(engine.config, other, max_seq_len=384)
        await engine.thread.change(Change("keep", 7, lambda: runner.load(dict(fresh.parameters))))
        return before, await answers(engine)

    before, after = with_engine(tiny, work, precision="float32")
    expected = with_engine(tmp_path, answers, precision="float32")
    assert [each.token_ids for each in after] == [each.token_ids for each in expected]
    assert [each.token_ids for each in after] != [each.token_ids for each in before]
    assert {span.version for each in after for span in each.versions} == {7}


def test_sleep_gives_memory_back_and_waking_goes_on(tiny: Path) -> None:
    async def work(engine: NativeEngine) -> tuple[int, int, list[Completion], list[Completion]]:
        before = await answers(engine)
        held = torch.cuda.memory_allocated()
        await engine.sleep()
        left = torch.cuda.memory_allocated()
        waiting = asyncio.ensure_future(answers(engine))
        await engine.wake()
        return held, left, before, await waiting

    held, left, before, after = with_engine(tiny, work, precision="float32", kv_cache_gb=0.5)
    assert held > 2**29
    assert left < held - 2**29
    assert [each.token_ids for each in after] == [each.token_ids for each in before]
