"""Every object for Kubernetes against the API's own schemas, and against rules that API servers check beyond them."""

from __future__ import annotations

import copy
import itertools
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from foreign_packages import KUBERNETES_VALIDATE
from forge.cli.job import kubernetes_objects
from forge.config import KubernetesConfig, LauncherConfig
from forge.envs.external.venvs import VenvError, python_of
from forge.runtime.launchers.kubernetes import manifests

ROOT = Path(__file__).parents[2]
VALIDATE = ROOT / "tests" / "support" / "kubernetes_schemas.py"
VERSIONS = ("1.25", "1.31", "1.37")
"""The oldest has `podFailurePolicy` for the first time without a feature gate that must be set."""
LIMIT_S = 600
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")

Object = dict[str, Any]

OPTIONS: dict[str, tuple[Any, ...]] = {
    "num_hosts": (1, 8),
    "gpus_per_host": (0, 8),
    "service_account": (None, "trainer"),
    "tls_secret": (None, "forge-tls"),
    "labels": ({}, {"example.org/team": "rl", "forge-run": "x", "empty": ""}),
    "claims": ({}, {"team.models": "/models", "runs": "/runs"}),
}
JOB_NAMES = ("forge", "Qwen3.grpo_8B", "8b", "a." * 64, "x" * 128)


def configurations() -> Iterator[LauncherConfig]:
    """Every combination of the options, with names and the rest in turn."""
    rest = itertools.cycle(itertools.product(JOB_NAMES, (True, False), ("kubernetes", "local")))
    for values in itertools.product(*OPTIONS.values()):
        name, insecure, kind = next(rest)
        options = dict(zip(OPTIONS, values, strict=True))
        wanted = KubernetesConfig(image="registry.example/team/forge:1.0", namespace="rl", port=22223, **options)
        yield LauncherConfig(kind=kind, bind="10.0.0.1", job_name=name, insecure=insecure, kubernetes=wanted)


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    made: list[Object] = []
    for number, config in enumerate(configurations()):
        words = ["apps/grpo/main.py", "--config", "my run.yaml"]
        made += manifests(config, token=f"{number:08x}")
        made += kubernetes_objects(config, words, grace_s=120, backoff_limit=number % 3, claim="runs")
    return made


def runs_of(objects: list[Object]) -> Iterator[list[Object]]:
    """The objects of each run: Service and StatefulSet of the workers; the Job, perhaps with a Service before it."""
    ends = [number + 1 for number, each in enumerate(objects) if each["kind"] == "Job"]
    return (objects[begin:end] for begin, end in itertools.pairwise([0, *ends]))


@pytest.fixture(scope="module")
def problems_of() -> Callable[[list[Object]], list[str]]:
    try:
        python = python_of(KUBERNETES_VALIDATE)
    except VenvError as error:
        pytest.skip(f"kubernetes-validate cannot be installed here: {str(error)[-400:]}")

    def validate(given: list[Object]) -> list[str]:
        command = [str(python), str(VALIDATE), *VERSIONS]
        done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        found: list[str] = json.loads(done.stdout)
        return found

    return validate


def test_the_api_knows_every_field(objects: list[Object], problems_of: Callable[[list[Object]], list[str]]) -> None:
    assert len(list(runs_of(objects))) == 2 ** len(OPTIONS)
    assert {each["kind"] for each in objects} == {"Service", "StatefulSet", "Job"}
    assert problems_of(objects) == []


def test_the_schemas_refuse_what_is_wrong(
    objects: list[Object], problems_of: Callable[[list[Object]], list[str]]
) -> None:
    workers = copy.deepcopy(objects[1])
    workers["spec"]["template"]["spec"]["containers"][0]["gpus"] = 8
    workers["spec"]["replicas"] = "2"
    (unknown, kind) = problems_of([workers])[:2]
    assert "'gpus' was unexpected" in unknown + kind
    assert "'2' is not of type" in unknown + kind


def test_the_api_knows_what_the_guide_shows(problems_of: Callable[[list[Object]], list[str]]) -> None:
    guide = (ROOT / "docs" / "guides" / "hosts.md").read_text(encoding="utf-8")
    shown = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(apiVersion:.*?)```", guide, re.DOTALL)]
    assert [each["kind"] for each in shown] == ["Role"]
    assert problems_of(shown) == []


def pod_of(made: Object) -> Object:
    pod: Object = made["spec"]["template"]["spec"]
    return pod


def test_names_and_labels_are_those_that_a_cluster_admits(objects: list[Object]) -> None:
    """Schemas say nothing about them: the API server checks them by rules of its own."""
    for each in objects:
        assert NAME.fullmatch(each["metadata"]["name"]), each["metadata"]
        of_pods = each["spec"].get("template", each)["metadata"]["labels"]
        for labels in (each["metadata"]["labels"], of_pods):
            assert all(LABEL.fullmatch(value) for value in labels.values()), labels
        if each["kind"] != "Service":
            names = [volume["name"] for volume in pod_of(each)["volumes"]]
            assert all(NAME.fullmatch(name) for name in names)
            assert len(set(names)) == len(names)
    for service, workers, *_, job in runs_of(objects):
        assert workers["spec"]["serviceName"] == service["metadata"]["name"]
        # pods have the name of their set with a number, and a label with the name and a hash of ten characters
        assert len(workers["metadata"]["name"]) <= 63 - len("-0123456789")
        assert len(job["metadata"]["name"]) <= 63 - len("-01234")


def test_selectors_volumes_and_policies_refer_to_what_there_is(objects: list[Object]) -> None:
    for service, workers, *named, job in runs_of(objects):
        labels = workers["spec"]["template"]["metadata"]["labels"]
        for selector in (service["spec"]["selector"], workers["spec"]["selector"]["matchLabels"]):
            assert selector.items() <= labels.items()
        for each in named:
            assert each["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
            assert each["metadata"]["name"] == pod_of(job)["subdomain"]
            name = f"{pod_of(job)['hostname']}.{pod_of(job)['subdomain']}.rl.svc"
            assert pod_of(job)["containers"][0]["command"][-1] == f"launcher.bind={name}"
        for made in (workers, job):
            pod = pod_of(made)
            (container,) = pod["containers"]
            mounts = container["volumeMounts"]
            assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod["volumes"]}
            assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
            known = {variable["name"] for variable in container["env"]}
            assert set(re.findall(r"\$\((\w+)\)", " ".join(container["command"]))) <= known
        rules = job["spec"]["podFailurePolicy"]["rules"]
        named = {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule}
        assert named == {container["name"] for container in pod_of(job)["containers"]}
        assert pod_of(job)["restartPolicy"] == "Never", "which a podFailurePolicy requires"
