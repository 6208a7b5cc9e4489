"""What agents of other projects ask an endpoint for: choices of tools, streams with calls, the Responses protocol."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from endpoint_clients import CALL, TOOLS, client_of, program_of, run
from forge.envs.episode import episode, run_episode
from forge.envs.trace import rows_of
from scripted_policy import END, ScriptedPolicy, state_of

USER = {"role": "user", "content": "How many?"}
NAMED = {"type": "function", "function": {"name": "double"}}
FLAT_TOOLS = [{"type": "function", **TOOLS[0]["function"], "strict": True}]
TWO_CALLS = f"Well. {CALL % 2}\n{CALL % 3}{END}"


async def ask(client, messages, **options):
    return await client.chat.completions.create(model="any", messages=messages, **options)


# ---- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_cannot_be_forced_unless_the_program_says_to_ignore_it(thinking, choice):
    async def refused(client, endpoint):
        with pytest.raises(openai.BadRequestError, match=r"ignore=\['tool_choice'\]") as caught:
            await ask(client, [USER], tools=TOOLS, tool_choice=choice)
        assert (caught.value.param, caught.value.code) == ("tool_choice", "unsupported_value")
        assert "cannot be forced" in endpoint.last_refusal
        return 1.0

    async def ignored(client, endpoint):
        found = await ask(client, [USER], tools=TOOLS, tool_choice=choice)
        return float(found.choices[0].message.tool_calls is None)

    assert run(program_of(refused), ScriptedPolicy(thinking, [])).turns == ()
    policy = ScriptedPolicy(thinking, [f"No call.{END}"])
    assert run(program_of(ignored, ignore=["tool_choice"]), policy).score.reward == 1.0
    assert "double" in thinking.decode(policy.prompts[0]), "the tools are offered all the same"


@pytest.mark.parametrize("choice", [{**NAMED, "function": {"name": "triple"}}, "any", {"type": "allowed_tools"}, 3])
def test_choices_that_do_not_exist_are_refused_even_where_they_are_ignored(thinking, choice):
    async def talk(client, endpoint):
        with pytest.raises(openai.BadRequestError, match="name one of `tools`"):
            await ask(client, [USER], tools=TOOLS, extra_body={"tool_choice": choice})
        return 1.0

    run(program_of(talk, ignore=["tool_choice"]), ScriptedPolicy(thinking, []))


def test_without_a_choice_of_tools_none_are_offered(thinking):
    async def talk(client, endpoint):
        found = await ask(client, [USER], tools=TOOLS, tool_choice="none")
        return float(found.choices[0].message.tool_calls is None)

    policy = ScriptedPolicy(thinking, [CALL % 2 + END])
    assert run(program_of(talk), policy).score.reward == 1.0
    assert "double" not in thinking.decode(policy.prompts[0])


def test_one_call_at_a_time_is_the_first_and_the_history_is_as_sampled(thinking):
    async def talk(client, endpoint):
        first = await ask(client, [USER], tools=TOOLS, parallel_tool_calls=False)
        message = first.choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"x": 2}
        assert first.choices[0].finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
        history = [USER, message.model_dump(exclude_none=True), result]
        second = await ask(client, history, tools=TOOLS, parallel_tool_calls=False)
        return float(second.choices[0].message.content == "Four.")

    policy = ScriptedPolicy(thinking, [TWO_CALLS, f"Four.{END}"])
    done = run(program_of(talk), policy)
    (row,) = rows_of(done.turns)
    assert row.token_ids == policy.prompts[1] + done.turns[1].token_ids
    assert (
        thinking.decode(policy.prompts[1]).count("<tool_call>")
        - thinking.decode(policy.prompts[0]).count("<tool_call>")
        == 2
    ), "what was sampled stays in the context"
    assert len(done.turns[0].calls) == 2
    assert dict(done.counts.tool_errors) == {"parallel_call": 1}


def test_several_calls_are_delivered_unless_one_is_asked_for(thinking):
    async def talk(client, endpoint):
        found = await ask(client, [USER], tools=TOOLS, parallel_tool_calls=True)
        return float(len(found.choices[0].message.tool_calls))

    done = run(program_of(talk), ScriptedPolicy(thinking, [TWO_CALLS]))
    assert done.score.reward == 2.0
    assert done.counts.tool_errors.total() == 0


def test_the_stream_helper_of_the_official_client_puts_calls_together(thinking):
    async def talk(client, endpoint):
        asked = {"model": "any", "messages": [USER], "tools": TOOLS, "stream_options": {"include_usage": True}}
        async with client.chat.completions.stream(**asked) as stream:
            seen = [event.type async for event in stream]
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"x": 2}, {"x": 3}]
        assert (message.content.strip(), final.choices[0].finish_reason) == ("Well.", "tool_calls")
        assert final.usage.completion_tokens == len(endpoint.turns[0])
        assert {"content.delta", "tool_calls.function.arguments.delta"} <= set(seen)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "6"} for call in message.tool_calls]
        history = [USER, message.model_dump(exclude_none=True, exclude={"parsed"}), *results]
        for call in history[1]["tool_calls"]:
            call["function"].pop("parsed_arguments", None)
        stream = await ask(client, history, tools=TOOLS, stream=True)
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return float("".join(texts) == "Six.")

    policy = ScriptedPolicy(thinking, [TWO_CALLS, f"Six.{END}"])
    done = run(program_of(talk), policy)
    assert done.score.reward == 1.0
    (row,) = rows_of(done.turns)
    assert row.token_ids == policy.prompts[1] + done.turns[1].token_ids


def test_formats_can_be_ignored(thinking):
    async def talk(client, endpoint):
        await ask(client, [USER], response_format={"type": "json_object"})
        await client.responses.create(model="m", input="?", text={"format": {"type": "json_object"}})
        return 1.0

    policy = ScriptedPolicy(thinking, [f"a{END}", f"b{END}"])
    run(program_of(talk, ignore=["response_format"]), policy)
    assert [options.get("structured") for options in policy.options] == [None, None]


# ---- the Responses protocol ------------------------------------------------------------------------------------------


def test_responses_are_branches_with_exact_tokens(thinking):
    async def talk(client, endpoint):
        given = [{"role": "user", "content": [{"type": "input_text", "text": "How many?"}]}]
        asked = {"model": "m", "instructions": "Be brief.", "tools": FLAT_TOOLS, "max_output_tokens": 200}
        first = await client.responses.create(input=given, **asked)
        assert (first.status, first.output_text.strip(), first.model) == ("completed", "Well.", "m")
        calls = [item for item in first.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"x": 2}, {"x": 3}]
        given += [item.model_dump(exclude_none=True) for item in first.output]
        given += [{"type": "function_call_output", "call_id": call.call_id, "output": "6"} for call in calls]
        second = await client.responses.create(input=given, **asked)
        assert second.usage.input_tokens == len(policy.prompts[1])
        assert second.usage.output_tokens == len(endpoint.turn(second.id))
        given += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "Sure?"}]
        third = await client.responses.create(input=given, **asked, temperature=1.0, store=False)
        return float(third.output_text == "Yes.")

    policy = ScriptedPolicy(thinking, [TWO_CALLS, f"Six.{END}", f"Yes.{END}"])
    done = run(program_of(talk), policy, sampling={"temperature": 1.0, "max_tokens": 256})
    assert done.score.reward == 1.0
    (row,) = rows_of(done.turns)
    assert row.token_ids == policy.prompts[2] + done.turns[2].token_ids
    assert [options["max_tokens"] for options in policy.options] == [200] * 3
    assert "Be brief." in thinking.decode(policy.prompts[0])
    assert [turn.prefix_break for turn in done.turns] == [None] * 3


def test_both_protocols_continue_the_same_conversation(thinking):
    async def talk(client, endpoint):
        first = await client.responses.create(model="m", input="How many?")
        said = {"role": "assistant", "content": first.output_text}
        second = await ask(client, [USER, said, {"role": "user", "content": "More."}])
        return float(second.choices[0].message.content == "Two.")

    policy = ScriptedPolicy(thinking, [f"One.{END}", f"Two.{END}"])
    (row,) = rows_of(run(program_of(talk), policy).turns)
    assert row.token_ids[: len(policy.prompts[1])] == policy.prompts[1]


def test_responses_are_streamed(thinking):
    async def talk(client, endpoint):
        async with client.responses.stream(model="m", input="How many?", tools=FLAT_TOOLS) as stream:
            seen = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
        assert [item.arguments for item in final.output[1:]] == ['{"x": 2}', '{"x": 3}']
        assert (seen[0], seen[-1]) == ("response.created", "response.completed")
        events = await client.responses.create(model="m", input="Again?", stream=True)
        numbers = [event.sequence_number async for event in events]
        return float(numbers == list(range(len(numbers))))

    assert run(program_of(talk), ScriptedPolicy(thinking, [TWO_CALLS, f"No.{END}"])).score.reward == 1.0


def test_a_response_that_is_cut_off_says_so(thinking):
    async def talk(client, endpoint):
        found = await client.responses.create(model="m", input="How many?", max_output_tokens=2)
        assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="m", input="x " * 100_000)
        return 1.0

    policy = ScriptedPolicy(thinking, lambda _: f"One two three four.{END}", max_seq_len=1000)
    run(program_of(talk), policy)


BAD_RESPONSES = {
    "previous_response_id": ({"previous_response_id": "resp_1"}, "whole conversation"),
    "background": ({"background": True}, "may only be false or null"),
    "truncation": ({"truncation": "auto"}, "disabled"),
    "tools[0]": ({"tools": [{"type": "web_search"}]}, "no other tools"),
    "input[0].type": ({"input": [{"type": "reasoning", "summary": []}]}, "reasoning"),
    "input[1].content": (
        {"input": [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "input_image"}]}]},
        "input_text",
    ),
    "input[0].call_id": ({"input": [{"type": "function_call_output", "output": "x"}]}, "must be text"),
    "input": ({"input": []}, "list of items"),
    "text.format": ({"text": {"format": {"type": "json_object"}}}, "ignore="),
    "text.colour": ({"text": {"colour": "red"}}, "Unknown parameter"),
    "reasoning.efort": ({"reasoning": {"efort": "low"}}, "reasoning.effort"),
    "include": ({"include": ["message.output_text.logprobs"]}, "not available"),
    "messages": ({"messages": []}, "Unknown parameter"),
    "instrctions": ({"instrctions": "x"}, "instructions"),
    "temperature": ({"temperature": 0.1}, "this run samples with"),
    "tool_choice": ({"tools": FLAT_TOOLS, "tool_choice": "required"}, "cannot be forced"),
}


@pytest.mark.parametrize("param", BAD_RESPONSES)
def test_what_a_response_cannot_be_is_named(thinking, param):
    change, words = BAD_RESPONSES[param]

    async def talk(client, endpoint):
        body = {"model": "m", "input": "How many?", **change}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/responses", body=body, cast_to=object)
        assert caught.value.param == param
        assert words in caught.value.message
        return 1.0

    assert run(program_of(talk), ScriptedPolicy(thinking, [])).turns == ()


# ---- many agents -----------------------------------------------------------------------------------------------------


def test_two_hundred_agents_on_one_port_never_meet(thinking):
    """Each has three turns at the same time as all others, with either protocol, and only ever sees its own."""
    num_agents, num_turns = 200, 3
    ports = set()

    def program(number):
        @episode
        async def talk(task, agent):
            async with agent.endpoint() as endpoint, client_of(endpoint) as client:
                ports.add(endpoint.base_url)
                given = [{"role": "user", "content": f"I am {number}."}]
                for turn in range(num_turns):
                    if number % 2:
                        text = (await ask(client, given)).choices[0].message.content
                    else:
                        text = (await client.responses.create(model="m", input=given)).output_text
                    assert text == f"You are {number}, {turn}."
                    given += [{"role": "assistant", "content": text}, {"role": "user", "content": "Again?"}]
                return 1.0

        return talk

    def answer(text):
        number = text.partition("I am ")[2].partition(".")[0]
        return f"You are {number}, {text.count('Again?')}.{END}"

    policies = [ScriptedPolicy(thinking, answer) for _ in range(num_agents)]

    async def main():
        states = [state_of(policy) for policy in policies]
        async with asyncio.timeout(500):
            return await asyncio.gather(*(run_episode(program(number), state) for number, state in enumerate(states)))

    for done, policy in zip(asyncio.run(main()), policies, strict=True):
        assert (done.score.reward, done.counts.num_turns, done.counts.num_undelivered) == (1.0, num_turns, 0)
        (row,) = rows_of(done.turns)
        assert row.token_ids == policy.prompts[-1] + done.turns[-1].token_ids
    assert len(ports) == 1
