"""GiGPO: advantages of turns among those taken in the same state, worked by hand and from the paper's formulas."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

from forge.config import AlgorithmConfig
from forge.config.algorithm import AdvantageConfig
from forge.errors import ConfigError
from forge.rollout.credit import assign_advantages, find_advantage, needs_batch
from forge.rollout.state_credit import state_advantages, state_of
from forge.types import Episode, Group, Score, Task, Turn

TASK = Task("maze", messages=({"role": "user", "content": "start"},))


def walk(member: int, rooms: str, total: float, rewards: dict[int, float] | None = None, **last: Any) -> Episode:
    """An episode of one turn in each room; turn n samples n + 1 tokens. `last` changes the last turn."""
    turns = []
    for index, room in enumerate(rooms):
        before = index - 1 if index else None
        fields: dict[str, Any] = {
            "index": index,
            "parent": before,
            "previous": before,
            "path": (),
            "messages": ({"role": "tool", "content": room, "tool_call_id": f"call-{member}-{index}"},),
            "context_ids": (ord(room),),
            "token_ids": tuple(range(100 * member, 100 * member + index + 1)),
            "logprobs": (-1.0,) * (index + 1),
            "full_logprobs": None,
            "text": "go",
            "finish_reason": "stop",
            "versions": (),
        }
        turns.append(Turn(**{**fields, **(last if index == len(rooms) - 1 else {})}))
    return Episode(TASK, tuple(turns), Score(total), member=member, turn_rewards=rewards or {})


def algorithm(**keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"preset": "gigpo", "advantage": keys})


def of_turns(episodes: list[Episode], config: AlgorithmConfig) -> list[list[float]]:
    """The advantage of each turn; all of its tokens have the same."""
    (group,) = assign_advantages([Group(0, 0, tuple(episodes))], config, mask_truncated=False)
    found = []
    for episode in group.episodes:
        assert episode.token_advantages is not None
        values = iter(episode.token_advantages)
        tokens = [[next(values) for _ in turn.token_ids] for turn in episode.turns]
        assert all(len(set(each)) == 1 for each in tokens)
        found.append([each[0] for each in tokens])
    return found


def test_a_turn_is_compared_with_those_taken_in_the_same_room() -> None:
    """Rooms A B C with reward 1, and A C with reward 0; without a discount and without scaling.

    Among the episodes +0.5 and -0.5. In A and in C the returns are 1 and 0, in B there is nothing to compare with.
    """
    episodes = [walk(0, "ABC", 1.0), walk(1, "AC", 0.0)]
    config = algorithm(scale="none", args={"gamma": 1.0})
    assert of_turns(episodes, config) == [[1.0, 0.5, 1.0], [-1.0, -1.0]]
    assert of_turns(episodes, algorithm(scale="none", args={"gamma": 1.0, "omega": 0.0})) == [[0.5] * 3, [-0.5] * 2]
    assert of_turns(episodes, algorithm(scale="none", args={"gamma": 1.0, "omega": 3.0})) == [[2, 0.5, 2], [-2, -2]]
    assert of_turns(episodes, algorithm(scale="none", clip=0.75, args={"gamma": 1.0})) == [
        [0.75, 0.5, 0.75],
        [-0.75, -0.75],
    ]


def test_returns_are_discounted_by_turns() -> None:
    """A B A B with reward 1 at the end: the turns in A have the returns 0.125 and 0.5, those in B 0.25 and 1."""
    episodes = [walk(0, "ABAB", 1.0), walk(1, "A", 1.0)]
    found = of_turns(episodes, algorithm(scale="none", args={"gamma": 0.5}))
    mean = (0.125 + 0.5 + 1.0) / 3
    assert found[0] == pytest.approx([0.125 - mean, 0.25 - 0.625, 0.5 - mean, 1.0 - 0.625])
    assert found[1] == pytest.approx([1.0 - mean])


def test_turns_that_earn_something_themselves() -> None:
    """A reward in the first turn is not part of the return of later ones."""
    episodes = [walk(0, "AB", 3.0, {0: 2.0}), walk(1, "AB", 2.0, {1: 2.0})]
    assert of_turns(episodes, algorithm(scale="none", args={"gamma": 1.0, "omega": 1.0})) == [[1.0, 0.0], [-1.0, 0.0]]


def test_the_papers_formula_on_random_walks() -> None:
    """A^E = (R - mean) / (std + eps), A^S the same of discounted returns in each room, A = A^E + omega A^S."""
    chance = random.Random(7)
    for _ in range(50):
        episodes = [
            walk(member, "".join(chance.choices("ABC", k=chance.randint(1, 5))), chance.choice([0.0, 0.5, 1.0]))
            for member in range(4)
        ]
        totals = [episode.score.reward for episode in episodes]
        rooms: dict[str, list[float]] = {}
        for episode in episodes:
            for turn in episode.turns:
                to_go = episode.score.reward * 0.9 ** (len(episode.turns) - 1 - turn.index)
                rooms.setdefault(turn.messages[0]["content"], []).append(to_go)
        wanted = [
            [
                compared(episode.score.reward, totals)
                + 0.7
                * compared(
                    episode.score.reward * 0.9 ** (len(episode.turns) - 1 - turn.index),
                    rooms[turn.messages[0]["content"]],
                )
                for turn in episode.turns
            ]
            for episode in episodes
        ]
        found = of_turns(episodes, algorithm(args={"gamma": 0.9, "omega": 0.7}))
        assert [value for each in found for value in each] == pytest.approx([v for each in wanted for v in each])


def compared(value: float, values: list[float]) -> float:
    if len(values) == 1 or math.isclose(max(values), min(values), rel_tol=0, abs_tol=1e-15):
        return 0.0
    return (value - statistics.fmean(values)) / (statistics.stdev(values) + 1e-4)


def test_what_a_state_is() -> None:
    """Calls have ids of their own, which do not distinguish states; histories differ where sampled tokens do."""
    first, second = walk(0, "AB", 1.0), walk(1, "AB", 0.0)
    assert state_of(first, first.turns[1], "observation") == state_of(second, second.turns[1], "observation")
    assert state_of(first, first.turns[0], "history") == state_of(second, second.turns[0], "history")
    assert state_of(first, first.turns[1], "history") == (ord("A"), 0, ord("B"))
    assert state_of(second, second.turns[1], "history") == (ord("A"), 100, ord("B"))
    plain = walk(0, "A", 1.0, messages=())
    assert state_of(plain, plain.turns[0], "observation") == (ord("A"),)
    found = of_turns([first, second], algorithm(scale="none", args={"gamma": 1.0, "state": "history"}))
    assert found == [[1.0, 0.5], [-1.0, -0.5]]


def test_a_turn_that_is_not_trained_on_is_not_compared() -> None:
    lost = walk(1, "AB", 0.0, is_delivered=False)
    found = of_turns([walk(0, "AB", 1.0), lost], algorithm(scale="none", args={"gamma": 1.0}))
    assert found == [[1.0, 0.5], [-1.0, -0.5]]


def test_equal_rewards_everywhere_have_no_signal() -> None:
    episodes = [walk(0, "AB", 1.0), walk(1, "AB", 1.0)]
    assert of_turns(episodes, algorithm()) == [[0.0, 0.0], [0.0, 0.0]]
    assert not needs_batch(algorithm())
    assert state_advantages([], [], AdvantageConfig()) == []


@pytest.mark.parametrize(
    ("args", "key"),
    [({"gamma": 0.0}, "gamma"), ({"gamma": 1.5}, "gamma"), ({"omega": -1.0}, "omega"), ({"state": "room"}, "state")],
)
def test_arguments_out_of_range_are_refused_before_the_run(args: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_advantage(algorithm(args=args))
    assert refused.value.path == f"algorithm.advantage.args.{key}"
    assert refused.value.repair
