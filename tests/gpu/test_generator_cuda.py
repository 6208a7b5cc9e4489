"""The embedded engine on a GPU: what it computes, with and without recorded steps, and what it gives back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge.config import GeneratorConfig, ModelConfig, Sampling
from forge.generator.engine import Request
from forge.generator.native.batching import Batching
from forge.generator.native.engine import NativeEngine
from forge.generator.native.sequences import PendingRequest
from forge.generator.native.thread import WeightUpdate
from forge.generator.native.transfer import HostCopy, put
from forge.models.locate import resolve
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer
from forge.types import Completion

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible here"),
]

PROMPTS = [tuple((7 * place + 13 * number) % 500 + 3 for place in range(5 + 37 * number)) for number in range(6)]
GREEDY = Sampling(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "qwen2", "llama"])
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
                "model": model.architecture,
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


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_likeliest_tokens_of_a_prompt_are_the_greedy_ones(tiny: Path, precision: str) -> None:
    async def work(engine: NativeEngine) -> Any:
        (found,) = await engine.generate(Request("0", PROMPTS[2], GREEDY))
        (scores,) = await engine.score_prompts([found.prompt_ids + found.token_ids])
        return found, scores

    found, scores = with_engine(tiny, work, precision=precision)
    start = len(found.prompt_ids)
    assert len(scores.logprobs) == len(scores.best_ids) == len(scores.best_logprobs) == start + len(found.token_ids)
    pairs = zip(scores.logprobs[start:], scores.best_logprobs[start:], strict=True)
    assert all(own == pytest.approx(best, abs=2e-5 if precision == "float32" else 0.1) for own, best in pairs)
    if precision == "float32":
        assert scores.best_ids[start:] == found.token_ids
        assert scores.logprobs[start:] == scores.best_logprobs[start:]


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
        await engine.thread.update_weights(
            WeightUpdate("keep", 7, lambda: runner.update_weights(dict(fresh.parameters)))
        )
        return before, await answers(engine)

    before, after = with_engine(tiny, work, precision="float32")
    expected = with_engine(tmp_path, answers, precision="float32")
    assert [each.token_ids for each in after] == [each.token_ids for each in expected]
    assert [each.token_ids for each in after] != [each.token_ids for each in before]
    assert {span.version for each in after for span in each.versions} == {7}


def test_sleep_gives_memory_back_and_waking_goes_on(tiny: Path) -> None:
    async def work(engine: NativeEngine) -> tuple[int, int, list[Completion], list[Completion]]:
        before = await answers(engine)
        awake = torch.cuda.mem_get_info()[0]
        await engine.sleep()
        asleep = torch.cuda.mem_get_info()[0]
        waiting = asyncio.ensure_future(answers(engine))
        await engine.wake()
        return awake, asleep, before, await waiting

    awake, asleep, before, after = with_engine(tiny, work, precision="float32", kv_cache_gb=0.5)
    assert asleep - awake > 0.98 * 2**29
    assert [each.token_ids for each in after] == [each.token_ids for each in before]


# ---- Looking ahead ------------------------------------------------------------------------------------------------


def stepping(
    folder: Path, samplings: list[Sampling], *, looks_ahead: bool | None, cuda_graphs: bool = True
) -> tuple[Batching, dict[int, Any]]:
    """An engine to be stepped by hand that has been asked for completions, and the answers by request."""
    model = resolve(ModelConfig(path=str(folder)))
    limits: dict[str, Any] = {"max_seq_len": 384, "max_batch": 16, "kv_cache_gb": 0.25}
    config = GeneratorConfig(
        model=model.architecture, with_gpus=True, precision="float32", cuda_graphs=cuda_graphs, **limits
    )
    batching = Batching(
        config,
        model,
        tokenizer=ChatTokenizer.load(folder),
        max_seq_len=384,
        shared=None,
        send=lambda messages: [deliver(value) for deliver, value in messages],
    )
    batching.looks_ahead = looks_ahead
    found: dict[int, Any] = {}
    for number, sampling in enumerate(samplings):
        asked = Request(str(number), PROMPTS[number % len(PROMPTS)], sampling)
        batching.enter(PendingRequest(asked, deliver=lambda each, number=number: found.__setitem__(number, each)))
    return batching, found


def stepped(folder: Path, samplings: list[Sampling], **options: Any) -> tuple[list[Completion], int]:
    """Completions of requests that all come before the first step, and how many steps were launched ahead."""
    batching, found = stepping(folder, samplings, **options)
    while not batching.scheduler.is_idle:
        batching.step(0)
    batching.flush()
    assert not batching.is_ahead
    return [each for number in sorted(found) for each in found[number]], batching.counts.num_ahead


def test_recorded_steps_are_launched_ahead_with_the_same_bits(tiny: Path) -> None:
    """All end together, so that every step has the same padded size with and without."""
    samplings = [Sampling(seed=number, max_tokens=120, ignore_eos=True, n=2, temperature=0.8) for number in range(6)]
    ahead, num_ahead = stepped(tiny, samplings, looks_ahead=None)
    plain, none = stepped(tiny, samplings, looks_ahead=False)
    assert num_ahead > 100
    assert none == 0
    for one, other in zip(ahead, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.logprobs, one.full_logprobs) == (other.logprobs, other.full_logprobs)


def test_completions_that_end_anywhere_are_those_of_steps_one_by_one(tiny: Path) -> None:
    ends = [Sampling(seed=number, max_tokens=150, stop_token_ids=list(range(0, 500, 40))) for number in range(12)]
    lengths = [Sampling(seed=50 + number, max_tokens=20 + 9 * number, temperature=0.0) for number in range(4)]
    ahead, num_ahead = stepped(tiny, ends + lengths, looks_ahead=None)
    plain, _ = stepped(tiny, ends + lengths, looks_ahead=False)
    assert num_ahead > 10
    same = sum(
        (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        for one, other in zip(ahead, plain, strict=True)
    )
    assert same >= len(plain) - 1  # a step with one row more may round a draw to the other side of a boundary
    assert "stop" in {each.finish_reason for each in ahead}


def test_steps_that_are_not_recorded_can_be_launched_ahead(tiny: Path) -> None:
    samplings = [Sampling(seed=number, max_tokens=30, ignore_eos=True) for number in range(6)]
    ahead, num_ahead = stepped(tiny, samplings, looks_ahead=True, cuda_graphs=False)
    plain, _ = stepped(tiny, samplings, looks_ahead=False, cuda_graphs=False)
    assert num_ahead > 20
    assert [each.token_ids for each in ahead] == [each.token_ids for each in plain]


def test_copies_wait_for_nothing_that_was_launched_around_them() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    drawn = torch.arange(512, device=device)
    warm = HostCopy(drawn), put(np.zeros(512), device)  # to take pinned memory for the first time may wait
    torch.cuda.synchronize()
    del warm
    arrival = HostCopy(drawn)
    torch.cuda._sleep(1 << 31)  # about a second
    busy = torch.cuda.Event()
    busy.record()
    numbers = np.arange(512)
    copied = put(numbers, device)
    assert arrival.wait().tolist() == list(range(512))
    assert not busy.query(), "one of the two waited for what was launched before it or after"
    numbers[:] = 0
    assert copied.tolist() == list(range(512))


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_nothing_runs_when_a_step_has_been_settled(tiny: Path, is_forgotten: bool) -> None:
    samplings = [Sampling(seed=number, max_tokens=60, ignore_eos=True) for number in range(6)]
    batching, found = stepping(tiny, samplings, looks_ahead=None)
    while batching.counts.num_ahead < 5:
        batching.step(0)
    assert batching.is_ahead
    if is_forgotten:
        batching.fail_all(RuntimeError("it failed"))
    batching.finish_launched()
    assert torch.cuda.current_stream().query()
    batching.flush()
    assert len(found) == (len(samplings) if is_forgotten else 0)
