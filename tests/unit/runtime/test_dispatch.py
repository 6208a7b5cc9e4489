"""How one actor runs its calls, with a port that only remembers what was sent through it."""

from __future__ import annotations

import asyncio
import contextvars
import pickle
import threading
import traceback
from collections.abc import Coroutine
from typing import Any

import cloudpickle
import pytest

from forge.errors import ConfigError, RemoteError
from forge.runtime import dispatch
from forge.runtime.dispatch import Dispatcher
from forge.runtime.endpoints import endpoint, specs_of
from forge.runtime.serialization import as_remote, decode, encode

LIMIT_S = 600
tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")


class RecordingPort:
    """Keeps the one answer of a call."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, Any]] = []
        self.arrived = asyncio.Event()

    def send(self, value: Any) -> None:
        if value is Desk:
            raise ValueError("this answer cannot be sent")
        self.answers.append(("value", value))
        self.arrived.set()

    def exception(self, error: Exception) -> None:
        self.answers.append(("error", decode(encode(error))))  # as it arrives
        self.arrived.set()

    async def answer(self) -> tuple[str, Any]:
        await self.arrived.wait()
        assert len(self.answers) == 1
        return self.answers[0]

    async def error(self) -> Any:
        kind, error = await self.answer()
        assert kind == "error"
        return error


class Desk:
    """An actor's own object."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self.thread_gate = threading.Event()

    @endpoint
    async def write(self, word: str) -> int:
        self.log.append(f"{word} begins")
        await asyncio.sleep(0)
        self.log.append(f"{word} ends")
        return len(self.log)

    @endpoint
    async def wait(self, word: str) -> str:
        self.log.append(f"{word} waits")
        self.begun.set()
        try:
            await self.gate.wait()
        finally:
            self.log.append(f"{word} leaves")
        return word

    @endpoint(concurrent=True)
    async def open(self) -> None:
        self.log.append("open")
        self.gate.set()

    @endpoint
    def compute(self, *, loop: asyncio.AbstractEventLoop) -> tuple[str, str]:
        loop.call_soon_threadsafe(self.begun.set)
        assert self.thread_gate.wait(LIMIT_S)
        self.log.append("computed")
        return threading.current_thread().name, tenant.get()

    @endpoint
    def raise_on_thread(self) -> None:
        raise KeyError("on the thread")

    @endpoint
    async def fail(self, error: BaseException) -> None:
        raise error

    @endpoint
    async def answer_badly(self) -> type:
        return Desk


class Bench:
    """A dispatcher with an actor, and calls to it by name."""

    def __init__(self) -> None:
        self.desk, self.dispatcher = Desk(), Dispatcher()

    def call(self, name: str, *args: Any, call_id: int = 0, **kwargs: Any) -> RecordingPort:
        port = RecordingPort()
        self.dispatcher.start(self.desk, port, specs_of(Desk)[name], args, kwargs, call_id)
        return port


def drive(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, LIMIT_S))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_serial_calls_run_whole_and_in_the_order_of_arrival() -> None:
    async def body() -> None:
        bench = Bench()
        ports = [bench.call("write", word) for word in ("a", "b", "c")]
        assert [await port.answer() for port in ports] == [("value", 2), ("value", 4), ("value", 6)]
        assert bench.desk.log == [f"{word} {verb}" for word in "abc" for verb in ("begins", "ends")]
        assert bench.dispatcher.num_served == 3

    drive(body())


def test_a_concurrent_call_does_not_wait_for_its_turn() -> None:
    async def body() -> None:
        bench = Bench()
        waiting, opening = bench.call("wait", "a"), bench.call("open")
        assert await opening.answer() == ("value", None)
        assert await waiting.answer() == ("value", "a")

    drive(body())


def test_a_plain_method_runs_on_a_thread_in_the_callers_context_and_leaves_the_loop_free() -> None:
    async def body() -> None:
        bench = Bench()
        tenant.set("blue")
        computing = bench.call("compute", loop=asyncio.get_running_loop())
        later = bench.call("write", "after")
        await bench.desk.begun.wait()
        assert await bench.call("open").answer() == ("value", None)
        assert not computing.answers
        bench.desk.thread_gate.set()
        kind, (thread, seen) = await computing.answer()
        assert (kind, seen) == ("value", "blue")
        assert thread.startswith("forge-endpoint")
        await later.answer()
        assert bench.desk.log == ["open", "computed", "after begins", "after ends"]

    drive(body())


def test_a_running_call_can_be_cancelled_and_the_next_one_takes_its_turn() -> None:
    async def body() -> None:
        bench = Bench()
        first, second = bench.call("wait", "a", call_id=7), bench.call("write", "b", call_id=8)
        await bench.desk.begun.wait()
        bench.dispatcher.cancel(7)
        assert (await first.error()).type_name == "asyncio.exceptions.CancelledError"
        assert await second.answer() == ("value", 4)
        assert bench.desk.log == ["a waits", "a leaves", "b begins", "b ends"]
        assert bench.dispatcher.num_served == 1

    drive(body())


def test_a_call_that_waits_for_its_turn_can_be_cancelled() -> None:
    async def body() -> None:
        bench = Bench()
        first, second = bench.call("wait", "a", call_id=7), bench.call("write", "b", call_id=8)
        await bench.desk.begun.wait()
        bench.dispatcher.cancel(8)
        assert isinstance(await second.error(), RemoteError)
        bench.desk.gate.set()
        await first.answer()
        assert bench.desk.log == ["a waits", "a leaves"]

    drive(body())


def test_a_cancellation_that_overtakes_its_call_drops_it_on_arrival() -> None:
    async def body() -> None:
        bench = Bench()
        bench.dispatcher.cancel(7)
        dropped = bench.call("write", "dropped", call_id=7)
        assert await bench.call("write", "kept", call_id=8).answer() == ("value", 2)
        assert dropped.answers == []
        assert bench.desk.log == ["kept begins", "kept ends"]
        assert await bench.call("write", "same id", call_id=7).answer() == ("value", 4)

    drive(body())


def test_cancelling_a_call_that_has_answered_does_nothing() -> None:
    async def body() -> None:
        bench = Bench()
        port = bench.call("write", "a", call_id=7)
        await port.answer()
        await settle()
        bench.dispatcher.cancel(7)
        await settle()
        assert len(port.answers) == 1

    drive(body())


def test_cancellations_without_a_call_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_FORGET_AFTER", 3)

    async def body() -> None:
        bench = Bench()
        for call_id in (1, 2, 3, 4, 5):
            bench.dispatcher.cancel(call_id)
        assert await bench.call("write", "a", call_id=2).answer() == ("value", 2)
        dropped = bench.call("write", "b", call_id=3)
        await settle()
        assert dropped.answers == []

    drive(body())


def test_a_thread_keeps_the_turn_until_it_is_done_though_its_call_was_cancelled() -> None:
    async def body() -> None:
        bench = Bench()
        computing = bench.call("compute", loop=asyncio.get_running_loop(), call_id=7)
        later = bench.call("write", "after")
        await bench.desk.begun.wait()
        bench.dispatcher.cancel(7)
        await settle()
        assert bench.desk.log == []
        bench.desk.thread_gate.set()
        assert isinstance(await computing.error(), RemoteError)
        await later.answer()
        assert bench.desk.log == ["computed", "after begins", "after ends"]

    drive(body())


@pytest.mark.parametrize(("name", "args"), [("fail", (KeyError("on the thread"),)), ("raise_on_thread", ())])
def test_an_exception_travels_as_itself_with_its_traceback(name: str, args: tuple[Any, ...]) -> None:
    async def body() -> None:
        bench = Bench()
        error = await bench.call(name, *args).error()
        assert type(error).__name__ == "KeyError"
        assert error.args == ("on the thread",)
        assert f"in {name}" in error.remote_traceback
        assert error.__notes__ == [f"\nRemote traceback:\n{error.remote_traceback}"]
        assert error.__traceback__ is None
        assert await bench.call("write", "still alive").answer() == ("value", 2)
        assert bench.dispatcher.num_served == 1

    drive(body())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()])
def test_not_even_an_exit_request_ends_the_actor(error: BaseException) -> None:
    async def body() -> None:
        bench = Bench()
        stand_in = await bench.call("fail", error).error()
        assert type(stand_in) is RemoteError
        assert stand_in.type_name.endswith(type(error).__name__)
        assert await bench.call("write", "still alive").answer() == ("value", 2)

    drive(body())


def test_an_answer_that_cannot_be_sent_is_an_error_to_the_caller() -> None:
    async def body() -> None:
        bench = Bench()
        assert str(await bench.call("answer_badly").error()) == "this answer cannot be sent"
        assert bench.dispatcher.num_served == 0

    drive(body())


# ---- portable


class NeedsKeywords(Exception):
    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


class Unspeakable(NeedsKeywords):
    def __str__(self) -> str:
        raise ValueError("no words")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - it is what the test wants
        return caught


def there_and_back(error: Exception) -> Any:
    return pickle.loads(cloudpickle.dumps(error))


def test_an_error_with_fields_arrives_with_them() -> None:
    there = there_and_back(as_remote(raised(ConfigError("it failed", path="run.seed", value=-1))))
    assert type(there).__name__ == ConfigError.__name__
    assert (there.path, there.value) == ("run.seed", -1)
    assert "in raised" in there.remote_traceback
    assert "".join(traceback.format_exception(there)).count("Remote traceback:") == 1


def test_the_traceback_shows_the_cause_as_well() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError as cause:
            raise ValueError("second") from cause
    except ValueError as error:
        text = there_and_back(as_remote(error)).remote_traceback
    assert "KeyError: 'first'" in text
    assert "direct cause" in text


def test_an_error_of_a_local_class_arrives_as_itself() -> None:
    class Local(Exception):
        pass

    assert type(there_and_back(as_remote(raised(Local("here"))))) is Local


@pytest.mark.parametrize(
    "error",
    [
        NeedsKeywords(reason="no way home"),
        StopIteration("done"),
        SystemExit(3),
        ValueError(threading.Lock()),
        ExceptionGroup("two", [ValueError(threading.Lock())]),
    ],
)
def test_what_cannot_travel_is_stood_for(error: BaseException) -> None:
    there = there_and_back(as_remote(raised(error)))
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    assert type(there).__name__ == RemoteError.__name__
    assert there.type_name == name
    assert there.message == f"{name}: {error}"
    assert "in raised" in there.remote_traceback


def test_an_error_that_cannot_even_be_printed_still_reaches_the_caller() -> None:
    there = there_and_back(as_remote(raised(Unspeakable(reason="none"))))
    assert type(there) is RemoteError
    assert there.type_name.endswith("Unspeakable")
