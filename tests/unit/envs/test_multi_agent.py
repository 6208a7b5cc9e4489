"""Episodes with several agents: conversations, seeds, limits, rewards, journals."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import forge
from forge import Agent, Task
from forge.config.agents import AgentLimits
from forge.config.episodes import EpisodeLimits
from forge.envs.character_codec import CharacterCodec
from forge.envs.episode import EpisodeRun, run_episode
from forge.envs.state import AgentBinding, EpisodeKey, EpisodeState
from forge.envs.trace import rows_of
from forge.errors import OptionError, RewardError
from forge.testing import play
from forge.testing.episodes import ScriptedPolicy as Script
from forge.types import Completion, Score, Turn
from scripted_policy import state_of

ASK = ({"role": "user", "content": "Name a number."},)


def told(text: str, by: str) -> dict[str, str]:
    return {"role": "user", "name": by, "content": text}


@forge.episode(agents=["solver", "critic"])
async def review(task: Task, solver: Agent, critic: Agent) -> Mapping[str, float]:
    draft = await solver.generate(ASK)
    verdict = await critic.generate([told(draft.text, "solver")])
    final = await solver.generate([told(verdict.text, "critic")])
    return {"solver": float(final.text == "7"), "critic": float(len(verdict.text))}


def test_agents_get_conversations_of_their_own() -> None:
    answers = {"solver": ["6", "7"], "critic": ["more"]}
    run = asyncio.run(play(review, answers))
    assert [(turn.agent, turn.text, turn.parent) for turn in run.turns] == [
        ("solver", "6", None),
        ("solver", "7", 0),
        ("critic", "more", None),
    ]
    assert [turn.order for turn in run.turns] == [0, 2, 1]
    assert [turn.messages[0]["content"] for turn in run.turns] == ["Name a number.", "more", "6"]
    assert [[turn.index for turn in row.turns] for row in rows_of(run.turns)] == [[0, 1], [2]]
    assert {name: result.score and result.score.reward for name, result in run.agents.items()} == {
        "solver": 1.0,
        "critic": 4.0,
    }
    assert run.score.reward == 1.0  # the first agent that learns
    assert run.score.parts == {"solver": 1.0, "critic": 4.0}


def test_an_agent_does_not_see_what_another_one_saw() -> None:
    policies = {"solver": Script(["6", "7"]), "critic": Script(["more"])}
    asyncio.run(play(review, policies))
    assert policies["critic"].prompts == ["user: 6\nassistant: "]


def test_a_single_agent_keeps_its_seeds_and_its_name() -> None:
    @forge.episode
    async def alone(task: Task, agent: Agent) -> float:
        await agent.generate(ASK)
        await agent.fork().generate()
        return 1.0

    run = asyncio.run(run_episode(alone, state_of(Script(["a", "b"]))))
    key = EpisodeKey(1, 2, 3)
    assert [turn.seed for turn in run.turns] == [key.seed(0), key.seed(0, 0)]
    assert [turn.agent for turn in run.turns] == ["agent", "agent"]
    assert run.agents == {}


class Arrivals:
    """A policy that answers in an order of its own: by how long it lets each session wait."""

    max_seq_len = 1 << 16

    def __init__(self, waits: Mapping[str, int]) -> None:
        self.codec, self._waits = CharacterCodec(), waits

    async def sample(self, token_ids: Sequence[int], *, options: Mapping[str, Any], session: str) -> Completion:
        for _ in range(self._waits.get(session.split("-")[-1], 0)):
            await asyncio.sleep(0)
        text = str(options["seed"] % 3)
        ids = (*self.codec.encode_rendered(text), self.codec.stop_token_ids[0])
        return Completion(tuple(token_ids), ids, (-1.0,) * len(ids), None, text, "stop")


@forge.episode(agents=["row", "column"], deterministic=True)
async def simultaneous(task: Task, row: Agent, column: Agent) -> Mapping[str, float]:
    bonus = column.rng.random() - row.rng.random()
    for _ in range(3):
        first, second = await asyncio.gather(row.generate(ASK), column.generate(ASK))
        row.add_reward(float(first.text == second.text), name="match", turn=first)
    return {"row": bonus, "column": -bonus}


@pytest.mark.parametrize("waits", [{"row": 9}, {"column": 9}, {"row": 2, "column": 3}])
def test_simultaneous_moves_do_not_depend_on_arrival(waits: dict[str, int]) -> None:
    def run(policy: Arrivals) -> EpisodeRun:
        return asyncio.run(run_episode(simultaneous, state_of(policy)))

    plain, other = run(Arrivals({})), run(Arrivals(waits))
    assert other.turns == plain.turns
    assert other.agents == plain.agents
    assert other.turn_rewards == plain.turn_rewards
    seeds = [turn.seed for turn in plain.turns]
    key = EpisodeKey(1, 2, 3)
    assert seeds == [key.seed(name, number) for name in ("row", "column") for number in range(3)]
    assert len(set(seeds)) == 6


def test_a_journal_replays_all_agents() -> None:
    journal: list[Mapping[str, Any]] = []
    first = asyncio.run(play(simultaneous, Arrivals({}), journal=journal))
    assert [entry["key"][0] for entry in journal] == ["row", "column"] * 3
    again = asyncio.run(play(simultaneous, [], journal=journal))
    assert (again.turns, again.agents, again.num_replayed) == (first.turns, first.agents, 6)


def test_records_of_two_agents_do_not_collide() -> None:
    @forge.episode(agents=["a", "b"], deterministic=True)
    async def both(task: Task, a: Agent, b: Agent) -> Mapping[str, float]:
        return {"a": await a.record(lambda: 1.0), "b": await b.record(lambda: 2.0)}

    journal: list[Mapping[str, Any]] = []
    for _ in range(2):
        run = asyncio.run(play(both, [], journal=journal))
        assert run.score.parts == {"a": 1.0, "b": 2.0}
    assert len(journal) == 2


def test_calls_of_two_agents_have_ids_of_their_own() -> None:
    call = '<tool_call>{"name": "double", "arguments": {"x": 2}}</tool_call>'

    @forge.tool
    def double(x: int) -> int:
        """Double a number."""
        return 2 * x

    @forge.episode(agents=["a", "b"])
    async def both(task: Task, a: Agent, b: Agent) -> Mapping[str, float]:
        turns = await asyncio.gather(*(each.run_tools(ASK, tools=[double]) for each in (a, b)))
        return {name: float(turn.text) for name, turn in zip("ab", turns, strict=True)}

    run = asyncio.run(play(both, {"a": [call, "4"], "b": [call, "5"]}))
    assert [call.id for turn in run.turns for call in turn.calls] == ["call_a_0_0", "call_b_0_0"]
    assert run.score.parts == {"a": 4.0, "b": 5.0}


def bound(state: EpisodeState, **fields: Any) -> AgentBinding:
    return AgentBinding(state.policy, state.codec, state.tool_format, state.sampling, **fields)


def run_bound(
    program: Any, answers: list[str], bindings: Mapping[str, Mapping[str, Any]], **changes: Any
) -> EpisodeRun:
    state = state_of(Script(answers), **changes)
    state.bindings = {name: bound(state, **fields) for name, fields in bindings.items()}
    return asyncio.run(run_episode(program, state))


@forge.episode(agents=["a", "b"])
async def chat(task: Task, a: Agent, b: Agent) -> Mapping[str, float]:
    for _ in range(4):
        await a.generate(ASK)
        await b.generate(ASK)
    return {"a": 1.0, "b": 0.0}


def test_an_agent_has_limits_of_its_own() -> None:
    run = run_bound(chat, ["x"] * 8, {"b": {"limits": AgentLimits(max_turns=2)}})
    assert (run.outcome, [turn.agent for turn in run.turns]) == ("turn_limit", ["a"] * 3 + ["b"] * 2)
    assert run.score.parts == {"a": 0.0, "a/limit": 0.0, "b": 0.0, "b/limit": 0.0}


def test_an_agent_has_tokens_of_its_own() -> None:
    run = run_bound(chat, ["xyz"] * 8, {"b": {"limits": AgentLimits(max_tokens=5)}})
    lengths = [(turn.agent, len(turn)) for turn in run.turns]
    assert run.outcome == "token_limit"
    assert lengths == [("a", 4)] * 3 + [("b", 4), ("b", 1)]


def test_agents_share_the_limits_of_the_episode() -> None:
    run = run_bound(chat, ["x"] * 8, {}, limits=EpisodeLimits(max_turns=5))
    assert (run.outcome, [turn.agent for turn in run.turns]) == ("turn_limit", ["a"] * 3 + ["b"] * 2)
    run = run_bound(chat, ["xyz"] * 8, {}, limits=EpisodeLimits(max_tokens=10))
    assert (run.outcome, sum(map(len, run.turns))) == ("token_limit", 10)


def test_an_agent_that_does_not_learn_is_left_out() -> None:
    @forge.episode(agents=["a", "b"])
    async def game(task: Task, a: Agent, b: Agent) -> Mapping[str, float]:
        await a.generate(ASK)
        await b.generate(ASK, temperature=0.5)  # it is not trained on
        return {"a": 1.0}

    run = run_bound(game, ["x", "y"], {"b": {"learns": False}})
    assert [turn.is_trained for turn in run.turns] == [True, False]
    assert [row.turns[0].agent for row in rows_of(run.turns)] == ["a"]
    assert (run.agents["b"].score, run.agents["b"].learns) == (None, False)


def test_turns_of_another_model_keep_their_text_only() -> None:
    run = run_bound(chat, ["x"] * 8, {"b": {"learns": False, "label": "endpoint m", "has_tokens": False}})
    other = [turn for turn in run.turns if turn.agent == "b"]
    assert [(turn.text, len(turn), turn.context_ids, turn.versions) for turn in other] == [("x", 0, (), ())] * 4
    assert run.agents["b"].policy == "endpoint m"
    assert run.counts.num_sampled == sum(len(turn) for turn in run.turns if turn.agent == "a")
    assert run.counts.num_turns == 8


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"a": 1.0}, "gave b no reward"),
        (1.0, "did not return rewards by agent"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "did not return rewards by agent"),
        ({"a": 1.0, "b": math.nan}, "not a finite number"),
        ({"a": 1.0, "b": Score(math.inf)}, "not a finite number"),
    ],
)
def test_rewards_that_are_missing_or_wrong(returned: Any, message: str) -> None:
    @forge.episode(agents=["a", "b"])
    async def program(task: Task, a: Agent, b: Agent) -> Any:
        return returned

    with pytest.raises(RewardError, match=message):
        asyncio.run(play(program, []))


def test_rewards_add_up_for_each_agent() -> None:
    @forge.episode(agents=["a", "b"])
    async def program(task: Task, a: Agent, b: Agent) -> Mapping[str, float | Score]:
        turn = await a.generate(ASK)
        a.add_reward(0.5, name="style", turn=turn)
        b.add_reward(-0.5, name="style")
        return {"a": Score(1.0, {"right": 1.0}), "b": 2.0}

    run = asyncio.run(play(program, ["x"]))
    scores = {name: (each.score.reward, dict(each.score.parts)) for name, each in run.agents.items() if each.score}
    assert scores == {"a": (1.5, {"right": 1.0, "style": 0.5}), "b": (1.5, {"style": -0.5, "reward": 2.0})}
    assert run.turn_rewards == {0: 0.5}
    assert run.score.parts == {"a": 1.5, "a/right": 1.0, "a/style": 0.5, "b": 1.5, "b/style": -0.5}


def test_a_reward_for_another_agents_turn() -> None:
    @forge.episode(agents=["a", "b"])
    async def program(task: Task, a: Agent, b: Agent) -> None:
        turn: Turn = await a.generate(ASK)
        b.add_reward(1.0, turn=turn)

    with pytest.raises(OptionError, match=r"another agent's turn[\s\S]*turn 0 of a"):
        asyncio.run(play(program, ["x"]))


@pytest.mark.parametrize("names", ["solver", ["solver", "solver"], ["1st"], ["a b"], [""], [3]])
def test_names_that_are_refused(names: Any) -> None:
    with pytest.raises(OptionError, match="not the names of agents"):
        forge.episode(agents=names)


def test_functions_that_are_refused() -> None:
    async def swapped(task: Task, critic: Agent, solver: Agent) -> None: ...

    async def one(task: Task, solver: Agent) -> None: ...

    for function in (swapped, one):
        with pytest.raises(OptionError, match=r"async def program\(task, solver, critic\)"):
            forge.episode(agents=["solver", "critic"])(function)

    async def other_names(task: Task, first: Agent, second: Agent, *, depth: int = 1) -> None: ...

    program = forge.episode(agents=["solver", "critic"])(other_names)
    assert program.with_args({"depth": 2}).args == {"depth": 2}
    with pytest.raises(OptionError, match="does not take these arguments"):
        program.with_args({"first": 2})
