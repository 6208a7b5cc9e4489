"""What requests to vLLM come to, judged by transformers."""

from __future__ import annotations

import asyncio
import json
import os
import re

import pytest
import torch

from forge.config import Sampling
from forge.errors import ConfigError, OptionError, Overloaded, PromptError
from forge.types import VersionSpan
from generator_bench import make_engine
from vllm_kit import PROMPT, config, greedy, judged, request, tiny, token_logprobs

DRAWN = Sampling(temperature=0.7, max_tokens=12, seed=11, ignore_eos=True)


def near(found, expected, bound: float = 1e-5) -> None:
    assert len(found) == len(expected)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < bound


def test_the_likeliest_tokens_are_those_of_transformers(engine, on_loop):
    (made,) = on_loop(engine.generate(request()))
    assert list(made.token_ids) == greedy(0, PROMPT, 12)
    near(made.logprobs, token_logprobs(0, PROMPT, made.token_ids))
    assert made.full_logprobs is made.logprobs
    assert made.prompt_ids == PROMPT
    assert (made.finish_reason, made.stop_reason) == ("length", None)
    assert made.versions == (VersionSpan(engine.version, 0, 12),)
    assert 0 <= made.timings.queued_s <= made.timings.first_token_s < made.timings.total_s


def test_logprobs_are_those_of_the_temperature(engine, on_loop):
    (made,) = on_loop(engine.generate(request(sampling=DRAWN)))
    near(made.logprobs, token_logprobs(0, PROMPT, made.token_ids, temperature=0.7))
    assert made.full_logprobs is made.logprobs


def test_many_seeded_prompts_come_at_once(engine, on_loop):
    prompts = [tuple((place + number) % 400 + 20 for place in range(100)) for number in range(12)]

    async def work():
        return await asyncio.gather(*(engine.generate(request(ids, DRAWN, max_tokens=2)) for ids in prompts))

    assert [each[0].prompt_ids for each in on_loop(work())] == prompts


def test_seeds_draw_the_same_again_whatever_else_is_generated(engine, on_loop):
    async def body():
        alone = await engine.generate(request(sampling=DRAWN, n=3))
        crowd = [engine.generate(request(PROMPT[:9], DRAWN, seed=seed)) for seed in range(4)]
        again, *_ = await asyncio.gather(engine.generate(request(sampling=DRAWN, n=3)), *crowd)
        return alone, again

    alone, again = on_loop(body())
    assert [made.index for made in alone] == [0, 1, 2]
    assert len({made.token_ids for made in alone}) == 3, "they are drawn each for itself"
    assert [made.token_ids for made in alone] == [made.token_ids for made in again]


def test_without_chance_all_n_are_the_same(engine, on_loop):
    made = on_loop(engine.generate(request(n=2)))
    assert [one.index for one in made] == [0, 1]
    assert made[0].token_ids == made[1].token_ids


@pytest.mark.parametrize("narrow", [{"top_k": 4}, {"top_p": 0.02}, {"min_p": 0.5}])
def test_truncated_logprobs_are_of_what_is_left(engine, on_loop, narrow):
    (made,) = on_loop(engine.generate(request(sampling=DRAWN, max_tokens=6, **narrow)))
    table = judged(0, [*PROMPT, *made.token_ids], temperature=0.7)[len(PROMPT) - 1 : -1]
    whole = table.gather(1, torch.tensor(made.token_ids)[:, None])[:, 0]
    left = torch.tensor(made.logprobs, dtype=torch.float64)
    assert (left > whole + 0.5).all(), "the others' share went to those that are left"
    if "top_k" in narrow:
        kept = table.topk(4).values
        near(made.logprobs, (whole - kept.logsumexp(1)).tolist())
    assert made.full_logprobs is None


def test_penalties_shape_the_likeliest_too(engine, on_loop):
    (plain,) = on_loop(engine.generate(request()))
    (made,) = on_loop(engine.generate(request(frequency_penalty=2.0)))
    assert made.token_ids[:1] == plain.token_ids[:1]
    assert len(set(made.token_ids)) > len(set(plain.token_ids))
    assert made.full_logprobs is None


def test_a_prompt_that_ends_inside_a_character_is_not_repeated(engine, on_loop):
    """vLLM's own text would repeat it."""
    tokenizer = engine._llm.get_tokenizer()
    euro = tokenizer.encode("a€", add_special_tokens=False)
    assert len(euro) == 4, "one token for each byte"
    for ids in (euro[:2], euro):
        sampling = Sampling(temperature=0.0, max_tokens=4, structured={"regex": "[b-d]{3}"})
        (made,) = on_loop(engine.generate(request(ids, sampling)))
        assert re.fullmatch("[b-d]{3}", made.text)


def test_a_stop_string_ends_the_text_before_it(engine, on_loop):
    sampling = DRAWN.model_copy(update={"max_tokens": 40, "seed": 5})
    (whole,) = on_loop(engine.generate(request(sampling=sampling)))
    word = next(word for word in re.findall(r"[a-zA-Z]{2,}", whole.text[1:]))
    (made,) = on_loop(engine.generate(request(sampling=sampling, stop=(word,))))
    assert (made.finish_reason, made.stop_reason) == ("stop", word)
    assert made.text == whole.text[: whole.text.index(word)]
    assert made.token_ids == whole.token_ids[: len(made.token_ids)]
    (kept,) = on_loop(engine.generate(request(sampling=sampling, stop=(word,), include_stop=True)))
    assert kept.text == made.text + word
    (late,) = on_loop(engine.generate(request(sampling=sampling, stop=(word,), min_tokens=40)))
    assert late.finish_reason == "length"


def test_a_stop_token_is_in_the_tokens_and_not_in_the_text(engine, on_loop):
    (whole,) = on_loop(engine.generate(request(sampling=DRAWN)))
    token = whole.token_ids[5]
    (made,) = on_loop(engine.generate(request(sampling=DRAWN, stop_token_ids=(token,))))
    assert made.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    assert (made.finish_reason, made.stop_reason) == ("stop", token)
    assert len(made.text) < len(whole.text)


STRUCTURES = {
    "json_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "regex": r"\d{3}-\d{2}",
    "choice": ["yes", "no"],
    "grammar": 'root ::= "left" | "right"',
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_text_follows_its_structure(engine, on_loop, kind):
    sampling = Sampling(seed=3, max_tokens=60, structured={kind: STRUCTURES[kind]})
    (made,) = on_loop(engine.generate(request(sampling=sampling)))
    if kind == "json_schema":
        assert set(json.loads(made.text)) == {"a", "b"}
    elif kind == "regex":
        assert re.fullmatch(STRUCTURES["regex"], made.text)
    else:
        assert made.text in ("yes", "no", "left", "right")
    assert made.finish_reason == "stop"
    assert made.stop_reason == made.token_ids[-1] == tiny_end(), "the model's own end token, which has no text"
    assert made.full_logprobs is None


def tiny_end() -> int:
    found = json.loads((tiny().folder / "generation_config.json").read_text())["eos_token_id"]
    return found if isinstance(found, int) else found[0]


def test_a_structure_that_cannot_be_is_refused(engine, on_loop):
    with pytest.raises(PromptError, match="refuses") as caught:
        on_loop(engine.generate(request(sampling=Sampling(structured={"grammar": "root ::= ("}))))
    assert caught.value.rule


def test_a_stream_adds_up_to_the_completion(engine, on_loop):
    sampling = DRAWN.model_copy(update={"n": 2, "stop": ("zq",)})

    async def collect():
        return [delta async for delta in engine.stream(request(sampling=sampling))]

    deltas = on_loop(collect())
    whole = on_loop(engine.generate(request(sampling=sampling)))
    for index in range(2):
        mine = [delta for delta in deltas if delta.index == index]
        assert len(mine) > 3
        assert [delta.completion is not None for delta in mine] == [False] * (len(mine) - 1) + [True]
        last = mine[-1].completion
        for name in ("token_ids", "logprobs", "text", "finish_reason", "versions", "index"):
            assert getattr(last, name) == getattr(whole[index], name), name
        assert tuple(token for delta in mine for token in delta.token_ids) == last.token_ids
        assert tuple(number for delta in mine for number in delta.logprobs) == last.logprobs
        assert "".join(delta.text for delta in mine) == last.text
        assert {delta.version for delta in mine} == {engine.version}


def test_cancelling_and_closing_end_the_work(engine, on_loop):
    async def body():
        before = engine.stats()
        task = asyncio.ensure_future(engine.generate(request(max_tokens=400)))
        stream = engine.stream(request(max_tokens=400, temperature=1.0, n=2))
        await anext(stream)
        assert engine.stats().num_running + engine.stats().num_waiting == 3
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stream.aclose()
        await engine.generate(request())  # after what was sent before
        after = engine.stats()
        assert (after.num_running, after.num_waiting) == (0, 0)
        assert after.num_aborted - before.num_aborted == 3
        assert after.num_tokens - before.num_tokens < 400
        assert engine._llm.get_num_unfinished_requests() == 0

    on_loop(body())


def test_the_queue_is_bounded(engine, on_loop):
    async def body():
        with pytest.raises(ConfigError) as caught:
            await engine.generate(request(temperature=1.0, n=17))
        assert (caught.value.path, caught.value.value) == ("sampling.n", 17)
        assert "max_batch 8 and max_queue 8" in caught.value.rule
        full = asyncio.ensure_future(engine.generate(request(temperature=1.0, n=16)))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await engine.generate(request())
        assert len(await full) == 16
        assert len(await engine.generate(request())) == 1

    on_loop(body())


def test_scores_are_those_of_transformers(engine, on_loop):
    scores = on_loop(engine.score([PROMPT, PROMPT[:1], PROMPT[5:]]))
    assert scores[1] == [0.0]
    for ids, found in ((PROMPT, scores[0]), (PROMPT[5:], scores[2])):
        assert found[0] == 0.0
        near(found[1:], token_logprobs(0, ids[:1], ids[1:]))


def test_scores_that_cannot_be_had_are_refused(engine, on_loop):
    with pytest.raises(OptionError, match="temperature"):
        on_loop(engine.score([PROMPT], temperature=0.5))
    for ids in ([], [1] * (engine.max_seq_len + 1)):
        with pytest.raises(PromptError) as caught:
            on_loop(engine.score([ids]))
        assert str(engine.max_seq_len) in caught.value.rule


@pytest.mark.parametrize("ids", [(), (1,) * 512, (511, 512)], ids=["empty", "too long", "no such token"])
def test_prompts_that_cannot_be_served_are_refused(engine, on_loop, ids):
    with pytest.raises(PromptError) as caught:
        on_loop(engine.generate(request(ids)))
    assert caught.value.rule
    assert caught.value.repair
    assert len(on_loop(engine.generate(request()))) == 1


def test_prompts_that_begin_alike_share_the_beginning(engine, on_loop):
    long = [(11 * place) % 450 + 20 for place in range(200)]
    before = engine.stats().num_shared_tokens
    (first,), (second,) = [on_loop(engine.generate(request(long))) for _ in range(2)]
    assert (first.num_shared, second.num_shared) == (0, 128)
    assert second.token_ids == first.token_ids
    assert engine.stats().num_shared_tokens - before == 128


def test_a_turn_finds_what_the_turns_before_it_computed(engine, on_loop):
    """Completions too: the first prompt is shorter than one of vLLM's blocks of 128 tokens."""
    history = [(13 * place) % 450 + 20 for place in range(60)]
    before = engine.stats()
    turns = []
    for number in range(4):
        (turn,) = on_loop(engine.generate(request(history, DRAWN, seed=number, max_tokens=70)))
        near(turn.logprobs, token_logprobs(0, history, turn.token_ids, temperature=0.7))
        turns.append(turn)
        history = [*history, *turn.token_ids, *((17 * place + number) % 450 + 20 for place in range(30))]
    assert [turn.num_shared for turn in turns] == [0, 128, 128, 256]
    after = engine.stats()
    num_prompt, num_shared = sum(len(turn.prompt_ids) for turn in turns), sum(turn.num_shared for turn in turns)
    assert after.num_prompt_tokens - before.num_prompt_tokens == num_prompt
    assert after.num_shared_tokens - before.num_shared_tokens == num_shared
    assert after.num_prefill_tokens - before.num_prefill_tokens == num_prompt - num_shared


def test_requests_wait_while_it_sleeps(engine, on_loop):
    async def body():
        stream = engine.stream(request(max_tokens=100))
        await anext(stream)
        await engine.sleep()
        await engine.sleep()
        assert engine.stats().is_asleep
        late = asyncio.ensure_future(engine.generate(request()))
        await engine._llm.collective_rpc("forge_facts")  # the engine has seen the request, and answers
        num_tokens = engine.stats().num_tokens
        await engine._llm.collective_rpc("forge_facts")
        assert engine.stats().num_tokens == num_tokens
        assert not late.done()
        await engine.wake()
        assert not engine.stats().is_asleep
        assert list((await late)[0].token_ids) == greedy(0, PROMPT, 12)
        rest = [delta async for delta in stream]
        assert rest[-1].completion.token_ids == tuple(greedy(0, PROMPT, 100))

    on_loop(body())


def test_threads_do_not_spin_and_nothing_is_sent_home(engine):
    """Without these, two engines on two cores were ten times slower, and the first logprobs took 7 to 22 s."""
    (worker,) = engine.workers
    expected = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "FORGE_VLLM_OWNER": str(os.getpid()),
    }
    assert expected.items() <= worker["environment"].items()
    assert worker["num_threads"] == int(worker["environment"]["OMP_NUM_THREADS"])
    assert not [name for name in os.environ if name.startswith(("VLLM_", "FORGE_VLLM", "FORGE_RENDEZVOUS"))]


@pytest.mark.parametrize(
    ("arguments", "path", "said"),
    [
        ({"gpu_memory_utilisation": 0.5}, "gpu_memory_utilisation", "gpu_memory_utilization"),
        ({"enforce_eager": "maybe"}, "enforce_eager", "boolean"),
        ({"kv_cache_dtype": "fp7"}, "kv_cache_dtype", "fp8"),
        ({"block_size": -3}, "block_size", "greater than 0"),
        ({"speculative_config": {"method": "nonsense"}}, "speculative_config", "ngram"),
        ({"compilation_config": {"nonsense": 1}}, "compilation_config", "nonsense"),
    ],
)
def test_arguments_are_checked_before_anything_starts(on_loop, arguments, path, said):
    with pytest.raises(ConfigError) as caught:
        on_loop(make_engine(config(engine_args=arguments)).start())
    assert caught.value.path == f"generator.engine_args.{path}"
    assert said in str(caught.value)
    assert caught.value.repair


def test_a_build_for_the_cpu_refuses_gpus(on_loop):
    with pytest.raises(ConfigError) as caught:
        on_loop(make_engine(config(with_gpus=True)).start())
    assert caught.value.path == "generator.with_gpus"


def test_neighbouring_seeds_share_no_completion(engine, on_loop):
    async def work():
        return [await engine.generate(request(PROMPT, DRAWN, seed=seed, n=2)) for seed in (7, 8)]

    first, second = on_loop(work())
    assert len({completion.token_ids for completion in first + second}) == 4
