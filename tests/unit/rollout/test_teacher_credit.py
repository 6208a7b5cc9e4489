"""On-policy distillation: the teacher's part of advantages, against values and gradients derived by other means."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from forge.config import AlgorithmConfig
from forge.errors import DataError
from forge.rollout.credit import assign_advantages, needs_batch
from forge.rollout.distillation import divergence_metrics
from forge.rollout.references import References
from forge.rollout.samples import make_batch
from forge.rollout.signal import SignalTest
from forge.types import Batch, Completion, Episode, Group, Score, Task

TASK = Task(id="p", text="?")


def an_episode(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    teacher: Sequence[float] | None,
    *,
    reward: float = 0.0,
    **more: Any,
) -> Episode:
    completion = Completion((9,), tuple(tokens), tuple(logprobs), None, "", "stop")
    given = None if teacher is None else tuple(teacher)
    return replace(Episode.single(TASK, completion, Score(reward)), teacher_logprobs=given, **more)


def distilled(**section: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"distillation": {"coefficient": 1.0, **section}})


def advantages(groups: Sequence[Group], algorithm: AlgorithmConfig) -> list[list[tuple[float, ...]]]:
    found = assign_advantages(groups, algorithm, mask_truncated=False)
    return [[episode.token_advantages or () for episode in group.episodes] for group in found]


def test_a_token_is_worth_what_the_teacher_says_minus_what_the_student_said() -> None:
    episode = an_episode((1, 2, 3), (-1.0, -2.0, -0.5), (-0.25, -4.0, -0.5))
    alone = distilled(coefficient=2.0, reward_coefficient=0.0)
    assert advantages([Group(0, 0, (episode,))], alone) == [[(1.5, -4.0, 0.0)]]
    to_go = distilled(reward_coefficient=0.0, credit="return_to_go")
    assert advantages([Group(0, 0, (episode,))], to_go) == [[(0.75 - 2.0, -2.0, 0.0)]]
    clamped = distilled(reward_coefficient=0.0, clamp=0.5)
    assert advantages([Group(0, 0, (episode,))], clamped) == [[(0.5, -0.5, 0.0)]]


def test_rewards_and_teacher_are_added_with_their_weights() -> None:
    made = [an_episode((1, 2), (-1.0, -1.0), (-0.5, -2.0), reward=reward) for reward in (1.0, 0.0)]
    mixed = AlgorithmConfig.model_validate(
        {
            "advantage": {"scale": "none"},
            "distillation": {"coefficient": 0.5, "reward_coefficient": 3.0},
        }
    )
    # (1 - 0.5) x 3 and (0 - 0.5) x 3, plus half of 0.5 and of -1
    assert advantages([Group(0, 0, tuple(made))], mixed) == [[(1.75, 1.0), (-1.25, -2.0)]]


def test_advantages_of_a_group_do_not_depend_on_its_batch() -> None:
    groups = [
        Group(number, 0, tuple(an_episode((1, 2), (-1.0, -number - 1.0), (-2.0, -0.5)) for _ in range(2)))
        for number in range(3)
    ]
    alone = distilled(reward_coefficient=0.0)
    assert not needs_batch(
        AlgorithmConfig.model_validate({"preset": "reinforce_pp", "distillation": alone.distillation})
    )
    assert advantages(groups, alone) == [each for group in groups for each in advantages([group], alone)]


def _exact(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(student || teacher) of sequences of two tokens, summed over all of them: logits [1 + V, V], the first row for
    the first token, the others for the second after each first."""
    own, other = (torch.log_softmax(each, -1) for each in (student, teacher))
    total = torch.zeros((), dtype=student.dtype)
    for first, second in itertools.product(range(student.shape[1]), repeat=2):
        logprob = own[0, first] + own[1 + first, second]
        total = total + logprob.exp() * (logprob - other[0, first] - other[1 + first, second])
    return total


@pytest.mark.parametrize("credit", ["return_to_go", "token"])
def test_the_expected_policy_gradient_is_that_of_the_divergence(credit: str) -> None:
    generator = torch.Generator().manual_seed(0)
    size = 3
    student = torch.randn(1 + size, size, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(1 + size, size, generator=generator, dtype=torch.float64)
    own, other = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    algorithm = distilled(reward_coefficient=0.0, credit=credit)
    loss = torch.zeros((), dtype=torch.float64)
    for first, second in itertools.product(range(size), repeat=2):
        places = ((0, first), (1 + first, second))
        sampled = [[float(values.detach()[place]) for place in places] for values in (own, other)]
        episode = an_episode((first, second), *sampled)
        ((values,),) = advantages([Group(0, 0, (episode,))], algorithm)
        probability = math.exp(sum(sampled[0]))  # of sampling it
        loss = loss - probability * sum(value * own[place] for value, place in zip(values, places, strict=True))
    (found,) = torch.autograd.grad(loss, student, retain_graph=True)
    if credit == "return_to_go":
        (expected,) = torch.autograd.grad(_exact(student, teacher), student)
    else:  # each place's own divergence, with the probability of getting there held fixed
        reached = torch.cat([torch.ones(1, dtype=torch.float64), own[0].detach().exp()])
        per_place = (own.exp() * (own - other)).sum(-1)
        (expected,) = torch.autograd.grad((reached * per_place).sum(), student)
    assert torch.allclose(found, expected, atol=1e-12)


def test_the_trainer_gets_the_advantages_where_the_tokens_are() -> None:
    episode = an_episode((1, 2), (-1.0, -2.0), (-0.5, -2.5), reward=1.0)
    (group,) = assign_advantages([Group(0, 0, (episode,))], distilled(reward_coefficient=0.0), mask_truncated=False)
    batch = make_batch([group])
    assert batch.fields["advantages"].tolist() == [0.0, 0.5, -0.5]
    assert batch.loss_weights.tolist() == [0.0, 1.0, 1.0]


def test_a_group_has_signal_where_the_teacher_disagrees() -> None:
    apart = Group(0, 0, (an_episode((1,), (-1.0,), (-0.5,)),))
    alike = Group(1, 0, (an_episode((1,), (-1.0,), (-1.0,)),))
    test = SignalTest(distilled(reward_coefficient=0.0), before_shaping=True)
    assert test.passes([apart])
    assert not test.passes([alike])


def test_reference_and_teacher_are_asked_at_the_same_time() -> None:
    arrived = {"reference": asyncio.Event(), "teacher": asyncio.Event()}

    def model(name: str, other: str, value: float) -> Any:
        async def ask(batch: Batch, temperature: float) -> list[torch.Tensor]:
            arrived[name].set()
            await arrived[other].wait()
            return [torch.full((length,), value * temperature) for length in batch.lengths]

        return ask

    async def body() -> None:
        references = References(
            model("reference", "teacher", -1.0),
            algorithm=AlgorithmConfig(),
            temperature=0.5,
            teacher=model("teacher", "reference", -2.0),
        )
        (found,) = await references.compared([an_episode((1, 2), (-1.0, -1.0), None)], number=0)
        assert (found.ref_logprobs, found.teacher_logprobs) == ((-0.5, -0.5), (-1.0, -1.0))

    asyncio.run(asyncio.wait_for(body(), 600))


def test_metrics_are_means_over_tokens() -> None:
    made = (an_episode((1, 2, 3), (-1.0, -1.0, -1.0), (-2.0, -1.0, -1.5)), an_episode((1,), (-1.0,), (-1.5,)))
    assert divergence_metrics([Group(0, 0, made)]) == {
        "distillation/reverse_kl": 0.5,
        "distillation/teacher_nll": 1.5,
    }
    assert divergence_metrics([Group(0, 0, (an_episode((1,), (-1.0,), None),))]) == {}


@pytest.mark.parametrize(("teacher", "value"), [(None, None), ((-1.0, -math.inf), -math.inf)])
def test_logprobs_that_are_missing_or_infinite_are_refused(teacher: Any, value: Any) -> None:
    group = Group(4, 0, (an_episode((1, 2), (-1.0, -1.0), teacher),))
    with pytest.raises(DataError) as caught:
        advantages([group], distilled(reward_coefficient=0.0))
    assert (caught.value.path, caught.value.value) == ("group 4, sample 0 (p)", value)
    assert caught.value.rule
    assert caught.value.repair


def test_keys_without_an_effect_are_refused() -> None:
    for key, value in (("reward_coefficient", 0.5), ("credit", "return_to_go"), ("clamp", 1.0)):
        with pytest.raises(Exception, match="has no effect with coefficient 0"):
            AlgorithmConfig.model_validate({"distillation": {key: value}})
