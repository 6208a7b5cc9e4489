"""Names and files of cluster jobs: what the launchers and `forge job` share. Imports nothing heavy."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from forge.errors import LaunchError

_MAX_NAME: Final = 50  # names of pods, and a label that the cluster derives from them, must stay below 63 characters

_TLS_DIR: Final = "/etc/forge/tls"
_TLS_FILES: Final = {"CERT": "tls.crt", "KEY": "tls.key", "CA": "ca.crt"}


def is_loopback(host: str) -> bool:
    """Return whether other machines cannot reach a listener on `host` (or it says nothing about where it is)."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def log_pattern(log_dir: Path) -> str:
    """Return where SLURM writes a job's output; %x is the job's name and %j its number."""
    return f"{str(log_dir).replace('%', '%%')}/%x-%j.log"


def make_log_dir(log_dir: Path) -> None:
    """Make the folder of a job's log. SLURM does not, and a job without one fails without a word."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"the folder for the job's log cannot be made: {error}", path="launcher.slurm.log_dir",
            value=str(log_dir), rule="a folder that can be written to, here and on the nodes",
            repair="launcher.slurm.log_dir=FOLDER, on a file system that the nodes share",
        ) from error  # fmt: skip


def claim_volumes(claims: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the volumes of a pod that mounts these claims. Their names are not the claims', which may have dots."""
    return [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(claims)
    ]


def claim_mounts(claims: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return where a container mounts them."""
    return [{"name": f"claim-{number}", "mountPath": path} for number, path in enumerate(claims.values())]


def tls_volumes(secret: str | None) -> list[dict[str, Any]]:
    """Return the volume with the certificates of a pod; none without a secret."""
    return [] if secret is None else [{"name": "tls", "secret": {"secretName": secret}}]


def tls_mounts(secret: str | None) -> list[dict[str, Any]]:
    """Return where a container mounts them."""
    return [] if secret is None else [{"name": "tls", "mountPath": _TLS_DIR, "readOnly": True}]


def tls_variables(secret: str | None) -> list[dict[str, str]]:
    """Return the variables that name them."""
    if secret is None:
        return []
    return [{"name": f"HYPERACTOR_TLS_{part}", "value": f"{_TLS_DIR}/{file}"} for part, file in _TLS_FILES.items()]


def headless_service(metadata: Mapping[str, Any], selector: Mapping[str, str], *, port: int) -> dict[str, Any]:
    """Return a Service that gives pods names: `POD.SERVICE.NAMESPACE.svc`."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            # A worker binds to its own name, so the name must resolve before the worker can be ready.
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": [{"name": "worker", "port": port}],
        },
    }


def object_name(job_name: str, suffix: str = "") -> str:
    """Return `launcher.job_name` as the name of a Kubernetes object: lower-case letters, digits and dashes, a letter
    first. A name that is too long loses its end, never its suffix."""
    name = re.sub(r"[^a-z0-9]+", "-", job_name.lower()).strip("-")
    name = name if name[0].isalpha() else f"forge-{name}"
    return name[: _MAX_NAME - len(suffix)].rstrip("-") + suffix
