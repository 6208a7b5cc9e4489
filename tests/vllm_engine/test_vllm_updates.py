"""New weights while vLLM generates, judged by transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from adapter_contract import check_adapters
from forge.errors import ConfigError, ModelError, OptionError, PromptError, StoreKeyError, WeightMismatch
from forge.generator.vllm.adapters import Adapters
from forge.store import Weights
from forge.types import Delta, VersionSpan
from vllm_kit import PROMPT, greedy, judge, judged, request, tiny, token_logprobs, weights

LONG = [(11 * place) % 450 + 20 for place in range(200)]


class Publisher:
    """Publishes weights as a trainer does, each as the next version."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.store = Weights(engine.config.weights, rank=0, world_size=1)

    async def publish(self, tensors: dict[str, torch.Tensor]) -> int:
        kept = await self.store.versions()
        number = 1 + max([info.number for info in kept] + [self.engine.version])
        await self.store.publish(tensors, version=number)
        return number

    async def serve(self, seed: int) -> int:
        """Publish and update, with nothing under way."""
        number = await self.publish(weights(seed))
        assert (await self.engine.update_weights("latest", "drain")).version == number
        return number


@pytest.fixture
def publisher(engine) -> Publisher:
    return Publisher(engine)


def continued(old: int, new: int, ids: list[int], count: int) -> list[int]:
    """What weights `new` make of keys and values that weights `old` have left for all but the last token."""
    with torch.no_grad():
        cache = judge(old)(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
        found = [ids[-1]]
        for _ in range(count):
            answer = judge(new)(torch.tensor([found[-1:]]), past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            found.append(int(answer.logits[0, -1].argmax()))
    return found[1:]


async def update_after(engine: Any, stream: AsyncIterator[Delta], count: int, mode: str) -> tuple[list[Delta], Any]:
    """Read a stream to its end, with an update after some tokens; the deltas, and the update's report."""
    deltas, task = [], None
    async for delta in stream:
        deltas.append(delta)
        if task is None and sum(len(delta.token_ids) for delta in deltas) >= count:
            task = asyncio.ensure_future(engine.update_weights("latest", mode))
    assert task is not None
    return deltas, await task


@pytest.mark.parametrize("mode", ["drain", "keep", "recompute", "abort"])
def test_spans_tell_the_truth(engine, on_loop, publisher, mode):
    async def body() -> None:
        old = await publisher.serve(1)
        new = await publisher.publish(weights(2))
        other = asyncio.ensure_future(engine.generate(request(PROMPT[:9], max_tokens=150)))
        deltas, report = await update_after(engine, engine.stream(request(max_tokens=150)), 20, mode)
        (beside,) = await other
        made = deltas[-1].completion
        assert (report.version, report.mode, engine.version) == (new, mode, new)
        assert 0 < report.stall_s <= report.seconds
        for prompt, one in ((PROMPT, made), (PROMPT[:9], beside)):
            check(prompt, one, old, new)
        by_token = [delta.version for delta in deltas for _ in delta.token_ids]
        assert by_token == [span.version for span in made.versions for _ in range(span.start, span.end)]
        after = (await engine.generate(request()))[0]
        assert list(after.token_ids) == greedy(2, PROMPT, 12)
        assert after.versions == (VersionSpan(new, 0, 12),)
        assert report.num_aborted == (2 if mode == "abort" else 0)

    def check(prompt: Any, made: Any, old: int, new: int) -> None:
        first = made.versions[0]
        assert (first.version, first.start) == (old, 0)
        assert first.end >= 10
        tokens = list(made.token_ids)
        assert tokens[: first.end] == greedy(1, prompt, first.end)
        if mode in ("drain", "abort"):
            assert made.versions == (VersionSpan(old, 0, len(tokens)),)
            assert made.finish_reason == ("length" if mode == "drain" else "abort")
            assert len(tokens) == 150 or mode == "abort"
            return
        assert made.versions[1:] == (VersionSpan(new, first.end, 150),)
        read = [*prompt, *tokens[: first.end]]
        kept, again = continued(1, 2, read, 20), greedy(2, read, 20)
        assert kept != again, "this test could not tell"
        assert tokens[first.end : first.end + 20] == (kept if mode == "keep" else again)

    on_loop(body())


def test_a_stream_that_is_read_late_is_cut_where_weights_changed(engine, on_loop, publisher):
    async def body() -> None:
        old = await publisher.serve(1)
        new = await publisher.publish(weights(2))
        stream = engine.stream(request(max_tokens=200))
        deltas = [await anext(stream) for _ in range(3)]
        await engine.update_weights("latest", "keep")
        await engine.generate(request())  # by now the stream has tokens of both that nobody has read
        deltas += [delta async for delta in stream]
        made = deltas[-1].completion
        assert [span.version for span in made.versions] == [old, new]
        by_token = [delta.version for delta in deltas for _ in delta.token_ids]
        assert by_token == [span.version for span in made.versions for _ in range(span.start, span.end)]
        assert max(len(delta.token_ids) for delta in deltas) > 3, "this test could not tell"

    on_loop(body())


def test_what_was_aborted_can_be_continued(engine, on_loop, publisher):
    async def body() -> None:
        old = await publisher.serve(1)
        new = await publisher.publish(weights(2))
        deltas, _ = await update_after(engine, engine.stream(request(max_tokens=150)), 20, "abort")
        cut = deltas[-1].completion
        (rest,) = await engine.generate(request((*cut.prompt_ids, *cut.token_ids), max_tokens=10))
        whole = cut.continued(rest)
        assert whole.versions == (VersionSpan(old, 0, len(cut)), VersionSpan(new, len(cut), len(cut) + 10))
        assert list(rest.token_ids) == greedy(2, [*PROMPT, *cut.token_ids], 10)

    on_loop(body())


def test_new_requests_never_use_old_keys(engine, on_loop, publisher):
    """Also after `keep`, when a completion under way prevents vLLM from forgetting them."""

    async def body() -> None:
        await publisher.serve(1)
        assert [(await engine.generate(request(LONG)))[0].num_shared for _ in range(2)] == [0, 128]
        await publisher.publish(weights(2))
        stream = engine.stream(request(LONG, max_tokens=250))
        await anext(stream)
        await engine.update_weights("latest", "keep")
        assert not await engine._llm.reset_prefix_cache(), "vLLM forgets them now: the salt of prompts may go"
        (made,) = await engine.generate(request(LONG))
        await stream.aclose()
        assert made.num_shared == 0
        assert list(made.token_ids) == greedy(2, LONG, 12)
        expected = token_logprobs(2, LONG, made.token_ids)
        assert max(abs(a - b) for a, b in zip(made.logprobs, expected, strict=True)) < 1e-5
        assert (await engine.generate(request(LONG)))[0].num_shared == 128

    on_loop(body())


@pytest.mark.parametrize("mode", ["drain", "keep", "recompute", "abort"])
def test_a_turn_after_an_update_is_of_the_new_weights_alone(engine, on_loop, publisher, mode):
    """Nothing is in progress between two turns: what old weights computed of a conversation is computed again."""

    async def body() -> None:
        await publisher.serve(1)
        (first,) = await engine.generate(request(LONG, max_tokens=40))
        history = [*LONG, *first.token_ids, *PROMPT]
        new = await publisher.publish(weights(2))
        await engine.update_weights("latest", mode)
        for shared in (0, 256):
            (turn,) = await engine.generate(request(history, max_tokens=40))
            assert (turn.num_shared, turn.versions) == (shared, (VersionSpan(new, 0, 40),))
            expected = token_logprobs(2, history, turn.token_ids)
            assert max(abs(a - b) for a, b in zip(turn.logprobs, expected, strict=True)) < 1e-5
            history += [*turn.token_ids, *PROMPT]

    on_loop(body())


def test_an_update_that_fails_changes_nothing(engine, on_loop, publisher):
    async def body() -> None:
        served = await publisher.serve(1)
        stream = engine.stream(request(max_tokens=200))
        await anext(stream)
        with pytest.raises(StoreKeyError) as unknown:
            await engine.update_weights(served + 1000, "abort")
        assert unknown.value.value == served + 1000
        assert str(served) in unknown.value.rule
        whole = weights(2)
        wrong = await publisher.publish(whole | {"norm.weight": torch.zeros(7)})
        with pytest.raises(WeightMismatch) as shape:
            await engine.update_weights(wrong, "abort")
        assert (shape.value.path, shape.value.value) == ("norm.weight", (7,))
        assert "(128,)" in shape.value.rule
        partial = await publisher.publish({name: whole[name] for name in whole if name != "norm.weight"})
        with pytest.raises(WeightMismatch) as missing:
            await engine.update_weights(partial, "abort")
        assert missing.value.tensors == ("norm.weight",)
        strange = await publisher.publish(whole | {"surplus.weight": torch.zeros(3)})
        with pytest.raises(WeightMismatch, match="surplus"):
            await engine.update_weights("latest", "abort")
        assert strange > partial > wrong > served == engine.version
        deltas = [delta async for delta in stream]
        made = deltas[-1].completion
        assert list(made.token_ids) == greedy(1, PROMPT, 200)
        assert made.versions == (VersionSpan(served, 0, 200),)
        assert (await engine.update_weights(await publisher.publish(whole), "keep")).version > strange
        assert list((await engine.generate(request()))[0].token_ids) == greedy(2, PROMPT, 12)

    on_loop(body())


def test_weights_that_serve_already_cost_no_pause(engine, on_loop, publisher):
    async def body() -> None:
        served = await publisher.serve(1)
        stream = engine.stream(request(max_tokens=50))
        await anext(stream)
        report = await engine.update_weights("latest", "abort")
        assert (report.version, report.stall_s, report.num_aborted) == (served, 0.0, 0)
        assert [delta async for delta in stream][-1].completion.finish_reason == "length"
        await publisher.store.rewind(to=served - 1)
        await publisher.store.publish(weights(2), version=served)
        assert (await engine.update_weights(served, "keep")).stall_s > 0, "the same number, other weights"
        assert list((await engine.generate(request()))[0].token_ids) == greedy(2, PROMPT, 12)

    on_loop(body())


def test_an_update_while_it_sleeps_does_not_wake_it(engine, on_loop, publisher):
    async def body() -> None:
        await publisher.serve(1)
        new = await publisher.publish(weights(2))
        stream = engine.stream(request(max_tokens=100))
        await anext(stream)
        await engine.sleep()
        late = asyncio.ensure_future(engine.generate(request()))
        assert (await engine.update_weights("latest", "drain")).version == new
        assert engine.stats().is_asleep
        assert not late.done()
        await engine.wake()
        assert list((await late)[0].token_ids) == greedy(2, PROMPT, 12)
        made = [delta async for delta in stream][-1].completion
        assert [span.version for span in made.versions] == [new - 1, new]

    on_loop(body())


def test_a_cancelled_update_leaves_whole_weights(engine, on_loop, publisher):
    async def body() -> None:
        old = await publisher.serve(1)
        new = await publisher.publish(weights(2))
        for num_turns in (0, 1, 3, 10, 30):
            task = asyncio.ensure_future(engine.update_weights("latest", "keep"))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            seed = {old: 1, new: 2}[engine.version]
            assert list((await engine.generate(request()))[0].token_ids) == greedy(seed, PROMPT, 12)
        assert (await engine.update_weights("latest", "keep")).version == new

    on_loop(body())


# ---- Adapters ------------------------------------------------------------------------------------------------------


def write_adapter(folder: Any, seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """A LoRA adapter on the queries of every layer, as PEFT writes one; what it adds to each weight."""
    facts, generator = tiny().architecture, torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for layer in range(facts.num_layers):
        name = f"model.layers.{layer}.self_attn.q_proj"
        down = torch.randn(rank, facts.hidden_size, generator=generator) * 0.3
        up = torch.randn(facts.num_heads * facts.head_dim, rank, generator=generator) * 0.3
        tensors |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
        added[f"{name}.weight"] = 2.0 * up @ down
    described = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj"], "bias": "none",
        "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny",
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return added


def merged_logprobs(seed: int, added: dict[str, torch.Tensor], ids: list[int], tokens: Any) -> list[float]:
    """What transformers gives with an adapter's part added to the weights."""
    parameters = dict(judge(seed).named_parameters())
    with torch.no_grad():
        for name, part in added.items():
            parameters[name] += part
        try:
            table = judged(seed, [*ids, *tokens])
        finally:
            for name, part in added.items():
                parameters[name] -= part
    return [float(table[len(ids) + place - 1, token]) for place, token in enumerate(tokens)]


def test_adapters_are_loaded_replaced_and_forgotten(engine, on_loop, publisher, tmp_path):
    async def body() -> None:
        await publisher.serve(1)
        (plain,) = await engine.generate(request(LONG))
        for seed in (1, 2):  # the second is loaded in place of the first, under the same name
            added = write_adapter(tmp_path / "adapter", seed)
            await engine.load_adapter("mine", str(tmp_path / "adapter"))
            assert engine.stats().more["adapters"] == ("mine",)
            (made,) = await engine.generate(request(LONG, adapter="mine"))
            expected = merged_logprobs(1, added, LONG, made.token_ids)
            assert max(abs(a - b) for a, b in zip(made.logprobs, expected, strict=True)) < 1e-4
            assert made.num_shared == 0, "what another adapter computed is of no use"
            assert made.logprobs != plain.logprobs
        await publisher.serve(2)  # new weights below, the same adapter above
        (made,) = await engine.generate(request(LONG, adapter="mine"))
        expected = merged_logprobs(2, added, LONG, made.token_ids)
        assert max(abs(a - b) for a, b in zip(made.logprobs, expected, strict=True)) < 1e-4
        await engine.unload_adapter("mine")
        with pytest.raises(PromptError) as unknown:
            await engine.generate(request(adapter="mine"))
        assert unknown.value.path == "sampling.adapter"
        with pytest.raises(OptionError):
            await engine.unload_adapter("mine")

    on_loop(body())


def test_adapters_as_with_every_engine(engine, on_loop, publisher, tmp_path):
    async def body() -> None:
        await publisher.serve(1)
        await check_adapters(engine, judge(1), tiny().architecture, tmp_path, tolerance=1e-4)

    on_loop(body())


def test_adapters_that_cannot_be_loaded_are_refused(engine, on_loop, tmp_path):
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        on_loop(engine.load_adapter("mine", str(tmp_path)))
    write_adapter(tmp_path / "wide", 1, rank=16)
    with pytest.raises(ModelError, match="max_lora_rank"):
        on_loop(engine.load_adapter("mine", str(tmp_path / "wide")))
    with pytest.raises(OptionError):
        on_loop(engine.load_adapter("", str(tmp_path)))
    with pytest.raises(ConfigError) as caught:
        on_loop(Adapters(engine._llm, is_enabled=False).load("mine", str(tmp_path)))
    assert caught.value.path == "generator.engine_args.enable_lora"
    assert engine.stats().more["adapters"] == ()
    assert len(on_loop(engine.generate(request()))) == 1
