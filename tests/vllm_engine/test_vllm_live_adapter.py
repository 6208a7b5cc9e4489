"""The adapter that is trained, in vLLM: updates in place, judged by transformers with the adapter merged."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from forge.config import AdapterConfig, Sampling
from forge.errors import ConfigError, PromptError, WeightMismatch
from forge.generator.engine import Request
from forge.models.adapter_names import AdapterSpec, adapter_map
from forge.models.peft_files import write_adapter
from forge.store import Weights
from forge.types import INITIAL_VERSION, Completion, VersionSpan
from generator_bench import last_of, make_engine, native_engine, request, until
from generator_models import FIRST, config, judge, model, prompt, weights

SPEC = AdapterSpec(4, 12.0, ("q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"))
PROMPT, LONG = prompt(24), prompt(200)
START = 100
"""The seed of the adapter that the engine starts with."""


@functools.cache
def adapter(seed: int) -> dict[str, Tensor]:
    """An adapter under our names, as a trainer publishes it."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.2
        for slot in adapter_map(model(FIRST).architecture, SPEC)
        for name, shape in zip(slot.names, slot.shapes, strict=True)
    }


@functools.cache
def merged(seed: int) -> Any:
    """The model with an adapter, in transformers."""
    made = copy.deepcopy(judge(FIRST))
    parameters = dict(made.named_parameters())
    with torch.no_grad():
        for slot in adapter_map(model(FIRST).architecture, SPEC):
            down, up = (adapter(seed)[name] for name in slot.names)
            parameters[slot.base.hf_names[0]] += SPEC.scale * up @ down
    return made


@torch.no_grad()
def expected(seed: int, ids: tuple[int, ...], tokens: tuple[int, ...]) -> list[float]:
    """What transformers gives for tokens after a prompt."""
    table = merged(seed)(torch.tensor([[*ids, *tokens]])).logits[0].double().log_softmax(-1)
    return [float(table[len(ids) + place - 1, token]) for place, token in enumerate(tokens)]


@torch.no_grad()
def greedy(seed: int, ids: tuple[int, ...], count: int, *, read_by: int | None = None) -> tuple[int, ...]:
    """What transformers generates; with `read_by`, on keys of another adapter for all tokens but the last."""
    cache = None if read_by is None else merged(read_by)(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
    found, left = [], torch.tensor([ids if cache is None else ids[-1:]])
    for _ in range(count):
        answer = merged(seed)(left, past_key_values=cache, use_cache=True)
        cache, left = answer.past_key_values, answer.logits[:, -1:].argmax(-1)
        found.append(int(left))
    return tuple(found)


def is_made_by(seed: int, made: Completion, *, atol: float = 1e-4) -> bool:
    wanted = expected(seed, made.prompt_ids, made.token_ids)
    return max(abs(a - b) for a, b in zip(made.logprobs, wanted, strict=True)) < atol


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("start")
    write_adapter(found, adapter(START), model=model(FIRST).architecture, spec=SPEC)
    return found


@pytest.fixture(scope="module")
def engine(on_loop: Any, folder: Path) -> Iterator[Any]:
    """An engine with room for the adapter that is trained, which starts from a folder, and for named ones."""
    fields = {"max_seq_len": 1024, "kv_cache_gb": 0.05, "adapter": AdapterConfig(path=str(folder))}
    made = make_engine(config(FIRST, engine="vllm", engine_args={"enable_lora": True}, **fields))
    on_loop(made.start())
    pids = made.stats().more["pids"]
    (first,) = on_loop(made.generate(request(PROMPT, max_tokens=12)))
    assert is_made_by(START, first)
    assert first.versions == (VersionSpan(INITIAL_VERSION, 0, 12),)
    yield made
    on_loop(made.close())
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


class Publisher:
    """Publishes adapters as a trainer does, each as the next version."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.store = Weights(engine.config.weights, keep=3, rank=0, world_size=1)

    async def publish(self, tensors: dict[str, Tensor]) -> int:
        kept = await self.store.versions()
        number = 1 + max([info.number for info in kept] + [self.engine.version])
        await self.store.publish(tensors, version=number)
        return number

    async def serve(self, seed: int) -> int:
        number = await self.publish(adapter(seed))
        assert (await self.engine.update_weights(number, "drain")).version == number == self.engine.version
        return number


@pytest.fixture
def publisher(engine: Any) -> Publisher:
    return Publisher(engine)


@pytest.mark.parametrize("mode", ["drain", "keep", "recompute", "abort"])
def test_an_update_reaches_requests_in_progress_as_one_of_all_weights_does(engine, on_loop, publisher, mode):
    async def body() -> None:
        old = await publisher.serve(1)
        new = await publisher.publish(adapter(2))
        stream = engine.stream(request(PROMPT, max_tokens=150))
        await until(stream, num_tokens=10)
        update = asyncio.ensure_future(engine.update_weights(new, mode))
        made = await last_of(stream)
        report = await update
        assert (report.version, report.mode, report.num_aborted) == (new, mode, int(mode == "abort"))
        first = made.versions[0]
        assert (first.version, first.start) == (old, 0)
        tokens = made.token_ids
        assert tokens[: first.end] == greedy(1, PROMPT, first.end)
        if mode in ("drain", "abort"):
            assert made.versions == (VersionSpan(old, 0, len(tokens)),)
            assert made.finish_reason == ("length" if mode == "drain" else "abort")
        else:
            assert made.versions[1:] == (VersionSpan(new, first.end, 150),)
            read = (*PROMPT, *tokens[: first.end])
            kept, again = greedy(2, read, 15, read_by=1), greedy(2, read, 15)
            assert kept != again, "this test could not tell"
            assert tokens[first.end : first.end + 15] == (kept if mode == "keep" else again)
        (after,) = await engine.generate(request(PROMPT, max_tokens=12))
        assert is_made_by(2, after)
        assert after.versions == (VersionSpan(new, 0, 12),)

    on_loop(body())


def test_logprobs_are_those_of_the_native_engine(engine, on_loop, publisher):
    async def body() -> None:
        native = native_engine(engine.config.model_copy(update={"engine": "native", "engine_args": {}}))
        await native.start()
        try:
            for seed in (1, 2):
                number = await publisher.serve(seed)
                await native.update_weights(number, "drain")
                sampling = Sampling(max_tokens=40, ignore_eos=True, seed=seed, n=3)
                made = await engine.generate(Request("sampled", PROMPT, sampling))
                running = asyncio.ensure_future(engine.generate(request(LONG, max_tokens=60)))
                sequences = [[*one.prompt_ids, *one.token_ids] for one in made]
                scored, wanted = await engine.score(sequences), await native.score(sequences)
                await running
                for one, ours, theirs in zip(made, scored, wanted, strict=True):
                    assert ours == pytest.approx(theirs, abs=1e-4)
                    assert list(one.logprobs) == pytest.approx(theirs[len(PROMPT) :], abs=1e-4)
        finally:
            await native.close()

    on_loop(body())


def test_new_requests_never_use_keys_of_the_adapter_before(engine, on_loop, publisher):
    async def body() -> None:
        await publisher.serve(1)
        assert [(await engine.generate(request(LONG, max_tokens=4)))[0].num_shared for _ in range(2)] == [0, 128]
        new = await publisher.publish(adapter(2))
        stream = engine.stream(request(LONG, max_tokens=250))
        await anext(stream)
        await engine.update_weights(new, "keep")
        (made,) = await engine.generate(request(LONG, max_tokens=12))
        await stream.aclose()
        assert made.num_shared == 0
        assert is_made_by(2, made)

    on_loop(body())


def test_what_is_not_this_adapter_changes_nothing(engine, on_loop, publisher):
    async def body() -> None:
        served = await publisher.serve(1)
        stream = engine.stream(request(PROMPT, max_tokens=150))
        await anext(stream)
        name, whole = next(iter(adapter(2))), adapter(2)
        wrong: list[tuple[dict[str, Tensor], str, Any]] = [
            (whole | {name: torch.zeros(8, 3)}, name, (8, 3)),
            ({each: whole[each] for each in whole if each != name}, name, None),
            (whole | {"layers.0.attention.wv.lora_a": torch.zeros(4, 128)}, "layers.0.attention.wv.lora_a", (4, 128)),
            (weights(FIRST), name, None),
        ]
        for tensors, path, value in wrong:
            with pytest.raises(WeightMismatch) as refused:
                await engine.update_weights(await publisher.publish(tensors), "abort")
            assert (refused.value.path, refused.value.value) == (path, value)
            assert refused.value.rule
            assert refused.value.repair
        assert engine.version == served
        made = await last_of(stream)
        assert made.versions == (VersionSpan(served, 0, 150),)
        assert made.token_ids == greedy(1, PROMPT, 150)
        await publisher.serve(2)
        assert is_made_by(2, (await engine.generate(request(PROMPT, max_tokens=12)))[0])

    on_loop(body())


def test_the_engine_reports_which_tensors_differ(engine, on_loop, publisher):
    async def body() -> None:
        served = await publisher.serve(1)
        assert await engine.differing(served) == {}
        name = "layers.1.attention.wo.lora_b"
        changed = adapter(1) | {name: adapter(1)[name] + 1e-3}
        found = await engine.differing(await publisher.publish(changed))
        assert set(found) == {name}
        assert found[name][0] != found[name][1]
        assert is_made_by(1, (await engine.generate(request(PROMPT, max_tokens=12)))[0]), "nothing was loaded"

    on_loop(body())


def test_an_update_while_it_sleeps_waits_for_the_end_of_sleep(engine, on_loop, publisher):
    async def body() -> None:
        old = await publisher.serve(1)
        new = await publisher.publish(adapter(2))
        stream = engine.stream(request(PROMPT, max_tokens=100))
        await anext(stream)
        await engine.sleep()
        late = asyncio.ensure_future(engine.generate(request(PROMPT, max_tokens=12)))
        assert (await engine.update_weights(new, "drain")).version == new
        assert engine.stats().is_asleep
        assert not late.done()
        await engine.wake()
        assert is_made_by(2, (await late)[0])
        assert [span.version for span in (await last_of(stream)).versions] == [old, new]

    on_loop(body())


def test_named_adapters_live_beside_the_one_that_is_trained(engine, on_loop, publisher, tmp_path):
    """Also more of them than vLLM has places for: it drops the one that it has not used for longest."""

    async def body() -> None:
        await publisher.serve(1)
        names = {f"other{seed}": seed for seed in (11, 12, 13)}
        for name, seed in names.items():
            write_adapter(tmp_path / name, adapter(seed), model=model(FIRST).architecture, spec=SPEC)
            await engine.load_adapter(name, str(tmp_path / name))
        for live in (1, 2):
            asked = [(None, live), *names.items(), (None, live)]
            made = await asyncio.gather(
                *(engine.generate(request(PROMPT, max_tokens=12, adapter=name)) for name, _ in asked)
            )
            for (one,), (name, seed) in zip(made, asked, strict=True):
                assert is_made_by(seed, one), name
                version = engine.version if name is None else INITIAL_VERSION
                assert one.versions == (VersionSpan(version, 0, 12),), name
            if live == 1:
                stream = engine.stream(request(PROMPT, max_tokens=100, adapter="other11"))
                await anext(stream)
                await engine.update_weights(await publisher.publish(adapter(2)), "keep")
                deltas = [delta async for delta in stream]
                assert {delta.version for delta in deltas} == {INITIAL_VERSION}
                assert deltas[-1].completion.token_ids == greedy(11, PROMPT, 100), "an update leaves it alone"
        for name in names:
            await engine.unload_adapter(name)
        with pytest.raises(PromptError):
            await engine.generate(request(PROMPT, adapter="other11"))
        assert is_made_by(2, (await engine.generate(request(PROMPT, max_tokens=12)))[0])

    on_loop(body())


def test_without_room_for_named_adapters_they_are_refused(engine, on_loop, tmp_path):
    from forge.generator.vllm.adapters import Adapters

    with pytest.raises(ConfigError) as refused:
        on_loop(Adapters(engine._llm, is_enabled=False, is_live=True).load("mine", str(tmp_path)))
    assert refused.value.path == "generator.engine_args.enable_lora"
