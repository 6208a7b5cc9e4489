"""Agents and episodes: tokens, seeds, limits, rewards, faults and replays."""

from __future__ import annotations

import asyncio
import json
import math
import time

import pytest

from forge.envs.episode import episode, run_episode
from forge.envs.journal import Journal
from forge.envs.limits import EpisodeLimits, EpisodeOver, Fault, ReplayMismatch
from forge.envs.state import EpisodeKey
from forge.envs.tools import tool
from forge.envs.trace import rows_of
from forge.errors import OptionError, RewardError
from forge.types import Episode, Score, Task
from scripted_policy import END, ScriptedPolicy, state_of

CALL = '<tool_call>{"name": "double", "arguments": {"x": %d}}</tool_call>' + END
MORE = [{"role": "user", "content": "More."}]


@tool
async def double(x: int) -> int:
    "Double a number."
    return 2 * x


@episode
async def ask_twice(task, agent):
    await agent.generate(task.messages)
    turn = await agent.generate(MORE)
    return float(turn.text == "Two.")


@episode(deterministic=True)
async def use_tools(task, agent):
    turn = await agent.run_tools(task.messages, tools=[double], max_turns=8)
    agent.add_reward(float("8" in turn.text), name="right")


def run(program, policy, **changes):
    return asyncio.run(run_episode(program, state_of(policy, **changes)))


def test_turns_extend_each_other_and_are_what_the_engine_received_and_sampled(codec):
    policy = ScriptedPolicy(codec, [f"One.{END}", f"Two.{END}"])
    done = run(ask_twice, policy)
    (row,) = rows_of(done.turns)
    sent, sampled = policy.prompts[-1], done.turns[-1].token_ids
    assert row.token_ids == sent + sampled
    assert policy.prompts[1][: len(policy.prompts[0])] == policy.prompts[0]
    assert (done.score.reward, done.score.parts, done.outcome) == (1.0, {"reward": 1.0}, "finished")
    assert (done.counts.num_turns, done.counts.num_observed) == (2, len(sent) - len(done.turns[0]))
    assert [each.parent for each in done.turns] == [None, 0]
    assert set(policy.sessions) == {"1-2-3-"}


def test_tools_are_called_until_none_is(codec):
    policy = ScriptedPolicy(codec, [CALL % 2, CALL % 4, f"It is 8.{END}"])
    done = run(use_tools, policy)
    assert done.score == Score(1.0, {"right": 1.0})
    texts = [codec.decode(ids) for ids in policy.prompts]
    assert "tool\n4<|im_end|>" in texts[1]
    assert "tool\n8<|im_end|>" in texts[2]
    assert len(rows_of(done.turns)) == 1
    assert done.counts.num_tool_calls == 2


@pytest.mark.parametrize("ending", ["</think>It is 6.", ""])
def test_a_call_in_the_reasoning_is_not_run(codec, ending):
    thought = "<think>Perhaps " + (CALL % 3).removesuffix(END)
    done = run(use_tools, ScriptedPolicy(codec, [f"{thought}{ending}{END}"]))
    assert (done.counts.num_turns, done.counts.num_tool_calls, done.turns[0].calls) == (1, 0, ())


def test_calls_of_one_answer_run_at_the_same_time(codec):
    meeting = asyncio.Barrier(2)

    async def meet(x: int) -> str:
        "Meet."
        await meeting.wait()
        return f"met {x}"

    both = "".join(f'<tool_call>{{"name": "meet", "arguments": {{"x": {x}}}}}</tool_call>' for x in (1, 2)) + END

    @episode
    async def program(task, agent):
        await agent.run_tools(task.messages, tools=[meet])
        return 1.0

    policy = ScriptedPolicy(codec, [both, f"Done.{END}"])
    run(program, policy)
    text = codec.decode(policy.prompts[1])
    assert text.index("met 1") < text.index("met 2")


def test_what_the_policy_got_wrong_is_told_and_counted(codec):
    bad = '<tool_call>{"name": "double", "arguments": {"x": "a"}}</tool_call><tool_call>{</tool_call>' + END
    policy = ScriptedPolicy(codec, [bad, f"I give up.{END}"])
    done = run(use_tools, policy)
    assert done.counts.tool_errors == {"bad_arguments": 1, "malformed": 1}
    assert "Error: bad arguments of double: x" in codec.decode(policy.prompts[1])
    assert (done.score.reward, done.outcome) == (0.0, "finished")


def test_seeds_depend_on_branch_and_turn_and_not_on_arrival(codec):
    def made(delays):
        @episode
        async def program(task, agent):
            await agent.generate(task.messages)
            forks = [agent.fork() for _ in range(3)]

            async def talk(number, fork):
                content = f"branch {number}"
                await fork.generate([{"role": "user", "content": content}])
                await fork.generate(MORE)

            await asyncio.gather(*(talk(number, fork) for number, fork in enumerate(forks)))
            return agent.rng.random()

        def delay(text):
            return next((delays[number] for number in range(3) if f"branch {number}" in text), 0.0)

        policy = ScriptedPolicy(codec, lambda text: f"Yes, {len(text)}.{END}", delay=delay)
        return run(program, policy)

    first, second = made([0.0, 0.01, 0.02]), made([0.02, 0.01, 0.0])
    assert [(turn.path, turn.parent, turn.seed, turn.token_ids) for turn in first.turns] == [
        (turn.path, turn.parent, turn.seed, turn.token_ids) for turn in second.turns
    ]
    assert first.score == second.score
    assert [turn.path for turn in first.turns] == [(), (0,), (0,), (1,), (1,), (2,), (2,)]
    assert [turn.parent for turn in first.turns] == [None, 0, 1, 0, 3, 0, 5]
    assert len({turn.seed for turn in first.turns}) == 7
    assert [row.counted for row in rows_of(first.turns)] == [(True,) * 3, (False, True, True), (False, True, True)]
    assert EpisodeKey(1, 2, 3).seed(0) != EpisodeKey(1, 2, 4).seed(0)


def test_compaction_starts_a_new_root_and_is_counted(codec):
    @episode
    async def program(task, agent):
        await agent.generate(task.messages)
        agent.replace_history([{"role": "system", "content": "Summary."}])
        await agent.generate(MORE)
        assert [each["role"] for each in agent.messages] == ["system", "user", "assistant"]
        return 1.0

    done = run(program, ScriptedPolicy(codec, [f"One.{END}", f"Two.{END}"]))
    assert [turn.prefix_break for turn in done.turns] == [None, "compaction"]
    assert [(turn.parent, turn.previous) for turn in done.turns] == [(None, None), (None, 0)]
    assert done.counts.prefix_breaks == {"compaction": 1}
    assert [len(row.turns) for row in rows_of(done.turns)] == [1, 1]


def test_a_turn_at_another_temperature_is_refused_unless_it_is_left_out_of_training(codec):
    seen = []

    @episode
    async def judged(task, agent):
        await agent.generate(task.messages, temperature=1.0)
        judge = agent.fork()
        with pytest.raises(OptionError, match="run's temperature") as refused:
            await judge.generate(MORE, temperature=0.0)
        seen.append(refused.value)
        await judge.generate(MORE, temperature=0.0, train=False)
        await agent.run_tools(MORE, tools=[double], train=False, temperature=0.5)
        return 1.0

    policy = ScriptedPolicy(codec, [f"One.{END}", f"Two.{END}", f"Three.{END}"])
    done = run(judged, policy)
    assert [options["temperature"] for options in policy.options] == [1.0, 0.0, 0.5]
    assert (seen[0].path, seen[0].value) == ("agent.generate(temperature=)", 0.0)
    (row,) = rows_of(done.turns)
    assert [turn.text for turn in row.turns] == ["One."]
    assert [turn.is_trained for turn in done.turns] == [True, False, False]
    assert Episode(done.task, done.turns, done.score).num_trained_tokens == len(done.turns[0])


def test_in_evaluations_every_temperature_is_allowed(codec):
    @episode
    async def fixed(task, agent):
        await agent.generate(task.messages, temperature=0.7)
        return 1.0

    policy = ScriptedPolicy(codec, [f"One.{END}"])
    assert run(fixed, policy, is_evaluation=True).turns[0].is_trained


def test_stripped_reasoning_starts_a_new_root(thinking):
    policy = ScriptedPolicy(thinking, [f"<think>\nhm\n</think>\n\nOne.{END}", f"Two.{END}"])
    done = run(ask_twice, policy)
    assert done.counts.prefix_breaks == {"template": 1}
    first, second = rows_of(done.turns)
    assert second.token_ids == policy.prompts[1] + done.turns[1].token_ids
    assert first.token_ids == policy.prompts[0] + done.turns[0].token_ids


@pytest.mark.parametrize(
    ("limits", "outcome", "num_turns"),
    [
        ({"max_turns": 1}, "turn_limit", 1),
        ({"max_tokens": 2}, "token_limit", 1),
        ({}, "context_full", 1),
    ],
)
def test_limits_end_an_episode_which_is_scored_by_rule(codec, limits, outcome, num_turns):
    policy = ScriptedPolicy(codec, [f"One.{END}"] * 3)
    if outcome == "context_full":
        policy.max_seq_len = 30
    done = run(ask_twice, policy, limits=EpisodeLimits(**limits))
    assert (done.outcome, len(done.turns)) == (outcome, num_turns)
    assert done.score == Score(0.0, {"limit": 0.0})
    if outcome == "token_limit":
        assert len(done.turns[0]) == 2
        assert done.turns[0].finish_reason == "length"


def test_a_program_may_deal_with_its_limits_and_rewards_given_before_count(codec):
    @episode(limit_reward=-1.0)
    async def careful(task, agent):
        agent.add_reward(0.25, name="start")
        try:
            await agent.run_tools(task.messages, tools=[double])
        except EpisodeOver as over:
            agent.add_reward(0.5 if over.outcome == "tool_call_limit" else 0.0, name="start")
            raise

    done = run(careful, ScriptedPolicy(codec, lambda text: CALL % 1), limits=EpisodeLimits(max_tool_calls=3))
    assert (done.outcome, done.score) == ("tool_call_limit", Score(0.75, {"start": 0.75}))
    assert done.counts.num_tool_calls == 3
    done = run(use_tools, ScriptedPolicy(codec, lambda text: CALL % 1))
    assert (done.outcome, len(done.turns), done.score.reward) == ("turn_limit", 8, 0.0)


def test_rewards_per_turn_add_up(codec):
    @episode
    async def program(task, agent):
        first = await agent.generate(task.messages)
        second = await agent.generate(MORE)
        agent.add_reward(1, name="step", turn=second)
        agent.add_reward(2.0, name="step", turn=first)
        agent.add_reward(0.5, name="step", turn=second)
        return Score(4.0, {"judge": 4.0})

    done = run(program, ScriptedPolicy(codec, [f"One.{END}", f"Two.{END}"]))
    assert done.score == Score(7.5, {"judge": 4.0, "step": 3.5})
    assert done.turn_rewards == {0: 2.0, 1: 1.5}


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None])
def test_rewards_that_are_not_numbers_are_errors(codec, value):
    @episode
    async def program(task, agent):
        await agent.generate(task.messages)
        if value is None:
            return None
        agent.add_reward(value)
        return 1.0

    with pytest.raises(RewardError) as error:
        run(program, ScriptedPolicy(codec, [f"One.{END}"]))
    assert error.value.rule is not None
    assert error.value.repair is not None


def test_time_is_a_fault_unless_the_task_says_otherwise(codec):
    async def slow(task, agent):
        await agent.generate(task.messages)
        await asyncio.Event().wait()
        return 1.0

    policy = ScriptedPolicy(codec, lambda text: f"One.{END}")
    limits = EpisodeLimits(timeout_s=0.05)
    with pytest.raises(Fault) as fault:
        run(episode(slow), policy, limits=limits)
    assert fault.value.kind == "time"
    limits = EpisodeLimits(timeout_s=1.0)  # far longer than the turn takes
    done = run(episode(time_is_task=True, limit_reward=-2.0)(slow), policy, limits=limits)
    assert (done.outcome, done.score.reward, len(done.turns)) == ("time_limit", -2.0, 1)
    policy.delay = lambda text: 60.0
    with pytest.raises(Fault) as fault:
        run(ask_twice, policy, limits=EpisodeLimits(turn_timeout_s=0.01))
    assert fault.value.kind == "turn_timeout"


def test_an_agent_is_used_inside_its_episode_and_one_turn_at_a_time(codec):
    kept = []

    @episode
    async def program(task, agent):
        kept.append(agent)
        await asyncio.gather(agent.generate(task.messages), agent.generate(MORE))
        return 1.0

    policy = ScriptedPolicy(codec, lambda text: f"One.{END}", delay=lambda text: 0.001)
    with pytest.raises(OptionError, match="one turn at a time"):
        run(program, policy)
    with pytest.raises(OptionError, match="over"):
        kept[0].add_reward(1.0)


def test_a_replay_does_nothing_again_and_continues(codec):
    entries, calls = [], []

    @tool
    async def count(x: int) -> int:
        "Count."
        calls.append(x)
        return 2 * x

    @episode(deterministic=True)
    async def program(task, agent):
        salt = await agent.record(lambda: len(calls))
        turn = await agent.run_tools(task.messages, tools=[count])
        return float(salt == 0 and turn.text == "8.")

    answers = [(CALL % 2).replace("double", "count"), (CALL % 4).replace("double", "count"), f"8.{END}"]
    journal = Journal(write=lambda entry: entries.append(json.loads(json.dumps(entry))))
    whole = run(program, ScriptedPolicy(codec, answers), journal=journal)
    assert whole.score.reward == 1.0
    assert len(entries) == 6
    for num_kept in range(len(entries) + 1):
        calls.clear()
        known = sum(entry["kind"] == "turn" for entry in entries[:num_kept])
        again = run(program, ScriptedPolicy(codec, answers[known:]), journal=Journal(entries[:num_kept]))
        assert (again.turns, again.score, again.num_replayed) == (whole.turns, whole.score, num_kept)
        assert len(calls) == 2 - sum(entry["kind"] == "tool" for entry in entries[:num_kept])


def test_a_replay_with_another_prompt_starts_over(codec):
    entries = []
    run(ask_twice, ScriptedPolicy(codec, [f"One.{END}", f"Two.{END}"]), journal=Journal(write=entries.append))

    @episode
    async def other(task, agent):
        await agent.generate(task.messages)
        await agent.generate([{"role": "user", "content": "Less."}])
        return 1.0

    with pytest.raises(ReplayMismatch, match="1"):
        run(other, ScriptedPolicy(codec, []), journal=Journal(entries))


def test_recorded_values_are_plain(codec):
    @episode
    async def program(task, agent):
        await agent.record(lambda: {1: 2})
        return 1.0

    with pytest.raises(OptionError, match="replay"):
        run(program, ScriptedPolicy(codec, []))


def test_programs_that_cannot_be(codec):
    with pytest.raises(OptionError, match="coroutine"):
        episode(lambda task, agent: 1.0)
    with pytest.raises(OptionError, match="limit_reward"):
        episode(limit_reward=math.nan)(ask_twice.function)
    with pytest.raises(OptionError) as error:
        ask_twice.with_args({"depth": 3})
    assert error.value.path == "episode.args"


def branches_in_a_task_group(*, fails=None):
    @episode(limit_reward=-1.0)
    async def program(task, agent):
        async def branch(fork):
            await fork.generate(task.messages)
            await fork.generate(MORE)

        async with asyncio.TaskGroup() as group:
            for fork in (agent.fork(), agent.fork()):
                group.create_task(branch(fork))
            if fails is not None:
                group.create_task(fails())
        return 1.0

    return program


def test_what_ends_branches_in_a_task_group_ends_the_episode_as_it_would_alone(codec):
    policy = ScriptedPolicy(codec, lambda text: f"One.{END}")
    done = run(branches_in_a_task_group(), policy, limits=EpisodeLimits(max_turns=3))
    assert (done.outcome, done.score.reward) == ("turn_limit", -1.0)

    async def loses_its_sandbox():
        raise Fault("gone", kind="sandbox")

    with pytest.raises(Fault) as fault:
        run(branches_in_a_task_group(fails=loses_its_sandbox), policy, limits=EpisodeLimits(max_turns=1))
    assert fault.value.kind == "sandbox"

    async def has_a_bug():
        raise KeyError("x")

    with pytest.raises(ExceptionGroup):  # a limit does not hide a bug
        run(branches_in_a_task_group(fails=has_a_bug), policy, limits=EpisodeLimits(max_turns=1))

    async def hangs_and_fails():
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError("while it was cancelled")

    with pytest.raises(Fault) as fault:
        run(branches_in_a_task_group(fails=hangs_and_fails), policy, limits=EpisodeLimits(timeout_s=0.05))
    assert fault.value.kind == "time"


def test_a_returned_score_is_checked_in_all_its_parts_and_keeps_what_is_unshaped(codec):
    def returning(score):
        @episode
        async def program(task, agent):
            agent.add_reward(2.0, name="step")
            return score

        return run(program, ScriptedPolicy(codec, []))

    assert returning(Score(1.0, unshaped=3.0)).score == Score(3.0, {"step": 2.0}, unshaped=5.0)
    for score in (Score(1.0, {"judge": math.nan}), Score(1.0, unshaped=math.inf)):
        with pytest.raises(RewardError):
            returning(score)


def test_a_limit_that_the_program_catches_is_the_outcome_all_the_same(codec):
    @episode
    async def goes_on(task, agent):
        try:
            while True:
                await agent.generate(task.messages)
        except EpisodeOver:
            return 0.5

    policy = ScriptedPolicy(codec, lambda text: f"One.{END}")
    done = run(goes_on, policy, limits=EpisodeLimits(max_turns=2))
    assert (done.outcome, done.score.reward) == ("turn_limit", 0.5)
    done = run(goes_on, policy, limits=EpisodeLimits(max_tokens=8))
    assert (done.outcome, done.score.reward) == ("token_limit", 0.5)


@pytest.mark.parametrize(
    ("limits", "outcome"),
    [({"max_turns": 2}, "turn_limit"), ({"max_tokens": 4}, "token_limit"), ({"max_tool_calls": 1}, "tool_call_limit")],
)
def test_after_a_limit_every_further_turn_raises_and_the_outcome_stays(codec, limits, outcome):
    found = []

    @episode
    async def stubborn(task, agent):
        forks = [agent.fork() for _ in range(3)]
        found.extend(
            await asyncio.gather(
                *(fork.run_tools(task.messages, tools=[double], max_turns=2) for fork in forks), return_exceptions=True
            )
        )
        for again in (agent, *forks, agent.fork()):
            try:
                found.append(await again.generate(MORE))
            except Exception as error:  # noqa: BLE001 - as careless programs do
                found.append(error)
        return 1.0

    done = run(stubborn, ScriptedPolicy(codec, lambda text: CALL % 1), limits=EpisodeLimits(**limits))
    assert done.outcome == outcome
    assert any(isinstance(each, EpisodeOver) for each in found[:3])
    assert all(isinstance(each, EpisodeOver) and each.outcome == outcome for each in found[3:])
    assert done.counts.num_turns == len(done.turns)


def test_a_branch_that_was_too_long_may_continue_with_another_history(codec):
    @episode
    async def compact(task, agent):
        other = agent.fork()
        for _ in range(2):
            with pytest.raises(EpisodeOver, match="context_full"):
                await agent.generate([{"role": "user", "content": "A long question. " * 20}])
        await other.generate(MORE)
        if not task.metadata.get("gives_up"):
            agent.replace_history(MORE)
            await agent.generate()
        return 1.0

    policy = ScriptedPolicy(codec, lambda text: f"One.{END}", max_seq_len=60)
    assert run(compact, policy).outcome == "finished"
    assert run(compact, policy, task=Task("t", metadata={"gives_up": True})).outcome == "context_full"


def test_what_a_program_leaves_running_is_cancelled_and_writes_nothing(codec):
    left, entries = [], []

    @episode(deterministic=True)
    async def leaves(task, agent):
        left.append(asyncio.create_task(agent.fork().generate(MORE)))
        await agent.generate(task.messages)
        return 1.0

    async def body():
        policy = ScriptedPolicy(codec, lambda text: f"One.{END}", delay=lambda text: 60.0 * ("More." in text))
        state = state_of(policy, journal=Journal(write=entries.append))
        done = await run_episode(leaves, state)
        await asyncio.wait(left)
        return done

    done = asyncio.run(body())
    assert left[0].cancelled()
    assert len(done.turns) == len(entries) == 1


def test_a_replay_with_other_sampling_starts_over(codec):
    entries = []
    policy = ScriptedPolicy(codec, [f"One.{END}", f"Two.{END}"])
    run(ask_twice, policy, journal=Journal(write=entries.append), sampling={"temperature": 1.0})
    assert len(policy.prompts) == len(entries) == 2
    assert run(ask_twice, policy, journal=Journal(entries), sampling={"temperature": 1.0}).num_replayed == 2
    with pytest.raises(ReplayMismatch):
        run(ask_twice, policy, journal=Journal(entries), sampling={"temperature": 0.5})


@pytest.mark.parametrize("held_up_s", [0.0, 0.1])
def test_a_program_that_does_not_end_when_its_time_is_up_is_ended(codec, monkeypatch, held_up_s):
    """Also where the event loop does not get its turn until both of its limits are over."""
    monkeypatch.setattr("forge.envs.episode.CLOSE_LIMIT_S", 0.02)
    was_cancelled = []

    async def cannot_close(task, agent):
        try:
            await agent.generate(task.messages)
            time.sleep(held_up_s)  # it holds up the event loop
            await asyncio.Event().wait()
        finally:
            try:
                await asyncio.Event().wait()  # a sandbox that does not answer
            except asyncio.CancelledError:
                was_cancelled.append(True)
                raise

    policy = ScriptedPolicy(codec, lambda text: f"One.{END}")
    with pytest.raises(Fault) as fault:
        run(episode(cannot_close), policy, limits=EpisodeLimits(timeout_s=0.02))
    assert (fault.value.kind, was_cancelled) == ("time", [True])
    done = run(episode(time_is_task=True)(cannot_close), policy, limits=EpisodeLimits(timeout_s=0.02))
    assert done.outcome == "time_limit"
