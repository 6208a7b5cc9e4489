"""Hosts with real network boundaries: `forge worker` and the controller in namespaces of their own, over mutual TLS."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import grpo_runs
from certificates import make_certificates, tls_variables
from networks import MAX_HOSTS, SUPPORT, HostProcess, Network, NetworkHost, require_network

pytestmark = pytest.mark.alone
PORT = 22222


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_network()
    made = tmp_path_factory.mktemp("tls")
    make_certificates(made, {f"host{n}": f"IP:10.77.0.{n}" for n in range(1, MAX_HOSTS + 1)})
    return made


class Cluster:
    """A controller's host, the first of a network, and workers on the others."""

    def __init__(self, network: Network, certificates: Path, logs: Path) -> None:
        self.network, self._certificates, self._logs = network, certificates, logs
        self.controller, *self.hosts = network.hosts

    def start(self, host: NetworkHost, command: Sequence[str]) -> HostProcess:
        paths = os.pathsep.join(dict.fromkeys([str(SUPPORT), *filter(None, sys.path)]))
        variables = tls_variables(self._certificates, host.name) | {"PYTHONPATH": paths}
        return host.start([sys.executable, *command], env=variables, stderr=self._logs / f"{host.name}.log")

    def address(self, host: NetworkHost, port: int = PORT) -> str:
        return f"tls://{host.address}:{port}"

    def start_workers(self, hosts: Sequence[NetworkHost], port: int = PORT) -> list[HostProcess]:
        command = ["-m", "forge.cli", "worker", "--address"]
        started = [self.start(host, [*command, self.address(host, port)]) for host in hosts]
        for worker in started:
            assert "listening at tls://10.77.0." in worker.read_line()
        return started

    def control(self, scenario: str, hosts: Sequence[NetworkHost]) -> HostProcess:
        command = [str(SUPPORT / "network_hosts_controller.py"), scenario, self.controller.address]
        return self.start(self.controller, [*command, *map(self.address, hosts)])

    def answer(self, controller: HostProcess, line: str = "") -> Any:
        """Send a line if there is one, and return the controller's next answer; other output is passed over."""
        if line:
            controller.write_line(line)
        while (answer := controller.read_line()) and not answer.startswith("{"):
            pass
        assert answer, self.logs()
        return json.loads(answer)

    def finish(self, controller: HostProcess) -> None:
        """End the controller's input, and check that it ends well."""
        controller.communicate()
        assert controller.wait() == 0, self.logs()

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-6000:]}" for path in sorted(self._logs.iterdir()))


@pytest.fixture
def make_cluster(leaves_nothing: None, certificates: Path, tmp_path: Path) -> Iterator[Callable[[int], Cluster]]:
    networks: list[Network] = []
    logs = tmp_path / "logs"
    logs.mkdir()

    def make(num_hosts: int) -> Cluster:
        networks.append(Network(num_hosts))
        return Cluster(networks[-1], certificates, logs)

    yield make
    for network in networks:
        network.close()


def test_a_service_outlives_a_partition_and_a_dead_host(make_cluster: Callable[[int], Cluster]) -> None:
    require_network(faults=True)
    cluster = make_cluster(4)
    one, two, three = cluster.hosts
    first, *_ = cluster.start_workers(cluster.hosts)
    names = {host: cluster.address(host) for host in cluster.hosts}
    controller = cluster.control("serve", [one, two])
    said = cluster.answer(controller)
    assert said == {"places": sorted([names[one], names[two]] * 2), "pids": 4}

    said = cluster.answer(controller, f"join {names[three]}")
    assert said["places"] == sorted([names[one], names[two], names[three]] * 2)

    cluster.network.partition([one], [cluster.controller, two, three])
    said = cluster.answer(controller, f"lose {names[one]}")
    assert sorted(set(said["places"])) == sorted([names[two], names[three]])
    assert said["states"] == {names[one]: "lost", names[two]: "ready", names[three]: "ready"}
    assert "a fresh worker takes over" in first.read_line(), "the host ends its processes by itself"
    cluster.network.heal()

    two.end()
    said = cluster.answer(controller, f"lose {names[two]}")
    assert said["places"] == [names[three]] * 6
    cluster.finish(controller)


def test_weights_travel_between_hosts(make_cluster: Callable[[int], Cluster]) -> None:
    cluster = make_cluster(3)
    cluster.start_workers(cluster.hosts)
    controller = cluster.control("weights", cluster.hosts)
    sent_before = cluster.hosts[0].traffic().sent
    said = cluster.answer(controller)
    assert len(set(said["hosts"])) == 2
    assert said["fetched"] == [[0, said["digest"]]] * 2
    found = sorted(said["relaying"], key=lambda each: each["relays"])
    assert found == [{"relays": 0, "maps": 2, "publishers": 0}, {"relays": 2, "maps": 0, "publishers": 0}]
    assert said["needed"] <= said["sent"] <= 1.05 * said["needed"]
    assert cluster.hosts[0].traffic().sent - sent_before >= said["needed"], "the bytes left the host"
    cluster.finish(controller)


def test_a_run_trains_over_a_bad_link_while_its_host_is_cut_off_and_comes_back(
    make_cluster: Callable[[int], Cluster], tmp_path: Path
) -> None:
    """It ends with the weights and the ledger of a run on one machine that nothing disturbed."""
    require_network(faults=True, delay=True)
    whole = grpo_runs.config(tmp_path / "whole", "rollout.batch_groups=4")
    grpo_runs.train_here(whole)
    cluster = make_cluster(3)
    one, two = cluster.hosts
    cluster.start_workers(cluster.hosts)
    cluster.network.limit(two, upload_mbit=100, download_mbit=30)
    cluster.network.delay(two, upload_s=0.02, download_s=0.005)
    cluster.network.lose(one, two, 0.01)
    controller = cluster.control("train", cluster.hosts)
    said = cluster.answer(controller)
    by_name = {cluster.address(host): host for host in cluster.hosts}
    kept = by_name[said["trainer"][0]]
    (lost,) = {one, two} - {kept}
    assert cluster.address(lost) in said["generators"], "a generator is on another host than the trainer"

    cluster.network.partition([lost], [cluster.controller, kept])
    assert set(cluster.answer(controller, f"lose {cluster.address(lost)}")["generators"]) == {cluster.address(kept)}

    assert set(cluster.answer(controller)["generators"]) == {cluster.address(kept)}
    cluster.network.heal()
    cluster.start_workers([lost], PORT + 1)
    again = cluster.address(lost, PORT + 1)
    said = cluster.answer(controller, f"join {again}")
    assert sorted(said["generators"]) == sorted([cluster.address(kept)] * 2 + [again])

    said = cluster.answer(controller)
    assert said["step"] == grpo_runs.NUM_STEPS
    assert said["recovered"] == [], "the trainer was not touched"
    assert said["weights"] == grpo_runs.weights_digest(whole)
    assert said["ledger"] == [repr(line) for line in grpo_runs.ledger(whole)]
    cluster.finish(controller)


def test_a_host_answers_while_it_imports(make_cluster: Callable[[int], Cluster]) -> None:
    cluster = make_cluster(2)
    cluster.start_workers(cluster.hosts)
    controller = cluster.control("import", cluster.hosts)
    said = cluster.answer(controller)
    assert said["port"] > 0
    assert said["sum"] == 2
    cluster.finish(controller)
