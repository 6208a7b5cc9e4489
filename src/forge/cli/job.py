"""`forge job slurm` and `forge job kubernetes`: print a job that runs a program, and runs it again after preemption.

Both run `forge run --supervise`. On SIGTERM the run saves within `--grace` seconds and exits with 143; then the SLURM
script asks for its own requeue, and the Kubernetes Job starts another pod.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forge.errors import ConfigError
from forge.runtime.jobs import (
    claim_mounts,
    claim_volumes,
    headless_service,
    is_loopback,
    log_pattern,
    make_log_dir,
    object_name,
    tls_mounts,
    tls_variables,
    tls_volumes,
)

if TYPE_CHECKING:
    from forge.config import LauncherConfig

_STOPPED: Final = 143
_RUNS: Final = "/runs"
_CONTROLLER: Final = "-controller"
_CONTROLLER_HOST: Final = "controller"
_JOB_LABEL: Final = "forge-job"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `job`."""
    parser = subparsers.add_parser(
        "job",
        help="print a SLURM or Kubernetes job that survives preemption",
        description="Print a job that runs SCRIPT under a supervisor. Before its time is up, or when it is preempted, "
        "the run saves; then the job is queued again and resumes.",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    slurm = kinds.add_parser(
        "slurm",
        help="a script for sbatch",
        description="Print a script for sbatch. What it asks for is in the section launcher.slurm.",
        epilog="example: forge job slurm grpo --config qwen3.yaml > job.sh && sbatch job.sh",
    )
    slurm.add_argument(
        "--max-requeues", metavar="N", type=int, default=100, help="how often the job queues itself again (100)"
    )
    slurm.set_defaults(handler=_slurm)
    kubernetes = kinds.add_parser(
        "kubernetes",
        help="a manifest for kubectl",
        description="Print a Job for kubectl. Image, namespace and GPUs are in the section launcher.kubernetes.",
        epilog="example: forge job kubernetes --claim runs grpo --config qwen3.yaml | kubectl apply -f -",
    )
    kubernetes.add_argument(
        "--claim", metavar="NAME", required=True, help="persistent volume claim for the run's folder"
    )
    kubernetes.add_argument(
        "--service-account",
        metavar="NAME",
        help="service account of the controller's pod, which may need rights that workers do not "
        "(launcher.kubernetes.service_account)",
    )
    kubernetes.add_argument(
        "--backoff-limit", metavar="N", type=int, default=6, help="failed pods before the Job fails (6)"
    )
    kubernetes.set_defaults(handler=_kubernetes)
    for each in (slurm, kubernetes):
        each.add_argument(
            "--grace", metavar="S", type=int, default=120, help="seconds between SIGTERM and SIGKILL (120)"
        )
        each.add_argument("script", metavar="SCRIPT", type=Path, help="a Python file, or a recipe")
        each.add_argument(
            "rest", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="--config FILE and overrides, for SCRIPT"
        )


def _slurm(arguments: argparse.Namespace) -> int:
    _check_count("--grace", arguments.grace, least=2)
    _check_count("--max-requeues", arguments.max_requeues, least=0)
    launcher = _launcher(arguments)
    if launcher.kind == "local" and launcher.slurm.nodes > 1:
        raise ConfigError(
            "the program would run on the first node alone",
            path="launcher.slurm.nodes",
            value=launcher.slurm.nodes,
            rule="1 with launcher.kind=local",
            repair="set launcher.kind=slurm: the job then holds the controller, which submits another for its workers",
        )
    words = [str(arguments.script), *arguments.rest]
    make_log_dir(launcher.slurm.log_dir)
    print(slurm_script(launcher, words, grace_s=arguments.grace, max_requeues=arguments.max_requeues), end="")
    return 0


def _kubernetes(arguments: argparse.Namespace) -> int:
    from forge.config.yaml_text import write_yaml

    _check_count("--grace", arguments.grace, least=2)
    _check_count("--backoff-limit", arguments.backoff_limit, least=0)
    launcher = _launcher(arguments)
    if launcher.kubernetes.image is None:
        raise ConfigError(
            "the Job needs an image",
            path="launcher.kubernetes.image",
            value=None,
            rule="an image with this library and your program",
            repair="add launcher.kubernetes.image=REGISTRY/NAME:TAG",
        )
    taken = next((name for name, path in launcher.kubernetes.claims.items() if path == _RUNS), arguments.claim)
    if taken != arguments.claim:
        raise ConfigError(
            f"two claims would be mounted at {_RUNS}",
            path="--claim",
            value=arguments.claim,
            rule=f"`{taken}`, which launcher.kubernetes.claims mounts there",
            repair=f"--claim {taken}, or mount that one elsewhere",
        )
    words = [str(arguments.script), *arguments.rest]
    if arguments.service_account is not None:
        chosen = launcher.kubernetes.model_copy(update={"service_account": arguments.service_account})
        launcher = launcher.model_copy(update={"kubernetes": chosen})
    found = kubernetes_objects(
        launcher, words, grace_s=arguments.grace, backoff_limit=arguments.backoff_limit, claim=arguments.claim
    )
    print("---\n".join(write_yaml(each) for each in found), end="")
    return 0


def _check_count(flag: str, value: int, *, least: int) -> None:
    if value < least:
        raise ConfigError(
            "this number is too small",
            path=flag,
            value=value,
            rule=f"a whole number >= {least}",
            repair="leave it out for the default",
        )


def _launcher(arguments: argparse.Namespace) -> LauncherConfig:
    """Return the section `launcher` of a program's configuration, whatever else its schema has."""
    from forge.cli.run import read_program, split_configs
    from forge.config import ForgeConfig, load
    from forge.config.layers import split_words
    from forge.config.loading import merge_layers

    command = read_program(arguments.script, *split_configs([], list(arguments.rest))).command
    overrides = split_words([word for word in command.words if not word.startswith("-")])[1]
    merged = merge_layers(ForgeConfig, files=command.files, overrides=overrides)
    return load(ForgeConfig, defaults={"launcher": merged.get("launcher") or {}}).launcher


# ---- SLURM ----------------------------------------------------------------------------------------------------------

_BODY: Final = """\
trap : TERM
srun --nodes=1 --ntasks=1 --overlap --cpu-bind=none {command}
status=$?
if [ "$status" -eq {stopped} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_requeues} ]; then
    case "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T </dev/null)" in
        RUNNING | PREEMPTED) scontrol requeue "$SLURM_JOB_ID" </dev/null ;;
    esac
fi
exit "$status"
"""
_BIND: Final = ' "launcher.bind=${SLURMD_NODENAME:-$(hostname)}"'
"""The node on which the controller's job runs is known only there."""


def slurm_script(
    config: LauncherConfig, words: Sequence[str], *, grace_s: int, max_requeues: int, python: str = sys.executable
) -> str:
    """Return a script for sbatch that runs a program and queues itself again.

    The program is a step of the job, because SLURM sends SIGTERM to steps alone: `grace_s` seconds before the time
    limit, and when the job is preempted with a grace time. When the run has saved and ended with 143, the script asks
    for its requeue, unless the job was cancelled: then its state is COMPLETING. With `launcher.kind` slurm the job
    holds the controller alone, whose own job has the GPUs.
    """
    slurm, is_local = config.slurm, config.kind == "local"
    options = [f"--job-name={config.job_name}{'' if is_local else '-controller'}", "--nodes=1", "--ntasks-per-node=1"]
    if slurm.gpus_per_node and is_local:
        options.append(f"--gpus-per-node={slurm.gpus_per_node}")
    named = {"time": slurm.time_limit, "partition": slurm.partition, "account": slurm.account, "qos": slurm.qos}
    options += [f"--{name}={shlex.quote(value)}" for name, value in named.items() if value is not None]
    if slurm.exclusive and is_local:
        options += ["--exclusive", "--mem=0"]
    options += ["--requeue", "--open-mode=append", f"--signal=TERM@{grace_s}"]
    options += [f"--output={shlex.quote(log_pattern(slurm.log_dir))}"]
    options += slurm.extra_sbatch if is_local else ()
    command = shlex.join([python, "-m", "forge.cli", "run", "--supervise", *words, f"checkpointing.grace_s={grace_s}"])
    command += _BIND if config.kind == "slurm" and is_loopback(config.bind) else ""
    body = _BODY.format(command=command, stopped=_STOPPED, max_requeues=max_requeues)
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "", body])


# ---- Kubernetes -----------------------------------------------------------------------------------------------------


def kubernetes_objects(
    config: LauncherConfig, words: Sequence[str], *, grace_s: int, backoff_limit: int, claim: str
) -> list[dict[str, Any]]:
    """Return a Job that runs a program in one pod, and in another one after the first was preempted or failed.

    Pods that the cluster itself ends (preemption, a drained node) do not count towards `backoff_limit`; invalid input,
    exit code 2, fails the Job at once. With TLS, workers must find the controller by a name that its certificate has:
    a headless Service before the Job gives it one.
    """
    wanted, name = config.kubernetes, object_name(config.job_name, _CONTROLLER)
    has_name = config.kind != "local" and wanted.tls_secret is not None
    labels = {**wanted.labels, "app.kubernetes.io/name": "torchforge"}
    metadata = {"name": name, "namespace": wanted.namespace, "labels": labels}
    pod = _pod(config, words, grace_s=grace_s, claim=claim)
    if has_name:
        labels = {**labels, _JOB_LABEL: name}
        pod |= {"hostname": _CONTROLLER_HOST, "subdomain": name}
    invalid = {"containerName": "controller", "operator": "In", "values": [2]}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "backoffLimit": backoff_limit,
            "podFailurePolicy": {
                "rules": [
                    # The schemas of older clusters require the empty list and the status, which have defaults.
                    {"action": "FailJob", "onExitCodes": invalid, "onPodConditions": []},
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    return [headless_service(metadata, {_JOB_LABEL: name}, port=wanted.port), job] if has_name else [job]


def _pod(config: LauncherConfig, words: Sequence[str], *, grace_s: int, claim: str) -> dict[str, Any]:
    """The pod of a program: all of the run, or its controller alone."""
    wanted, is_local = config.kubernetes, config.kind == "local"
    claims = {**wanted.claims, claim: _RUNS}
    tls = None if is_local else wanted.tls_secret
    command = ["forge", "run", "--supervise", *words]
    command += [f"checkpointing.grace_s={grace_s}", f"run.output_dir={_RUNS}"]
    if tls is not None:
        name = object_name(config.job_name, _CONTROLLER)
        command.append(f"launcher.bind={_CONTROLLER_HOST}.{name}.{wanted.namespace}.svc")
    elif not is_local:
        command.append("launcher.bind=$(POD_IP)")
    memory = {"name": "shared-memory", "mountPath": "/dev/shm"}
    container: dict[str, Any] = {
        "name": "controller",
        "image": wanted.image,
        "command": command,
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}, *tls_variables(tls)],
        "volumeMounts": [*claim_mounts(claims), memory, *tls_mounts(tls)],
    }
    if wanted.gpus_per_host and is_local:
        container["resources"] = {"limits": {"nvidia.com/gpu": wanted.gpus_per_host}}
    shared_memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s,
        "containers": [container],
        "volumes": [*claim_volumes(claims), shared_memory, *tls_volumes(tls)],
    }
    if wanted.service_account is not None:
        pod["serviceAccountName"] = wanted.service_account
    elif is_local:
        pod["automountServiceAccountToken"] = False
    return pod
