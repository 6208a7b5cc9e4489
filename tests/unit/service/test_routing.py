"""The built-in routers as pure functions, and the check on a user's own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.errors import OptionError
from forge.service.records import ReplicaState, Request
from forge.service.routing import BUILT_IN, check_choice, least_loaded, round_robin

REQUEST = Request("generate", None, 0)


def state(index: int, *, in_flight: int = 0, last_used: int = 0) -> ReplicaState:
    return ReplicaState(index, 0, in_flight, last_used, "box")


@given(num_replicas=st.integers(1, 6), num_calls=st.integers(0, 60))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_round_robin_is_fair_to_the_call(num_replicas: int, num_calls: int) -> None:
    last_used = dict.fromkeys(range(num_replicas), 0)
    counts: Counter[int] = Counter(dict.fromkeys(range(num_replicas), 0))
    for number in range(1, num_calls + 1):
        chosen = round_robin([state(index, last_used=used) for index, used in last_used.items()], REQUEST)
        last_used[chosen] = number
        counts[chosen] += 1
    assert max(counts.values()) - min(counts.values()) <= 1


@given(presence=st.lists(st.sets(st.integers(0, 4), min_size=1), max_size=60))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_round_robin_is_fair_whichever_replicas_come_and_go(presence: list[set[int]]) -> None:
    """Between two calls of one replica, each other that was there all along is called exactly once or not passed over:
    nobody is served twice while another that could be served waits."""
    last_used = dict.fromkeys(range(5), 0)
    turns_waited: dict[int, Counter[int]] = {index: Counter() for index in range(5)}
    for number, present in enumerate(presence, start=1):
        chosen = round_robin([state(index, last_used=last_used[index]) for index in sorted(present)], REQUEST)
        assert chosen in present
        last_used[chosen] = number
        turns_waited[chosen].clear()
        for index in present - {chosen}:
            turns_waited[index][chosen] += 1
            assert turns_waited[index][chosen] <= 1


states_of_replicas = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=8).map(
    lambda pairs: [state(index, in_flight=load, last_used=used) for index, (load, used) in enumerate(pairs)]
)


@given(states=states_of_replicas)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_least_loaded_picks_a_minimum_and_among_equals_the_longest_idle(states: list[ReplicaState]) -> None:
    chosen = states[least_loaded(states, REQUEST)]
    assert chosen.in_flight == min(one.in_flight for one in states)
    assert chosen.last_used == min(one.last_used for one in states if one.in_flight == chosen.in_flight)


@given(states=states_of_replicas)
@settings(derandomize=True, deadline=None, max_examples=100)
def test_round_robin_picks_the_longest_idle(states: list[ReplicaState]) -> None:
    assert states[round_robin(states)].last_used == min(one.last_used for one in states)


@pytest.mark.parametrize("router", [round_robin, least_loaded])
def test_among_equals_the_first_is_chosen(router: Any) -> None:
    assert router([state(4), state(2), state(7)], REQUEST) == 4


def test_the_names_of_the_routers() -> None:
    assert [BUILT_IN["round_robin"], BUILT_IN["least_loaded"]] == [round_robin, least_loaded]
    assert len(BUILT_IN) == 2


def test_a_choice_among_those_shown_is_taken() -> None:
    assert check_choice(5, [state(3), state(5)], round_robin) == 5


@pytest.mark.parametrize("choice", [0, 4, -1, None, True, "3", 3.0])
def test_any_other_choice_is_refused(choice: object) -> None:
    def mine(states: Any, request: Any) -> Any: ...

    with pytest.raises(OptionError, match="did not choose one of the replicas") as caught:
        check_choice(choice, [state(3), state(1)], mine)
    error = caught.value
    assert (error.path, error.value) == ("options(routing=mine)", choice)
    assert error.rule == "one of [3, 1]"
    assert error.repair
