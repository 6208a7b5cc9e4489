"""What every router promises: it names one of the replicas that it is shown, and says the same for the same states."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.service import ReplicaState, Request
from forge.service.routing import BUILT_IN, check_choice


def first_of_a_host(states, request):
    """A router as a user would write it: the one of the docs."""
    near = [state for state in states if state.host == "local"] or states
    return min(near, key=lambda state: state.in_flight).index


ROUTERS = {**BUILT_IN, "a user's": first_of_a_host}

states_strategy = st.lists(
    st.builds(
        ReplicaState,
        index=st.integers(0, 31),
        generation=st.integers(0, 5),
        in_flight=st.integers(0, 100),
        last_used=st.integers(0, 10_000),
        host=st.sampled_from(["local", "tcp://10.0.0.1:1"]),
    ),
    min_size=1,
    max_size=16,
    unique_by=lambda state: state.index,
)


@pytest.mark.parametrize("name", ROUTERS)
@given(states=states_strategy, session=st.none() | st.just("s"), attempt=st.integers(0, 3))
def test_a_router_names_one_that_it_was_shown_and_keeps_its_word(name, states, session, attempt):
    router, request = ROUTERS[name], Request("generate", session, attempt)
    choice = check_choice(router(tuple(states), request), states, router)
    assert choice == router(tuple(states), request)
