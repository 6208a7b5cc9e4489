"""An episode's endpoint: OpenAI's own client as the agent."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from endpoint_clients import CALL, TOOLS, program_of, run
from forge.envs.journal import Journal
from forge.envs.limits import EpisodeLimits, Fault
from forge.envs.trace import rows_of
from forge.errors import OptionError
from scripted_policy import END, ScriptedPolicy

USER = {"role": "user", "content": "How many?"}
MORE = {"role": "user", "content": "More."}
THOUGHT = "<think>\nhm\n</think>\n\n"


async def ask(client, messages, **options):
    return await client.chat.completions.create(model="any", messages=messages, **options)


def test_a_conversation_is_one_branch_with_exact_tokens(thinking):
    async def talk(client, endpoint):
        first = await ask(client, [USER])
        assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("One.", "stop")
        said = {"role": "assistant", "content": [{"type": "text", "text": "One."}]}
        second = await ask(client, [USER, said, MORE], logprobs=True)
        assert second.model == "any"
        assert second.usage.prompt_tokens == len(policy.prompts[1])
        assert [each.logprob for each in second.choices[0].logprobs.content] == list(endpoint.turns[1].logprobs)
        assert endpoint.turn(second.id).text == "Two."
        return 0.5

    policy = ScriptedPolicy(thinking, [f"One.{END}", f"Two.{END}"])
    done = run(program_of(talk), policy)
    (row,) = rows_of(done.turns)
    assert row.token_ids == policy.prompts[1] + done.turns[1].token_ids
    assert [turn.prefix_break for turn in done.turns] == [None, None]
    assert [turn.path for turn in done.turns] == [(0, 0), (0, 0)]
    assert done.turns[1].messages == (MORE,)
    assert len(set(policy.sessions)) == 1
    assert (done.score.reward, done.counts.num_turns, done.counts.num_undelivered) == (0.5, 2, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_come_back_as_the_text_that_was_sampled(thinking, stream):
    # Written as no template would write it: sent back as tool_calls, it must not be rendered again.
    sampled = 'Let me see. <tool_call>{"arguments":{"x":2},   "name":"double"}</tool_call>' + END

    async def talk(client, endpoint):
        messages = [USER]
        if stream:
            async with client.chat.completions.stream(model="any", messages=messages, tools=TOOLS) as events:
                final = await events.get_final_completion()
            answer = final.choices[0]
        else:
            answer = (await ask(client, messages, tools=TOOLS)).choices[0]
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", "Let me see.")
        (call,) = answer.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("double", {"x": 2})
        sent_back = answer.message.model_dump(exclude={"parsed"})
        messages += [sent_back, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
        assert (await ask(client, messages, tools=TOOLS)).choices[0].message.content == "It is 4."
        return 1.0

    policy = ScriptedPolicy(thinking, [sampled, f"It is 4.{END}"])
    done = run(program_of(talk), policy)
    (row,) = rows_of(done.turns)
    assert row.token_ids == policy.prompts[1] + done.turns[1].token_ids
    assert sampled in thinking.decode(policy.prompts[1])
    assert "Tools: " in thinking.decode(policy.prompts[0])
    assert [len(turn.calls) for turn in done.turns] == [1, 0]
    assert (done.counts.num_tool_calls, done.counts.prefix_breaks) == (1, {})


def test_answers_in_an_edited_history_are_as_they_were_sampled(thinking):
    sampled = 'See. <tool_call>{"arguments":{"x":2},   "name":"double"}</tool_call>'

    async def talk(client, endpoint):
        answer = (await ask(client, [USER], tools=TOOLS)).choices[0].message
        result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "4"}
        await ask(client, [MORE, answer.model_dump(), result], tools=TOOLS)  # another question before the answer
        return 1.0

    policy = ScriptedPolicy(thinking, lambda text: f"{sampled}{END}")
    done = run(program_of(talk), policy)
    assert [turn.prefix_break for turn in done.turns] == [None, "client_edit"]
    assert f"More.<|im_end|>\n<|im_start|>assistant\n{sampled}{END}" in thinking.decode(policy.prompts[1])


def test_streams_have_text_calls_usage_and_an_end(thinking):
    async def talk(client, endpoint):
        stream = await ask(client, [USER], tools=TOOLS, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == "Both."
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert [(call.index, call.function.name) for call in calls] == [(0, "double"), (1, "double")]
        assert chunks[-2].choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage.completion_tokens == len(endpoint.turns[0])
        return 1.0

    run(program_of(talk), ScriptedPolicy(thinking, [f"Both. {CALL % 1}{CALL % 2}{END}"]))


def test_a_malformed_call_stays_text(thinking):
    async def talk(client, endpoint):
        answer = (await ask(client, [USER], tools=TOOLS)).choices[0]
        assert (answer.message.content, answer.finish_reason) == ("<tool_call>{</tool_call>", "stop")
        assert endpoint.turns[0].calls[0].reason
        return 0.0

    run(program_of(talk), ScriptedPolicy(thinking, [f"<tool_call>{{</tool_call>{END}"]))


def test_prefix_breaks_are_classified(thinking):
    async def talk(client, endpoint):
        async def answer(*messages, **options):
            found = await ask(client, list(messages), **options)
            return {"role": "assistant", "content": found.choices[0].message.content}

        first = await answer(USER)
        second = await answer(USER, first, MORE)  # the template strips the reasoning of the first
        edited = {"role": "assistant", "content": "Something else."}
        await answer(USER, edited, MORE)  # the client replaced the answer
        await answer(USER, first, MORE, edited, MORE)  # and here the second, after the first
        await answer(MORE, second, USER)  # the client dropped the start
        await answer(USER, first, MORE, second, MORE, tools=TOOLS)  # other tools
        await answer({"role": "user", "content": "New"}, edited, MORE)  # its own conversation
        return 1.0

    answers = iter([f"{THOUGHT}One.{END}", *(f"Answer {number}.{END}" for number in range(6))])
    policy = ScriptedPolicy(thinking, lambda text: next(answers))
    done = run(program_of(talk), policy)
    by_prompt = {
        turn.context_ids if turn.parent is None else policy_prompt(done.turns, turn): turn for turn in done.turns
    }
    turns = [by_prompt[prompt] for prompt in policy.prompts]
    breaks = [None, "template", "client_edit", "client_edit", "client_edit", "client_edit", None]
    assert [turn.prefix_break for turn in turns] == breaks
    assert turns[1].previous == turns[2].previous == turns[0].index
    assert turns[3].previous == turns[1].index
    assert turns[4].previous == turns[5].previous == turns[1].index
    assert turns[6].previous is None
    assert done.counts.prefix_breaks == {"template": 1, "client_edit": 4}
    assert len({turn.path for turn in turns}) == 5
    assert all(turn.parent is None for turn in turns if turn.prefix_break == "template")


def policy_prompt(turns, turn):
    path = []
    index = turn.index
    while index is not None:
        path.append(turns[index])
        index = turns[index].parent
    tokens = [token for each in path[::-1] for token in (*each.context_ids, *each.token_ids)]
    return tuple(tokens[: len(tokens) - len(turn)])


def test_white_space_that_a_client_trims_is_no_edit(thinking):
    async def talk(client, endpoint):
        first = (await ask(client, [USER])).choices[0].message.content
        assert first == "  One.\n"
        await ask(client, [USER, {"role": "assistant", "content": first.strip()}, MORE])
        return 1.0

    policy = ScriptedPolicy(thinking, [f"  One.\n{END}", f"Two.{END}"])
    done = run(program_of(talk), policy)
    assert done.turns[1].parent == 0
    assert (
        policy.prompts[1][: len(policy.prompts[0]) + len(done.turns[0])] == policy.prompts[0] + done.turns[0].token_ids
    )


def test_a_fork_from_the_middle_of_a_long_conversation_is_exact(thinking):
    asked = []

    async def talk(client, endpoint):
        messages = []
        for number in range(6):
            messages.append({"role": "user", "content": f"Turn {number}"})
            asked.append(list(messages))
            messages.append({"role": "assistant", "content": (await ask(client, messages)).choices[0].message.content})
        for start in asked[1:6:2]:
            asked.append([*start[:-1], MORE])
            await ask(client, asked[-1])
        return 1.0

    policy = ScriptedPolicy(thinking, lambda text: f"{len(text)} is it.{END}")
    done = run(program_of(talk), policy)
    prompts = {policy_prompt(done.turns, turn) for turn in done.turns}
    assert prompts == set(policy.prompts)
    assert [thinking.decode(prompt) for prompt in policy.prompts] == [thinking.render_prompt(each) for each in asked]
    assert [turn.prefix_break for turn in done.turns] == [None] * 9
    assert sum(turn.parent is None for turn in done.turns) == 1


def test_branches_of_one_answer_share_its_tokens(thinking):
    async def talk(client, endpoint):
        first = (await ask(client, [USER])).choices[0].message.content
        start = [USER, {"role": "assistant", "content": first}]
        await asyncio.gather(*(ask(client, [*start, {"role": "user", "content": f"B{n}"}]) for n in range(3)))
        return 1.0

    policy = ScriptedPolicy(thinking, lambda text: f"Yes.{END}")
    done = run(program_of(talk), policy)
    rows = rows_of(done.turns)
    assert sorted(row.token_ids for row in rows) == sorted(
        prompt + done.turns[0].token_ids for prompt in policy.prompts[1:]
    )
    assert sum(sum(row.counted) for row in rows) == 4
    assert {turn.path for turn in done.turns} == {(0, 0), (0, 0, 0), (0, 0, 1)}


class SeededPolicy(ScriptedPolicy):
    """Answers with its seed."""

    async def sample(self, token_ids, *, options, session):
        self.answers = lambda text: f"{options['seed'] % 1000}.{END}"
        return await super().sample(token_ids, options=options, session=session)


def test_nothing_depends_on_the_order_in_which_requests_arrive(thinking):
    def sampled(order):
        async def talk(client, endpoint):
            async def converse(name):
                for _ in range(order[name]):
                    await asyncio.sleep(0)
                text = {"role": "user", "content": name}
                said, _ = await asyncio.gather(
                    ask(client, [text]), ask(client, [USER])
                )  # the second is always the same
                start = [text, {"role": "assistant", "content": said.choices[0].message.content}]
                await asyncio.gather(*(ask(client, [*start, {"role": "user", "content": c}]) for c in "xy"))

            await asyncio.gather(*map(converse, order))
            return 1.0

        done = run(program_of(talk), SeededPolicy(thinking, []))
        return [(turn.path, turn.index, turn.parent, turn.seed, turn.token_ids) for turn in done.turns]

    names = ["a", "b", "c"]
    expected = sampled(dict.fromkeys(names, 0))
    assert sampled({name: 7 * number for number, name in enumerate(names)}) == expected
    assert sampled({name: 7 * (3 - number) for number, name in enumerate(names)}) == expected
    assert len({seed for _, _, _, seed, _ in expected}) == 12


# ---- What clients may ask for ----------------------------------------------------------------------------------------


def test_max_tokens_and_stop_are_honoured_within_the_run(thinking):
    async def talk(client, endpoint):
        await ask(client, [USER], max_tokens=3, stop="\n")
        await ask(client, [USER], max_completion_tokens=10_000, temperature=1.0, top_p=1.0, n=1)
        return 1.0

    policy = ScriptedPolicy(thinking, lambda text: f"One two three four five six.{END}")
    done = run(program_of(talk), policy, sampling={"temperature": 1.0, "max_tokens": 256, "stop": ("##",)})
    by_size = sorted(policy.options, key=lambda options: options["max_tokens"])
    assert [options["max_tokens"] for options in by_size] == [3, 256]
    assert by_size[0]["stop"] == ["##", "\n"]
    assert {turn.finish_reason for turn in done.turns} == {"length", "stop"}


REFUSED = {
    "temperature": 0.0,
    "top_p": 0.9,
    "seed": 1,
    "n": 2,
    "presence_penalty": 1.0,
    "response_format": {"type": "json_object"},
    "top_logprobs": 3,
    "logit_bias": {"5": 1},
    "tool_choice": "required",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_what_is_trained_is_refused(thinking, name):
    async def talk(client, endpoint):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, [USER], tools=TOOLS, extra_body={name: REFUSED[name]})
        assert caught.value.param == name
        assert f"'{name}'" in caught.value.message
        return 1.0

    policy = ScriptedPolicy(thinking, [])
    assert run(program_of(talk), policy).turns == ()
    assert policy.prompts == []


def test_unknown_parameters_are_refused_and_the_nearest_name_is_given(thinking):
    async def talk(client, endpoint):
        with pytest.raises(openai.BadRequestError, match=r"Unknown parameter: 'temprature'.*temperature"):
            await ask(client, [USER], extra_body={"temprature": 1.0})
        return 1.0

    run(program_of(talk), ScriptedPolicy(thinking, []))


def test_the_program_may_allow_or_ignore_parameters(thinking):
    async def talk(client, endpoint):
        await ask(client, [USER], temperature=0.25, top_p=0.5, seed=3)
        with pytest.raises(openai.BadRequestError, match="min_p"):
            await ask(client, [USER], extra_body={"min_p": 0.5})
        return 1.0

    policy = ScriptedPolicy(thinking, lambda text: f"Yes.{END}")
    done = run(program_of(talk, allow=["temperature"], ignore=["top_p", "seed"]), policy)
    assert [turn.is_trained for turn in done.turns] == [False]  # the trainer computes at the run's temperature
    (options,) = policy.options
    assert (options["temperature"], options.get("top_p", 1.0)) == (0.25, 1.0)
    assert options["seed"] != 3


@pytest.mark.parametrize("options", [{"allow": ["seed"]}, {"allow": ["nonsense"]}, {"ignore": ["messages"]}])
def test_names_that_cannot_be_allowed_or_ignored_raise(thinking, options):
    async def talk(client, endpoint):
        raise AssertionError("it must not open")

    with pytest.raises(OptionError, match=r"agent\.endpoint"):
        run(program_of(talk, **options), ScriptedPolicy(thinking, []))


def test_tools_that_the_template_leaves_out_are_refused(codec):
    async def talk(client, endpoint):
        with pytest.raises(openai.BadRequestError, match="double"):
            await ask(client, [USER], tools=TOOLS)
        return 1.0

    run(program_of(talk), ScriptedPolicy(codec, []))


# ---- Limits, faults and replays --------------------------------------------------------------------------------------


def test_limits_are_errors_of_the_client_and_outcomes_of_the_episode(thinking):
    async def talk(client, endpoint):
        await ask(client, [USER])
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await ask(client, [MORE])
        assert (caught.value.type, caught.value.code) == ("episode_over", "turn_limit")
        return 0.25

    policy = ScriptedPolicy(thinking, lambda text: f"Yes.{END}")
    done = run(program_of(talk), policy, limits=EpisodeLimits(max_turns=1))
    assert (done.outcome, done.score.reward, len(done.turns)) == ("turn_limit", 0.25, 1)


def test_a_program_that_a_limit_ends_is_scored_by_rule(thinking):
    async def talk(client, endpoint):
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(client, [USER]))
            group.create_task(ask(client, [MORE]))
        raise AssertionError("a limit ends it before")

    policy = ScriptedPolicy(thinking, lambda text: f"Yes.{END}")
    done = run(program_of(talk, limit_reward=-1.0), policy, limits=EpisodeLimits(max_turns=1))
    assert (done.outcome, done.score.reward) == ("turn_limit", -1.0)


def test_a_bug_of_the_program_is_not_taken_for_a_limit(thinking):
    async def talk(client, endpoint):
        await ask(client, [USER])
        with pytest.raises(openai.PermissionDeniedError):
            await ask(client, [MORE])
        raise LookupError("a bug")

    policy = ScriptedPolicy(thinking, lambda text: f"Yes.{END}")
    with pytest.raises(LookupError, match="a bug"):
        run(program_of(talk), policy, limits=EpisodeLimits(max_turns=1))


def test_a_full_context_can_be_shortened_by_the_client(thinking):
    async def talk(client, endpoint):
        for size in (2_000, 10_000_000 // 8):  # too many tokens, and more characters than need be tokenised
            with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
                await ask(client, [{"role": "user", "content": "a b " * size}])
            assert caught.value.code == "context_full"
        await ask(client, [USER])
        return 1.0

    class Codec:
        def __getattr__(self, name):
            return getattr(thinking, name)

        def encode_rendered(self, text):
            assert len(text) < 128_000
            return thinking.encode_rendered(text)

    policy = ScriptedPolicy(thinking, lambda text: f"Yes.{END}", max_seq_len=1_000)
    done = run(program_of(talk), policy, codec=Codec())
    assert (done.outcome, len(done.turns)) == ("finished", 1)


def test_tool_results_are_counted_and_cut(thinking):
    async def talk(client, endpoint):
        messages = [USER]
        for _ in range(3):
            answer = (await ask(client, messages, tools=TOOLS)).choices[0].message
            results = [{"role": "tool", "tool_call_id": call.id, "content": "ab " * 500} for call in answer.tool_calls]
            messages += [answer.model_dump(), *results]

    policy = ScriptedPolicy(thinking, lambda text: f"{CALL % 1}{END}")
    limits = EpisodeLimits(max_tool_calls=1, max_tool_tokens=40)
    done = run(program_of(talk, limit_reward=0.5), policy, limits=limits)
    assert (done.outcome, done.counts.num_tool_calls, len(done.turns)) == ("tool_call_limit", 1, 2)
    assert "its middle is left out" in thinking.decode(policy.prompts[1])
    assert done.turns[1].parent == done.turns[0].index


class FailingPolicy(ScriptedPolicy):
    """Fails for the first requests."""

    num_failures = 1

    async def sample(self, token_ids, *, options, session):
        completion = await super().sample(token_ids, options=options, session=session)
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise Fault("the generator died", kind="generator")
        return completion


def test_a_fault_is_never_scored_even_if_the_program_goes_on(thinking):
    async def talk(client, endpoint):
        with pytest.raises(openai.InternalServerError, match="the generator died"):
            await ask(client, [USER])
        return 0.0

    with pytest.raises(Fault, match="the generator died"):
        run(program_of(talk), FailingPolicy(thinking, lambda text: f"Yes.{END}"))


def test_a_fault_that_a_retry_gets_over_is_none_and_has_the_same_seed(thinking):
    async def talk(client, endpoint):
        await ask(client.with_options(max_retries=1), [USER])
        return 1.0

    policy = FailingPolicy(thinking, lambda text: f"Yes.{END}")
    done = run(program_of(talk), policy)
    assert (done.score.reward, len(done.turns)) == (1.0, 1)
    assert policy.options[0]["seed"] == policy.options[1]["seed"]


def test_a_replay_continues_through_the_endpoint(thinking):
    async def talk(client, endpoint):
        messages = [USER]
        for _ in range(3):
            answer = (await ask(client, messages, tools=TOOLS)).choices[0].message
            messages.append(answer.model_dump())
            (call,) = answer.tool_calls
            messages.append({"role": "tool", "tool_call_id": call.id, "content": call.function.arguments})
        return 1.0

    entries: list = []
    whole = ScriptedPolicy(thinking, lambda text: f"{CALL % len(text)}{END}")
    program = program_of(talk, deterministic=True)
    before = run(program, whole, journal=Journal(write=lambda entry: entries.append(json.loads(json.dumps(entry)))))
    rest = ScriptedPolicy(thinking, lambda text: f"{CALL % len(text)}{END}")
    after = run(program, rest, journal=Journal(entries[:2]))
    assert (after.num_replayed, len(rest.prompts)) == (2, 1)
    assert rest.prompts[0] == whole.prompts[2]
    assert [turn.token_ids for turn in after.turns] == [turn.token_ids for turn in before.turns]
    assert [turn.seed for turn in after.turns] == [turn.seed for turn in before.turns]
