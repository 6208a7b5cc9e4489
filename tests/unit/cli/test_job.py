"""`forge job`: the text of the jobs, and what the SLURM script does when bash runs it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.cli import main
from forge.cli.job import slurm_script
from forge.config import LauncherConfig, SlurmConfig
from stand_in_programs import Programs

LIMIT_S = 600

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=qwen3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --partition=gpu
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@90
#SBATCH --output=runs/slurm/%x-%j.log
#SBATCH --constraint=h200

trap : TERM
srun --nodes=1 --ntasks=1 --overlap --cpu-bind=none /opt/env/bin/python -m forge.cli run --supervise main.py --config \
'my run.yaml' run.seed=7 checkpointing.grace_s=90
status=$?
if [ "$status" -eq 143 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; then
    case "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T </dev/null)" in
        RUNNING | PREEMPTED) scontrol requeue "$SLURM_JOB_ID" </dev/null ;;
    esac
fi
exit "$status"
"""


def test_the_slurm_script() -> None:
    options = SlurmConfig(
        gpus_per_node=8, time_limit="12:00:00", partition="gpu", extra_sbatch=("--constraint=h200",), nodes=2
    )
    words = ["main.py", "--config", "my run.yaml", "run.seed=7"]
    asked: dict[str, Any] = {"grace_s": 90, "max_requeues": 5, "python": "/opt/env/bin/python"}
    assert slurm_script(LauncherConfig(job_name="qwen3", slurm=options), words, **asked) == SCRIPT


def test_the_slurm_script_of_a_controller_alone() -> None:
    options = SlurmConfig(gpus_per_node=8, extra_sbatch=("--constraint=h200",), nodes=2)
    asked: dict[str, Any] = {"grace_s": 90, "max_requeues": 5}
    config = LauncherConfig(kind="slurm", job_name="qwen3", slurm=options)
    controller = slurm_script(config, ["main.py"], **asked)
    assert "#SBATCH --job-name=qwen3-controller\n#SBATCH --nodes=1\n" in controller
    assert not {"gpus", "exclusive", "constraint"} & set(controller.replace("-", " ").split())
    assert ' checkpointing.grace_s=90 "launcher.bind=${SLURMD_NODENAME:-$(hostname)}"\n' in controller
    chosen = config.model_copy(update={"bind": "10.0.0.1"})
    assert "launcher.bind" not in slurm_script(chosen, ["main.py"], **asked)


@pytest.mark.parametrize(
    ("status", "state", "restarts", "is_requeued"),
    [
        (143, "RUNNING", 4, True),
        (143, "PREEMPTED", 0, True),
        (143, "RUNNING", 5, False),
        (143, "COMPLETING", 0, False),
        (1, "RUNNING", 0, False),
        (0, "RUNNING", 0, False),
    ],
)
def test_a_job_queues_itself_again(tmp_path: Path, status: int, state: str, restarts: int, is_requeued: bool) -> None:
    """With stand-ins. `tests/integration/test_slurm_cluster.py` submits it to a real SLURM."""
    (tmp_path / "job.sh").write_text(slurm_script(LauncherConfig(), ["main.py"], grace_s=90, max_requeues=5))
    answers = {"srun": [{"code": status}], "squeue": [{"out": f"{state}\n"}], "scontrol": [{}]}
    programs = Programs(tmp_path / "bin", answers)
    env = {**os.environ, "PATH": f"{programs.folder}{os.pathsep}{os.environ['PATH']}"}
    env |= {"SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": str(restarts)}
    assert subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=env, timeout=LIMIT_S).returncode == status
    assert programs.calls("scontrol") == ([["scontrol", "requeue", "41"]] if is_requeued else [])


def test_the_folder_of_the_log_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SLURM does not, and the job would fail without a log."""
    monkeypatch.chdir(tmp_path)
    assert main(["job", "slurm", __file__, "launcher.slurm.log_dir=logs/here"]) == 0
    assert "#SBATCH --output=logs/here/%x-%j.log\n" in capsys.readouterr().out
    assert (tmp_path / "logs" / "here").is_dir()


def test_the_kubernetes_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "main.py"
    script.write_text("")
    given = ["launcher.kubernetes.image=forge:1", "launcher.kubernetes.gpus_per_host=8", "mine.key=1"]
    assert main(["job", "kubernetes", "--claim", "disk", "--grace", "60", str(script), *given]) == 0
    job = yaml.safe_load(capsys.readouterr().out)
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == ("batch/v1", "Job", "forge-controller")
    assert job["spec"]["backoffLimit"] == 6
    invalid = {"containerName": "controller", "operator": "In", "values": [2]}
    assert job["spec"]["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": invalid, "onPodConditions": []},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    pod = job["spec"]["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 60)
    (container,) = pod["containers"]
    assert container["command"] == [
        *("forge", "run", "--supervise", str(script), *given),
        *("checkpointing.grace_s=60", "run.output_dir=/runs"),
    ]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert pod["volumes"][0] == {"name": "claim-0", "persistentVolumeClaim": {"claimName": "disk"}}
    assert container["volumeMounts"][0] == {"name": "claim-0", "mountPath": "/runs"}
    assert main(["job", "kubernetes", "--claim", "disk", str(script), *given, "launcher.kind=kubernetes"]) == 0
    (container,) = yaml.safe_load(capsys.readouterr().out)["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == "launcher.bind=$(POD_IP)"
    assert "resources" not in container
    given += ["launcher.kubernetes.service_account=worker", "launcher.kubernetes.claims={models: /models}"]
    assert main(["job", "kubernetes", "--claim", "disk", "--service-account", "forge", str(script), *given]) == 0
    pod = yaml.safe_load(capsys.readouterr().out)["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "forge"
    assert [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]] == ["/models", "/runs", "/dev/shm"]


def test_a_controller_with_tls_gets_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "main.py"
    script.write_text("")
    kubernetes = "launcher.kubernetes={namespace: rl, image: forge:1, tls_secret: forge-tls}"
    given = ("launcher.kind=kubernetes", "launcher.job_name=qwen3", kubernetes)
    assert main(["job", "kubernetes", "--claim", "disk", str(script), *given]) == 0
    service, job = yaml.safe_load_all(capsys.readouterr().out)
    pod = job["spec"]["template"]["spec"]
    assert (service["kind"], service["metadata"]["name"], pod["subdomain"]) == ("Service", *["qwen3-controller"] * 2)
    assert service["spec"]["selector"] == {"forge-job": "qwen3-controller"}
    (container,) = pod["containers"]
    assert container["command"][-1] == "launcher.bind=controller.qwen3-controller.rl.svc"
    assert {"name": "HYPERACTOR_TLS_CERT", "value": "/etc/forge/tls/tls.crt"} in container["env"]
    assert pod["volumes"][-1] == {"name": "tls", "secret": {"secretName": "forge-tls"}}


@pytest.mark.parametrize(
    ("words", "path", "rule"),
    [
        (["slurm", "--grace", "1", __file__], "--grace", "a whole number >= 2"),
        (["slurm", "--max-requeues", "-1", __file__], "--max-requeues", "a whole number >= 0"),
        (["slurm", "no.py"], "SCRIPT", "a Python file that exists"),
        (["slurm", __file__, "--config", "no.yaml"], "--config", "a YAML file that exists"),
        (["slurm", __file__, "launcher.slurm.nodes=2"], "launcher.slurm.nodes", "1 with launcher.kind=local"),
        (["slurm", __file__, "launcher.slurm.nodes=0"], "launcher.slurm.nodes", "greater than or equal to 1"),
        (
            ["kubernetes", "--claim", "disk", __file__],
            "launcher.kubernetes.image",
            "an image with this library and your program",
        ),
        (
            [
                "kubernetes",
                "--claim",
                "disk",
                __file__,
                "launcher.kubernetes.image=forge:1",
                "launcher.kubernetes.claims={runs: /runs}",
            ],
            "--claim",
            "`runs`, which launcher.kubernetes.claims mounts there",
        ),
        (["slurm", __file__, "launcher.slurm.log_dir=/dev/null/logs"], "launcher.slurm.log_dir", "written to"),
    ],
)
def test_what_a_job_is_refused_for(capsys: pytest.CaptureFixture[str], words: list[str], path: str, rule: str) -> None:
    assert main(["job", *words]) == 2
    printed = capsys.readouterr().err
    assert path in printed
    assert rule in printed
    assert "repair: " in printed
