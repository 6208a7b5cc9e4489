"""Every option of an actor and a service: what is refused, and how the refusal reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from forge import ForgeActor
from forge.errors import OptionError
from forge.runtime.actor import ActorOptions
from forge.service import ServiceOptions
from forge.service.calls import CallOptions
from forge.service.routing import least_loaded, round_robin

NAN, INF = float("nan"), float("inf")

NO_COUNT = [0, -1, 1.0, "2", True, [1]]
NO_NATURAL = [-1, 1.0, "2", True]
NO_SECONDS = [0, 0.0, -1, NAN, INF, -INF, "1", True, [1]]
NO_SECONDS_OR_ZERO = [-0.5, NAN, INF, "1", False, True]

BAD: dict[str, list[Any]] = {
    "procs": [*NO_COUNT, None],
    "hosts": NO_COUNT,
    "with_gpus": [1, 0, "true", None],
    "mesh_name": ["", "  ", 3, b"policy"],
    "env": [None, "A=1", {"A": 1}, {1: "a"}, {"A": None}, [("A", "1")]],
    "num_threads": NO_COUNT,
    "setup_timeout_s": [*NO_SECONDS, None],
    "spawn_timeout_s": [*NO_SECONDS, None],
    "preload": ["torch", ["torch"], ("",), (1,)],
    "num_replicas": [*NO_COUNT, None],
    "routing": ["random", "", None, 3, ["round_robin"], {"a": 1}],
    "max_concurrency": NO_COUNT,
    "max_queue": NO_NATURAL,
    "call_timeout_s": NO_SECONDS,
    "max_retries": [*NO_NATURAL, None],
    "heartbeat_s": [*NO_SECONDS, None],
    "heartbeat_timeout_s": [*NO_SECONDS, None],
    "max_restarts": [*NO_NATURAL, None],
    "restart_backoff_s": [*NO_SECONDS_OR_ZERO, None],
    "max_backoff_s": [*NO_SECONDS, None],
    "stable_s": [*NO_SECONDS_OR_ZERO, None],
}
GOOD: dict[str, list[Any]] = {
    "procs": [1, 8],
    "hosts": [None, 2],
    "with_gpus": [True, False],
    "mesh_name": [None, "policy"],
    "env": [{}, {"A": "1"}],
    "num_threads": [None, 4],
    "setup_timeout_s": [0.5, 3600],
    "spawn_timeout_s": [0.5, 3600],
    "preload": [None, (), ("torch", "json")],
    "num_replicas": [1, 64],
    "routing": ["round_robin", "least_loaded", least_loaded, lambda states, request: 0],
    "max_concurrency": [None, 1],
    "max_queue": [None, 0, 9],
    "call_timeout_s": [None, 0.1],
    "max_retries": [0, 3],
    "heartbeat_s": [0.05, 10],
    "heartbeat_timeout_s": [0.05, 10],
    "max_restarts": [0, 3],
    "restart_backoff_s": [0, 0.5],
    "max_backoff_s": [0.5],
    "stable_s": [0, 0.5],
}


class Model(ForgeActor):
    pass


def test_every_option_is_tested_here() -> None:
    names = {field.name for field in dataclasses.fields(ServiceOptions)}
    assert set(BAD) == set(GOOD) == names


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_named_with_its_rule_and_a_repair(name: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        Model.options(**{name: value})
    error = caught.value
    assert error.message == f"option {name!r} is not valid"
    assert error.path == f"options({name}=)"
    assert error.value is value
    assert error.rule
    assert error.repair is not None
    assert error.repair.startswith(f"{name}=")


@pytest.mark.parametrize("name", sorted(BAD))
def test_the_repair_that_is_offered_is_accepted(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        Model.options(**{name: BAD[name][0]})
    repair = str(caught.value.repair)
    value = eval(repair.partition("=")[2])  # our own text, such as `procs=1`
    assert getattr(Model.options(**{name: value}).chosen, name) == value


@pytest.mark.parametrize("name", ["restart_backoff_s", "stable_s"])
def test_where_zero_is_allowed_the_rule_says_so(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        Model.options(**{name: -1})
    assert caught.value.rule == "a finite number of seconds >= 0"


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_a_good_value_is_kept(name: str, value: Any) -> None:
    assert getattr(Model.options(**{name: value}).chosen, name) == value


def test_an_unknown_option_raises_with_the_nearest_name() -> None:
    with pytest.raises(OptionError) as caught:
        Model.options(num_replica=2)
    error = caught.value
    assert error.message == "options() has no 'num_replica'; did you mean 'num_replicas'?"
    assert (error.path, error.value) == ("options(num_replica=)", 2)
    assert error.rule is not None
    assert error.rule.startswith("one of procs, ")
    assert error.repair == "write options(num_replicas=...)"


def test_an_unknown_option_that_is_like_no_other() -> None:
    with pytest.raises(OptionError) as caught:
        Model.options(procs=2).options(zzz=1)
    assert caught.value.message == "options() has no 'zzz'"
    assert caught.value.repair == "remove it"


def test_a_plain_actor_has_no_options_of_a_service() -> None:
    with pytest.raises(OptionError, match="has no 'num_replicas'"):
        ActorOptions.from_keywords(num_replicas=2)


def test_options_add_up_and_change_nothing_behind_them() -> None:
    first = Model.options(procs=2, env={"A": "1"})
    second = first.options(num_replicas=3)
    assert (first.chosen.procs, first.chosen.num_replicas) == (2, 1)
    assert (second.chosen.procs, second.chosen.num_replicas) == (2, 3)
    assert Model.options().chosen == ServiceOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        second.chosen.procs = 4  # type: ignore[misc]
    with pytest.raises(OptionError):
        second.options(procs=0)


def test_what_is_spawned_does_not_follow_later_changes_of_a_callers_dict() -> None:
    env = {"A": "1"}
    spec = Model.options(procs=2, env=env, num_threads=3).chosen.group_spec(Model, (1,), {"b": 2}, label="m")
    env["A"] = "2"
    assert (spec.env, spec.num_procs, spec.num_threads) == ({"A": "1"}, 2, 3)
    assert (spec.cls, spec.args, spec.kwargs, spec.label) == (Model, (1,), {"b": 2}, "m")


def test_the_router_of_a_name_and_of_a_function() -> None:
    assert ServiceOptions().router() is round_robin
    assert ServiceOptions(routing="least_loaded").router() is least_loaded
    assert ServiceOptions(routing=max).router() is max


@pytest.mark.parametrize("value", NO_SECONDS)
def test_a_call_cannot_have_a_bad_time_out(value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        CallOptions(timeout_s=value)
    assert caught.value.value is value
