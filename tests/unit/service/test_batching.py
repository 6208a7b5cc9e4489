"""Batching in the caller's process: who shares a call, who gets which answer, and what a failure costs whom."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from forge.errors import FanoutError, OptionError, RemoteError
from forge.runtime.endpoints import Batch, EndpointSpec
from forge.service import Outcome
from forge.service.batching import Batcher
from forge.service.calls import CallOptions, ServiceEndpoint

LIMIT_S = 600
NEVER_S = 3600.0
"""A batch that waits so long is sent because it is full, or not at all."""

Answer = Callable[[list[Any]], Any]


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


class RecordingPath:
    """The way of a call, as far as a batcher knows it: answers through a function, for each replica one."""

    def __init__(self, *answers: Answer) -> None:
        self.name = "reward"
        self.table = self
        self.session: contextvars.ContextVar[str | None] = contextvars.ContextVar("session")
        self.batches: list[list[Any]] = []
        self.sessions: list[str | None] = []
        self.overrides: list[CallOptions] = []
        self.num_cancelled = 0
        self._answers = answers

    def limit_s(self, options: CallOptions) -> float | None:
        return options.timeout_s

    def session_of(self, options: CallOptions) -> str | None:
        return options.session or self.session.get(None)

    async def route(
        self, spec: EndpointSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
    ) -> Any:
        assert (spec.name, len(args), kwargs) == ("score", 1, {})
        self.batches.append(args[0])
        self.sessions.append(self.session.get(None))
        self.overrides.append(options)
        answer = self._answers[0](args[0])
        if not isinstance(answer, asyncio.Future):
            return answer
        try:
            return await answer
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def fanout(
        self, spec: EndpointSpec, args: tuple[Any, ...], kwargs: Any, options: CallOptions
    ) -> list[Outcome]:
        assert kwargs == {}
        self.batches.append(args[0])
        return [Outcome(index, answer(args[0])) for index, answer in enumerate(self._answers)]


class Bench:
    """A batcher, and what it sends."""

    def __init__(
        self, answer: Answer = double, *, size: int = 2, wait_s: float = NEVER_S, options: CallOptions | None = None
    ) -> None:
        self.path = RecordingPath(answer)
        self.batcher = Batcher(spec_of(size, wait_s), self.path, options or CallOptions())  # type: ignore[arg-type]

    @property
    def batches(self) -> list[list[Any]]:
        return self.path.batches

    def submit(self, *items: Any) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(self.batcher.submit((item,), {})) for item in items]


def spec_of(size: int, wait_s: float) -> EndpointSpec:
    async def score(self: Any, items: list[Any]) -> list[Any]:
        raise AssertionError("the path answers")

    return EndpointSpec("score", score, is_async=True, batch=Batch(size, wait_s))


def drive(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, LIMIT_S))


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def outcomes(tasks: Sequence[asyncio.Task[Any]]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_a_full_batch_is_one_call_and_each_caller_gets_its_own_answer() -> None:
    async def body() -> None:
        bench = Bench(size=3)
        tasks = bench.submit(1, 2, 3, 4, 5, 6)
        assert await outcomes(tasks) == [2, 4, 6, 8, 10, 12]
        assert bench.batches == [[1, 2, 3], [4, 5, 6]]

    drive(body())


def test_a_batch_that_is_not_full_is_kept_until_its_time() -> None:
    async def body() -> None:
        bench = Bench(size=3)
        tasks = bench.submit(1, 2)
        await settle()
        assert bench.batches == []
        tasks += bench.submit(3)
        assert await outcomes(tasks) == [2, 4, 6]

    drive(body())


def test_when_its_time_is_up_a_batch_goes_as_it_is() -> None:
    async def body() -> None:
        bench = Bench(size=100, wait_s=0.0)
        assert await outcomes(bench.submit(1, 2)) == [2, 4]
        assert await outcomes(bench.submit(3)) == [6]
        assert bench.batches == [[1, 2], [3]]

    drive(body())


def test_an_exception_in_an_items_place_is_that_callers_alone() -> None:
    def answer(items: list[int]) -> list[Any]:
        return [KeyError(item) if item < 0 else item for item in items]

    async def body() -> None:
        first, second, third = await outcomes(Bench(answer, size=3).submit(1, -2, 3))
        assert (first, third) == (1, 3)
        assert (type(second), second.args) == (KeyError, (-2,))

    drive(body())


def test_an_exception_that_asyncio_refuses_keeps_nobody_waiting() -> None:
    async def body() -> None:
        bench = Bench(lambda items: [StopIteration("done"), 7])
        first, second = await outcomes(bench.submit(1, 2))
        assert isinstance(first, RemoteError)
        assert first.type_name == "builtins.StopIteration"
        assert second == 7

    drive(body())


def test_a_call_that_fails_fails_for_all_of_its_batch_and_for_no_other() -> None:
    def answer(items: list[int]) -> list[int]:
        if -1 in items:
            raise KeyError("no")
        return items

    async def body() -> None:
        first, second, third, fourth = await outcomes(Bench(answer).submit(1, -1, 3, 4))
        assert type(first) is type(second) is KeyError
        assert (third, fourth) == (3, 4)

    drive(body())


@pytest.mark.parametrize(
    ("answers", "value"), [([1], "1 answers"), ([1, 2, 3], "3 answers"), ({1: 2, 3: 4}, "dict"), (None, "NoneType")]
)
def test_an_endpoint_that_answers_anything_but_one_for_each_is_told_so(answers: Any, value: str) -> None:
    async def body() -> None:
        bench = Bench(lambda items: answers)
        for error in await outcomes(bench.submit(1, 2)):
            assert isinstance(error, OptionError)
            assert (error.path, error.value) == ("score", value)
            assert error.rule == "a list with one answer for each of the 2 items"
            assert error.repair

    drive(body())


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2), {}), ((1,), {"k": 2}), ((), {"item": 1})])
def test_a_call_brings_exactly_one_item(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    async def body() -> None:
        bench = Bench(wait_s=0.0)
        with pytest.raises(OptionError) as caught:
            await bench.batcher.submit(args, kwargs)
        error = caught.value
        assert (error.path, error.value) == ("score.route", (args, kwargs))
        assert error.rule
        assert error.repair == "score.route(item)"
        await settle()
        assert bench.batches == []

    drive(body())


def test_a_caller_that_gives_up_takes_its_item_out_of_a_batch_that_is_not_sent() -> None:
    async def body() -> None:
        bench = Bench(size=3)
        first, second = bench.submit(1, 2)
        await settle()
        first.cancel()
        await settle()
        (third,) = bench.submit(3)
        assert await outcomes([second, third]) == [4, 6]
        assert bench.batches == [[2, 3]]

    drive(body())


def test_a_batch_that_nobody_wants_any_more_is_not_sent() -> None:
    async def body() -> None:
        bench = Bench(size=100, wait_s=0.0)
        tasks = bench.submit(1, 2)
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await settle()
        assert bench.batches == []

    drive(body())


def test_a_sent_batch_goes_on_for_those_who_stay_and_is_cancelled_when_all_have_left() -> None:
    async def body() -> None:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        bench = Bench(lambda items: answer)
        first, second = bench.submit(1, 2)
        await settle()
        assert bench.batches == [[1, 2]]
        first.cancel()
        await settle()
        assert not answer.done()
        second.cancel()
        await settle()
        assert answer.cancelled()
        assert bench.path.num_cancelled == 1

    drive(body())


def test_one_who_leaves_a_sent_batch_does_not_cost_the_other_its_answer() -> None:
    async def body() -> None:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        bench = Bench(lambda items: answer)
        first, second = bench.submit(1, 2)
        await settle()
        first.cancel()
        await settle()
        answer.set_result(["one", "two"])
        assert await second == "two"

    drive(body())


def test_what_the_callers_wish_for_goes_with_their_batch() -> None:
    async def body() -> None:
        options = CallOptions(timeout_s=3)
        bench = Bench(options=options)
        await outcomes(bench.submit(1, 2))
        assert bench.path.overrides == [options]

    drive(body())


@pytest.mark.parametrize("wait_s", [NEVER_S, 0.0])
def test_callers_of_different_sessions_do_not_share_a_batch(wait_s: float) -> None:
    async def body() -> None:
        bench = Bench(size=2 if wait_s else 100, wait_s=wait_s)
        tasks = []
        for session, item in (("s", 1), ("t", 2), ("s", 3), ("t", 4)):
            bench.path.session.set(session)
            tasks += bench.submit(item)
        assert await outcomes(tasks) == [2, 4, 6, 8]
        assert list(zip(bench.path.sessions, bench.batches, strict=True)) == [("s", [1, 3]), ("t", [2, 4])]

    drive(body())


# ---- fanout of a batched endpoint


class OwnersService:
    """As in the process that started the service, where the table is at hand."""

    def __init__(self, path: RecordingPath) -> None:
        self._path, self._supervisor = path, self

    async def _ready(self, timeout_s: float | None = None) -> None: ...

    def _batcher(self, spec: Any, options: Any) -> Batcher:
        return Batcher(spec, self._path, options)  # type: ignore[arg-type]


def endpoint_of(*answers: Answer) -> ServiceEndpoint:
    return ServiceEndpoint(OwnersService(RecordingPath(*answers)), spec_of(4, 0.0))  # type: ignore[arg-type]


def test_a_fanout_sends_a_batch_of_one_to_each() -> None:
    async def body() -> None:
        assert await endpoint_of(double, double).fanout(4) == [8, 8]

    drive(body())


def test_a_fanout_brings_exactly_one_item() -> None:
    async def body() -> None:
        with pytest.raises(OptionError, match="takes one item a call"):
            await endpoint_of(double).fanout(4, 5)

    drive(body())


def test_a_fanout_never_returns_an_exception_as_a_value() -> None:
    async def body() -> None:
        score = endpoint_of(double, lambda items: [KeyError("no")])
        with pytest.raises(FanoutError, match="1 of 2 replicas failed: replica 1: KeyError") as caught:
            await score.fanout(4)
        assert caught.value.outcomes[0] == Outcome(0, 8)
        partial = await score.options(partial=True).fanout(4)
        assert [outcome.ok for outcome in partial] == [True, False]

    drive(body())


@pytest.mark.parametrize("answer", [[], [1, 2], None])
def test_a_fanout_that_is_not_answered_with_one_item_fails(answer: Any) -> None:
    async def body() -> None:
        with pytest.raises(FanoutError, match="must answer a list"):
            await endpoint_of(lambda items: answer).fanout(4)

    drive(body())
