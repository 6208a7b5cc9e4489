"""Several LoRA adapters in one native engine: each request has the bits of an engine that serves its adapter alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_folders import make_adapter
from forge.config import AdapterConfig
from forge.errors import ForgeError, ModelError, OptionError, PromptError
from forge.generator.engine import Request
from forge.generator.native.adapters import LoadedAdapter, segments_of
from forge.generator.native.schedule import Piece, by_adapter
from forge.generator.native.sequences import PendingRequest, SequenceState
from forge.models.adapter_segments import BASE, LIVE
from forge.models.peft_files import adapter_digest
from forge.types import AdapterUse, Completion
from generator_bench import native_engine, request, until
from generator_models import FIRST, config, model, prompt

SHAPES: dict[str, dict[str, Any]] = {
    "wide": {"seed": 1, "rank": 8, "alpha": 16.0},
    "thin": {"seed": 2, "rank": 1, "alpha": 3.0, "targets": ("q_proj", "v_proj")},
    "deep": {"seed": 3, "rank": 3, "alpha": 5.0, "targets": ("o_proj", "down_proj")},
}
Alone = dict[str | None, list[list[tuple[Any, ...]]]]
NAMES = (None, "wide", "thin", "deep")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(place / name, model(FIRST).architecture, **shape) for name, shape in SHAPES.items()}


def on_engine(body: Callable[[Any], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    """Run a test's body with an engine that is closed afterwards."""

    async def run() -> Any:
        engine = native_engine(config(FIRST, kv_cache_gb=0.05, **{"max_seq_len": 256, **options}))
        await engine.start()
        try:
            return await body(engine)
        finally:
            await engine.close()

    async def limited() -> Any:
        async with asyncio.timeout(600):
            return await run()

    return asyncio.run(limited())


def asked(number: int, adapter: str | None) -> Request:
    """One of the requests of a mix: sampled or greedy, of several lengths, some with a common prefix."""
    start = prompt(40)[: 8 * (number % 4)]
    return request(
        (*start, *prompt(3 + 7 * (number % 5), seed=number)),
        adapter=adapter,
        temperature=float(number % 3 != 0),
        seed=number,
        n=1 + number % 2,
        max_tokens=12 + number % 7,
    )


def plain(completions: list[Completion]) -> list[tuple[Any, ...]]:
    return [(each.token_ids, each.logprobs, each.full_logprobs) for each in completions]


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> Alone:
    """What engines make of the requests of a mix, each with an adapter of its own and none that was loaded."""

    async def body(engine: Any) -> list[list[tuple[Any, ...]]]:
        return [plain(await engine.generate(asked(number, None))) for number in range(16)]

    paths = {None: None, **folders}
    configs = {name: None if path is None else AdapterConfig(path=str(path)) for name, path in paths.items()}
    return {name: on_engine(body, adapter=adapter) for name, adapter in configs.items()}


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_mixed_batch_has_the_bits_of_one_adapter_alone(
    folders: dict[str, Path], alone: Alone, num_threads: int
) -> None:
    async def body(engine: Any) -> None:
        for name, path in folders.items():
            assert await engine.load_adapter(name, str(path)) == adapter_digest(path)
        mix = [asked(number, NAMES[(number * 7) % 4]) for number in range(16)]
        found = await asyncio.gather(*map(engine.generate, mix))
        assert engine.stats().more["num_steps"] < 60, "requests of several adapters are not in the same steps"
        for number, (one, completions) in enumerate(zip(mix, found, strict=True)):
            name = one.sampling.adapter
            assert plain(completions) == alone[name][number]
            use = None if name is None else AdapterUse(name, adapter_digest(folders[name]))
            assert all(each.adapter == use for each in completions)

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        on_engine(body, max_batch=12, prefill_chunk_tokens=32)
    finally:
        torch.set_num_threads(before)
    assert len({str(each[3]) for each in alone.values()}) == 4, "the adapters change nothing"


def test_without_the_step_kernel_the_bits_are_the_same(folders: dict[str, Path], alone: Alone) -> None:
    async def body(engine: Any) -> None:
        runner = engine.thread.serving().runner
        runner._cpu_steps = None
        for name, path in folders.items():
            await engine.load_adapter(name, str(path))
        mix = [asked(number, NAMES[number % 4]) for number in range(8)]
        found = await asyncio.gather(*map(engine.generate, mix))
        for number, (one, completions) in enumerate(zip(mix, found, strict=True)):
            name = one.sampling.adapter
            assert plain(completions) == alone[name][number]

    on_engine(body)


def test_a_step_has_one_segment_for_each_adapter() -> None:
    """However requests came, and none where all are of the live weights."""

    def piece(number: int | None, size: int) -> Piece:
        adapter = None if number is None else LoadedAdapter(AdapterUse(str(number), ""), number)
        pending = PendingRequest(asked(0, None), deliver=lambda _: None, adapter=adapter)
        return Piece(SequenceState(ids=[0] * size, num_prompt=size, max_len=99, pending=pending), 0, size)

    pieces = [piece(2, 3), piece(None, 1), piece(1, 1), piece(2, 1), piece(BASE, 4), piece(None, 2)]
    found = [(each.adapter, each.start, each.end) for each in segments_of(by_adapter(pieces))]
    assert found == [(BASE, 0, 4), (LIVE, 4, 7), (1, 7, 8), (2, 8, 12)]
    assert segments_of([piece(None, 5), piece(None, 1)]) == ()


def test_prefixes_are_shared_within_an_adapter_only(folders: dict[str, Path], tmp_path: Path) -> None:
    """Also when a name stands for other weights, and when it stands for the first ones again."""

    async def body(engine: Any) -> None:
        ids = prompt(70)
        first, second = folders["wide"], make_adapter(tmp_path, model(FIRST).architecture, seed=9)
        await engine.load_adapter("mine", str(first))
        seen: dict[str | None, tuple[Any, ...]] = {}
        reading: set[str | None] = set()
        for name in (None, "mine", None, "mine"):
            (completion,) = await engine.generate(request(ids, adapter=name, max_tokens=8))
            assert seen.setdefault(name, completion.logprobs) == completion.logprobs
            assert (completion.num_shared > 0) == (name in reading)
            reading.add(name)
        assert completion.num_shared >= 64
        for path, is_first in ((second, False), (first, True)):
            await engine.load_adapter("mine", str(path))
            (completion,) = await engine.generate(request(ids, adapter="mine", max_tokens=8))
            assert completion.num_shared == 0
            assert (completion.logprobs == seen["mine"]) == is_first
        await engine.load_adapter("mine", str(first))  # nothing changes: prefixes stay
        (completion,) = await engine.generate(request(ids, adapter="mine", max_tokens=8))
        assert completion.num_shared >= 64

    on_engine(body)


def test_requests_in_progress_keep_the_adapter_they_started_with(folders: dict[str, Path]) -> None:
    async def body(engine: Any) -> None:
        await engine.load_adapter("mine", str(folders["wide"]))
        ids = prompt(10)
        (whole,) = await engine.generate(request(ids, adapter="mine", max_tokens=60))
        streams = [engine.stream(request(ids, adapter="mine", max_tokens=60)) for _ in range(2)]
        await until(streams[0], num_tokens=2)
        await engine.load_adapter("mine", str(folders["deep"]))
        await until(streams[1], num_tokens=2)
        await engine.unload_adapter("mine")
        ends = [[each.completion async for each in stream][-1] for stream in streams]
        assert plain([ends[0]]) == plain([whole])
        assert [end.adapter.digest for end in ends] == [adapter_digest(folders[name]) for name in ("wide", "deep")]
        await engine.generate(request(ids, max_tokens=1))  # what the streams left has been done by then
        linears = [each for each in engine.thread.serving().runner.model.modules() if hasattr(each, "adapters")]
        assert not any(linear.adapters for linear in linears), "an unloaded adapter still has memory"

    on_engine(body)


def test_the_base_below_a_live_adapter(folders: dict[str, Path], alone: Alone) -> None:
    async def body(engine: Any) -> None:
        await engine.load_adapter("thin", str(folders["thin"]))
        mix = [asked(number, (None, "base", "thin")[number % 3]) for number in range(9)]
        found = await asyncio.gather(*map(engine.generate, mix))
        for number, completions in enumerate(found):
            assert plain(completions) == alone[("wide", None, "thin")[number % 3]][number]
        assert [found[number][0].adapter for number in (0, 1)] == [None, AdapterUse("base", "")]
        long = {"max_tokens": 240}  # neither ends before the update
        streams = [engine.stream(request(prompt(5), adapter=name, **long)) for name in (None, "thin")]
        for stream in streams:
            await until(stream, num_tokens=2)
        async with engine.paused(7, "abort"):  # an update of the live adapter
            pass
        live, fixed = [[each.completion async for each in stream][-1] for stream in streams]
        assert (live.finish_reason, fixed.finish_reason) == ("abort", "length")
        assert (live.version, fixed.version) == (-1, -1)
        assert (await engine.generate(asked(5, None)))[0].version == 7
        (again,) = await engine.generate(request(prompt(5), adapter="thin", **long))
        assert (again.version, again.logprobs, again.num_shared > 0) == (-1, fixed.logprobs, True)

    on_engine(body, adapter=AdapterConfig(path=str(folders["wide"])))

    async def without(engine: Any) -> None:
        (completion,) = await engine.generate(asked(4, "base"))
        assert plain([completion]) == alone[None][4]
        assert completion.adapter is None

    on_engine(without)


def test_what_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    narrow = model(FIRST).architecture.model_copy(update={"hidden_size": 32})
    other = make_adapter(tmp_path / "other", narrow, seed=0)
    (tmp_path / "empty").mkdir()

    async def refusal(call: Coroutine[Any, Any, Any]) -> ForgeError:
        with pytest.raises(ForgeError) as raised:
            await call
        assert raised.value.rule
        assert raised.value.repair
        return raised.value

    async def body(engine: Any) -> None:
        wide, thin = str(folders["wide"]), str(folders["thin"])
        error = await refusal(engine.load_adapter("other", str(other)))
        assert (type(error), str(other) in str(error.path)) == (ModelError, True)
        assert "lora_" in str(error.path)
        error = await refusal(engine.load_adapter("gone", str(tmp_path / "empty")))
        assert (type(error), error.path, error.value) == (ModelError, "load_adapter(path)", str(tmp_path / "empty"))
        for name in ("", "base"):
            error = await refusal(engine.load_adapter(name, wide))
            assert (type(error), error.path, error.value) == (OptionError, "load_adapter(name)", name)
        error = await refusal(engine.unload_adapter("none"))
        assert (type(error), error.path, error.value) == (OptionError, "unload_adapter(name)", "none")
        await engine.load_adapter("thin", thin)
        error = await refusal(engine.generate(request(prompt(4), adapter="none")))
        assert (type(error), error.path, error.value) == (PromptError, "sampling.adapter", "none")
        assert "thin" in str(error.rule)
        pinned = Request("test", prompt(4), request(prompt(4), adapter="thin").sampling, version=0)
        error = await refusal(engine.generate(pinned))
        assert (type(error), error.path, error.value) == (PromptError, "sampling.adapter", "thin")
        error = await refusal(engine.load_adapter("deep", str(folders["deep"])))
        assert (type(error), error.path, error.value) == (ModelError, "generator.max_adapters", 1)
        error = await refusal(engine.load_adapter("thin", wide))  # one may take another's place, but this is larger
        assert (type(error), error.path, error.value) == (ModelError, "generator.max_adapter_gb", 3e-5)
        await engine.load_adapter("thin", thin)

    on_engine(body, max_adapters=1, max_adapter_gb=3e-5)
