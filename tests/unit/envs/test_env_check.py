"""Checks of environments without a model: agents, determinism, leaks, rewards, oracles."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

import forge
from forge import Agent, Task
from forge.envs.character_codec import ChatPrompt
from forge.envs.check import check_env
from forge.envs.check_agents import act_randomly, random_value, write_answer
from forge.envs.check_records import Check, EnvReport
from forge.envs.environment import CountingEnv, as_program, episode_from_env
from forge.envs.limits import EpisodeLimits, Fault
from forge.envs.tools import Tool
from forge.errors import OptionError
from tried_episodes import Guess, broken, calculate, faulty, unrewarded

TASKS = [Task(f"sum:{n}", messages=({"role": "user", "content": f"{n} + 1?"},), answer=str(n + 1)) for n in range(3)]


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> None:
    """Each check collects garbage several times: let it not visit what other tests left in this process."""
    gc.collect()
    gc.freeze()


def checked(program: Any, tasks: Any = TASKS, **options: Any) -> EnvReport:
    found = as_program(program, name="program")
    return asyncio.run(asyncio.wait_for(check_env(found, tasks, **{"grace_s": 0.2, **options}), 600))


def check(report: EnvReport, name: str) -> Check:
    (found,) = [each for each in report.checks if each.name == name]
    return found


def agent(report: EnvReport, name: str) -> dict[str, Any]:
    found: dict[str, Any] = report.as_dict()["agents"][name]
    return found


def add_one(task: Task) -> list[Any]:
    """Right answers for `calculate`: a call, then the number."""
    n = int(task.id.partition(":")[2])
    return [{"name": "add", "arguments": {"a": n, "b": 1}}, f"It is {n + 1}."]


# ---- A good environment


def test_a_good_program_passes_everything() -> None:
    report = checked(calculate, oracle=add_one)
    assert [each.status for each in report.checks] == ["pass"] * 8
    assert report.is_ok
    assert agent(report, "nothing")["reward_max"] == 0
    assert agent(report, "oracle")["reward_min"] == 1
    assert agent(report, "oracle")["num_tool_calls"] == 3
    assert agent(report, "random")["num_tool_calls"] > 0
    assert agent(report, "random")["tool_errors"] == {}, "random calls are valid"
    assert agent(report, "oracle")["turns_mean"] == 2
    json.dumps(report.as_dict())


def test_an_environments_own_oracle_is_used() -> None:
    program = episode_from_env(Guess)
    assert program.oracle is Guess.oracle
    report = checked(program, oracle=program.oracle)
    assert check(report, "oracle").status == "pass"
    assert agent(report, "nothing")["turns_mean"] == 5


def test_an_oracle_may_answer_the_messages() -> None:
    async def count(task: Task, messages: Any) -> str:
        return str(sum(message["role"] == "assistant" for message in messages) + 1)

    report = checked(CountingEnv, oracle=count)
    assert check(report, "oracle").message == "the oracle gets the highest reward on every task (3)"


def test_random_agents_differ_by_seed_and_task_but_not_by_run() -> None:
    def answers(seed: int) -> list[tuple[str, ...]]:
        report = checked(calculate, seed=seed)
        return [each.transcript for each in report.agents[1].episodes]

    assert answers(1) == answers(1) != answers(2)


# ---- Randomness


def test_random_arguments_are_valid() -> None:
    def tool(
        a: Annotated[int, Field(ge=3, le=9)],
        b: float,
        c: Literal["x", "y"],
        d: list[bool] | None,
        e: dict[str, int],
        f: Annotated[str, Field(min_length=3)],
        g: Annotated[float, Field(gt=0, lt=1)],
        h: int = 2,
    ) -> None:
        """Takes all kinds."""

    made = Tool(tool)
    schema = made.schema["function"]["parameters"]
    rng = random.Random(1)
    for _ in range(200):
        made.check(random_value(schema, rng, ["7", "word"]))


def test_random_words_come_from_the_conversation_as_well() -> None:
    prompt = ChatPrompt(({"role": "user", "content": "zebra quagga"},), {})
    said = " ".join(asyncio.run(_many(prompt))).split()
    assert {"zebra", "quagga", "yes", "no"} <= set(said)


async def _many(prompt: ChatPrompt) -> list[str]:
    return [await act_randomly(prompt, random.Random(seed)) for seed in range(200)]


# ---- Failures


def test_what_a_program_raises_is_a_failure_with_its_traceback() -> None:
    report = checked(broken)
    found = check(report, "runs")
    assert (found.status, report.is_ok) == ("fail", False)
    assert found.message == "6 of 6 episodes raised or ended in a fault"
    (text,) = found.detail
    assert text.startswith("nothing, random on sum:0, sum:1, sum:2:\nTraceback")
    assert text.endswith("KeyError: 'mine'")
    assert check(report, "nothing").status == "skip"
    assert agent(report, "nothing")["outcomes"] == {"failed (raised)": 3}


def test_faults_and_missing_rewards_are_failures() -> None:
    assert "fault (server): the tool server cannot be reached" in check(checked(faulty), "runs").detail[0]
    report = checked(unrewarded)
    assert check(report, "runs").status == "pass"
    assert check(report, "rewards").status == "fail"
    assert "gave no reward" in check(report, "rewards").detail[0]


def test_an_episode_that_hangs_is_ended_by_its_limit() -> None:
    @forge.episode
    async def hang(task: Task, agent: Agent) -> float:
        await asyncio.Event().wait()
        return 1.0

    found = check(checked(hang, TASKS[:1], limits=EpisodeLimits(timeout_s=0.01)), "runs")
    assert "fault (time)" in found.detail[0]


# ---- Determinism


def test_a_difference_is_named() -> None:
    numbers = itertools.count()

    async def counting(task: Task, agent: Agent) -> float:
        await agent.generate([{"role": "user", "content": f"number {next(numbers)}"}])
        return 0.0

    found = check(checked(counting), "determinism")
    assert found.status == "warn"
    assert found.message.startswith("6 of 6 episodes differ")
    assert found.detail[0] == "nothing on sum:0: turn 0, user message: 'number 0', then 'number 1'"
    declared = forge.episode(deterministic=True)(counting)
    assert check(checked(declared), "determinism").status == "fail"


def test_other_rewards_turns_and_outcomes_are_differences() -> None:
    numbers = itertools.count()

    async def by_reward(task: Task, agent: Agent) -> float:
        await agent.generate(task.messages)
        return float(next(numbers))

    async def by_length(task: Task, agent: Agent) -> float:
        for _ in range(1 + next(numbers) % 2):
            await agent.generate(task.messages)
        return 0.0

    async def by_failure(task: Task, agent: Agent) -> float:
        if next(numbers) % 2:
            raise Fault("gone")
        return 0.0

    details = [check(checked(each), "determinism").detail[0] for each in (by_reward, by_length, by_failure)]
    assert details[0] == "nothing on sum:0: reward 'reward': '0.0', then '1.0'"
    assert "'turn 1, user message: 0 + 1?'" in details[1]
    assert details[2].endswith("\"reward 'reward': 0.0\", then 'outcome: fault'")


def test_agents_random_numbers_are_no_difference() -> None:
    async def dice(task: Task, agent: Agent) -> float:
        await agent.generate([{"role": "user", "content": str(agent.rng.random())}])
        return 0.0

    assert check(checked(dice), "determinism").status == "pass"


# ---- Leaks


@pytest.fixture
def left() -> Iterator[list[Any]]:
    """What a leaking program leaves; it is ended with the test."""
    kept: list[Any] = []
    yield kept
    for each in kept:
        if isinstance(each, subprocess.Popen):
            each.kill()
            each.wait(600)
        elif isinstance(each, threading.Event):
            each.set()
        elif isinstance(each, int):
            os.close(each)


@pytest.mark.parametrize("kind", ["process", "thread", "file descriptor"])
def test_what_is_left_open_is_named(kind: str, left: list[Any]) -> None:
    async def leak(task: Task, agent: Agent) -> float:
        await agent.generate(task.messages)
        if kind == "process":
            left.append(subprocess.Popen([sys.executable, "-c", "input()  # left", task.id], stdin=subprocess.PIPE))
        elif kind == "thread":
            ended = threading.Event()
            left.append(ended)
            threading.Thread(target=ended.wait, name="left").start()
        else:
            left.append(os.open(os.devnull, os.O_RDONLY))
        return 0.0

    found = check(checked(leak), "leaks")
    assert found.status == "fail"
    (line,) = [each for each in found.detail if each.startswith(f"{kind}: ")]
    assert {"process": "# left", "thread": "left (10 times)", "file descriptor": "/dev/null (10 times)"}[kind] in line


def test_tasks_that_outlive_their_episode_are_named_and_ended() -> None:
    cancelled = []

    async def outlive() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    kept = []

    async def leak(task: Task, agent: Agent) -> float:
        kept.append(asyncio.create_task(outlive()))
        await agent.generate(task.messages)
        return 0.0

    found = check(checked(leak, TASKS[:1], grace_s=0.01), "leaks")
    assert found.status == "fail"
    assert found.detail[0].startswith("task: ")
    assert "outlive (4 times); after nothing on sum:0" in found.detail[0]
    assert len(cancelled) == 4


def test_a_single_task_that_stays_is_a_warning(left: list[Any]) -> None:
    async def connect(task: Task, agent: Agent) -> float:
        if not left:
            left.append(asyncio.create_task(asyncio.Event().wait(), name="reader"))
        await agent.generate(task.messages)
        assert not left[0].done(), "later episodes use it"
        return 0.0

    report = checked(connect, grace_s=0.01)
    assert check(report, "runs").status == "pass"
    assert check(report, "leaks").status == "warn"
    assert left[0].cancelled()


def test_what_is_kept_for_later_episodes_is_no_leak(left: list[Any]) -> None:
    async def cache(task: Task, agent: Agent) -> float:
        if not left:
            left.append(os.open(os.devnull, os.O_RDONLY))
        await asyncio.to_thread(len, "x")
        asyncio.get_running_loop().call_soon(lambda: None)
        asyncio.create_task(asyncio.sleep(0))  # noqa: RUF006 - it ends by itself
        await agent.generate(task.messages)
        return 0.0

    assert check(checked(cache), "leaks").status == "pass"


def test_garbage_is_no_leak() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own, self.number = self, os.open(os.devnull, os.O_RDONLY)

        def __del__(self) -> None:
            os.close(self.number)

    async def forget(task: Task, agent: Agent) -> float:
        await agent.generate(task.messages)
        Cycle()
        return 0.0

    assert check(checked(forget), "leaks").status == "pass"


# ---- Rewards


def test_rewarding_nothing_is_a_warning() -> None:
    async def generous(task: Task, agent: Agent) -> float:
        turn = await agent.generate(task.messages)
        return 0.5 if task.id == "sum:1" and not turn.text else 0.0

    report = checked(generous)
    found = check(report, "nothing")
    assert (found.status, report.is_ok) == ("warn", True)
    assert found.message == "doing nothing is rewarded: up to 0.5 on 1 of 3 tasks"
    assert found.detail == ("sum:1",)


def test_doing_nothing_that_pays_best_is_a_warning() -> None:
    async def costly(task: Task, agent: Agent) -> float:
        return -float(len((await agent.generate(task.messages)).text))

    assert check(checked(costly), "nothing").message.startswith("doing nothing pays best: 0")


def test_a_constant_reward_is_a_warning() -> None:
    async def constant(task: Task, agent: Agent) -> float:
        await agent.generate(task.messages)
        return 0.0

    report = checked(constant, oracle=lambda task: ["x"])
    assert check(report, "signal").status == "warn"
    assert check(report, "oracle").message == "the oracle earns no more than doing nothing on 3 of 3 tasks"


def test_an_oracle_below_the_maximum_fails() -> None:
    report = checked(calculate, oracle=lambda task: ["It is 1."])
    found = check(report, "oracle")
    assert (found.status, report.is_ok) == ("fail", False)
    assert found.message == "the oracle earns no more than doing nothing on 2 of 3 tasks"
    found = check(checked(calculate, oracle=add_one, max_reward=2.0), "oracle")
    assert found.message == "the oracle misses the maximum on 3 of 3 tasks"
    assert found.detail[0] == "sum:0: 1 of 2"
    found = check(checked(calculate, oracle=lambda task: add_one(task)[:1]), "oracle")
    assert found.detail[-1] == "the oracle had too few answers on sum:0, sum:1, sum:2"
    assert check(checked(calculate), "oracle").status == "skip"


def test_limits_are_reported_and_fail_no_check() -> None:
    async def endless(task: Task, agent: Agent) -> float:
        while True:
            await agent.generate(task.messages)

    found = check(checked(endless, oracle=lambda task: ["x"], limits=EpisodeLimits(max_turns=2)), "limits")
    assert found.status == "warn"
    assert found.detail[0] == "nothing: turn_limit 3; 3 got only limit_reward"


# ---- Bad input


@pytest.mark.parametrize("answer", [3, None, {"arguments": {}}, [3], b"x"])
def test_an_answer_that_cannot_be_used_is_named(answer: Any) -> None:
    with pytest.raises(OptionError, match="the oracle gave an answer") as raised:
        write_answer(answer)
    assert raised.value.path == "oracle"
    assert raised.value.repair is not None


def test_an_oracle_that_gives_no_list_is_named() -> None:
    assert "a list with the answer of each turn" in check(checked(calculate, oracle=lambda task: 3), "runs").detail[0]


class Methodical(Guess):
    def oracle(self, task: Task) -> list[str]:  # type: ignore[override]
        return ["1"]


def without_parameters() -> list[str]:
    return []


@pytest.mark.parametrize("oracle", [without_parameters, lambda a, b, c: [], Methodical.oracle, 3])
def test_an_oracle_that_cannot_be_called_is_refused(oracle: Any) -> None:
    with pytest.raises(OptionError, match="the oracle cannot be called") as raised:
        checked(calculate, oracle=oracle)
    assert "@staticmethod" in str(raised.value)


def test_no_tasks_are_refused() -> None:
    with pytest.raises(OptionError, match="there is no task to check"):
        checked(calculate, [])
