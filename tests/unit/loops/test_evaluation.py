"""Evaluations: what is asked, how it is counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from episodes import make_completion
from forge.config import AlgorithmConfig, EpisodeConfig, EvaluationConfig, Sampling
from forge.envs.limits import Fault
from forge.errors import ActorFailure, ConfigError, EngineDead, PromptError
from forge.loops.evaluation import (
    Evaluation,
    Evaluator,
    check_evaluation,
    episode_attempts,
    pass_at_k,
    single_turn_attempts,
)
from forge.rollout.episode_source import EpisodeSource
from forge.rollout.references import References
from forge.rollout.rollouter import Prompts
from forge.types import Completion, Episode, Group, Score, Task


class Book:
    digest = "dataset"

    def __len__(self) -> int:
        return 4

    def read(self, index: int) -> Task:
        return Task(f"p{index}", text="?", answer=str(index))


class Asked:
    """Remembers what was asked, and scores completion i of prompt p as solved when i < p."""

    def __init__(self) -> None:
        self.samplings: list[Sampling] = []
        self.running = self.most = 0

    async def generate(self, prompt: Task, *, sampling: Sampling) -> list[Completion]:
        self.samplings.append(sampling)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return [make_completion((1,) * (index + 1)) for index in range(sampling.n)]

    async def extend(self, completion: Completion, *, sampling: Sampling) -> Completion:
        raise AssertionError

    async def score(self, prompt: Task, completions: Sequence[Completion]) -> list[Score]:
        right = int(prompt.answer or 0)
        return [
            Score(2.0 * (index < right), {"right": float(index < right), "other": 1.0})
            for index in range(len(completions))
        ]


def evaluated(asked: Asked | None = None, **keys: Any) -> tuple[Any, Asked]:
    async def body() -> tuple[Any, Asked]:
        who = asked or Asked()
        config = EvaluationConfig(fraction=0.5, **keys)
        sampling = Sampling(max_tokens=9, temperature=1.0, n=8)
        evaluator = Evaluator(
            config,
            dataset=Book(),
            attempt=single_turn_attempts(config, policy=who, score=who.score, sampling=sampling),
            at_once=2,
        )
        return await evaluator.run(), who

    return asyncio.run(body())


def test_figures_of_several_samples() -> None:
    found, asked = evaluated(num_samples=3, temperature=0.5)
    # prompts 0..3 have 0, 1, 2 and 3 of 3 right
    assert (found.num_prompts, found.reward, found.solved) == (4, 1.0, 0.5)
    assert found.pass_at == pytest.approx({1: 0.5, 2: (0 + 2 / 3 + 1 + 1) / 4, 3: 0.75})
    assert found.length == 2.0
    assert found.values()["evaluation/avg@3"] == 0.5
    assert Evaluation.read(json.loads(json.dumps(found.plain()))) == found
    assert asked.most == 2
    assert {(each.temperature, each.n, each.max_tokens) for each in asked.samplings} == {(0.5, 3, 9)}
    assert len({each.seed for each in asked.samplings}) == 4


def test_answers_can_be_recorded() -> None:
    groups: list[Group] = []

    async def body() -> Evaluation:
        asked, config = Asked(), EvaluationConfig(fraction=0.5, num_samples=3, temperature=0.5)
        sampling = Sampling(max_tokens=9, temperature=1.0, n=8)
        attempt = single_turn_attempts(config, policy=asked, score=asked.score, sampling=sampling)
        evaluator = Evaluator(config, dataset=Book(), attempt=attempt, at_once=2)
        return await evaluator.run(record=groups.extend)

    asyncio.run(body())
    assert [(group.number, group.task.id, len(group.episodes)) for group in groups] == [
        (number, f"p{number}", 3) for number in range(4)
    ]
    assert groups[1].rewards == (2.0, 0.0, 0.0)


def test_without_chance_one_sample_is_enough() -> None:
    found, asked = evaluated(num_samples=5, max_prompts=2)
    assert {each.n for each in asked.samplings} == {1}
    assert (found.num_prompts, found.pass_at) == (2, {1: 0.5})


def test_one_reward_may_decide() -> None:
    found, _ = evaluated(reward="other")
    assert found.solved == 1.0


class Failing(Asked):
    """Fails with these errors, one for each request, before it answers."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)

    async def generate(self, prompt: Task, *, sampling: Sampling) -> list[Completion]:
        if self.errors:
            raise self.errors.pop()
        return await super().generate(prompt, sampling=sampling)


def test_a_reward_that_no_episode_has_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    found, _ = evaluated(reward="wright")
    assert found.solved == 0.0
    assert "'wright'" in caplog.text
    assert "other, right" in caplog.text
    caplog.clear()
    evaluated(reward="right")
    assert not caplog.text


def test_a_process_that_dies_does_not_end_an_evaluation() -> None:
    found, _ = evaluated(Failing(ActorFailure("died"), EngineDead("its engine died"), ActorFailure("again")))
    assert (found.num_prompts, found.solved) == (4, 0.75)
    with pytest.raises(EngineDead):
        evaluated(Failing(*[EngineDead("its engine died")] * 20))


def test_a_prompt_that_nobody_can_answer_is_left_out_and_not_all_may_be() -> None:
    found, _ = evaluated(Failing(PromptError("too long")))
    assert (found.num_prompts, found.solved) == (3, 1.0)
    with pytest.raises(PromptError, match="no held-out prompt"):
        evaluated(Failing(*[PromptError("too long")] * 4))


def test_rewards_that_fail_are_counted() -> None:
    class Broken(Asked):
        async def score(self, prompt: Task, completions: Sequence[Completion]) -> list[Score]:
            return [Score(0.0, {}, failures={"right": "it raised"} if prompt.id == "p2" else {}) for _ in completions]

    found, _ = evaluated(Broken())
    assert (found.num_failed, found.values()["evaluation/num_failed"]) == (1, 1.0)


def test_pass_at_k_is_the_chance_of_at_least_one() -> None:
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(10, 3, 2) == pytest.approx(1 - (7 * 6) / (10 * 9))


def test_a_reward_that_is_not_there_cannot_decide() -> None:
    with pytest.raises(ConfigError) as caught:
        check_evaluation(EvaluationConfig(reward="rihgt"), ["right", "other"])
    assert (caught.value.path, caught.value.rule) == ("evaluation.reward", "one of right, other")


def source_of(run: Any, compare: Any = None, **keys: Any) -> EpisodeSource:
    references = References(None, algorithm=AlgorithmConfig(), temperature=1.0)
    config = EpisodeConfig(kind="own_episodes:dialogue", **keys)
    prompts = cast(Prompts, None)
    return EpisodeSource(prompts, run=run, compare=compare, references=references, config=config, group_size=2)


def test_held_out_episodes_are_compared_and_their_faults_are_counted_apart() -> None:
    faults = [Fault("gone", kind="sandbox"), Fault("no judge", kind="judge")]

    async def run(task: Task, group: int, member: int, *, evaluation: bool) -> Episode:
        assert evaluation
        if (group, member) == (1, 0) and len(faults) == 2:
            raise faults.pop(0)
        return replace(Episode.single(task, make_completion(), Score(0.0)), member=member)

    async def compare(task: Task, episodes: Sequence[Episode]) -> list[float]:
        if len(faults) == 1:
            raise faults.pop()
        return [float(episode.member == 1) for episode in episodes]

    source = source_of(run, compare)
    section = EvaluationConfig(num_samples=2, temperature=1.0)
    evaluator = Evaluator(
        section,
        dataset=Book(),
        attempt=episode_attempts(section, source),
        at_once=1,
        take_faults=source.take_evaluation_faults,
    )
    found = asyncio.run(evaluator.run())
    assert (found.reward, found.solved, found.pass_at[2]) == (0.5, 0.5, 1.0)
    assert found.faults == {"judge": 1, "sandbox": 1}
    assert found.values()["evaluation/num_faults"] == 2.0
    assert found.values()["evaluation/faults/sandbox"] == 1.0
    assert source.take_metrics() == {"episode/num_faults": 0.0}
    assert Evaluation.read(found.plain()) == found
    assert Evaluation.read({key: value for key, value in found.plain().items() if key != "faults"}).faults == {}


def test_an_episode_that_fails_ends_the_other_attempts_of_its_prompt() -> None:
    cancelled = list[int]()

    async def run(task: Task, group: int, member: int, **options: Any) -> Episode:
        if member == 1:
            raise Fault("gone")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(member)
            raise
        raise AssertionError("never")

    attempt = episode_attempts(EvaluationConfig(num_samples=3, temperature=1.0), source_of(run, max_retries=0))

    async def body() -> None:
        with pytest.raises(Fault, match="gone"):
            await attempt(0, Task("t"))
        assert sorted(cancelled) == [0, 2]

    asyncio.run(body())
