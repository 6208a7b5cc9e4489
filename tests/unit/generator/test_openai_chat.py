"""/v1/chat/completions through OpenAI's own clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest

from forge.config import Sampling
from forge.generator.openai import OpenAIServer
from forge.testing.generators import FakeGenerator, FakeRequest
from openai_serving import client_of, serving

QUESTION = [{"role": "user", "content": "2 + 2?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "é"}}\n</tool_call>'


def answer(request: FakeRequest) -> str:
    asked = request.messages[-1]["content"] if request.messages else ""
    return {"call": f"Let me see.\n{CALL}\n{CALL}", "broken": "<tool_call>{oops</tool_call> so"}.get(
        asked, "It is four."
    )


class Setting:
    """A policy, its server, and a client."""

    def __init__(self, policy: FakeGenerator, server: OpenAIServer, client: openai.OpenAI) -> None:
        self.policy, self.server, self.client = policy, server, client
        self.create = client.chat.completions.create


@pytest.fixture(scope="module")
def shared() -> Iterator[Setting]:
    policy = FakeGenerator(answer, sampling=Sampling(temperature=0.7))
    with serving(policy) as server, client_of(server) as client:
        yield Setting(policy, server, client)


@pytest.fixture
def setting(shared: Setting) -> Setting:
    shared.policy.requests.clear()
    return shared


def test_an_answer(setting: Setting) -> None:
    response = setting.create(model="fake", messages=QUESTION)
    assert response.id.startswith("chatcmpl-")
    assert (response.object, response.model) == ("chat.completion", "fake")
    (choice,) = response.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "It is four.", "stop")
    assert choice.message.tool_calls is None
    assert choice.logprobs is None
    num_read = len("user: 2 + 2?\nassistant: ")
    assert response.usage is not None
    assert response.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": num_read,
        "completion_tokens": 11,
        "total_tokens": num_read + 11,
    }
    assert setting.policy.requests[0].sampling.temperature == 0.7, "the configuration's, where the request is silent"


def test_what_a_request_says_reaches_the_generator(setting: Setting) -> None:
    setting.create(
        model="fake",
        messages=QUESTION,
        temperature=0.2,
        top_p=0.9,
        max_completion_tokens=7,
        seed=5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        stop=["four", "!"],
        user="somebody",
        extra_body={
            "top_k": 9,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [7],
            "include_stop_str_in_output": True,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    (request,) = setting.policy.requests
    assert request.sampling == Sampling(
        temperature=0.2,
        top_p=0.9,
        top_k=9,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        max_tokens=7,
        min_tokens=2,
        stop=("four", "!"),
        stop_token_ids=(7,),
        ignore_eos=True,
        include_stop=True,
        seed=5,
    )
    assert request.template == {"enable_thinking": False}


def test_all_is_what_vllm_calls_minus_one(setting: Setting) -> None:
    setting.create(model="fake", messages=QUESTION, stop="four", extra_body={"top_k": -1})
    assert setting.policy.requests[0].sampling.top_k == 0
    assert setting.policy.requests[0].sampling.stop == ("four",)


def test_several_answers_with_logprobs_and_token_ids(setting: Setting) -> None:
    response = setting.create(
        model="fake", messages=QUESTION, n=2, max_tokens=2, logprobs=True, extra_body={"return_token_ids": True}
    )
    assert [(choice.index, choice.finish_reason) for choice in response.choices] == [(0, "length"), (1, "length")]
    for choice in response.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [token.logprob for token in choice.logprobs.content] == [-0.01, -0.02]
        assert [token.token for token in choice.logprobs.content] == ["token_id:73", "token_id:116"]
        assert choice.token_ids == [ord("I"), ord("t")]
        assert choice.weight_versions == [{"version": -1, "start": 0, "end": 2}]
    assert response.prompt_token_ids == list(map(ord, "user: 2 + 2?\nassistant: "))
    assert response.usage is not None
    assert response.usage.completion_tokens == 4
    assert response.usage.prompt_tokens == len(response.prompt_token_ids), "the prompt is read once"


def test_a_stream(setting: Setting) -> None:
    stream = setting.create(
        model="fake",
        messages=QUESTION,
        n=2,
        stream=True,
        logprobs=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    *chunks, last = list(stream)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 22
    assert {chunk.id for chunk in chunks} == {last.id}
    assert all(chunk.usage is None for chunk in chunks)
    for index in range(2):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == "It is four."
        assert [choice.finish_reason for choice in choices] == [*[None] * (len(choices) - 1), "stop"]
        logprobs = [token.logprob for choice in choices if choice.logprobs for token in choice.logprobs.content or ()]
        assert logprobs == [-(number + 1) / 100 for number in range(11)]
        ids = [token for choice in choices for token in getattr(choice, "token_ids", None) or ()]
        assert ids == list(map(ord, "It is four."))
        assert choices[-1].weight_versions == [{"version": -1, "start": 0, "end": 11}]


def test_a_stream_without_extras_is_plain(setting: Setting) -> None:
    chunks = list(setting.create(model="fake", messages=QUESTION, stream=True))
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "It", " is", " four.", None]
    assert all("usage" not in chunk.model_dump(exclude_unset=True) for chunk in chunks)


def test_the_async_client(setting: Setting) -> None:
    async def talk() -> tuple[list[str | None], list[str]]:
        async with openai.AsyncOpenAI(
            base_url=setting.server.base_url,
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as client:
            create = client.chat.completions.create
            whole = await asyncio.gather(*(create(model="fake", messages=QUESTION) for _ in range(4)))
            stream = await create(model="fake", messages=QUESTION, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return [one.choices[0].message.content for one in whole], pieces

    whole, pieces = asyncio.run(talk())
    assert whole == ["It is four."] * 4
    assert "".join(pieces) == "It is four."


def test_messages_take_the_form_that_templates_expect(setting: Setting) -> None:
    setting.create(
        model="fake",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "2 +"}, {"type": "text", "text": " 2?"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}},
                    {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{oops"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "4"},
        ],
        tools=TOOLS,
    )
    (request,) = setting.policy.requests
    assert request.messages is not None
    system, user, assistant, tool = request.messages
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "2 + 2?"}
    assert assistant["content"] == ""
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"a": 2}, "{oops"]
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "4"}
    assert request.template == {"tools": TOOLS}


def test_tool_calls_are_found_in_the_text(setting: Setting) -> None:
    messages = [{"role": "user", "content": "call"}]
    (choice,) = setting.create(model="fake", messages=messages, tools=TOOLS, tool_choice="auto").choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.tool_calls is not None
    first, second = choice.message.tool_calls
    assert first.function.name == "add"
    assert json.loads(first.function.arguments) == {"a": 2, "b": "é"}
    assert first.id != second.id


def test_tool_calls_in_a_stream(setting: Setting) -> None:
    messages = [{"role": "user", "content": "call"}]
    choices = [chunk.choices[0] for chunk in setting.create(model="fake", messages=messages, tools=TOOLS, stream=True)]
    assert "".join(choice.delta.content or "" for choice in choices) == "Let me see."
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert [call.index for call in calls] == [0, 1]
    assert [json.loads(call.function.arguments)["b"] for call in calls] == ["é", "é"]
    assert choices[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_a_time_is_the_first(setting: Setting, stream: bool) -> None:
    messages = [{"role": "user", "content": "call"}]
    asked = {"model": "fake", "messages": messages, "tools": TOOLS, "parallel_tool_calls": False}
    if stream:
        choices = [chunk.choices[0] for chunk in setting.create(**asked, stream=True)]
        calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
        assert ([call.index for call in calls], choices[-1].finish_reason) == ([0], "tool_calls")
    else:
        (choice,) = setting.create(**asked).choices
        assert (len(choice.message.tool_calls or ()), choice.finish_reason) == (1, "tool_calls")


def test_malformed_calls_stay_text(setting: Setting) -> None:
    messages = [{"role": "user", "content": "broken"}]
    (choice,) = setting.create(model="fake", messages=messages, tools=TOOLS).choices
    assert choice.message.content == "<tool_call>{oops</tool_call> so"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_without_tools_nothing_is_a_call(setting: Setting) -> None:
    messages = [{"role": "user", "content": "call"}]
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = setting.create(model="fake", messages=messages, **more).choices
        assert choice.message.content == f"Let me see.\n{CALL}\n{CALL}"
        assert choice.finish_reason == "stop"
        assert setting.policy.requests[-1].template == {}
