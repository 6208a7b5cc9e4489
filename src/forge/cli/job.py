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

if TYPE_CHECKING:
    from forge.config import LauncherConfig

_STOPPED: Final = 143
_RUNS: Final = "/runs"


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
        epilog="example: forge job slurm apps/grpo/main.py --config qwen3.yaml > job.sh && sbatch job.sh",
    )
    slurm.add_argument(
        "--max-requeues", metavar="N", type=int, default=100, help="how often the job queues itself again (100)"
    )
    slurm.set_defaults(handler=_slurm)
    kubernetes = kinds.add_parser(
        "kubernetes",
        help="a manifest for kubectl",
        description="Print a Job for kubectl. Image, namespace and GPUs are in the section launcher.kubernetes.",
        epilog="example: forge job kubernetes --claim runs main.py --config qwen3.yaml | kubectl apply -f -",
    )
    kubernetes.add_argument(
        "--claim", metavar="NAME", required=True, help="persistent volume claim for the run's folder"
    )
    kubernetes.add_argument(
        "--backoff-limit", metavar="N", type=int, default=6, help="failed pods before the Job fails (6)"
    )
    kubernetes.set_defaults(handler=_kubernetes)
    for each in (slurm, kubernetes):
        each.add_argument(
            "--grace", metavar="S", type=int, default=120, help="seconds between SIGTERM and SIGKILL (120)"
        )
        each.add_argument("script", metavar="SCRIPT", type=Path, help="a Python file")
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
    words = [str(arguments.script), *arguments.rest]
    found = kubernetes_job(
        launcher, words, grace_s=arguments.grace, backoff_limit=arguments.backoff_limit, claim=arguments.claim
    )
    print(write_yaml(found), end="")
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
    from forge.cli.run import split_configs
    from forge.config import ForgeConfig, load
    from forge.config.layers import split_words
    from forge.config.loading import merge_layers

    if not arguments.script.is_file():
        raise ConfigError(
            "there is no such script",
            path="SCRIPT",
            value=str(arguments.script),
            rule="a Python file that exists",
            repair="check the path; it is relative to the working directory",
        )
    files, words = split_configs([], list(arguments.rest))
    overrides = split_words([word for word in words if not word.startswith("-")])[1]
    for file in files:
        if not Path(file).is_file():
            raise ConfigError(
                "there is no such configuration file",
                path="--config",
                value=file,
                rule="a YAML file that exists",
                repair="check the path; it is relative to the working directory",
            )
    merged = merge_layers(ForgeConfig, files=files, overrides=overrides)
    return load(ForgeConfig, defaults={"launcher": merged.get("launcher") or {}}).launcher


# ---- SLURM ----------------------------------------------------------------------------------------------------------

_BODY: Final = """\
asked=0 status=127
trap 'asked=1 interrupted=1; kill -TERM "$run" 2>/dev/null' TERM
{command} &
run=$!
[ "$asked" -eq 0 ] || kill -TERM "$run"
while interrupted=0; do
    wait "$run"
    code=$?
    [ "$code" -eq 127 ] || status=$code
    [ "$interrupted" -eq 1 ] || break
done
if [ "$asked" -eq 1 ] && [ "$status" -eq {stopped} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_requeues} ]; then
    case "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T </dev/null)" in
        RUNNING | PREEMPTED) scontrol requeue "$SLURM_JOB_ID" </dev/null ;;
    esac
fi
exit "$status"
"""


def slurm_script(
    config: LauncherConfig, words: Sequence[str], *, grace_s: int, max_requeues: int, python: str = sys.executable
) -> str:
    """Return a script for sbatch that runs a program and queues itself again.

    SLURM sends SIGTERM to the script `grace_s` seconds before the time limit, or when the job is preempted. The script
    passes it on, waits until the run has saved, and asks for its requeue, unless the job was cancelled: then its state
    is COMPLETING. With `launcher.kind` slurm the job holds the controller alone, whose own job has the GPUs.
    """
    slurm, is_local = config.slurm, config.kind == "local"
    options = [f"--job-name={config.job_name}{'' if is_local else '-controller'}", "--nodes=1", "--ntasks-per-node=1"]
    if slurm.gpus_per_node and is_local:
        options.append(f"--gpus-per-node={slurm.gpus_per_node}")
    named = {"time": slurm.time_limit, "partition": slurm.partition, "account": slurm.account, "qos": slurm.qos}
    options += [f"--{name}={shlex.quote(value)}" for name, value in named.items() if value is not None]
    if slurm.exclusive and is_local:
        options += ["--exclusive", "--mem=0"]
    options += ["--requeue", "--open-mode=append", f"--signal=B:TERM@{grace_s}"]
    options += [f"--output={shlex.quote(str(slurm.log_dir).replace('%', '%%') + '/%x-%j.log')}"]
    options += slurm.extra_sbatch if is_local else ()
    command = [python, "-m", "forge.cli", "run", "--supervise", *words, f"checkpointing.grace_s={grace_s}"]
    body = _BODY.format(command=shlex.join(command), stopped=_STOPPED, max_requeues=max_requeues)
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "", body])


# ---- Kubernetes -----------------------------------------------------------------------------------------------------


def kubernetes_job(
    config: LauncherConfig, words: Sequence[str], *, grace_s: int, backoff_limit: int, claim: str
) -> dict[str, Any]:
    """Return a Job that runs a program in one pod, and in another one after the first was preempted or failed.

    Pods that the cluster itself ends (preemption, a drained node) do not count towards `backoff_limit`; invalid input,
    exit code 2, fails the Job at once.
    """
    wanted, is_local = config.kubernetes, config.kind == "local"
    command = ["forge", "run", "--supervise", *words]
    command += [f"checkpointing.grace_s={grace_s}", f"run.output_dir={_RUNS}"]
    container: dict[str, Any] = {
        "name": "controller",
        "image": wanted.image,
        "command": command if is_local else [*command, "launcher.bind=$(POD_IP)"],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "volumeMounts": [{"name": "runs", "mountPath": _RUNS}, {"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    if wanted.gpus_per_host and is_local:
        container["resources"] = {"limits": {"nvidia.com/gpu": wanted.gpus_per_host}}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if wanted.service_account is not None:
        pod["serviceAccountName"] = wanted.service_account
    elif is_local:
        pod["automountServiceAccountToken"] = False
    name = f"{config.job_name}-controller".lower().replace("_", "-").replace(".", "-")
    labels = {**wanted.labels, "app.kubernetes.io/name": "torchforge"}
    invalid = {"containerName": "controller", "operator": "In", "values": [2]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": wanted.namespace, "labels": labels},
        "spec": {
            "backoffLimit": backoff_limit,
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onExitCodes": invalid},
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
                ]
            },
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
