"""Streaming endpoints on real processes: order, back-pressure, leaving early, errors, limits, other processes."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from actors import TaskFailed
from forge.errors import CallTimeout, OptionError
from forge.runtime.replies import reply_channel
from forge.runtime.streams import WINDOW, StreamReader
from stream_actors import Reader, Streamer

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_streams_of_a_service(drive):
    """One service for many questions: starting it is what costs."""

    async def body():
        service = await Streamer.options(num_replicas=2, max_concurrency=3).as_service()
        for check in (
            items_come_in_order_and_each_as_soon_as_it_is_yielded,
            a_slow_reader_holds_the_generator,
            leaving_cancels_the_generator,
            cancelling_the_reader_cancels_the_generator,
            a_generator_that_swallows_its_cancellation_is_closed,
            what_the_generator_raises_comes_after_its_items,
            what_cannot_travel_is_an_error_to_the_reader,
            the_time_out_is_for_each_item_and_not_for_the_reader,
            streams_hold_slots,
            streams_belong_to_sessions,
            other_verbs_are_refused,
        ):
            await check(service)
        metrics = await service.get_metrics()
        assert [replica.in_flight for replica in metrics.replicas] == [0, 0]
        while await service.kept.fanout() != [(0, 0), (0, 0)]:
            pass  # the last one to be cancelled may still be ending
        assert [call for call in reply_channel()._calls.values() if isinstance(call, StreamReader)] == []
        await handles_in_other_processes_stream_too(service)

    drive(body())


async def items_come_in_order_and_each_as_soon_as_it_is_yielded(service):
    assert [item async for item in service.count.stream(3 * WINDOW)] == list(range(3 * WINDOW))
    assert [item async for item in service.count.stream(0)] == []
    stream = service.step.stream("soon")
    assert (await service.get_metrics()).replicas[0].in_flight == 0, "nothing is sent before it is asked for"
    pid = await anext(stream)  # the gate is still shut
    busy = [replica.pids[0] for replica in (await service.get_metrics()).replicas if replica.in_flight]
    assert busy == [pid]
    await service.open.fanout("soon")
    assert [item async for item in stream] == [1]
    assert sum(replica.num_ok for replica in (await service.get_metrics()).replicas) == 2 + 2 + 1


async def a_slow_reader_holds_the_generator(service):
    async with service.session():
        async with contextlib.aclosing(service.count.stream(1000)) as stream:
            assert await anext(stream) == 0
            while await service.count_yielded.route() < WINDOW:
                pass
            assert [await service.count_yielded.route() for _ in range(5)] == [WINDOW] * 5
            assert [await anext(stream) for _ in range(WINDOW)] == list(range(1, WINDOW + 1))
            assert await service.count_yielded.route() <= 2 * WINDOW
            assert [item async for item in stream] == list(range(WINDOW + 1, 1000))
        assert await service.count_yielded.route() == 1000


async def leaving_cancels_the_generator(service):
    before = (await service.get_metrics()).num_cancelled
    async with service.session():
        async for first in service.step.stream("break"):
            pid = first
            break
        assert await service.passed.route("closed break") == pid
        stream = service.step.stream("aclose")
        assert await anext(stream) == pid
        await stream.aclose()
        assert await service.passed.route("closed aclose") == pid
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert (await service.get_metrics()).num_cancelled == before + 2


async def cancelling_the_reader_cancels_the_generator(service):
    begun = asyncio.Event()

    async def read():
        async for _ in service.step.stream("cancel"):
            begun.set()

    async with service.session():
        reader = asyncio.create_task(read())
        await begun.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await service.passed.route("closed cancel")


async def a_generator_that_swallows_its_cancellation_is_closed(service):
    async with service.session():
        async for _ in service.insist.stream("insist"):
            break
        await service.passed.route("swallowed insist")
        await service.passed.route("closed insist")


async def what_the_generator_raises_comes_after_its_items(service):
    before = sum(replica.num_errors for replica in (await service.get_metrics()).replicas)
    stream = service.count.stream(9, fail_at=5)
    assert [await anext(stream) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(TaskFailed) as caught:
        await anext(stream)
    assert caught.value.code == 5
    assert "raise TaskFailed(number)" in caught.value.remote_traceback
    with pytest.raises(TypeError, match="num_itens"):
        await anext(service.count.stream(num_itens=3))
    assert sum(replica.num_errors for replica in (await service.get_metrics()).replicas) == before + 2


async def what_cannot_travel_is_an_error_to_the_reader(service):
    async with service.session():
        stream = service.yield_oddly.stream()
        assert await anext(stream) == "first"
        with pytest.raises(TypeError, match="pickle"):
            await anext(stream)
        await service.passed.route("closed oddly")


async def the_time_out_is_for_each_item_and_not_for_the_reader(service):
    loop = asyncio.get_running_loop()
    clock = loop.time
    async with service.session():
        stream = service.step.options(timeout_s=50).stream("late")
        pid = await anext(stream)
        loop.time = lambda: clock() + 60  # the reader was busy for a minute
        await service.open.route("late")
        assert await anext(stream) == 1
        del loop.time
        await stream.aclose()
        before = (await service.get_metrics()).num_timeouts
        stream = service.step.options(timeout_s=5).stream("never")
        assert await anext(stream) == pid
        with pytest.raises(CallTimeout, match="did not yield in time") as caught:
            await anext(stream)
        assert caught.value.value == "5 s"
        assert (await service.get_metrics()).num_timeouts == before + 1
        assert await service.passed.route("closed never") == pid


async def streams_hold_slots(service):
    held = [service.step.stream("slots") for _ in range(6)]
    assert len({await anext(stream) for stream in held}) == 2
    queued = asyncio.ensure_future(anext(service.count.stream(1)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert (await service.get_metrics()).num_waiting == 1
    await held[0].aclose()
    assert await queued == 0
    for stream in held:
        await stream.aclose()


async def streams_belong_to_sessions(service):
    outside = [service.step.stream("session") for _ in range(2)]
    async with service.session():
        inside = [service.step.stream("session") for _ in range(2)]
        assert len({await anext(stream) for stream in inside}) == 1
        assert len({await anext(stream) for stream in outside}) == 2, "they were made before the session began"
    for stream in inside + outside:
        await stream.aclose()


async def other_verbs_are_refused(service):
    for verb in ("route", "fanout"):
        with pytest.raises(OptionError, match="is a streaming endpoint") as caught:
            await getattr(service.count, verb)(3)
        assert (caught.value.path, caught.value.value) == (f"Streamer.count.{verb}", verb)
        assert caught.value.rule
        assert caught.value.repair == "async for item in Streamer.count.stream(...)"
    with pytest.raises(OptionError, match="is not a streaming endpoint") as caught:
        service.open.stream("gate")
    assert (caught.value.path, caught.value.value) == ("Streamer.open.stream", "stream")
    assert caught.value.rule
    assert "route" in caught.value.repair
    for wish in ("all_ranks", "partial"):
        with pytest.raises(OptionError, match=f"it has no {wish}") as caught:
            service.count.options(**{wish: True})
        assert (caught.value.path, caught.value.value) == (f"count.options({wish}=)", True)
        assert caught.value.rule
        assert caught.value.repair
    with pytest.raises(TypeError, match="async for"):
        service.count(3)


async def handles_in_other_processes_stream_too(service):
    reader = await Reader.options(num_replicas=1).as_service(service)
    assert await reader.read_all.route(100) == list(range(100))
    pids = [replica.pids[0] for replica in (await service.get_metrics()).replicas]
    async for pid in reader.read_step.stream("passed on"):
        assert pid in pids
        break  # and the service's own generator is cancelled behind it
    asked = [asyncio.ensure_future(service.passed.route("closed passed on")) for _ in pids]
    answered, unanswered = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    assert [call.result() for call in answered] == [pid]
    for call in unanswered:
        call.cancel()
    await asyncio.gather(*unanswered, return_exceptions=True)


def test_streams_of_an_actor(drive):
    async def body():
        actor = await Streamer.options(procs=2).as_actor()
        assert [item async for item in actor.by_rank.stream([3, 3])] == [(0, 0), (0, 1), (0, 2)]
        second = actor.slice(procs=1)
        assert [item async for item in second.by_rank.stream([3, 200])] == [(1, number) for number in range(200)]
        assert len([item async for item in actor.by_rank.stream([2, 200])]) == 2, "rank 1 is let go in the end"
        with pytest.raises(TaskFailed) as caught:
            _ = [item async for item in actor.by_rank.stream([200, -1])]
        assert caught.value.code == 1
        async for _ in actor.step.stream("break"):
            break
        assert len({pid for _, pid in (await actor.passed.call("closed break")).items()}) == 2, "on both ranks"
        for verb in ("call", "call_one", "choose", "broadcast", "rref"):
            with pytest.raises(OptionError, match="is a streaming endpoint") as refused:
                getattr(actor.count, verb)(3)
            assert refused.value.path == f"Streamer.count.{verb}"
        with pytest.raises(TypeError, match="async for"):
            actor.count(3)

    drive(body())
