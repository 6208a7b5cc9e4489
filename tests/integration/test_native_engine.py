"""The embedded engine in this process: the trainer's own bits, whatever way the pages went; and its life."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import generator_models as models
from forge.config import DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.errors import ConfigError, EngineDead, ModelError, NonFiniteError
from forge.generator.engine import Request
from forge.generator.native.batching import Batching
from forge.generator.native.engine import NativeEngine
from forge.generator.native.sequences import PendingRequest
from forge.models.inference import page_bytes
from forge.models.locate import resolve
from forge.store import Weights
from forge.trainer.engine import Engine
from forge.types import Batch, Completion, Sample, VersionSpan
from generator_bench import LIMIT_S, last_of, native_engine, request, until
from generator_models import FIRST, SECOND, Kind, prompt

KINDS = [
    FIRST,
    Kind(family="qwen3", tied=False),
    Kind(family="llama"),
    Kind(0, "llama", False),
    Kind(0, "qwen3_moe", False),
    Kind(family="qwen2"),
    Kind(0, "qwen2", False),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextlib.asynccontextmanager
async def serving(kind: Kind = FIRST, *, shared: Any = None, **changes: Any) -> AsyncIterator[NativeEngine]:
    engine = native_engine(models.config(kind, **changes), kind, shared=shared)
    await engine.start()
    try:
        yield engine
        assert engine.stats().cache_used == 0.0, "a page was not given back"
    finally:
        await engine.close()


def run(body: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await body

    return asyncio.run(limited())


@contextlib.contextmanager
def trainer(kind: Kind = FIRST, **options: Any) -> Iterator[Engine]:
    training = TrainingConfig(max_seq_len=256, schedule="constant", warmup_steps=0, learning_rate=1e-2)
    folder = ModelConfig(path=str(models.folder(kind)))
    engine = Engine(
        TrainerConfig(model=folder, training=training, distributed=DistributedConfig(with_gpus=False), **options)
    )
    try:
        yield engine
    finally:
        engine.close()


def batch_of(lines: Sequence[Sequence[int]], *, weight: float = 0.0) -> Batch:
    """Lines to score, or with a weight to learn from."""
    samples = []
    for line in lines:
        weights = torch.full((len(line),), weight)
        weights[0] = 0.0
        samples.append(Sample(torch.tensor(line), weights))
    return Batch.of(samples)


def lines_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [[*completion.prompt_ids, *completion.token_ids] for completion in completions]


def equal_to_trainer(trained: Engine, completions: Sequence[Completion], *, temperature: float = 1.0) -> None:
    """Every bit of the full logprobs is the trainer's."""
    theirs = trained.forward_logprobs(batch_of(lines_of(completions)), temperature=temperature)
    for completion, own in zip(completions, theirs, strict=True):
        assert completion.full_logprobs is not None
        assert list(completion.full_logprobs) == own[len(completion.prompt_ids) :].tolist()


async def all_of(engine: NativeEngine, requests: Sequence[Request]) -> list[Completion]:
    found = await asyncio.gather(*(engine.generate(each) for each in requests))
    return [completion for completions in found for completion in completions]


def drawn(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    return [(each.prompt_ids, each.index, each.token_ids, each.logprobs, each.full_logprobs) for each in completions]


# ---- The trainer's bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.family}-{'tied' if kind.tied else 'untied'}")
def test_logprobs_have_the_bits_of_the_trainer(kind: Kind) -> None:
    async def body(trained: Engine) -> None:
        async with serving(kind, prefill_chunk_tokens=16, max_batch=6) as engine:
            sizes = (1, 15, 16, 17, 33, 70)
            asked = [request(prompt(size), temperature=1.0, seed=size, max_tokens=20) for size in sizes]
            asked += [request(prompt(40), temperature=1.0, seed=1, max_tokens=9, n=4)]
            first = await all_of(engine, asked)
            equal_to_trainer(trained, first)
            group = first[-4:]
            assert [completion.num_shared for completion in group] == [0, 40, 40, 40]
            again = await all_of(engine, asked)  # all but the last token of the prompts is found, and chunks are others
            assert drawn(again) == drawn(first)
            assert [completion.num_shared for completion in again[:6]] == [0, 14, 15, 16, 32, 69]
            longer = [request(tuple(line), temperature=0.7, seed=5, max_tokens=9) for line in lines_of(first)]
            onward = await all_of(engine, longer)
            equal_to_trainer(trained, onward, temperature=0.7)
            assert onward[5].num_shared == 89, "what was written token by token is shared too"
            lines = lines_of(onward)
            theirs = trained.forward_logprobs(batch_of(lines))
            assert await engine.score(lines) == [each.tolist() for each in theirs]

    with trainer(kind, frozen=True) as trained:
        run(body(trained))


def test_truncation_changes_logprobs_and_not_the_full_ones() -> None:
    async def body(trained: Engine) -> None:
        async with serving() as engine:
            shaped: list[dict[str, Any]] = [
                {"top_k": 3},
                {"top_p": 0.5},
                {"repetition_penalty": 1.5},
                {"min_tokens": 9},
            ]
            asked = [request(prompt(21), temperature=0.9, seed=2, max_tokens=16, **each) for each in shaped]
            found = await all_of(engine, asked)
            equal_to_trainer(trained, found, temperature=0.9)
            for completion in found[:2]:
                assert all(map(float.__ge__, completion.logprobs, completion.full_logprobs or ()))
                assert completion.logprobs != completion.full_logprobs

    with trainer(frozen=True) as trained:
        run(body(trained))


def test_preempted_completions_are_as_with_all_the_memory_in_the_world() -> None:
    async def body() -> None:
        asked = [
            request(prompt(10 + 7 * place), temperature=1.0, seed=place, max_tokens=50, n=1 + place % 3)
            for place in range(9)
        ]
        lines = [prompt(90, seed=1), prompt(128, seed=2)]
        async with serving(max_seq_len=128) as roomy:
            expected, scores = drawn(await all_of(roomy, asked)), await roomy.score(lines)
            prompts = await roomy.score_prompts(lines)
            assert [list(each.logprobs) for each in prompts] == scores
            assert [len(each.best_ids) for each in prompts] == [90, 128]
            assert roomy.stats().num_preempted == 0
        each = page_bytes(models.model(FIRST).architecture, item_bytes=4)
        async with serving(max_seq_len=128, kv_cache_gb=9 * each / 2**30, prefill_chunk_tokens=32) as tight:
            assert tight.stats().more["num_pages"] == 9
            working = asyncio.gather(all_of(tight, asked), tight.score(lines), tight.score_prompts(lines))
            found, scored, with_best = await working
            assert tight.stats().num_preempted > 0
            assert drawn(found) == expected
            assert scored == scores
            assert with_best == prompts

    run(body())


def test_two_threads_draw_the_tokens_of_one() -> None:
    async def body() -> list[tuple[Any, ...]]:
        async with serving() as engine:
            asked = [request(prompt(30 + place), temperature=1.0, seed=place, max_tokens=8) for place in range(4)]
            return drawn(await all_of(engine, asked))

    alone = run(body())
    torch.set_num_threads(2)
    assert run(body()) == alone


def test_the_longest_prompts_and_the_largest_groups() -> None:
    async def body() -> None:
        async with serving(max_seq_len=64, max_batch=4) as engine:
            (longest,) = await engine.generate(request(prompt(63)))
            assert (longest.token_ids, longest.finish_reason) == (models.greedy(prompt(63), 1), "length")
            (score,) = await engine.score([prompt(64)])
            assert score[1:] == pytest.approx(models.logprobs(prompt(64)[:1], prompt(64)[1:]), rel=1e-5)
            assert await engine.score([prompt(1), ()]) == [[0.0], []]
            scoring = asyncio.ensure_future(engine.score([prompt(60, seed=seed) for seed in range(6)]))
            many = await engine.generate(request(prompt(20), temperature=1.0, seed=3, n=11, max_tokens=12))
            assert [completion.index for completion in many] == list(range(11))
            assert len({completion.token_ids for completion in many}) == 11
            one = await engine.generate(request(prompt(20), temperature=1.0, seed=3, max_tokens=12))
            assert one[0].token_ids == many[0].token_ids
            assert [len(line) for line in await scoring] == [60] * 6

    run(body())


def test_a_model_without_a_folder_has_no_text() -> None:
    facts = ModelConfig(**models.model(FIRST).architecture.model_dump(exclude={"path", "name", "preset"}))

    async def body() -> None:
        config = models.config(FIRST).model_copy(update={"model": facts})
        engine = NativeEngine(config, model=resolve(facts))
        await engine.start()
        (completion,) = await engine.generate(request(prompt(5), max_tokens=4))
        assert (completion.text, len(completion)) == ("", 4)
        await engine.close()

    run(body())


# ---- Weights -----------------------------------------------------------------------------------------------------


def test_weights_of_a_trainer_in_this_process_are_shared(tmp_path: Path) -> None:
    async def body(trained: Engine) -> None:
        shared = trained.own_parameters()
        async with serving(shared=shared, max_seq_len=2048) as engine:
            assert engine.thread.batching is not None
            own = engine.thread.batching.runner.parameters
            assert {name: tensor.data_ptr() for name, tensor in own.items()} == {
                name: tensor.data_ptr() for name, tensor in shared.items()
            }
            (before,) = await engine.generate(request(prompt(40), max_tokens=20))
            stream = engine.stream(request(prompt(41)))
            await until(stream, num_tokens=2)
            async with engine.paused(7):
                trained.train_step(batch_of([prompt(50), prompt(30)], weight=1.0))
            await until(stream, num_tokens=2, version=7)
            await stream.aclose()
            (after,) = await engine.generate(request(prompt(40), max_tokens=20))
            assert after.token_ids != before.token_ids
            assert (after.versions, after.num_shared) == ((VersionSpan(7, 0, 20),), 0)
            equal_to_trainer(trained, [after])
            with pytest.raises(ModelError, match=r"engine\.paused"):
                await engine.update_weights("latest", "keep")
        return after

    with trainer() as trained:
        after = run(body(trained))
        exported = exported_folder(trained, tmp_path / "trained")

    async def fresh() -> None:
        engine = NativeEngine(models.config(FIRST), model=resolve(ModelConfig(path=str(exported))))
        await engine.start()
        (completion,) = await engine.generate(request(prompt(40), max_tokens=20))
        assert (completion.token_ids, completion.logprobs) == (after.token_ids, after.logprobs)
        await engine.close()

    run(fresh())


def exported_folder(trained: Engine, folder: Path) -> Path:
    from forge.trainer.checkpointer import Checkpointer

    Checkpointer(trained).export(folder, dtype=None, overwrite=False)
    return folder


def copied(engine: NativeEngine, kind: Kind) -> None:
    """Put the weights of a model in the place of those that an engine computes with. Only inside `paused`."""
    assert engine.thread.batching is not None
    engine.thread.batching.runner.update_weights(models.weights(kind))


def test_what_was_computed_before_a_change_is_not_shared_after_it() -> None:
    async def body() -> None:
        async with serving() as engine:
            for version, mode in enumerate(("keep", "recompute", "abort", "drain")):
                kind = (FIRST, SECOND)[version % 2]
                await engine.generate(request(prompt(64), max_tokens=1))
                stream = engine.stream(request(prompt(65), max_tokens=100))
                await until(stream, num_tokens=4)
                async with engine.paused(version, mode):
                    copied(engine, kind)
                (fresh,) = await engine.generate(request(prompt(64), max_tokens=8))
                assert (fresh.token_ids, fresh.num_shared) == (models.greedy(prompt(64), 8, kind), 0), mode
                (again,) = await engine.generate(request(prompt(64), max_tokens=8))
                assert (again.token_ids, again.num_shared) == (fresh.token_ids, 63), mode
                await stream.aclose()
                (onward,) = await engine.generate(request(fresh.prompt_ids + fresh.token_ids, max_tokens=8))
                assert onward.token_ids == models.greedy(onward.prompt_ids, 8, kind), mode

    run(body())


def test_pages_with_keys_of_two_versions_are_shared_with_nobody() -> None:
    """Step by step, without the engine's thread: the change comes before the first page is full."""
    batching = Batching(
        models.config(FIRST),
        models.model(FIRST),
        tokenizer=None,
        max_seq_len=256,
        shared=None,
        send=lambda messages: [deliver(value) for deliver, value in messages],
    )

    def finished(asked: Request, *, version: int) -> Completion:
        found: list[list[Completion]] = []
        batching.enter(PendingRequest(asked, deliver=found.append))
        while not found:
            batching.step(version)
            batching.flush()
        return found[0][0]

    found: list[list[Completion]] = []
    batching.enter(PendingRequest(request(prompt(5), max_tokens=40), deliver=found.append))
    for _ in range(3):
        batching.step(0)
    batching.runner.update_weights(models.weights(SECOND))
    assert batching.weights_updated("keep") == 0
    again = finished(request(prompt(5), max_tokens=40), version=1)
    (mixed,) = found[0]
    assert mixed.versions == (VersionSpan(0, 0, 3), VersionSpan(1, 3, 40))
    (old, new), ids = (mixed.token_ids[:3], mixed.token_ids[3:]), prompt(5)
    assert old == models.greedy(ids, 3, FIRST)
    assert new == models.choices_on_old_keys((*ids, *old), new, FIRST, SECOND)
    assert again.token_ids == models.greedy(ids, 40, SECOND)
    onward = finished(request((*ids, *mixed.token_ids), max_tokens=8), version=1)
    assert onward.num_shared == len(ids), "only what the new weights have read since"
    assert onward.token_ids == models.greedy(onward.prompt_ids, 8, SECOND)
    assert batching.scheduler.pool.num_held == 0


def test_what_proves_weights_waits_for_no_request() -> None:
    async def generated(engine: NativeEngine, ids: tuple[int, ...]) -> Completion:
        """As `score`, with a gather: after their answers have come, both need as many turns of the event loop."""
        ((completion,),) = await asyncio.gather(engine.generate(request(ids, max_tokens=90)))
        return completion

    async def body() -> None:
        each = page_bytes(models.model(FIRST).architecture, item_bytes=4)
        async with serving(max_seq_len=128, max_batch=2, kv_cache_gb=9 * each / 2**30) as engine:
            line = prompt(33)
            ended: list[asyncio.Future[Any]] = []
            async with engine.paused(engine.version):  # until all are asked for
                asked = [asyncio.ensure_future(generated(engine, prompt(30 + place))) for place in range(6)]
                scoring = asyncio.ensure_future(engine.score([line], urgent=True))
                for task in (*asked, scoring):
                    task.add_done_callback(ended.append)
                while len(engine.thread._commands) < 7:  # noqa: ASYNC110 - the engine has no event for it
                    await asyncio.sleep(0)
            (first,) = await scoring
            found = await asyncio.gather(*asked)
            assert ended[0] is scoring, "it overtook those that came before it"
            assert [completion.token_ids for completion in found] == [
                models.greedy(completion.prompt_ids, 90) for completion in found
            ]
            assert [first] == await engine.score([line])

    run(body())


def test_a_prompt_that_was_half_read_is_read_again_when_weights_change() -> None:
    """Whatever the mode: spans would say that the new weights alone made its tokens."""
    batching = Batching(
        models.config(FIRST, prefill_chunk_tokens=16, max_batch=3),
        models.model(FIRST),
        tokenizer=None,
        max_seq_len=256,
        shared=None,
        send=lambda messages: [deliver(value) for deliver, value in messages],
    )
    found: list[list[Completion]] = []
    batching.enter(PendingRequest(request(prompt(60), max_tokens=8, n=2), deliver=found.append))
    batching.enter(PendingRequest(request(prompt(61), max_tokens=8), deliver=found.append))
    batching.step(0)
    batching.runner.update_weights(models.weights(SECOND))
    assert batching.weights_updated("keep") == 0
    while len(found) < 2:
        batching.step(1)
        batching.flush()
    for completion in (*found[0], *found[1]):
        assert completion.versions == (VersionSpan(1, 0, 8),)
        assert completion.token_ids == models.greedy(completion.prompt_ids, 8, SECOND)
    assert [len(each[0].prompt_ids) for each in found] == [60, 61], "they begin again in their order"
    assert (batching.scheduler.pool.num_held, batching.scheduler.num_preempted) == (0, 0)


def test_a_completion_that_is_being_read_again_is_read_whole_by_the_new_weights() -> None:
    batching = Batching(
        models.config(FIRST, prefill_chunk_tokens=16),
        models.model(FIRST),
        tokenizer=None,
        max_seq_len=256,
        shared=None,
        send=lambda messages: [deliver(value) for deliver, value in messages],
    )
    found: list[list[Completion]] = []
    batching.enter(PendingRequest(request(prompt(60), max_tokens=12), deliver=found.append))
    while batching.counts.num_tokens < 4:
        batching.step(0)
    batching.scheduler.pool.forget()
    batching.scheduler.preempt_all()
    batching.step(0)
    batching.runner.update_weights(models.weights(SECOND))
    assert batching.weights_updated("keep") == 0
    while not found:
        batching.step(1)
        batching.flush()
    (completion,) = found[0]
    assert completion.versions == (VersionSpan(0, 0, 4), VersionSpan(1, 4, 12))
    old, new = completion.token_ids[:4], completion.token_ids[4:]
    assert old == models.greedy(completion.prompt_ids, 4, FIRST)
    assert new == models.greedy((*completion.prompt_ids, *old), 8, SECOND)


def test_a_change_that_fails_leaves_the_version_as_it_was() -> None:
    async def body() -> None:
        async with serving() as engine:
            async with engine.paused(1):
                copied(engine, FIRST)
            with pytest.raises(NonFiniteError, match="no step"):
                async with engine.paused(2):
                    raise NonFiniteError("no step was taken")
            assert engine.version == 1
            (completion,) = await engine.generate(request(prompt(20), max_tokens=3))
            assert completion.versions == (VersionSpan(1, 0, 3),)

    run(body())


def test_completions_that_lost_their_memory_are_drained_too() -> None:
    async def body() -> None:
        each = page_bytes(models.model(FIRST).architecture, item_bytes=4)
        async with serving(max_seq_len=128, kv_cache_gb=9 * each / 2**30) as engine:
            streams = [engine.stream(request(prompt(30 + place), max_tokens=90)) for place in range(3)]
            await asyncio.gather(*(until(stream, num_tokens=1) for stream in streams))
            while engine.stats().num_preempted == 0:
                await until(streams[0], num_tokens=1)
            async with engine.paused(1, "drain"):
                copied(engine, SECOND)
            for stream in streams:
                completion = await last_of(stream)
                assert completion.versions == (VersionSpan(-1, 0, 90),)

    run(body())


def test_scores_that_nobody_waits_for_are_not_computed() -> None:
    async def body() -> None:
        async with serving(max_batch=1, max_seq_len=2048) as engine:
            stream = engine.stream(request(prompt(20)))
            await until(stream, num_tokens=1)
            scoring = asyncio.ensure_future(engine.score([prompt(200, seed) for seed in range(20)]))
            await until(stream, num_tokens=2)
            scoring.cancel()
            with pytest.raises(asyncio.CancelledError):
                await scoring
            await stream.aclose()
            await engine.score([prompt(9)])
            assert engine.stats().more["num_score_tokens"] == 8

    run(body())


def test_a_sleeping_engine_says_what_an_update_aborted() -> None:
    async def body() -> None:
        async with serving(max_seq_len=2048) as engine:
            stream = engine.stream(request(prompt(20)))
            await until(stream, num_tokens=3)
            await engine.sleep()
            async with engine.paused(1, "abort"):
                copied(engine, SECOND)
            aborted = await asyncio.wait_for(last_of(stream), 600)
            assert (aborted.finish_reason, aborted.versions) == ("abort", (VersionSpan(-1, 0, len(aborted)),))
            await engine.wake()

    run(body())


def test_weights_that_are_no_numbers_fail_the_request_and_not_the_engine() -> None:
    async def body() -> None:
        async with serving(max_seq_len=2048) as engine:
            stream = engine.stream(request(prompt(30)))
            await until(stream, num_tokens=2)
            waiting = asyncio.ensure_future(engine.generate(request(prompt(31), n=3)))
            async with engine.paused(1):
                broken = {name: torch.full_like(tensor, math.nan) for name, tensor in models.weights(FIRST).items()}
                assert engine.thread.batching is not None
                engine.thread.batching.runner.update_weights(broken)
            for failing in (last_of(stream), waiting):
                with pytest.raises(NonFiniteError, match="NaN") as raised:
                    await failing
                assert raised.value.path == "logits"
            assert all(map(math.isnan, (await engine.score([prompt(5)]))[0][1:]))
            assert engine.stats().cache_used == 0.0
            async with engine.paused(2):
                copied(engine, SECOND)
            (completion,) = await engine.generate(request(prompt(30), max_tokens=8))
            assert completion.token_ids == models.greedy(prompt(30), 8, SECOND)

    run(body())


def test_an_update_that_nobody_waits_for_is_whole_or_not_at_all(drive: Callable[..., Any]) -> None:
    async def body() -> None:
        async with serving(max_seq_len=2048) as engine:
            published = Weights("policy", rank=0, world_size=1)
            await published.publish(models.weights(SECOND), version=1)
            stream = engine.stream(request(prompt(20)))
            await until(stream, num_tokens=2)
            update = asyncio.ensure_future(engine.update_weights(1, "drain"))
            while not engine.thread.updates:
                await until(stream, num_tokens=1)
            update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update
            await stream.aclose()
            (completion,) = await engine.generate(request(prompt(20), max_tokens=8))
            kind = {-1: FIRST, 1: SECOND}[completion.version]
            assert completion.token_ids == models.greedy(prompt(20), 8, kind)
            assert (await engine.update_weights(1, "keep")).version == 1
            (completion,) = await engine.generate(request(prompt(20), max_tokens=8))
            assert completion.token_ids == models.greedy(prompt(20), 8, SECOND)

    drive(body())


# ---- Ends and refusals -------------------------------------------------------------------------------------------


def test_close_answers_everybody(drive: Callable[..., Any]) -> None:
    async def body() -> None:
        engine = native_engine(models.config(FIRST, max_seq_len=2048))
        await engine.start()
        await Weights("policy", rank=0, world_size=1).publish(models.weights(SECOND), version=1)
        stream = engine.stream(request(prompt(20)))
        await until(stream, num_tokens=2)
        update = asyncio.ensure_future(engine.update_weights(1, "drain"))
        while not engine.thread.updates:
            await until(stream, num_tokens=1)
        await engine.close()
        asked = [update, *map(asyncio.ensure_future, (engine.update_weights(1, "keep"), engine.score([prompt(9)])))]
        asked.append(asyncio.ensure_future(engine.sleep()))
        ended, _ = await asyncio.wait(asked, timeout=600)
        assert [type(each.exception()) if each in ended else "still waiting" for each in asked] == [EngineDead] * 4
        assert (await last_of(stream)).finish_reason == "abort"
        sleeper = native_engine(models.config(FIRST))
        await sleeper.start()
        await sleeper.sleep()
        scoring = asyncio.ensure_future(sleeper.score([prompt(20)]))
        await asyncio.sleep(0)
        await sleeper.close()
        with pytest.raises(EngineDead, match="has ended"):
            await scoring
        with pytest.raises(EngineDead):
            async with sleeper.paused(1):
                raise AssertionError("weights change only where an engine is held")
        await native_engine(models.config(FIRST)).close()  # one that never began

    drive(body())


def test_refusals() -> None:
    async def body() -> None:
        with pytest.raises(ConfigError, match="at most 2048") as raised:
            native_engine(models.config(FIRST, max_seq_len=4096))
        assert raised.value.path == "generator.max_seq_len"
        small = native_engine(models.config(FIRST, kv_cache_gb=1e-5))
        with pytest.raises(ConfigError, match="cannot hold one sequence") as raised:
            await small.start()
        assert (raised.value.path, raised.value.value) == ("generator.kv_cache_gb", 1e-5)
        for gigabytes in (1e6, 1e300):
            with pytest.raises(ConfigError, match="larger than the memory that is free") as raised:
                await native_engine(models.config(FIRST, kv_cache_gb=gigabytes)).start()
            assert (raised.value.path, raised.value.value) == ("generator.kv_cache_gb", gigabytes)
        if not torch.cuda.is_available():
            with pytest.raises(ConfigError, match="torch sees none"):
                await native_engine(models.config(FIRST, with_gpus=True)).start()
        shared = models.weights(FIRST)
        halves = {name: tensor.bfloat16() for name, tensor in shared.items()}
        for wrong, words in ((halves, "bfloat16"), ({"norm.weight": shared["norm.weight"]}, "the same parameters")):
            with pytest.raises(ModelError, match=words):
                await native_engine(models.config(FIRST), shared=wrong).start()

    run(body())
