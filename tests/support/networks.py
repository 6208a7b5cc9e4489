"""A test network: hosts with addresses, memory and process ids of their own on one machine, connected by one switch.

    with Network(3) as network:
        a, b, c = network.hosts
        server = a.start([sys.executable, "server.py", a.address])
        network.limit(a, upload_mbit=8)
        network.partition([a], [b, c])
        network.heal()
        b.end()

Each host has a network, PID, mount, IPC and UTS namespace: its own `eth0` with an address of 10.77.0.0/24, its own host
name, `/dev/shm` and processes. All other files are those of the machine, as on a cluster with a shared file system. The
switch is a bridge in one more network namespace, so that nothing is added to the machine's own network, and no address
outside can be reached. Several networks can exist at once.

Nothing has to be swept afterwards. A namespace lives as long as its first process, which ends with this one, however
that ends (see `network_init`), and the kernel then kills everything in it.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import pytest

from forge.runtime.forking import SCOPE

SUPPORT = Path(__file__).parent
MAX_HOSTS = 9
LIMIT_S = 600
PATIENT = ("launcher.heartbeat_timeout_s=60", "launcher.lease_s=120", "launcher.attach_timeout_s=300")
"""For hosts that share the cores of one busy machine."""
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
_BRIDGE = "switch"
_BURST_BYTES = 32 * 1024
_REFILL_S = 0.001
_LINK_S = 60.0
_POLL_S = 0.2
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def require_network(*, faults: bool = False, delay: bool = False) -> None:
    """Skip the test where hosts cannot be made, or frames not dropped (`faults`) or delayed (`delay`)."""
    reason = why_no_hosts() or (faults and _why_no_faults()) or (delay and _why_no_delay())
    if reason:
        pytest.skip(f"a test network is not possible here: {reason}")


@functools.cache
def why_no_hosts() -> str:
    """Return why hosts cannot be made here; empty if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it needs root on Linux"
    if missing := [tool for tool in ("ip", "tc", "unshare", "nsenter", "mount") if not shutil.which(tool, path=_PATH)]:
        return f"{', '.join(missing)} not found (Debian: apt-get install iproute2 util-linux)"
    links = "ip link add br0 type bridge && ip link add v0 type veth peer name v1"
    return _refusal(f"{links} && tc qdisc add dev v0 root tbf rate 1mbit burst 32kb latency 50ms")


@functools.cache
def _why_no_faults() -> str:
    if not shutil.which("nft", path=_PATH):
        return "nft not found (Debian: apt-get install nftables)"
    rule = "ether saddr 02:00:00:00:00:01 numgen random mod 1000 < 1 counter drop"
    chain = f"chain c {{ type filter hook forward priority 0; {rule}; }};"
    return _refusal(f"nft 'table bridge t {{ {chain} }};'")


@functools.cache
def _why_no_delay() -> str:
    return "" if Path("/dev/net/tun").exists() else "/dev/net/tun is missing"


def _refusal(script: str) -> str:
    """Try commands in namespaces of their own; return what was refused."""
    command = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
    done = subprocess.run(command, env=os.environ | {"PATH": _PATH}, capture_output=True, text=True, timeout=LIMIT_S)
    return "" if done.returncode == 0 else f"{script!r} failed: {done.stderr.strip()}"


def _call(command: Sequence[str], text: str = "") -> str:
    """Run a tool that must succeed; return what it printed."""
    environment = os.environ | {"PATH": _PATH}
    done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}\n{text}")
    return done.stdout


def wait_for(condition: Callable[[], bool], what: str, logs: Callable[[], str]) -> None:
    """Wait until a condition holds that another program brings about, which tells nobody. `logs` explains a failure."""
    until = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {LIMIT_S} s until {what}\n{logs()}")
        time.sleep(_POLL_S)


class HostProcess:
    """A process that a test started on a host. It ends with the host."""

    def __init__(self, entered: subprocess.Popen[str]) -> None:
        self._entered = entered  # nsenter, whose only child it is

    @property
    def pid(self) -> int:
        """Return its process id as this process sees it. Ask when it has printed something: then it runs."""
        (child,) = psutil.Process(self._entered.pid).children()
        return int(child.pid)

    @property
    def is_running(self) -> bool:
        return self._entered.poll() is None

    def read_line(self) -> str:
        """Wait for its next line; empty when it has closed its standard output."""
        assert self._entered.stdout is not None
        return self._entered.stdout.readline()

    def write_line(self, line: str) -> None:
        assert self._entered.stdin is not None
        self._entered.stdin.write(line + "\n")
        self._entered.stdin.flush()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGCONT:  # nsenter stops when its child stops
            self._entered.send_signal(number)

    def wait(self) -> int:
        """Wait until it has ended and return its exit code, as a shell does: 128 + N after signal N."""
        return self._entered.wait(timeout=LIMIT_S)

    def communicate(self) -> tuple[str, str]:
        """Wait until it has ended; return the rest of what it printed."""
        return self._entered.communicate(timeout=LIMIT_S)

    def kill(self) -> None:
        """End it, if it still runs."""
        if self._entered.poll() is None:
            self.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Wait for its end, after that of its host, and close the pipes."""
        self._entered.communicate(timeout=LIMIT_S)


class _Namespaces:
    """The namespaces of a host, or of the switch, and their first process."""

    def __init__(self, name: str, hosts: str) -> None:
        self._owner = subprocess.Popen(
            ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc",
             sys.executable, "-I", str(SUPPORT / "network_init.py"), name, hosts],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PATH": _PATH},
        )  # fmt: skip
        assert self._owner.stdout is not None
        if self._owner.stdout.readline() != "ready\n":
            raise RuntimeError(f"host {name} did not start: exit code {self._owner.wait(timeout=LIMIT_S)}")
        (init,) = psutil.Process(self._owner.pid).children()
        self.pid = int(init.pid)

    def enter(self, *namespaces: str) -> list[str]:
        """Return the beginning of a command that runs in these namespaces."""
        return ["nsenter", f"--target={self.pid}", *namespaces, "--"]

    def ip(self, *lines: str) -> None:
        """Run commands of `ip` in the network namespace."""
        _call([*self.enter("--net"), "ip", "-batch", "-"], "\n".join(lines))

    def wait_for_link(self, device: str) -> None:
        """Wait until a device carries frames. The kernel says so a moment after a link was taken up."""
        until = time.monotonic() + _LINK_S
        while time.monotonic() < until:
            (link,) = json.loads(_call([*self.enter("--net"), "ip", "-j", "-d", "link", "show", device]))
            port = link.get("linkinfo", {}).get("info_slave_data", {})
            is_up = link["operstate"] in ("UP", "UNKNOWN")  # TAP devices do not say
            if is_up and port.get("state", "forwarding") == "forwarding":
                return
        raise RuntimeError(f"{device} does not carry frames after {_LINK_S:g} s: {link}")

    def hang_up(self) -> None:
        """Have the first process end, and do not wait for it."""
        if self._owner.stdin is not None:
            self._owner.stdin.close()
            self._owner.stdin = None

    def close(self) -> None:
        self.hang_up()
        self._owner.communicate(timeout=LIMIT_S)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that have passed the `eth0` of a host."""

    sent: int
    received: int


class NetworkHost:
    """A host of a network."""

    def __init__(self, number: int, hosts: str) -> None:
        self.name, self.address, self.mac = _name(number), _address(number), f"02:77:00:00:00:{number:02x}"
        self.port = f"port{number}"
        self.namespaces = _Namespaces(self.name, hosts)
        self.is_running = True
        self._processes: list[HostProcess] = []

    def __repr__(self) -> str:
        return f"NetworkHost({self.name!r}, {self.address!r})"

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, stderr: Path | None = None
    ) -> HostProcess:
        """Start a command on this host, with pipes for its standard input and output. `stderr` goes to a file."""
        environment = {name: value for name, value in os.environ.items() if name != SCOPE} | dict(env or {})
        with open(stderr or os.devnull, "a", encoding="utf-8") as errors:
            entered = subprocess.Popen(
                [*self.namespaces.enter(*_NAMESPACES), *command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            )  # fmt: skip
        process = HostProcess(entered)
        self._processes.append(process)
        return process

    def traffic(self) -> Traffic:
        (link,) = json.loads(_call([*self.namespaces.enter("--net"), "ip", "-j", "-s", "link", "show", "eth0"]))
        return Traffic(sent=link["stats64"]["tx"]["bytes"], received=link["stats64"]["rx"]["bytes"])

    def end(self) -> None:
        """Cut its power: all its processes are killed, and its link goes down."""
        self.is_running = False
        self.namespaces.close()
        for process in self._processes:
            process.close()
        self._processes.clear()


def _name(number: int) -> str:
    return f"host{number}"


def _bucket(mbit: float) -> str:
    """Return a queue that lets through so much. What it lets through at once must last until it is looked at again."""
    burst = max(_BURST_BYTES, round(mbit * 1e6 / 8 * _REFILL_S))
    return f"tbf rate {round(mbit * 1e6)}bit burst {burst} limit {16 * burst}"


def _address(number: int) -> str:
    return f"10.77.0.{number}"


class Network:
    """Two to nine hosts on one switch. Every method returns when its effect is in force."""

    def __init__(self, num_hosts: int) -> None:
        if not 2 <= num_hosts <= MAX_HOSTS:
            raise ValueError(f"a network has 2 to {MAX_HOSTS} hosts, not {num_hosts}")
        names = [f"{_address(number)} {_name(number)}\n" for number in range(1, num_hosts + 1)]
        self.hosts: tuple[NetworkHost, ...] = ()
        self._loss: dict[tuple[NetworkHost, NetworkHost], float] = {}
        self._delays: dict[NetworkHost, subprocess.Popen[str]] = {}
        self._switch = _Namespaces("switch", "127.0.0.1 localhost\n")
        try:
            self._switch.ip(f"link add {_BRIDGE} type bridge", f"link set {_BRIDGE} up")
            for number in range(1, num_hosts + 1):
                host = NetworkHost(number, "127.0.0.1 localhost\n" + "".join(names))
                self.hosts += (host,)
                self._connect(host)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, host: NetworkHost) -> None:
        peer = f"peer name eth0 address {host.mac} netns {host.namespaces.pid}"
        self._switch.ip(f"link add {host.port} type veth {peer}", f"link set {host.port} master {_BRIDGE} up")
        host.namespaces.ip("link set lo up", f"addr add {host.address}/24 dev eth0", "link set eth0 up")
        self._wait_for(host)

    def _wait_for(self, host: NetworkHost, *devices: str) -> None:
        """Wait until a host's link carries frames, with further devices of the switch that it passes."""
        for device in (host.port, *devices):
            self._switch.wait_for_link(device)
        host.namespaces.wait_for_link("eth0")

    def limit(self, host: NetworkHost, *, upload_mbit: float | None = None, download_mbit: float | None = None) -> None:
        """Limit the bandwidth of a host's link, each direction by itself; None lifts the limit."""
        for namespaces, device, mbit in (
            (host.namespaces, "eth0", upload_mbit),
            (self._switch, host.port, download_mbit),
        ):
            qdisc = "noqueue" if mbit is None else _bucket(mbit)
            _call([*namespaces.enter("--net"), "tc", "qdisc", "replace", "dev", device, "root", *qdisc.split()])

    def num_delayed_by_limit(self, host: NetworkHost, *, upload: bool) -> int:
        """Return how often a packet had to wait because a limit of bandwidth was reached."""
        namespaces, device = (host.namespaces, "eth0") if upload else (self._switch, host.port)
        listed = json.loads(_call([*namespaces.enter("--net"), "tc", "-j", "-s", "qdisc", "show", "dev", device]))
        return sum(int(qdisc.get("overlimits", 0)) for qdisc in listed)

    def lose(self, sender: NetworkHost, receiver: NetworkHost, fraction: float = 1.0) -> None:
        """Drop this fraction of the frames from one host to another; the other direction is left as it is."""
        self._set_loss({(sender, receiver): fraction})

    def partition(self, side: Iterable[NetworkHost], other: Iterable[NetworkHost]) -> None:
        """Drop every frame between two sets of hosts, in both directions. No host is told: its packets get lost."""
        others = tuple(other)
        self._set_loss({pair: 1.0 for a in side for b in others for pair in ((a, b), (b, a))})

    def heal(self) -> None:
        """Drop no frames any more."""
        self._set_loss(dict.fromkeys(self._loss, 0.0))

    def _set_loss(self, changes: Mapping[tuple[NetworkHost, NetworkHost], float]) -> None:
        """Replace all rules at once. Counters stay."""
        self._loss |= changes
        script = ["table bridge faults {"]
        script += [f"counter {a.name}_{b.name} {{ }}" for a, b in self._loss]
        script += ["chain forward { type filter hook forward priority 0; }", "}", "flush chain bridge faults forward"]
        for (a, b), fraction in self._loss.items():
            chance = "" if fraction >= 1 else f"numgen random mod 1000000 < {round(fraction * 1e6)} "
            if fraction > 0:
                match = f"ether saddr {a.mac} ether daddr {b.mac} {chance}counter name {a.name}_{b.name} drop"
                script.append(f"add rule bridge faults forward {match}")
        _call([*self._switch.enter("--net"), "nft", "-f", "-"], "\n".join(script) + "\n")

    def num_lost(self, sender: NetworkHost, receiver: NetworkHost) -> int:
        """Return how many frames from one host to another have been dropped on purpose."""
        listed = json.loads(_call([*self._switch.enter("--net"), "nft", "-j", "list", "counters"]))
        counters: list[dict[str, Any]] = [entry["counter"] for entry in listed["nftables"] if "counter" in entry]
        return sum(int(each["packets"]) for each in counters if each["name"] == f"{sender.name}_{receiver.name}")

    def unplug(self, host: NetworkHost) -> None:
        """Take a host's link down. The host sees that: its `eth0` has no carrier."""
        self._switch.ip(f"link set {host.port} down")

    def plug(self, host: NetworkHost) -> None:
        """Take the link up again."""
        self._switch.ip(f"link set {host.port} up")
        self._wait_for(host)

    def delay(self, host: NetworkHost, *, upload_s: float = 0.0, download_s: float = 0.0) -> None:
        """Delay the frames from and to a host, in addition to delays of other hosts; zeros remove the delay.

        Frames pass a process between the host's port and the switch, which costs CPU time: this is not for large data.
        """
        self._end_delay(host)
        if upload_s == download_s == 0.0:
            self._switch.ip(f"link set {host.port} master {_BRIDGE}")
            self._wait_for(host)
            return
        near, far, segment = (f"{host.port}{end}" for end in ("near", "far", "br"))
        command = [sys.executable, "-I", str(SUPPORT / "network_delay.py"), near, far, str(upload_s), str(download_s)]
        relay = self._delays[host] = subprocess.Popen(
            [*self._switch.enter("--net"), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert relay.stdout is not None
        if relay.stdout.readline() != "ready\n":
            raise RuntimeError(f"no delay for {host.name}: exit code {relay.wait(timeout=LIMIT_S)}")
        self._switch.ip(
            f"link add {segment} type bridge",
            f"link set {segment} up",
            f"link set {near} master {segment} up",
            f"link set {far} master {_BRIDGE} up",
            f"link set {host.port} master {segment}",
        )
        self._wait_for(host, near, far)

    def _end_delay(self, host: NetworkHost) -> None:
        relay = self._delays.pop(host, None)
        if relay is not None:
            relay.communicate(timeout=LIMIT_S)  # closes its standard input; its devices go with it
            self._switch.ip(f"link del {host.port}br")

    def close(self) -> None:
        """End every host with all its processes, and the switch."""
        for host in self.hosts:
            host.namespaces.hang_up()  # all at once: the kernel takes a second or two for each
        for host in self.hosts:
            if host.is_running:
                host.end()
        for relay in self._delays.values():
            relay.communicate(timeout=LIMIT_S)
        self._switch.close()
