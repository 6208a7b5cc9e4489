"""Episodes without a model: `forge.testing.play`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import forge
from forge import Agent, Fault, Observation, Task
from forge.config import EpisodeLimits
from forge.envs.character_codec import CharacterCodec
from forge.envs.journal import Entry
from forge.errors import OptionError, RewardError
from forge.testing import ScriptedPolicy, play


@forge.tool
async def double(number: int) -> str:
    """Double a number."""
    return str(2 * number)


@forge.episode
async def dialogue(task: Task, agent: Agent, *, question: str = "Again?") -> float:
    await agent.generate(task.messages)
    turn = await agent.generate([{"role": "user", "content": question}])
    return float(len(turn.text))


async def use_tool(task: Task, agent: Agent) -> float:
    turn = await agent.run_tools([{"role": "user", "content": "Double 4."}], tools=[double])
    return float(turn.text)


class Echo:
    async def reset(self, task: Task) -> Observation:
        return Observation([{"role": "user", "content": "Say it."}])

    async def step(self, message: object) -> Observation:
        return Observation(reward=1.0, terminated=True)

    async def close(self) -> None: ...


def test_answers_become_turns_of_one_sequence() -> None:
    policy = ScriptedPolicy(["one", "three"], version=4)
    run = asyncio.run(play(dialogue, policy, args={"question": "And?"}))
    assert run.score.reward == 5.0
    assert policy.prompts == ["user: ?\nassistant: ", "user: ?\nassistant: one\nuser: And?\nassistant: "]
    assert [turn.parent for turn in run.turns] == [None, 0]
    assert [turn.prefix_break for turn in run.turns] == [None, None]
    assert [turn.version for turn in run.turns] == [4, 4]


def test_an_answer_is_a_function_of_the_prompt() -> None:
    run = asyncio.run(play(dialogue, lambda prompt: "again" if "Again?" in prompt else "first"))
    assert [turn.text for turn in run.turns] == ["first", "again"]


def test_plain_functions_and_environments_are_programs() -> None:
    call = '<tool_call>{"name": "double", "arguments": {"number": 4}}</tool_call>'
    policy = ScriptedPolicy([call, "8"])
    assert asyncio.run(play(use_tool, policy)).score.reward == 8.0
    assert policy.prompts[1].startswith("tools: double\nuser: Double 4.\n")
    assert asyncio.run(play(Echo, ["x"])).score.parts == {"reward": 1.0}
    as_json = '{"name": "double", "arguments": {"number": 4}}'
    assert asyncio.run(play(use_tool, [as_json, "8"], tool_format="json")).counts.num_tool_calls == 1


def test_a_script_that_is_too_short_says_so() -> None:
    with pytest.raises(OptionError, match="no answer left") as caught:
        asyncio.run(play(dialogue, ["one"]))
    assert caught.value.rule == "an answer for each turn: this is turn 2"


def test_limits_cut_answers_and_end_episodes() -> None:
    run = asyncio.run(play(dialogue, ["one", "two"], limits=EpisodeLimits(max_tokens=6)))
    assert [(turn.text, turn.finish_reason) for turn in run.turns] == [("one", "stop"), ("tw", "length")]
    run = asyncio.run(play(dialogue, ["one"], limits=EpisodeLimits(max_turns=1)))
    assert (run.outcome, run.score.parts) == ("turn_limit", {"limit": 0.0})
    run = asyncio.run(play(dialogue, ["one", "two"], sampling={"max_tokens": 2}))
    assert [turn.text for turn in run.turns] == ["on", "tw"]


def test_what_programs_raise_is_raised() -> None:
    async def faulty(task: Task, agent: Agent) -> float:
        raise Fault("the server is down")

    async def unrewarded(task: Task, agent: Agent) -> None:
        await agent.generate(task.messages)

    with pytest.raises(Fault, match="the server is down"):
        asyncio.run(play(faulty, []))
    with pytest.raises(RewardError, match="gave no reward"):
        asyncio.run(play(unrewarded, ["x"]))


def test_a_journal_is_replayed() -> None:
    journal: list[Entry] = []
    first = asyncio.run(play(dialogue, ["one", "two"], journal=journal))
    assert len(journal) == 2
    again = asyncio.run(play(dialogue, [], journal=journal))
    assert (again.turns, again.num_replayed, len(journal)) == (first.turns, 2, 2)


def test_another_codec_is_used() -> None:
    class Lines:
        """Every message is a line."""

        stop_token_ids, special_tokens, tag_tokens = (10,), (), ()
        encode_rendered = encode_literal = CharacterCodec.encode_rendered
        decode = CharacterCodec.decode

        def render_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
            return "".join(f"{message['role'].upper()}: {message['content']}\n" for message in messages) + "ASSISTANT: "

    policy = ScriptedPolicy(["a", "b"], codec=Lines())
    asyncio.run(play(dialogue, policy))
    assert policy.prompts == ["USER: ?\nASSISTANT: ", "USER: ?\nASSISTANT: a\nUSER: Again?\nASSISTANT: "]
