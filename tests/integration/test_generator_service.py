"""`Generator`: the actor in this process, where all of its life can be seen, and as a service of two replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

import generator_models as models
from adapter_folders import make_adapter
from forge.config import (
    CanaryConfig,
    DistributedConfig,
    InvalidConfig,
    ModelConfig,
    TrainerConfig,
    TrainingConfig,
    UpdateConfig,
)
from forge.errors import (
    ConfigError,
    FanoutError,
    ModelError,
    OptionError,
    PromptError,
    StoreError,
    StoreKeyError,
    SyncError,
    WeightMismatch,
)
from forge.generator.actor import Generator
from forge.models.peft_files import adapter_digest
from forge.store import PinnedVersions, Weights
from forge.trainer.actor import Trainer
from forge.types import AdapterUse, Batch, Completion, Sample
from generator_actor import config, generator, publish
from generator_models import FIRST, SECOND, Kind, prompt

pytestmark = pytest.mark.usefixtures("leaves_nothing", "one_thread")
Drive = Callable[[Coroutine[Any, Any, Any]], Any]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Warnings(logging.Handler):
    """What the generator warned of, one at a time."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.queue: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.queue.put_nowait(record.getMessage())


# ---- The actor ---------------------------------------------------------------------------------------------------


def test_a_pinned_version_answers_whatever_is_live(drive: Drive) -> None:
    async def body() -> None:
        await publish(0, FIRST)
        pins = PinnedVersions("policy")
        await pins.add(0)
        await publish(1, SECOND)
        async with generator() as policy:
            asked: dict[str, Any] = {"token_ids": prompt(9), "sampling": GREEDY | {"max_tokens": 12}}
            (live,), (pinned,) = [await policy.generate(**asked, version=version) for version in (None, 0)]
            assert [span.version for each in (live, pinned) for span in each.versions] == [1, 0]
            assert live.token_ids != pinned.token_ids
            deltas = [delta async for delta in policy.generate_stream(**asked, version=0)]
            assert [token for delta in deltas for token in delta.token_ids] == list(pinned.token_ids)
            for wrong in (-1, True, "latest", 1.0):
                with pytest.raises(OptionError, match="no such version") as caught:
                    await policy.generate(**asked, version=wrong)
                assert "generate(version=)" in str(caught.value)
            await pins.remove(0)
            await policy.unload_version(0)
            with pytest.raises(StoreKeyError, match="is not pinned"):
                await policy.generate(**asked, version=0)

    drive(body())


def test_an_engine_without_pinned_versions_says_so(drive: Drive) -> None:
    async def body() -> None:
        async with generator(engine="own_engines:OneVersion") as policy:
            with pytest.raises(ConfigError, match="several versions of the weights at once") as caught:
                await policy.generate(token_ids=prompt(4), version=0)
            assert "native" in str(caught.value.repair)
            await policy.unload_version(0)

    drive(body())


def test_an_update_that_fails_is_tried_again(drive: Drive) -> None:
    async def body() -> None:
        warnings, logger = Warnings(), logging.getLogger("forge.generator")
        logger.addHandler(warnings)
        try:
            async with generator(update=UpdateConfig(max_attempts=2, retry_wait_s=1.0)) as policy:
                engine: Any = policy._engine
                update = asyncio.ensure_future(policy.update_weights(4))
                assert "attempt 1 of 2" in await warnings.queue.get()
                async with engine._updating:  # the second attempt waits for it, however long publishing takes
                    await publish(4, SECOND)
                report = await update
                assert (report.version, report.num_attempts, report.canary) == (4, 2, None)
                with pytest.raises(StoreError):
                    await policy.update_weights(9)
                wrong = models.weights(FIRST)
                wrong["norm.weight"] = torch.ones(3)
                await Weights("policy", rank=0, world_size=1).publish(wrong, version=5)
                with pytest.raises(WeightMismatch):  # it would be the same the next time
                    await policy.update_weights()
                assert [warnings.queue.get_nowait().split(":")[0] for _ in range(3)] == [
                    "the update to version 9 failed (attempt 1 of 2)",
                    "the update to version 9 failed (attempt 2 of 2)",
                    "the update to version latest was refused",
                ]
                (after,) = await policy.generate(token_ids=prompt(20), sampling={**GREEDY, "max_tokens": 8})
                assert (after.token_ids, after.version) == (models.greedy(prompt(20), 8, SECOND), 4)
                with pytest.raises(OptionError, match="one of drain, keep, recompute, abort"):
                    await policy.update_weights(mode="restart")  # type: ignore[arg-type]
        finally:
            logger.removeHandler(warnings)

    drive(body())


def test_other_logprobs_than_the_trainers_stop_everything_until_an_update_passes(drive: Drive) -> None:
    async def body() -> None:
        await publish(1, FIRST, canary=FIRST)
        async with generator() as policy:
            await publish(2, SECOND, canary=FIRST)  # before, so that nothing finishes while it is published
            stream = policy.generate_stream(token_ids=prompt(20), sampling=GREEDY)
            assert (await anext(stream)).version == 1, "it began with the newest weights"
            waiting = asyncio.ensure_future(policy.generate(token_ids=prompt(21), sampling=GREEDY))
            scoring = policy.score(prompt(20))
            assert len((await scoring)[0]) == 20
            with pytest.raises(SyncError) as raised:
                await policy.update_weights()
            assert raised.value.path == "generator.canary.bound"
            assert "every tensor has the digest that was published" in (raised.value.rule or "")
            for stopped in (waiting, read_all(stream), policy.generate("x"), policy.score(prompt(9))):
                with pytest.raises(SyncError):
                    await stopped
            with pytest.raises(SyncError):
                await anext(policy.generate_stream("x"))
            with pytest.raises(StoreError):
                await policy.update_weights(7)
            with pytest.raises(SyncError):
                await policy.generate("an update that fails clears nothing")
            await publish(3, SECOND, canary=SECOND)
            report = await policy.update_weights()
            assert report.canary == pytest.approx(0.0, abs=1e-4)
            (after,) = await policy.generate(token_ids=prompt(20), sampling={**GREEDY, "max_tokens": 8})
            assert (after.token_ids, after.version) == (models.greedy(prompt(20), 8, SECOND), 3)
            stats = await policy.stats()
            assert (stats.cache_used, stats.num_done) == (0.0, 1), "what was under way ended at once"

    drive(body())


def test_what_a_trainer_publishes_is_proven_bit_for_bit(drive: Drive) -> None:
    async def body() -> None:
        training = TrainingConfig(max_seq_len=256, schedule="constant", warmup_steps=0, learning_rate=1e-2)
        model = ModelConfig(path=str(models.folder(FIRST)))
        layout = DistributedConfig(with_gpus=False)
        trainer = Trainer(TrainerConfig(model=model, training=training, distributed=layout))
        await trainer.setup()
        async with generator() as policy:
            weights = torch.ones(60)
            weights[0] = 0.0
            await trainer.train_step(Batch.of([Sample(torch.tensor(prompt(60)), weights)]))
            await trainer.publish_weights(1)
            report = await policy.update_weights()
            assert (report.version, report.canary) == (1, 0.0)
            (completion,) = await policy.generate(token_ids=prompt(30), sampling={"max_tokens": 20, "seed": 1})
            line = torch.tensor([*completion.prompt_ids, *completion.token_ids])
            scored = await trainer.forward_logprobs(Batch.of([Sample(line, torch.zeros(len(line)))]))
            assert scored[0][30:].tolist() == list(completion.logprobs)
        await trainer.close()

    drive(body())


def test_an_update_holds_back_only_what_new_weights_made(drive: Drive) -> None:
    async def body() -> None:
        async with generator() as made:
            await publish(1, SECOND)  # before, so that nothing finishes while it is published
            long = asyncio.ensure_future(made.generate(token_ids=prompt(20), sampling={**GREEDY, "max_tokens": 1500}))
            short = asyncio.ensure_future(made.generate(token_ids=prompt(9), sampling={**GREEDY, "max_tokens": 200}))
            while made._engine.stats().num_running < 2:  # noqa: ASYNC110 - what a thread does
                await asyncio.sleep(0)
            update = asyncio.ensure_future(made.update_weights(1, mode="drain"))
            (completion,) = await short
            assert completion.version == -1
            assert not update.done()
            assert not long.done()
            report = await update
            assert report is not None
            assert report.version == 1
            assert (await long)[0].version == -1
            (after,) = await made.generate(token_ids=prompt(9), sampling={**GREEDY, "max_tokens": 5})
            assert after.version == 1

    drive(body())


async def read_all(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


def test_a_generator_that_begins_with_a_wrong_canary_waits_for_a_good_version(drive: Drive) -> None:
    async def body() -> None:
        await publish(1, SECOND, canary=FIRST)
        async with generator() as policy:
            with pytest.raises(SyncError):
                await policy.generate("x")
            await publish(2, SECOND, canary=SECOND)
            await policy.update_weights()
            assert len(await policy.generate("x", sampling={"max_tokens": 2})) == 1
        async with generator(canary=CanaryConfig(enabled=False)) as careless:
            await publish(3, SECOND, canary=FIRST)
            assert (await careless.update_weights()).canary is None
            assert len(await careless.generate("x", sampling={"max_tokens": 2})) == 1
        async with generator(canary=CanaryConfig(bound=100.0)) as generous:
            assert (await generous.update_weights(3)).canary > 1.0

    drive(body())


def test_weights_that_come_while_it_sleeps_are_proven_when_it_wakes(drive: Drive) -> None:
    async def body() -> None:
        async with generator() as policy:
            await policy.sleep()
            assert (await policy.stats()).is_asleep
            await publish(1, SECOND, canary=SECOND)
            assert (await asyncio.wait_for(policy.update_weights(), 600)).canary is None, (
                "an update waits for no waking"
            )
            waiting = asyncio.ensure_future(policy.generate(token_ids=prompt(20), sampling={**GREEDY, "max_tokens": 8}))
            await policy.wake()
            ((completion,),) = await asyncio.gather(waiting)
            assert (completion.token_ids, completion.version) == (models.greedy(prompt(20), 8, SECOND), 1)
            await policy.sleep()
            await publish(2, FIRST, canary=SECOND)
            await policy.update_weights()
            with pytest.raises(SyncError):
                await policy.wake()
            with pytest.raises(SyncError):
                await policy.generate("x")

    drive(body())


def test_the_tensors_that_are_not_as_published_are_named(drive: Drive) -> None:
    async def body() -> None:
        async with generator() as policy:
            changed = models.weights(FIRST)
            changed["norm.weight"] = changed["norm.weight"] * 1.5
            await Weights("policy", rank=0, world_size=1).publish(changed, version=1)
            differing = await policy._engine.differing(1)
            assert list(differing) == ["norm.weight"]
            published, here = differing["norm.weight"]
            assert published != here
            await policy.update_weights()
            assert await policy._engine.differing(1) == {}

    drive(body())


def test_what_only_vllm_can_do_is_refused(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with generator() as policy:
            with pytest.raises(ConfigError, match="only with an engine that does") as raised:
                await policy.generate("x", sampling={"structured": {"regex": "a"}})
            assert raised.value.path == "sampling.structured"
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(OptionError, match="runs in one process") as raised:
            await Generator(config()).setup()
        assert raised.value.value == 2

    drive(body())


def test_adapters_of_the_configuration_and_of_the_run(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A replica that starts later has what the configuration names, and what was loaded and unloaded since."""
    facts = models.model(FIRST).architecture
    paths = {
        name: str(make_adapter(tmp_path / name, facts, seed=seed)) for seed, name in enumerate(("one", "two", "a/b"))
    }
    digests = {name: adapter_digest(Path(path)) for name, path in paths.items()}
    monkeypatch.setenv("FORGE_SERVICE", "mine")

    async def body() -> None:
        named = {name: paths[name] for name in ("one", "two")}
        asked: dict[str, Any] = {"token_ids": prompt(9), "sampling": GREEDY | {"max_tokens": 6}}

        async def made(policy: Generator, adapter: str | None) -> Completion:
            (found,) = await policy.generate(**asked | {"sampling": asked["sampling"] | {"adapter": adapter}})
            return found

        async with generator(adapters=named) as policy:
            assert (await policy.stats()).more["adapters"] == {name: digests[name] for name in named}
            first = {name: await made(policy, name) for name in (None, "base", "one", "two")}
            assert first["base"].logprobs == first[None].logprobs != first["one"].logprobs
            assert await policy.load_adapter("a/b", paths["a/b"]) == digests["a/b"]
            await policy.unload_adapter("two")
            late = await made(policy, "a/b")
            deltas = [each async for each in policy.generate_stream(**asked | {"sampling": {"adapter": "one"}})]
            assert deltas[-1].completion.adapter == AdapterUse("one", digests["one"])
            async with generator(adapters=named) as later:
                assert (await later.stats()).more["adapters"] == {name: digests[name] for name in ("a/b", "one")}
                assert (await made(later, "a/b")).logprobs == late.logprobs
                with pytest.raises(PromptError) as raised:
                    await made(later, "two")
                assert (raised.value.path, raised.value.value) == ("sampling.adapter", "two")
        with pytest.raises(ModelError) as failed:
            async with generator(adapters={"gone": str(tmp_path / "gone")}):
                pass
        assert (failed.value.path, failed.value.value) == ("load_adapter(path)", str(tmp_path / "gone"))

    drive(body())


# ---- The service -------------------------------------------------------------------------------------------------


def test_two_replicas_feel_like_one_policy(drive: Drive) -> None:
    async def body() -> None:
        policy = await Generator.options(num_replicas=2, num_threads=1, with_gpus=False).as_service(
            config(max_seq_len=512, max_batch=16)
        )
        await requests(policy)
        await update_under_load(policy)

    drive(body())


async def requests(policy: Any) -> None:
    card = await policy.card.route()
    assert (card["engine"], card["version"], card["max_seq_len"], card["vocab_size"]) == ("native", -1, 512, 512)
    assert card["has_chat_template"]
    short = {**GREEDY, "max_tokens": 6}
    (completion,) = await policy.generate.route(token_ids=prompt(20), sampling=short)
    assert (completion.token_ids, completion.version) == (models.greedy(prompt(20), 6), -1)
    chat = await policy.generate.route(messages=[{"role": "user", "content": "Hi"}], sampling={"max_tokens": 5}, n=3)
    assert [completion.index for completion in chat] == [0, 1, 2]
    deltas = [delta async for delta in policy.generate_stream.stream(token_ids=prompt(20), sampling=short)]
    assert sum((delta.token_ids for delta in deltas), ()) == completion.token_ids
    line = [*prompt(20), *completion.token_ids]
    assert (await policy.score.route(line))[0][20:] == list(completion.logprobs)
    assert len(await policy.score.route([line, line[:5]])) == 2
    with pytest.raises(PromptError, match="at most 511 tokens"):
        await policy.generate.route(token_ids=[1] * 512)
    with pytest.raises(PromptError, match="from 0 to 511"):
        await policy.score.route([1, 512])
    with pytest.raises(InvalidConfig, match=r"sampling\.top_p"):
        await policy.generate.route("x", sampling={"top_p": 0})
    with pytest.raises(FanoutError) as raised:
        await policy.update_weights.fanout(version=1)
    assert [type(outcome.error) for outcome in raised.value.outcomes] == [StoreKeyError] * 2
    left = policy.generate_stream.stream(token_ids=prompt(30), sampling=GREEDY)
    assert len((await anext(left)).token_ids) == 1
    await left.aclose()


async def update_under_load(policy: Any) -> None:
    kinds = {-1: FIRST, 1: SECOND, 2: FIRST}
    asked = [prompt(10 + place) for place in range(32)]
    for version, mode in ((1, "recompute"), (2, "keep")):
        await publish(version, kinds[version], canary=kinds[version])  # before, so that nothing finishes meanwhile
        calls = [
            asyncio.ensure_future(policy.generate.route(token_ids=ids, sampling={**GREEDY, "max_tokens": 120}))
            for ids in asked
        ]
        watched = policy.generate_stream.stream(token_ids=prompt(9), sampling=GREEDY)
        for _ in range(5):
            await anext(watched)
        reports = await policy.update_weights.fanout(mode=mode)
        assert [(report.version, report.mode) for report in reports] == [(version, mode)] * 2
        assert all(report.canary < 1e-4 for report in reports)
        await watched.aclose()
        found = [completion for (completion,) in await asyncio.gather(*calls)]
        assert [completion.prompt_ids for completion in found] == asked
        for completion in found:
            told_right(completion, kinds, exact=mode == "recompute")
        assert any(len(completion.versions) == 2 for completion in found), "no update came in between"
    stats = await policy.stats.fanout()
    assert [(each.version, each.num_running, each.cache_used) for each in stats] == [(2, 0, 0.0)] * 2


def told_right(completion: Any, kinds: dict[int, Kind], *, exact: bool) -> None:
    """Every span's tokens are what its version chooses; after the first span only where the keys are of one version."""
    assert [span.start for span in completion.versions] == [0, *(span.end for span in completion.versions[:-1])]
    assert completion.versions[-1].end == len(completion) == 120
    for number, span in enumerate(completion.versions):
        if number == 0 or exact:
            before = completion.prompt_ids + completion.token_ids[: span.start]
            made = completion.token_ids[span.start : span.end]
            assert made == models.choices(before, made, kinds[span.version])
