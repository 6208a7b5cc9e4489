"""The objects of the Kubernetes launcher, run: each pod is a host of a test network on which its container's command is
started, with the variables and under the name that a cluster would give it. kubectl alone is a stand-in."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from certificates import make_certificates
from networks import SUPPORT, HostProcess, Network, NetworkHost, require_network, wait_for
from stand_in_programs import Programs

CONTROLLER = "controller.grpo-controller.rl.svc"
"""As `forge job kubernetes` names it."""
NAMES = ("grpo-0.grpo.rl.svc", "grpo-1.grpo.rl.svc")
TLS_DIR = "/etc/forge/tls"
TLS_FILES = {"CERT": "tls.crt", "KEY": "tls.key", "CA": "ca.crt"}
OVERRIDES = tuple(
    f"launcher.{key}"
    for key in (
        *("kind=kubernetes", "job_name=grpo", f"bind={CONTROLLER}"),
        "kubernetes={namespace: rl, image: x, num_hosts: 2, tls_secret: forge-tls}",
    )
)


@pytest.fixture
def network(leaves_nothing: None) -> Iterator[Network]:
    require_network()
    with Network(3) as made:
        yield made


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """The files of the secret, with the names that the guide tells to put into the certificate."""
    make_certificates(tmp_path, {"pods": f"DNS:*.grpo.rl.svc,DNS:{CONTROLLER}"})
    folder = tmp_path / "secret"
    folder.mkdir()
    for file, name in {"pods.crt": "tls.crt", "pods.key": "tls.key", "ca.crt": "ca.crt"}.items():
        shutil.copy(tmp_path / file, folder / name)
    return folder


def variables_of(container: Mapping[str, Any], pod: str, secret: Path) -> dict[str, str]:
    """The variables of a container, with the secret where it is here instead of where it would be mounted."""
    assert {"name": "tls", "mountPath": TLS_DIR, "readOnly": True} in container["volumeMounts"]
    fields = {"metadata.name": pod}
    return {
        each["name"]: each["value"].replace(TLS_DIR, str(secret))
        if "value" in each
        else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }


def start(host: NetworkHost, command: Sequence[str], variables: Mapping[str, str], errors: Path) -> HostProcess:
    """Start a command, which is looked up on the PATH of its variables."""
    paths = os.pathsep.join(dict.fromkeys([str(SUPPORT), *filter(None, sys.path)]))
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": paths, **variables}
    return host.start(["sh", "-c", 'exec "$@"', "sh", *command], env=env, stderr=errors)


def run_in_pod(host: NetworkHost, container: Mapping[str, Any], pod: str, secret: Path, errors: Path) -> HostProcess:
    """Start the command of a container as the cluster does: `$(NAME)` is replaced by the container's variables."""
    variables = variables_of(container, pod, secret)
    command = [str(word) for word in container["command"]]
    for name, value in variables.items():
        command = [word.replace(f"$({name})", value) for word in command]
    return start(host, command, variables, errors)


def publish(network: Network, names: Mapping[str, NetworkHost]) -> None:
    """Make names known everywhere, as a headless Service does."""
    text = "".join(f"{host.address} {name}\n" for name, host in names.items())
    for host in network.hosts:
        assert host.start(["sh", "-c", f"cat >> /etc/hosts <<'EOF'\n{text}EOF"]).wait() == 0


def test_pods_are_found_by_their_names_and_used(network: Network, secret: Path, tmp_path: Path) -> None:
    controller, *pods = network.hosts
    gate, errors = tmp_path / "ready", tmp_path / "stderr"
    os.mkfifo(gate)
    plan = {"kubectl create": [{}], "kubectl rollout": [{"tell": str(gate)}], "kubectl delete": [{}]}
    programs = Programs(tmp_path / "bin", plan)
    variables = {f"HYPERACTOR_TLS_{part}": str(secret / file) for part, file in TLS_FILES.items()}
    variables |= {"PATH": f"{programs.folder}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, str(SUPPORT / "launched_controller.py"), *OVERRIDES]
    program = start(controller, command, variables, errors)
    assert program.read_line() == f"waiting until the name {CONTROLLER} is known\n", errors.read_text()
    publish(network, {CONTROLLER: controller})

    wait_for(lambda: bool(programs.calls("kubectl")), "the objects are created", lambda: errors.read_text())
    _, workers = json.loads(programs.stdin_of("kubectl"))["items"]
    (container,) = workers["spec"]["template"]["spec"]["containers"]
    started = [run_in_pod(host, container, f"grpo-{index}", secret, errors) for index, host in enumerate(pods)]
    for worker, name in zip(started, NAMES, strict=True):
        assert worker.read_line() == f"waiting until the name {name} is known\n", errors.read_text()
    publish(network, dict(zip(NAMES, pods, strict=True)))
    for worker, name in zip(started, NAMES, strict=True):
        assert f"listening at tls://{name}:22222" in worker.read_line(), errors.read_text()
    gate.read_text()

    line = program.read_line()
    assert json.loads(line or "{}") == {"places": [f"tls://{name}:22222" for name in NAMES]}, errors.read_text()
    program.communicate()
    assert program.wait() == 0, errors.read_text()
    assert [call[1] for call in programs.calls("kubectl")] == ["create", "rollout", "delete"]
    assert [worker.wait() for worker in started] == [0, 0], "`--once`: the container ends with the run"
