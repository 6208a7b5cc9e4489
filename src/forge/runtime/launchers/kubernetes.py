"""The `kubernetes` launcher: a StatefulSet of workers, found by the names that its headless Service gives them."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from forge.errors import LaunchError
from forge.runtime.hosts import HostTimings
from forge.runtime.jobs import (
    claim_mounts,
    claim_volumes,
    headless_service,
    object_name,
    tls_mounts,
    tls_variables,
    tls_volumes,
)
from forge.runtime.launchers import Allocation, attach_all, check_launcher
from forge.runtime.launchers.submit import (
    Outcome,
    check_bind,
    require_program,
    run_command,
    run_regardless,
)
from forge.runtime.sockets import check_tls

if TYPE_CHECKING:
    from forge.config import LauncherConfig

_log = logging.getLogger("forge.runtime")

RUN_LABEL = "forge-run"
"""Every object of one run carries this label with a value of its own, so that a run removes its objects only."""

_WORKER = ("forge", "worker", "--once", "--name-timeout", "60")
_GRACE_S = 30.0


def addresses(config: LauncherConfig) -> list[str]:
    """Return where the workers will listen, first pod first."""
    return [_address(config, f"{object_name(config.job_name)}-{index}") for index in range(config.kubernetes.num_hosts)]


def _address(config: LauncherConfig, pod: str) -> str:
    wanted = config.kubernetes
    scheme = "tls" if wanted.tls_secret else "tcp"
    return f"{scheme}://{pod}.{object_name(config.job_name)}.{wanted.namespace}.svc:{wanted.port}"


def manifests(config: LauncherConfig, *, token: str) -> list[dict[str, Any]]:
    """Return the objects of a run, a headless Service and a StatefulSet. `token` tells this run from every other."""
    name, wanted = object_name(config.job_name), config.kubernetes
    labels = {**wanted.labels, "app.kubernetes.io/name": "torchforge", RUN_LABEL: token}
    metadata = {"name": name, "namespace": wanted.namespace, "labels": labels}
    service = headless_service(metadata, {RUN_LABEL: token}, port=wanted.port)
    workers = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "serviceName": name,
            "replicas": wanted.num_hosts,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {RUN_LABEL: token}},
            "template": {"metadata": {"labels": labels}, "spec": _pod(config)},
        },
    }
    return [service, workers]


def _pod(config: LauncherConfig) -> dict[str, Any]:
    wanted = config.kubernetes
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    volumes += claim_volumes(wanted.claims)
    pod: dict[str, Any] = {"restartPolicy": "Always", "containers": [_container(config)], "volumes": volumes}
    volumes += tls_volumes(wanted.tls_secret)
    if wanted.service_account is None:
        pod["automountServiceAccountToken"] = False  # workers run what they are sent: no key to the cluster for it
    else:
        pod["serviceAccountName"] = wanted.service_account
    return pod


def _container(config: LauncherConfig) -> dict[str, Any]:
    wanted = config.kubernetes
    env: list[dict[str, Any]] = [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}, *claim_mounts(wanted.claims)]
    env += tls_variables(wanted.tls_secret)
    mounts += tls_mounts(wanted.tls_secret)
    allowed = ["--insecure"] if config.insecure and wanted.tls_secret is None else []
    container: dict[str, Any] = {
        "name": "worker",
        "image": wanted.image,
        "command": [*_WORKER, *allowed, "--address", _address(config, "$(POD_NAME)")],
        "env": env,
        "ports": [{"name": "worker", "containerPort": wanted.port}],
        "readinessProbe": {"tcpSocket": {"port": wanted.port}, "periodSeconds": 2},
        "volumeMounts": mounts,
    }
    if wanted.gpus_per_host:
        container["resources"] = {"limits": {"nvidia.com/gpu": wanted.gpus_per_host}}
    return container


def launch_checks(config: LauncherConfig) -> tuple[Callable[[], object], ...]:
    """Return what must hold on this machine before anything is created: each raises what is wrong."""
    return (
        partial(require_program, "kubectl", kind="kubernetes"),
        partial(check_bind, config.bind, kind="kubernetes"),
        partial(check_launcher, config),
        *([check_tls] if config.kubernetes.tls_secret is not None else []),
    )


class KubernetesLauncher:
    """Creates the objects, waits until every pod is ready, attaches to the workers, and deletes the objects."""

    def __init__(
        self,
        config: LauncherConfig,
        *,
        attach: Callable[..., Awaitable[Allocation]] = attach_all,
        token: str | None = None,
    ) -> None:
        self._config, self._attach = config, attach
        self._name = object_name(config.job_name)
        self.token = token or secrets.token_hex(4)
        self._in_namespace = f"--namespace={config.kubernetes.namespace}"

    async def launch(self) -> Allocation:
        for check in launch_checks(self._config):
            check()
        try:
            await self._create()
            await self._wait_until_ready()
            timings = HostTimings.of(self._config)
            attached = await self._attach(addresses(self._config), bind=self._config.bind, timings=timings)
        except BaseException:
            await asyncio.shield(self._delete())
            raise

        async def release() -> None:
            try:
                await attached.release()
            finally:
                await asyncio.shield(self._delete())

        return Allocation(attached.hosts, release)

    async def _create(self) -> None:
        items = manifests(self._config, token=self.token)
        listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        # `create`, not `apply`: a name that another run holds must be refused, never taken over.
        outcome = await run_command(["kubectl", "create", self._in_namespace, "--filename=-"], stdin=listed)
        if outcome.code == 0:
            return
        if "AlreadyExists" in outcome.words or "already exists" in outcome.words:
            raise LaunchError(
                f"another run holds the name `{self._name}`: {outcome.words}", path="launcher.job_name",
                value=self._config.job_name, rule="one name, one run at a time, in a namespace",
                repair="choose another launcher.job_name; if it was left behind, "
                f"`kubectl delete statefulset,service {self._name} {self._in_namespace}`",
            )  # fmt: skip
        raise LaunchError(
            f"kubectl refused the workers: {outcome.words}", path="launcher.kubernetes", value=items,
            rule="the cluster accepts the Service and the StatefulSet",
            repair="correct launcher.kubernetes, or the rights of your account, as kubectl reports above",
        )  # fmt: skip

    async def _wait_until_ready(self) -> None:
        limit = self._config.kubernetes.start_timeout_s
        _log.warning("waiting for %d pod(s) of statefulset/%s", self._config.kubernetes.num_hosts, self._name)
        outcome = await run_command(
            [
                "kubectl",
                "rollout",
                "status",
                f"statefulset/{self._name}",
                self._in_namespace,
                f"--timeout={limit:.0f}s",
            ],
            timeout_s=limit + _GRACE_S,
            on_line=lambda line: _log.info("kubectl: %s", line),
        )
        if outcome.code != 0:
            raise await self._not_ready(outcome)

    async def _not_ready(self, outcome: Outcome) -> LaunchError:
        events = await run_command(
            ["kubectl", "get", "events", self._in_namespace, "--field-selector=involvedObject.kind=Pod", "--no-headers",
             "--sort-by=.lastTimestamp", "--output=custom-columns=:.involvedObject.name,:.reason,:.message"],
        )  # fmt: skip
        said = [line.strip() for line in events.stdout.splitlines() if line.strip().startswith(f"{self._name}-")]
        limit = self._config.kubernetes.start_timeout_s
        return LaunchError(
            "\n  ".join([f"the pods were not ready: {outcome.words}", *(said[-10:] or [f"no events: {events.words}"])]),
            path="launcher.kubernetes.start_timeout_s", value=limit,
            rule="every pod listens before this time is over",
            repair="act on the events above, or raise it; the pods were deleted",
        )  # fmt: skip

    async def _delete(self) -> None:
        selector = f"--selector={RUN_LABEL}={self.token}"
        wanted = ["kubectl", "delete", "statefulset,service", self._in_namespace, selector]
        outcome = await run_regardless([*wanted, "--ignore-not-found", "--wait=false"])
        if outcome.code != 0:
            _log.warning(
                "the workers were not deleted; run `kubectl delete statefulset,service %s %s`: %s",
                *(self._in_namespace, selector, outcome.words),
            )
