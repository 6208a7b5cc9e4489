"""Environments that are stepped, as episodes."""

from __future__ import annotations

import asyncio

import pytest

from forge.envs.environment import CountingEnv, Env, Observation, episode_from_env
from forge.envs.episode import run_episode
from forge.envs.tools import tool
from forge.errors import OptionError
from forge.testing import play
from forge.types import Episode
from scripted_policy import END, ScriptedPolicy, state_of


def run(program, policy):
    return asyncio.run(run_episode(program, state_of(policy)))


def test_an_environment_is_stepped_to_its_end(codec):
    policy = ScriptedPolicy(codec, [f"{number}{END}" for number in (1, 2, 4)])
    done = run(episode_from_env(CountingEnv, goal=3), policy)
    assert (done.score.reward, dict(done.turn_rewards)) == (2.0, {0: 1.0, 1: 1.0, 2: 0.0})
    assert len(done.turns) == 3
    assert [turn.parent for turn in done.turns] == [None, 0, 1]


class Ends:
    """Ends at its first step, as it is told."""

    def __init__(self, **ending):
        self.ending = ending

    async def reset(self, task):
        return Observation(task.messages)

    async def step(self, message):
        return Observation(**self.ending)

    async def close(self):
        return None


@pytest.mark.parametrize(
    ("ending", "outcome", "parts"),
    [
        ({"reward": 0.5, "terminated": True}, "finished", {"reward": 0.5}),
        ({"reward": 0.5, "truncated": True}, "truncated", {"reward": 0.5}),
        ({"reward": 0.5, "terminated": True, "truncated": True}, "finished", {"reward": 0.5}),
        ({"truncated": True}, "truncated", {"limit": -1.0}),
    ],
)
def test_an_episode_that_its_environment_truncated_says_so(codec, ending, outcome, parts):
    done = run(episode_from_env(Ends, limit_reward=-1.0, **ending), ScriptedPolicy(codec, [f"One.{END}"]))
    assert (done.outcome, dict(done.score.parts)) == (outcome, parts)
    assert Episode(done.task, done.turns, done.score, outcome=done.outcome).is_truncated == (outcome == "truncated")


class Shop:
    """Asks for a tool, and must be closed whatever happens."""

    closed = 0

    @tool
    async def price(self, item: str) -> int:
        "Return the price of an item."
        return len(item)

    async def reset(self, task):
        return Observation(task.messages, tools=[self.price])

    async def step(self, message):
        if message["content"] == "crash":
            raise RuntimeError("lost")
        return Observation(reward=float("5" in message["content"]), terminated=True)

    async def close(self):
        Shop.closed += 1


async def open_shop():
    return Shop()


def test_tools_are_run_before_the_environment_steps_and_it_is_always_closed(codec):
    call = '<tool_call>{"name": "price", "arguments": {"item": "bread"}}</tool_call>' + END
    Shop.closed = 0
    done = run(episode_from_env(open_shop), ScriptedPolicy(codec, [call, f"It is 5.{END}"]))
    assert (done.score.reward, done.counts.num_tool_calls, Shop.closed) == (1.0, 1, 1)
    with pytest.raises(RuntimeError, match="lost"):
        run(episode_from_env(open_shop), ScriptedPolicy(codec, [f"crash{END}"]))
    assert Shop.closed == 2


def test_what_is_not_an_environment(codec):
    with pytest.raises(OptionError, match="environment") as error:
        run(episode_from_env(dict), ScriptedPolicy(codec, []))
    assert error.value.value == "dict"
    assert isinstance(CountingEnv(), Env)


class TwoRewards:
    """Gives each answer a shaped and a final reward."""

    async def reset(self, task):
        return Observation(task.messages, reward={"bonus": 0.25})

    async def step(self, message):
        is_end = message["content"] == "end"
        return Observation(task_message(), reward={"shaped": -0.5, "final": float(is_end)}, terminated=is_end)

    async def close(self):
        return None


def task_message():
    return [{"role": "user", "content": "And now?"}]


def test_an_answer_may_earn_several_rewards_by_name(codec):
    done = run(episode_from_env(TwoRewards), ScriptedPolicy(codec, [f"go{END}", f"end{END}"]))
    assert dict(done.score.parts) == {"bonus": 0.25, "shaped": -1.0, "final": 1.0}
    assert dict(done.turn_rewards) == {0: -0.5, 1: 0.5}
    assert done.score.reward == 0.25
    assert Observation(reward=2.0, name="points").rewards == {"points": 2.0}
    assert Observation().rewards == {}


def test_arguments_of_a_configuration_are_added_to_those_of_the_program(codec):
    program = episode_from_env(CountingEnv, goal=2)
    assert dict(program.with_args({}).args) == {"goal": 2}
    assert dict(program.with_args({"goal": 1}).args) == {"goal": 1}
    policy = ScriptedPolicy(codec, [f"1{END}", f"2{END}"])
    assert len(run(program.with_args({}), policy).turns) == 2


def test_arguments_that_an_environment_does_not_take_are_refused_before_a_run():
    with pytest.raises(OptionError, match="goals") as error:
        episode_from_env(CountingEnv, goals=2)
    assert error.value.rule == "keyword arguments of CountingEnv(task: 'Task', agent: 'Agent', *, goal: 'int' = 3)" + (
        " -> 'None'"
    )

    async def make(size: int, **options: object) -> CountingEnv:
        return CountingEnv(size)

    with pytest.raises(OptionError, match="size"):
        episode_from_env(make, wide=True)
    assert dict(episode_from_env(make, size=1, wide=True).args) == {"size": 1, "wide": True}


def test_methods_that_are_not_as_the_protocol_says_are_named():
    class Gym(CountingEnv):
        async def step(self, message):
            return [], 1.0, True, False, {}

    class Plain(CountingEnv):
        def reset(self, task):
            return Observation([{"role": "user", "content": "Go."}])

        def close(self):
            return None

    for env, method in ((Gym, "step"), (Plain, "reset")):
        with pytest.raises(OptionError, match="returns an Observation") as error:
            asyncio.run(play(env, ["1"]))
        assert error.value.path.endswith(f"{env.__name__}.{method}")
    with pytest.raises(OptionError, match="anew for each episode"):
        episode_from_env(CountingEnv())


def test_time_can_be_part_of_an_environment_s_task():
    assert episode_from_env(CountingEnv, time_is_task=True, goal=2).time_is_task
