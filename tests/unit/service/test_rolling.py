"""Calls of one replica after another: who gets new calls meanwhile, and what an error or a loss ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from forge.errors import ActorFailure, FanoutError, OptionError
from forge.runtime.endpoints import Batch, EndpointSpec
from forge.service.calls import Call, CallPath, ServiceEndpoint
from forge.service.routing import least_loaded
from forge.service.routing_table import RoutingTable, Target
from stand_in_replica import LIMIT_S, entry, make_table, request, take


def drive(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, LIMIT_S))


def test_a_replica_that_is_held_back_gets_no_calls_while_there_are_others() -> None:
    table = make_table(3, router=least_loaded)
    with table.held_back(0), table.held_back(2):
        assert [take(table).index for _ in range(3)] == [1, 1, 1]
        table.update(entry(1, health="restarting"))
        assert take(table).index in (0, 2), "rather than none"
    assert {take(table).index for _ in range(2)} == {0, 2}, "it is over"


def test_a_session_leaves_a_replica_that_is_held_back() -> None:
    table = make_table(2)
    table.pin("mine")
    first = table.try_acquire(request(session="mine"))
    assert first is not None
    with table.held_back(first.index):
        other = table.try_acquire(request(session="mine"))
        assert other is not None
        assert other.index != first.index


def test_who_waits_for_a_slot_is_woken_when_the_replica_is_free_again() -> None:
    async def body() -> None:
        table = make_table(2, limit=1)
        with table.held_back(0):
            assert take(table).index == 1
            waiting = asyncio.ensure_future(table.acquire(request()))
            await asyncio.sleep(0)
            assert not waiting.done()
        assert (await waiting).index == 0

    drive(body())


class Path(CallPath):
    """Answers as the test says, and notes which replicas new calls would have gone to meanwhile."""

    def __init__(self, table: RoutingTable, answers: list[Any]) -> None:
        super().__init__(table, max_retries=0, timeout_s=None)
        self._answers = answers
        self.called: list[int] = []
        self.others: list[int] = []

    async def _send(self, target: Target, call: Call) -> Any:
        self.called.append(target.index)
        other = take(self.table)
        self.others.append(other.index)
        self.table.release(other)
        answer = self._answers[target.index]
        if isinstance(answer, Exception):
            raise answer
        return answer


def endpoint(answers: list[Any], **spec: Any) -> tuple[ServiceEndpoint, Path]:
    path = Path(make_table(len(answers)), answers)

    async def ready(limit_s: float | None) -> None:
        return

    service: Any = SimpleNamespace(_path=path, _ready=ready, _supervisor=None, _batcher=lambda *_: None)
    return ServiceEndpoint(service, EndpointSpec("update", lambda: None, is_async=True, **spec)), path


def test_one_replica_after_another_and_no_call_goes_to_it_meanwhile() -> None:
    update, path = endpoint(["a", "b", "c"])
    assert drive(update.rolling(7)) == ["a", "b", "c"]
    assert path.called == [0, 1, 2]
    assert all(called != other for called, other in zip(path.called, path.others, strict=True))


def test_the_first_error_ends_it() -> None:
    update, path = endpoint(["a", ValueError("no"), "c"])
    with pytest.raises(FanoutError, match="1 of 2 replicas failed: replica 1: ValueError: no") as caught:
        drive(update.rolling(7))
    assert path.called == [0, 1]
    assert [outcome.ok for outcome in caught.value.outcomes] == [True, False]
    outcomes = drive(update.options(partial=True).rolling(7))
    assert [(outcome.replica, outcome.ok) for outcome in outcomes] == [(0, True), (1, False)]


def test_a_replica_that_is_lost_is_passed_over() -> None:
    update, path = endpoint(["a", ActorFailure("gone"), "c"])
    assert drive(update.rolling(7)) == ["a", "c"]
    assert path.called == [0, 1, 2]
    assert [outcome.ok for outcome in drive(update.options(partial=True).rolling(7))] == [True, False, True]


def test_endpoints_that_are_called_in_batches_are_refused() -> None:
    update, _ = endpoint(["a"], batch=Batch(2))
    with pytest.raises(OptionError, match="called in batches"):
        drive(update.rolling(7))
