"""The Kubernetes launcher: the exact objects, and how kubectl's answers are met. kubectl is a stand-in on PATH."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from attaching import Attached
from forge.config import KubernetesConfig, LauncherConfig
from forge.errors import LaunchError
from forge.runtime.jobs import object_name
from forge.runtime.launchers import make_launcher
from forge.runtime.launchers.kubernetes import KubernetesLauncher, addresses, manifests
from forge.runtime.sockets import TLS_VARIABLES
from forge.runtime.worker import check_address
from stand_in_programs import Programs

GOLDEN = Path(__file__).parent / "golden"
READY = {
    "kubectl create": [{}],
    "kubectl rollout": [{"out": "Waiting for 2 pods to be ready...\n"}],
    "kubectl delete": [{}],
}
DELETE = [
    *("kubectl", "delete", "statefulset,service", "--namespace=rl", "--selector=forge-run=c0ffee"),
    *("--ignore-not-found", "--wait=false"),
]


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def put_on_path(plan: dict[str, list[dict[str, Any]]]) -> Programs:
        programs = Programs(tmp_path / "bin", plan)
        monkeypatch.setenv("PATH", str(programs.folder))  # nothing else: a real kubectl is never reached
        return programs

    return put_on_path


def config(*, bind: str = "10.0.0.1", **kubernetes: Any) -> LauncherConfig:
    wanted = {"namespace": "rl", "image": "registry.example/forge:1", "num_hosts": 2, **kubernetes}
    return LauncherConfig(
        kind="kubernetes", bind=bind, insecure=True, job_name="Qwen3.grpo", kubernetes=KubernetesConfig(**wanted)
    )


def launcher(attach: Attached | None = None, **kubernetes: Any) -> KubernetesLauncher:
    return KubernetesLauncher(config(**kubernetes), attach=attach or Attached(), token="c0ffee")


def refused(wanted: KubernetesLauncher) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        asyncio.run(wanted.launch())
    assert None not in (caught.value.path, caught.value.rule, caught.value.repair)
    return caught.value


def test_the_smallest_objects() -> None:
    smallest = LauncherConfig(kind="kubernetes", kubernetes=KubernetesConfig(image="forge:1"))
    assert manifests(smallest, token="c0ffee") == json.loads((GOLDEN / "kubernetes_smallest.json").read_text())


def test_objects_with_every_option() -> None:
    every = config(
        num_hosts=3, gpus_per_host=8, service_account="trainer", labels={"example.org/team": "rl", "forge-run": "x"},
        port=23456, tls_secret="forge-tls",
    )  # fmt: skip
    assert manifests(every, token="c0ffee") == json.loads((GOLDEN / "kubernetes_every_option.json").read_text())


def test_pods_listen_where_the_controller_looks_for_them() -> None:
    wanted = config(port=23456)
    command = manifests(wanted, token="c0ffee")[1]["spec"]["template"]["spec"]["containers"][0]["command"]
    pods = [f"qwen3-grpo-{index}" for index in range(2)]
    assert [command[-1].replace("$(POD_NAME)", pod) for pod in pods] == addresses(wanted)
    assert addresses(wanted)[1] == "tcp://qwen3-grpo-1.qwen3-grpo.rl.svc:23456"
    assert [check_address(address) for address in addresses(wanted)] == addresses(wanted)


@pytest.mark.parametrize(
    ("job_name", "name"),
    [
        ("forge", "forge"),
        ("Qwen3_1.7B--grpo", "qwen3-1-7b-grpo"),
        ("7b", "forge-7b"),
        ("a.", "a"),
        ("x" * 128, "x" * 50),
        ("x" * 49 + "-y", "x" * 49),
    ],
)
def test_names_are_what_kubernetes_admits(job_name: str, name: str) -> None:
    assert object_name(job_name) == name


def test_a_launch_creates_waits_attaches_and_deletes_at_the_end(use: Any, caplog: pytest.LogCaptureFixture) -> None:
    programs, attach = use(READY), Attached()

    async def use_it() -> None:
        allocation = await launcher(attach, start_timeout_s=120).launch()
        assert not any("delete" in call for call in programs.calls())
        await allocation.release()

    with caplog.at_level(logging.INFO):
        asyncio.run(use_it())
    sent = json.loads(programs.stdin_of("kubectl"))
    assert (sent["apiVersion"], sent["kind"]) == ("v1", "List")
    assert sent["items"] == manifests(config(), token="c0ffee")
    assert programs.calls() == [
        ["kubectl", "create", "--namespace=rl", "--filename=-"],
        ["kubectl", "rollout", "status", "statefulset/qwen3-grpo", "--namespace=rl", "--timeout=120s"],
        DELETE,
    ]
    assert attach.addresses == addresses(config())
    assert (attach.bind, attach.num_releases) == ("10.0.0.1", 1)
    assert "kubectl: Waiting for 2 pods to be ready..." in caplog.messages


def test_two_runs_are_told_apart() -> None:
    tokens = [manifests(config(), token=KubernetesLauncher(config()).token)[0]["spec"]["selector"] for _ in range(2)]
    assert tokens[0] != tokens[1]


def test_no_kubectl_on_path(use: Any) -> None:
    use({"sbatch": [{}]})
    error = refused(launcher())
    assert "`kubectl`" in str(error)
    assert error.path == "PATH"


@pytest.mark.parametrize("bind", ["127.0.0.1", "localhost"])
def test_a_loopback_controller_cannot_serve_pods(use: Any, bind: str) -> None:
    programs = use(READY)
    error = refused(launcher(bind=bind))
    assert (error.path, error.value) == ("launcher.bind", bind)
    assert programs.calls() == []


def test_tls_needs_the_controllers_certificates(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = use(READY)
    monkeypatch.setenv(TLS_VARIABLES[0], "/etc/forge/tls/tls.crt")
    for name in TLS_VARIABLES[1:]:
        monkeypatch.delenv(name, raising=False)
    error = refused(launcher(tls_secret="forge-tls"))
    assert (error.path, error.value) == ("environment", list(TLS_VARIABLES[1:]))
    assert programs.calls() == []


def test_the_cluster_refuses(use: Any) -> None:
    programs = use({**READY, "kubectl create": [{"err": "Error from server (Forbidden): no rights\n", "code": 1}]})
    error = refused(launcher())
    assert "Error from server (Forbidden): no rights" in str(error)
    assert error.path == "launcher.kubernetes"
    assert programs.calls()[1:] == [DELETE]


def test_a_name_that_another_run_holds(use: Any) -> None:
    words = 'Error from server (AlreadyExists): error when creating "STDIN": services "qwen3-grpo" already exists\n'
    programs = use({**READY, "kubectl create": [{"err": words, "code": 1}]})
    error = refused(launcher())
    assert (error.path, error.value) == ("launcher.job_name", "Qwen3.grpo")
    assert "kubectl delete statefulset,service qwen3-grpo --namespace=rl" in str(error.repair)
    assert programs.calls()[1:] == [DELETE], "only what carries this run's own label may be deleted"


def test_pods_that_do_not_become_ready(use: Any) -> None:
    events = "qwen3-grpo-1   FailedScheduling   3 Insufficient nvidia.com/gpu.\nother-0   Failed   x\n"
    programs = use(
        {
            **READY,
            "kubectl rollout": [{"err": "error: timed out waiting for the condition\n", "code": 1}],
            "kubectl get events": [{"out": events}],
        }
    )
    error = refused(launcher(start_timeout_s=30))
    assert "timed out waiting for the condition" in str(error)
    assert "3 Insufficient nvidia.com/gpu" in str(error)
    assert "other-0" not in str(error)
    assert (error.path, error.value) == ("launcher.kubernetes.start_timeout_s", 30)
    assert programs.calls()[-1] == DELETE


def test_the_objects_are_deleted_when_attaching_fails(use: Any) -> None:
    programs = use(READY)
    with pytest.raises(LaunchError, match="no worker answers"):
        asyncio.run(launcher(Attached(LaunchError("no worker answers"))).launch())
    assert programs.calls()[-1] == DELETE


def test_objects_that_cannot_be_deleted_are_named(use: Any, caplog: pytest.LogCaptureFixture) -> None:
    use({**READY, "kubectl delete": [{"err": "connection refused\n", "code": 1}]})

    async def use_it() -> None:
        await (await launcher().launch()).release()

    asyncio.run(use_it())
    wanted = "run `kubectl delete statefulset,service --namespace=rl --selector=forge-run=c0ffee`"
    assert any(wanted in message for message in caplog.messages)


def test_the_configuration_chooses_it() -> None:
    assert isinstance(make_launcher(config()), KubernetesLauncher)
