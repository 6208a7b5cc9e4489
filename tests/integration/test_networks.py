"""The test network itself: hosts that reach each other, and links that are slow, lossy, late, cut and healed.

Datagrams between two hosts keep their order: the first one that arrives after a cut proves that others were lost.
Times are only bounded from below: a link may be slower than asked for on a busy machine, never faster.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from leftovers import has_ended
from networks import LIMIT_S, SUPPORT, HostProcess, Network, NetworkHost, require_network

PORT = 4000
PEER = f"""
import socket, sys, time
FORCE = 33  # SO_RCVBUFFORCE
peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
peer.setsockopt(socket.SOL_SOCKET, FORCE, 1 << 24)
peer.bind((sys.argv[1], {PORT}))
print("bound", flush=True)
for line in sys.stdin:
    words = line.split()
    if words[0] == "send":
        address, text, count, size = words[1], words[2], int(words[3]), int(words[4])
        began = time.monotonic()
        for _ in range(count):
            peer.sendto(text.encode().ljust(size, b"."), (address, {PORT}))
        print(began, flush=True)
    else:
        others, last = 0, ""
        while last != words[1]:
            last = peer.recv(65536).decode().rstrip(".")
            others += last != words[1]
        print(others, time.monotonic(), flush=True)
"""


class Peer:
    """A process on a host that sends and receives datagrams."""

    def __init__(self, host: NetworkHost) -> None:
        self.host = host
        self.process: HostProcess = host.start([sys.executable, "-I", "-c", PEER, host.address])
        assert self.process.read_line() == "bound\n"

    def send(self, other: Peer, text: str, *, count: int = 1, size: int = 1) -> float:
        """Send datagrams; return when the first one left."""
        self.process.write_line(f"send {other.host.address} {text} {count} {size}")
        return float(self.process.read_line())

    def receive(self, text: str) -> tuple[int, float]:
        """Wait for this text; return how many others came before it, and when it came."""
        self.process.write_line(f"receive {text}")
        others, when = self.process.read_line().split()
        return int(others), float(when)


def greet(one: Peer, other: Peer) -> None:
    """Let both learn each other's hardware address."""
    one.send(other, "hello")
    other.receive("hello")
    other.send(one, "hello")
    one.receive("hello")


@pytest.fixture
def network(leaves_nothing: None) -> Iterator[Network]:
    require_network()
    with Network(3) as made:
        yield made


@pytest.fixture
def peers(network: Network) -> list[Peer]:
    started = [Peer(host) for host in network.hosts]
    for index, peer in enumerate(started):
        for other in started[index + 1 :]:
            greet(peer, other)
    return started


def test_hosts_have_names_processes_and_memory_of_their_own(network: Network) -> None:
    first, second, _ = network.hosts
    shared = first.start(["sh", "-c", "hostname; echo $$ >/dev/shm/mine; ls /dev/shm; getent hosts host2; ls /proc"])
    said = shared.communicate()[0].splitlines()
    assert said[:2] == ["host1", "mine"]
    assert said[2].split() == [second.address, "host2"]
    assert "1" in said[3:]
    assert str(os.getpid()) not in said[3:], "a host sees only its own processes"
    assert second.start(["ls", "/dev/shm"]).communicate()[0] == ""
    interfaces = Path("/proc/self/net/dev").read_text()
    assert "eth0" in first.start(["cat", "/proc/self/net/dev"]).communicate()[0]
    assert "port1" not in interfaces, "nothing is added to the machine's own network"


def test_partitions_block_and_heal(network: Network, peers: list[Peer]) -> None:
    require_network(faults=True)
    one, two, three = peers
    network.partition([one.host], [two.host, three.host])
    one.send(two, "lost", count=5)
    two.send(one, "lost", count=5)
    two.send(three, "inside")
    assert three.receive("inside")[0] == 0, "hosts on one side still reach each other"
    assert network.num_lost(one.host, two.host) >= 5
    assert network.num_lost(two.host, one.host) >= 5
    network.heal()
    one.send(two, "healed")
    two.send(one, "healed")
    assert two.receive("healed")[0] == one.receive("healed")[0] == 0


def test_one_direction_can_be_cut(network: Network, peers: list[Peer]) -> None:
    require_network(faults=True)
    one, two, _ = peers
    network.lose(one.host, two.host)
    one.send(two, "lost", count=5)
    two.send(one, "passes")
    assert one.receive("passes")[0] == 0
    assert network.num_lost(one.host, two.host) >= 5
    assert network.num_lost(two.host, one.host) == 0
    network.heal()
    one.send(two, "healed")
    assert two.receive("healed")[0] == 0


def test_a_fraction_of_the_frames_is_lost(network: Network, peers: list[Peer]) -> None:
    require_network(faults=True)
    one, two, _ = peers
    network.lose(one.host, two.host, 0.5)
    one.send(two, "some", count=200)
    network.heal()
    one.send(two, "end")
    arrived, _ = two.receive("end")
    assert 0 < arrived < 200
    assert arrived + network.num_lost(one.host, two.host) >= 200


def test_bandwidth_is_limited_in_one_direction(network: Network, peers: list[Peer]) -> None:
    one, two, three = peers
    num_bytes, burst = 150_000, 32 * 1024
    network.limit(one.host, upload_mbit=2)
    before = one.host.traffic()
    began = one.send(two, "data", count=150, size=1000)
    one.send(two, "end")
    arrived, ended = two.receive("end")
    assert arrived == 150
    assert one.host.traffic().sent - before.sent >= num_bytes
    assert ended - began >= 0.9 * (num_bytes - burst) * 8 / 2e6
    assert network.num_delayed_by_limit(one.host, upload=True) > 0
    two.send(one, "back", count=150, size=1000)
    two.send(one, "end")
    assert one.receive("end")[0] == 150
    assert network.num_delayed_by_limit(one.host, upload=False) == 0, "the other direction has no limit"
    network.limit(one.host, download_mbit=2)
    began = three.send(one, "data", count=150, size=1000)
    three.send(one, "end")
    _, ended = one.receive("end")
    assert ended - began >= 0.9 * (num_bytes - burst) * 8 / 2e6
    assert network.num_delayed_by_limit(one.host, upload=True) == 0, "the first limit is lifted"


def test_frames_are_delayed_in_each_direction(network: Network, peers: list[Peer]) -> None:
    require_network(delay=True)
    one, two, three = peers
    network.delay(one.host, upload_s=0.3, download_s=0.1)
    began = one.send(two, "late", count=20)
    one.send(two, "end")
    arrived, ended = two.receive("end")
    assert arrived == 20
    assert ended - began >= 0.3
    began = three.send(one, "end")
    assert one.receive("end")[1] - began >= 0.1
    network.delay(one.host)
    greet(one, two)


def test_a_link_goes_down_and_up(network: Network, peers: list[Peer]) -> None:
    one, two, _ = peers
    network.unplug(one.host)
    two.send(one, "lost", count=3)
    network.plug(one.host)
    two.send(one, "back")
    assert one.receive("back")[0] == 0
    greet(one, two)


def test_a_host_ends_with_everything_on_it(network: Network, peers: list[Peer]) -> None:
    one, two, three = peers
    pid = one.process.pid
    one.host.end()
    assert has_ended(pid)
    greet(two, three)


def test_nothing_outlives_a_test_that_is_killed() -> None:
    require_network(delay=True)
    program = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import psutil
from networks import Network
network = Network(2)
network.delay(network.hosts[0], upload_s=0.1)
sleeper = network.hosts[0].start(["sh", "-c", "echo runs; exec sleep infinity"])
assert sleeper.read_line() == "runs\\n"
print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        pids = [int(word) for word in killed.stdout.readline().split()]
        killed.kill()
        assert killed.wait(timeout=LIMIT_S) < 0
    assert len(pids) >= 8, "three first processes and their owners, a relay, and the one on the host with its owner"
    assert all(has_ended(pid) for pid in pids)
