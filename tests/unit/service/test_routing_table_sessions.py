"""Sessions in the routing table: they stay, wait, move and end, and hold up nobody else."""

from __future__ import annotations

from stand_in_replica import drive, entry, make_table, queue_up, request, settle, take


def test_a_session_stays_with_its_replica() -> None:
    table = make_table(3)
    table.pin("s")
    home = take(table, "s")
    others = [take(table).index for _ in range(4)]
    assert home.index not in others[:2]
    assert [take(table, "s") for _ in range(3)] == [home] * 3


def test_a_session_waits_for_its_replica_though_another_is_free() -> None:
    async def body() -> None:
        table = make_table(2, limit=1)
        table.pin("s")
        home = take(table, "s")
        assert table.try_acquire(request("s")) is None
        (waiting,) = await queue_up(table, "s")
        table.release(take(table))  # the other replica's slot is not for it
        await settle()
        assert not waiting.done()
        table.release(home)
        assert await waiting is home

    drive(body())


def test_a_session_that_waits_for_its_replica_does_not_hold_up_others() -> None:
    async def body() -> None:
        table = make_table(2, limit=1)
        table.pin("s")
        home = take(table, "s")
        (pinned,) = await queue_up(table, "s")
        (plain,) = await queue_up(table, None)
        assert plain.done(), "the other replica is idle"
        assert plain.result() is not home
        table.release(home)
        assert await pinned is home

    drive(body())


def test_a_session_moves_when_its_replica_is_lost_and_stays_where_it_moved() -> None:
    table = make_table(2)
    table.pin("s")
    home = take(table, "s")
    table.update(entry(home.index, health="restarting", failure="killed"))
    other = take(table, "s")
    assert other is not home
    table.update(entry(home.index, generation=1))
    assert take(table, "s") is other


def test_sessions_are_counted_and_end_once() -> None:
    table = make_table()
    table.pin("a")
    table.pin("b")
    assert (table.num_sessions, table.knows_session("a")) == (2, True)
    assert [table.unpin("a"), table.unpin("a"), table.unpin("nobody")] == [True, False, False]
    assert (table.num_sessions, table.knows_session("a")) == (1, False)


def test_a_call_that_outlives_its_session_does_not_bring_it_back() -> None:
    table = make_table()
    table.pin("s")
    table.unpin("s")
    take(table, "s")
    assert (table.num_sessions, table.knows_session("s")) == (0, False)


def test_ending_a_session_does_not_end_the_calls_that_are_pinned_by_it() -> None:
    async def body() -> None:
        table = make_table(1, limit=1)
        table.pin("s")
        home = take(table, "s")
        (waiting,) = await queue_up(table, "s")
        table.unpin("s")
        table.release(home)
        assert await waiting is home
        assert table.num_sessions == 0

    drive(body())


def test_what_waited_for_a_sessions_replica_may_go_elsewhere_when_the_session_ends() -> None:
    async def body() -> None:
        table = make_table(2, limit=1)
        table.pin("s")
        home = take(table, "s")
        (waiting,) = await queue_up(table, "s")
        table.unpin("s")
        await settle()
        assert waiting.done()
        assert waiting.result() is not home
        assert table.try_acquire(request()) is None

    drive(body())
