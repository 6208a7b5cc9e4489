"""Relays in the registry: who gets a version for its host, from whom, and when the copies are dropped."""

from __future__ import annotations

import itertools

import pytest
from test_registry import POLICY, Driver, request

from forge.errors import StoreError
from forge.store.records import Relay, Route, copied_part, copy_label, labelled_memory, memory_label
from forge.store.registry_pins import pinned_name
from forge.store.registry_relays import MOST_UPSTREAMS, RelayingRegistry, upstreams_of

TRAINER = 1


def at(host: str, session: int) -> Relay:
    return Relay(host, 100 + session, session, f"tcp:{host}:1")


class Run(Driver):
    """A registry with one publisher."""

    def __init__(self) -> None:
        super().__init__(RelayingRegistry)
        self.leases: dict[int, int] = {}

    @property
    def relaying(self) -> RelayingRegistry:
        assert isinstance(self.registry, RelayingRegistry)
        return self.registry

    def publish_version(self, number: int, keep: int = 2) -> None:
        self.publish(TRAINER, request(version=number, keep=keep))

    def route(self, host: str, session: int, *, failed: tuple[int, ...] = ()) -> Route | None:
        """Have a reader begin to read the newest version, or continue with the one that it reads."""
        if session not in self.leases:
            self.leases[session] = self.acquire(session).id
        return self.relaying.route(self.leases[session], at(host, session), failed)

    def memory(self, host: str, session: int) -> int:
        """Have a reader read the newest version; return the memory in which it arrives."""
        route = self.route(host, session)
        assert route is not None
        return route.relay.memory

    def let_go(self, session: int) -> None:
        self.registry.release(self.leases.pop(session))

    def dropped(self, memory: int) -> set[int]:
        """The sessions that were told to drop what they have of a memory."""
        return {session for session, segment in self.told.drops if segment == memory_label(memory)}


@pytest.fixture
def run() -> Run:
    return Run()


def routes(*found: Route | None) -> list[tuple[int, list[int]]]:
    """Session of the relay, and those of its upstreams."""
    return [(route.relay.session, [each.session for each in route.upstreams]) for route in found if route is not None]


def test_the_first_reader_of_a_host_relays_for_the_others(run: Run) -> None:
    run.publish_version(1)
    assert routes(run.route("b", 2), run.route("b", 3), run.route("c", 4), run.route("b", 5), run.route("c", 6)) == [
        (2, []), (2, []), (4, [2]), (2, []), (4, [2]),
    ]  # fmt: skip


def test_hosts_form_a_chain_in_the_order_in_which_they_began(run: Run) -> None:
    run.publish_version(1)
    found = [run.route(f"host{number}", number) for number in range(2, 9)]
    assert routes(*found) == [
        (2, []),
        (3, [2]),
        (4, [3, 2]),
        (5, [4, 3, 2]),
        (6, [5, 4, 3]),
        (7, [6, 5, 4]),
        (8, [7, 6, 5]),
    ]


@pytest.mark.parametrize("failed", list(itertools.combinations(range(1, 7), 2)))
def test_bytes_flow_from_earlier_to_later_relays_only(failed: tuple[int, ...]) -> None:
    order = [at(f"host{session % 4}", session) for session in range(1, 9)]
    for place, relay in enumerate(order):
        found = upstreams_of(order, relay, failed=failed)
        assert all(order.index(other) < place for other in found)
        assert relay.host not in {other.host for other in found}
        assert len({other.host for other in found}) == len(found) <= MOST_UPSTREAMS
        assert not set(failed) & {other.session for other in found}


def test_a_relay_that_failed_is_replaced_and_is_nobodys_upstream(run: Run) -> None:
    run.publish_version(1)
    assert routes(run.route("b", 2), run.route("b", 3), run.route("c", 4)) == [(2, []), (2, []), (4, [2])]
    assert routes(run.route("b", 3, failed=(2,))) == [(3, [4])]
    assert routes(run.route("b", 5), run.route("d", 6)) == [(3, [4]), (6, [3, 4])]
    assert run.route("b", 2) is None, "it reads directly"


def test_a_process_that_ended_relays_no_more(run: Run) -> None:
    run.publish_version(1)
    memory = run.memory("b", 2)
    run.route("b", 3)
    run.registry.left(2)
    assert routes(run.route("b", 3), run.route("c", 4)) == [(3, []), (4, [3])]
    assert run.dropped(memory) == set(), "its readers may still look at it"


def test_a_copy_belongs_to_one_version(run: Run) -> None:
    run.publish_version(1)
    first = run.route("b", 2)
    run.let_go(2)
    run.publish_version(2)
    second = run.route("b", 3)
    assert first is not None
    assert second is not None
    assert first.relay.copy != second.relay.copy


def test_the_memory_of_an_older_version_is_used_again(run: Run) -> None:
    run.publish_version(1)
    memory = run.memory("b", 2)
    assert run.memory("b", 3) == memory
    run.let_go(2)
    run.let_go(3)
    run.publish_version(2)
    assert run.numbers() == [1, 2]
    assert routes(run.route("b", 4)) == [(2, [])], "the process that has the memory relays again"
    assert run.memory("b", 4) == memory
    assert run.dropped(memory) == set()
    run.registry.retire(POLICY, keep=0)
    run.let_go(4)
    assert run.dropped(memory) == {2, 3, 4}, "also those that read the version before"


def test_memory_that_is_read_is_not_used_again(run: Run) -> None:
    run.publish_version(1)
    memory = run.memory("b", 2)
    assert run.memory("c", 3) != memory
    run.publish_version(2)
    run.let_go(2)
    assert run.memory("b", 4) != memory, "another host gets it from there"
    run.let_go(3)
    run.let_go(4)
    run.publish_version(3)
    assert routes(run.route("b", 5)) == [(2, [])]
    assert run.memory("b", 5) == memory


def test_one_free_memory_is_kept_for_a_host(run: Run) -> None:
    run.publish_version(1)
    first = run.memory("b", 2)
    run.publish_version(2)
    second = run.memory("b", 3)
    run.let_go(2)
    run.publish_version(3)
    run.let_go(3)
    assert run.dropped(first) == set()
    assert run.dropped(second) == {3}
    run.registry.retire(POLICY, keep=0)
    assert run.dropped(first) == {2}


def test_the_newest_version_stays_with_its_relays(run: Run) -> None:
    run.publish_version(1)
    memory = run.memory("b", 2)
    run.let_go(2)
    assert routes(run.route("b", 3)) == [(2, [])], "more readers may come"
    assert run.dropped(memory) == set()


def test_with_memory_for_one_version_none_is_kept(run: Run) -> None:
    run.publish_version(1, keep=1)
    memory = run.memory("b", 2)
    run.let_go(2)
    run.publish_version(2, keep=1)
    assert run.dropped(memory) == {2}
    assert run.memory("b", 3) != memory


def test_a_version_that_is_gone_is_dropped_everywhere(run: Run) -> None:
    run.publish_version(1)
    memory = run.memory("b", 2)
    run.let_go(2)
    run.registry.retire(POLICY, keep=0)
    assert run.dropped(memory) == {2}
    assert run.tables() == {}
    assert not run.relaying._relay_spares


def test_the_memory_of_a_process_that_failed_or_ended_is_not_used_again(run: Run) -> None:
    run.publish_version(1)
    one, other = run.memory("b", 2), run.memory("c", 3)
    run.route("b", 4, failed=(2,))
    for session in (2, 3, 4):
        run.let_go(session)
    run.publish_version(2)
    assert run.dropped(one) == {2}
    run.registry.left(3)
    assert run.dropped(other) == {3}
    assert routes(run.route("b", 5), run.route("c", 6)) == [(4, []), (6, [4])]


def test_a_spare_of_a_process_that_does_not_answer_is_dropped(run: Run) -> None:
    run.publish_version(1)
    memory = run.memory("b", 2)
    run.let_go(2)
    run.publish_version(2)
    assert routes(run.route("b", 3, failed=(2,))) == [(3, [])]
    assert run.dropped(memory) == {2}


def test_an_older_version_that_is_read_again_has_a_new_copy(run: Run) -> None:
    run.publish_version(1)
    before = run.route("b", 2)
    run.let_go(2)
    run.publish_version(2)
    lease = run.acquire(3, version=1)
    again = run.relaying.route(lease.id, at("b", 3))
    assert before is not None
    assert again is not None
    assert (again.relay.session, again.relay.memory) == (2, before.relay.memory)
    assert again.relay.copy != before.relay.copy, "nobody knows what was written there meanwhile"


def test_a_pinned_version_and_its_alias_share_relays(run: Run) -> None:
    run.publish_version(1)
    memory = run.memory("b", 2)
    pin = run.relaying.pin(9, POLICY, 1)
    run.let_go(2)
    run.publish_version(2)
    run.publish_version(3)
    assert run.memory("b", 4) != memory, "it is the newest under its pinned name"
    lease = run.acquire(3, ("weights", pinned_name("policy", 1)))
    assert routes(run.relaying.route(lease.id, at("b", 3))) == [(2, [])]
    run.registry.release(lease.id)
    assert run.dropped(memory) == set()
    run.registry.release(pin.id)
    run.let_go(4)
    run.publish_version(4)
    run.registry.retire(POLICY, keep=0)
    assert run.dropped(memory) == {2, 3}


def test_the_number_of_a_version_that_was_taken_back_may_be_another(run: Run) -> None:
    run.publish_version(1)
    first = run.memory("b", 2)
    run.registry.rewind(POLICY, to=0)
    run.publish_version(1)
    second = run.memory("b", 3)
    assert second != first
    run.registry.left(2)
    assert run.dropped(first) == {2}
    assert run.dropped(second) == set()


def test_without_distribution_everybody_reads_directly(run: Run) -> None:
    run.publish_version(1)
    before = run.acquire(2)
    run.relaying.set_distribution("direct")
    after = run.acquire(2)
    assert (before.is_direct, after.is_direct) == (False, True)
    assert run.route("b", 2) is None


def test_a_lease_is_needed(run: Run) -> None:
    with pytest.raises(StoreError, match="there is no such lease"):
        run.relaying.route(77, at("b", 2))


def test_labels_say_what_they_name() -> None:
    assert copied_part(copy_label(12, 3)) == (12, 3)
    assert labelled_memory(memory_label(12)) == 12
    assert copied_part(memory_label(12)) is None
    assert labelled_memory(copy_label(12, 3)) is None
    assert copied_part("forge-run-policy-1-1") is labelled_memory("assignment/1") is None
