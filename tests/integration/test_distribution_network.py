"""Weights reach every host of a real network once, whatever its readers want and whatever happens to a relay."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from networks import Network, NetworkHost, require_network, wait_for
from store_nodes import Node, Nodes

pytestmark = pytest.mark.alone
MIB = 1 << 20
SIZE = 8 * MIB
"""Of a version: four chunks."""
MBIT, SLOW_MBIT = 200.0, 20.0
OVERHEAD = 1.12
"""Headers of packets, and requests, beside the bytes of a version."""
NUM_READERS = (3, 2, 2)

Answer = dict[str, Any]


class Field:
    """A publisher on one host, and readers on three others."""

    def __init__(self, network: Network, nodes: Nodes) -> None:
        self.network, self._nodes = network, nodes
        self.home, *self.hosts = self.network.hosts
        self.root = nodes.start(self.home, bind=self.home.address)
        self._env: dict[str, str] = self.root.finish()
        self.readers = [
            [self.new_reader(host) for _ in range(count)] for host, count in zip(self.hosts, NUM_READERS, strict=True)
        ]
        self._versions = itertools.count()
        self.set_speed(MBIT)

    def new_reader(self, host: NetworkHost, **env: str) -> Node:
        return self._nodes.start(host, env={**self._env, **env})

    def set_speed(self, mbit: float) -> None:
        for host in self.network.hosts:
            self.network.limit(host, upload_mbit=mbit, download_mbit=mbit)

    def publish(self) -> int:
        version = next(self._versions)
        self.digest = self.root.run("publish", version, SIZE)
        return version

    def fetch(self, *readers: Node, **options: Any) -> list[Answer]:
        """Have readers fetch at once; all must get what was published."""
        for reader in readers:
            reader.start("fetch", SIZE, **options)
        return [self.checked(reader) for reader in readers]

    def checked(self, reader: Node) -> Answer:
        answer: Answer = reader.finish()
        assert answer["is_right"], reader.log()
        assert answer["digest"] == self.digest
        return answer

    @property
    def all_readers(self) -> list[Node]:
        return [reader for group in self.readers for reader in group]

    def wait_until_received(self, host: NetworkHost, num_bytes: int, *, since: int) -> None:
        wait_for(lambda: host.traffic().received - since >= num_bytes, f"{host} has {num_bytes} bytes", self.logs)

    @property
    def logs(self) -> Callable[[], str]:
        return self._nodes.logs


class Meter:
    """The bytes that cross the links of hosts from now on, in versions."""

    def __init__(self, field: Field) -> None:
        self._field = field
        self._before = {host: host.traffic() for host in field.network.hosts}

    def received(self, host: NetworkHost) -> float:
        return (host.traffic().received - self._before[host].received) / SIZE

    def sent(self, host: NetworkHost) -> float:
        return (host.traffic().sent - self._before[host].sent) / SIZE


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    require_network()
    with Nodes(tmp_path_factory.mktemp("nodes")) as nodes, Network(1 + len(NUM_READERS)) as network:
        yield Field(network, nodes)


@pytest.fixture
def field(shared: Field) -> Iterator[Field]:
    """The field with an empty store, whose readers have all been started again where a test ended them."""
    for readers in shared.readers:
        for number, reader in enumerate(readers):
            if reader.is_running:
                continue
            readers[number] = shared.new_reader(reader.host)
    yield shared
    shared.set_speed(MBIT)
    for reader in shared.all_readers:
        if reader.is_running:
            reader.run("let_go")
    shared.root.run("distribute", "auto")
    shared.root.run("retire", 0)


@pytest.mark.parametrize("verify", ["cheap", "full"])
def test_each_byte_crosses_the_link_of_a_host_once(field: Field, verify: str) -> None:
    field.publish()
    meter = Meter(field)
    answers = field.fetch(*field.all_readers, verify=verify)
    for host, readers in zip(field.hosts, field.readers, strict=True):
        assert 1 <= meter.received(host) <= OVERHEAD
        mine = [answer for reader, answer in zip(field.all_readers, answers, strict=True) if reader in readers]
        assert sum(answer["num_received"] for answer in mine) == pytest.approx(SIZE, rel=0.01)
        assert len({answer["relay"] for answer in mine}) == 1, "one process relays for the host"
    assert meter.sent(field.home) < 2, "the hosts pass it on"
    late = field.fetch(field.readers[0][2], views=True)
    assert late[0]["num_received"] == 0, "the relay still has the newest version"


def test_without_relays_each_reader_gets_it_from_the_publisher(field: Field) -> None:
    field.root.run("distribute", "direct")
    field.publish()
    meter = Meter(field)
    answers = field.fetch(*field.all_readers)
    assert [answer["relay"] for answer in answers] == [None] * sum(NUM_READERS)
    assert [round(meter.received(host)) for host in field.hosts] == list(NUM_READERS)
    assert meter.sent(field.home) >= sum(NUM_READERS)
    late = field.new_reader(field.hosts[0])
    field.fetch(late)
    assert not late.run("is_serving"), "it opens no port"
    late.kill()


def test_readers_with_other_shards_share_what_they_have_in_common(field: Field) -> None:
    field.publish()
    meter = Meter(field)
    (one, two, three), (four, five), (six, _) = field.readers
    wanted = {
        one: ("rows", 0, 2), two: ("columns", 1, 2), three: ("rows", 1, 2),
        four: ("rows", 1, 4), five: ("rows", 1, 4),
        six: ("columns", 3, 8),
    }  # fmt: skip
    for reader, part in wanted.items():
        reader.start("fetch", SIZE, part=part, verify="full")
    for reader in wanted:
        field.checked(reader)
    assert 1 <= meter.received(field.hosts[0]) <= OVERHEAD
    assert 1 / 4 <= meter.received(field.hosts[1]) <= OVERHEAD / 4
    assert 1 / 8 <= meter.received(field.hosts[2]) <= OVERHEAD / 8, "nobody there wants more"


def begin_at_relay(field: Field) -> tuple[Node, Meter]:
    """Have one reader of the first host begin, and then all others; return the one, in the middle of it."""
    field.set_speed(SLOW_MBIT)
    field.publish()
    meter = Meter(field)
    relay, *others = field.all_readers
    since = relay.host.traffic().received
    relay.start("fetch", SIZE)
    field.wait_until_received(relay.host, SIZE // 8, since=since)
    for reader in others:
        reader.start("fetch", SIZE)
    field.wait_until_received(relay.host, SIZE // 2, since=since)
    return relay, meter


def test_hosts_pass_on_what_they_are_still_receiving(field: Field) -> None:
    _, meter = begin_at_relay(field)
    for reader in field.all_readers:
        field.checked(reader)
    assert meter.sent(field.home) < 2, "one host received it from the publisher"


def test_a_relay_that_is_killed_is_replaced(field: Field) -> None:
    relay, meter = begin_at_relay(field)
    relay.kill()
    answers = [field.checked(reader) for reader in field.all_readers[1:]]
    mine, others = answers[: NUM_READERS[0] - 1], answers[NUM_READERS[0] - 1 :]
    (new,) = {answer["relay"] for answer in mine}
    assert new in [reader.own_pid for reader in field.readers[0][1:]], "the others of its host share a new one"
    assert meter.received(field.hosts[0]) <= 2 * OVERHEAD
    for host in field.hosts[1:]:
        assert meter.received(host) <= OVERHEAD, "what another host had from it is not read again"
    assert sum(answer["num_received"] for answer in others) == pytest.approx(2 * SIZE, rel=0.01)


def test_a_relay_that_is_stopped_delays_nobody(field: Field) -> None:
    relay, meter = begin_at_relay(field)
    relay.send_signal(signal.SIGSTOP)
    try:
        answers = [field.checked(reader) for reader in field.all_readers[1:]]
    finally:
        relay.send_signal(signal.SIGCONT)
    assert None not in {answer["relay"] for answer in answers}
    for host in field.hosts[1:]:
        assert meter.received(host) <= OVERHEAD + 4 * MIB / SIZE, "at most the chunks on their way are read again"
    field.checked(relay)
    assert "is not read through pid" in field.readers[0][1].log() + field.readers[0][2].log()


def test_a_host_that_is_cut_off_delays_no_other(field: Field) -> None:
    require_network(faults=True)
    _, meter = begin_at_relay(field)
    lost, *others = field.hosts
    field.network.partition([lost], [field.home, *others])
    try:
        for reader in field.readers[1] + field.readers[2]:
            field.checked(reader)
        for host in others:
            assert meter.received(host) <= OVERHEAD + 4 * MIB / SIZE, "at most the chunks on their way are read again"
    finally:
        for reader in field.readers[0]:
            reader.send_signal(signal.SIGKILL)
        field.network.heal()
    wait_for(lambda: not any(reader.is_running for reader in field.readers[0]), "they have ended", field.logs)
    field.set_speed(MBIT)
    field.publish()
    late = field.new_reader(lost)
    (answer,) = field.fetch(late)
    assert answer["relay"] == late.own_pid
    late.kill()


def test_a_version_that_is_taken_back_while_it_is_relayed(field: Field) -> None:
    """Its reader gets it whole, and those who come later get what has its number now."""
    first, second, third = field.readers[0]
    field.publish()
    field.fetch(first)  # it has memory for the next version
    field.set_speed(SLOW_MBIT)
    version = field.publish()
    taken_back, seed = field.digest, version + 10**6
    since = first.host.traffic().received
    first.start("fetch", SIZE, views=True)
    field.wait_until_received(first.host, SIZE // 8, since=since)
    assert field.root.run("rewind", version - 1) == [version]
    field.set_speed(MBIT)
    field.digest = field.root.run("publish", version, SIZE, seed=seed)
    assert field.digest != taken_back
    for found in field.fetch(second, third, *field.readers[1], seed=seed):
        assert (found["version"], found["relay"] is None) == (version, False)
    old = first.finish()
    assert (old["version"], old["digest"], old["is_right"]) == (version, taken_back, True)
    (again,) = field.fetch(first, seed=seed)
    assert again["num_received"] == 0


def test_a_slow_relay_delays_no_other_reader_of_its_host(field: Field) -> None:
    slow, second, third = field.readers[0]
    slow.run("throttle", 2.0)
    field.publish()
    slow.start("fetch", SIZE)
    field.wait_until_received(slow.host, 1, since=slow.host.traffic().received)
    found = field.fetch(second, third)
    (new,) = {answer["relay"] for answer in found}
    assert new in (second.own_pid, third.own_pid)
    assert "MiB/s from the holder" in second.log() + third.log()
    slow.kill()


def test_a_host_with_a_slow_link_delays_no_other(field: Field) -> None:
    slow = field.hosts[0]
    field.set_speed(SLOW_MBIT)
    field.network.limit(slow, upload_mbit=SLOW_MBIT, download_mbit=1)
    field.publish()
    meter = Meter(field)
    first = field.readers[0][0]
    since = slow.traffic().received
    first.start("fetch", SIZE)
    field.wait_until_received(slow, MIB // 8, since=since)
    field.fetch(*field.readers[1], *field.readers[2])
    assert meter.received(slow) < 0.5, "the others did not wait for it"
    for host in field.hosts[1:]:
        assert meter.received(host) <= OVERHEAD
    field.network.limit(slow)
    field.checked(first)


def test_a_damaged_relay_is_named_and_bypassed(field: Field) -> None:
    field.publish()
    first, second, third = field.readers[0]
    other = field.readers[1][0]
    (answer,) = field.fetch(first)
    assert answer["relay"] == first.own_pid
    assert first.run("spoil") == 1
    (away,) = field.fetch(other)
    assert away["relay"] is None
    assert "was damaged on its way through pid" in other.log()
    assert f"or pid {first.own_pid} on host" in other.log(), "the relay of the other host is named, too"
    (again,) = field.fetch(second, views=True)
    assert again["num_received"] == pytest.approx(SIZE, rel=0.01)
    assert again["relay"] == second.own_pid, "the damaged one is not used any more"
    (last,) = field.fetch(third)
    assert (last["relay"], last["num_received"]) == (second.own_pid, 0)


def test_a_damaged_relay_is_found_by_readers_of_its_host(field: Field) -> None:
    field.publish()
    first, second, _ = field.readers[0]
    field.fetch(first)
    assert first.run("spoil") == 1
    (found,) = field.fetch(second, views=True)
    assert found["relay"] is None
    assert f"was damaged on its way through pid {first.own_pid} on host" in second.log()


def test_a_host_without_memory_reads_directly(field: Field) -> None:
    poor = field.new_reader(field.hosts[2], FORGE_STORE_MEMORY_GB="0.001")
    field.publish()
    (answer,) = field.fetch(poor)
    assert (answer["relay"], answer["num_received"]) == (None, pytest.approx(SIZE, rel=0.01))
    assert "0.01 GiB of memory are needed to relay 'policy'" in poor.log()
    poor.kill()


def test_nothing_stays_of_versions_that_are_gone(field: Field) -> None:
    def held() -> list[dict[str, int]]:
        return [reader.run("held") for reader in field.all_readers]

    def is_dropped() -> bool:
        return all(each["segments"] == each["mapped"] == each["relaying"] == 0 for each in held())

    for _ in range(3):
        field.publish()
        field.fetch(*field.all_readers, views=True)
        for reader in field.all_readers:
            reader.run("let_go")
        wait_for(lambda: max(each["segments"] for each in held()) == 1, "the older version is dropped", field.logs)
    field.root.run("retire", 0)
    wait_for(is_dropped, "all is dropped", field.logs)
    # Of each process: to the registry, to the other readers of its host, each of which may have relayed, and from them.
    most = 6 + 3 * (max(NUM_READERS) - 1)
    wait_for(lambda: all(each["sockets"] <= most for each in held()), "connections are closed", field.logs)
