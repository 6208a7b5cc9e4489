"""`forge job`: the text of the jobs, and what the SLURM script does when bash runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
#SBATCH --signal=B:TERM@90
#SBATCH --output=runs/slurm/%x-%j.log
#SBATCH --constraint=h200

asked=0 status=127
trap 'asked=1 interrupted=1; kill -TERM "$run" 2>/dev/null' TERM
/opt/env/bin/python -m forge.cli run --supervise main.py --config 'my run.yaml' run.seed=7 checkpointing.grace_s=90 &
run=$!
[ "$asked" -eq 0 ] || kill -TERM "$run"
while interrupted=0; do
    wait "$run"
    code=$?
    [ "$code" -eq 127 ] || status=$code
    [ "$interrupted" -eq 1 ] || break
done
if [ "$asked" -eq 1 ] && [ "$status" -eq 143 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; then
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
    controller = slurm_script(LauncherConfig(kind="slurm", job_name="qwen3", slurm=options), words, **asked)
    assert "#SBATCH --job-name=qwen3-controller\n#SBATCH --nodes=1\n" in controller
    assert not {"gpus", "exclusive", "constraint"} & set(controller.replace("-", " ").split())


PROGRAM = """
import signal, sys

def stop(number, frame):
    print("saved", flush=True)
    sys.exit(128 + number)

signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
signal.pause()
"""


STAND_IN = """#!/bin/bash
trap 'kill $!; echo saved; exit 143' TERM
sleep 3600 >/dev/null &
echo ready
wait
"""
"""Ends as `forge run --supervise` does."""


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(
    ("state", "restarts", "is_requeued"),
    [("RUNNING", 4, True), ("PREEMPTED", 0, True), ("RUNNING", 5, False), ("COMPLETING", 0, False)],
)
def test_a_preempted_job_saves_and_queues_itself_again(
    tmp_path: Path, state: str, restarts: int, is_requeued: bool
) -> None:
    (tmp_path / "main.py").write_text(PROGRAM)
    (tmp_path / "stand_in").write_text(STAND_IN)
    (tmp_path / "stand_in").chmod(0o755)
    python = sys.executable if restarts == 4 else "./stand_in"
    script = slurm_script(LauncherConfig(), ["main.py"], grace_s=90, max_requeues=5, python=python)
    (tmp_path / "job.sh").write_text(script)
    programs = Programs(tmp_path / "bin", {"squeue": [{"out": f"{state}\n"}], "scontrol": [{}]})
    env = {**os.environ, "PATH": f"{programs.folder}{os.pathsep}{os.environ['PATH']}"}
    env |= {"SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": str(restarts)}
    with subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGTERM)
        assert job.stdout.read() == "saved\n"
        assert job.wait(LIMIT_S) == 143
    called = [call for call in programs.calls() if call[0] == "scontrol"]
    assert called == ([["scontrol", "requeue", "41"]] if is_requeued else [])


def test_the_kubernetes_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "main.py"
    script.write_text("")
    given = ["launcher.kubernetes.image=forge:1", "launcher.kubernetes.gpus_per_host=8", "mine.key=1"]
    assert main(["job", "kubernetes", "--claim", "disk", "--grace", "60", str(script), *given]) == 0
    job = yaml.safe_load(capsys.readouterr().out)
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == ("batch/v1", "Job", "forge-controller")
    assert job["spec"]["backoffLimit"] == 6
    assert job["spec"]["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": {"containerName": "controller", "operator": "In", "values": [2]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
    ]
    pod = job["spec"]["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 60)
    (container,) = pod["containers"]
    assert container["command"] == [
        *("forge", "run", "--supervise", str(script), *given),
        *("checkpointing.grace_s=60", "run.output_dir=/runs"),
    ]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert pod["volumes"][0] == {"name": "runs", "persistentVolumeClaim": {"claimName": "disk"}}
    assert container["volumeMounts"][0] == {"name": "runs", "mountPath": "/runs"}
    assert main(["job", "kubernetes", "--claim", "disk", str(script), *given, "launcher.kind=kubernetes"]) == 0
    (container,) = yaml.safe_load(capsys.readouterr().out)["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == "launcher.bind=$(POD_IP)"
    assert "resources" not in container


@pytest.mark.parametrize(
    ("words", "path", "rule"),
    [
        (["slurm", "--grace", "1", sys.executable], "--grace", "a whole number >= 2"),
        (["slurm", "--max-requeues", "-1", sys.executable], "--max-requeues", "a whole number >= 0"),
        (["slurm", "no.py"], "SCRIPT", "a Python file that exists"),
        (["slurm", sys.executable, "--config", "no.yaml"], "--config", "a YAML file that exists"),
        (["slurm", sys.executable, "launcher.slurm.nodes=2"], "launcher.slurm.nodes", "1 with launcher.kind=local"),
        (["slurm", sys.executable, "launcher.slurm.nodes=0"], "launcher.slurm.nodes", "greater than or equal to 1"),
        (
            ["kubernetes", "--claim", "disk", sys.executable],
            "launcher.kubernetes.image",
            "an image with this library and your program",
        ),
    ],
)
def test_what_a_job_is_refused_for(capsys: pytest.CaptureFixture[str], words: list[str], path: str, rule: str) -> None:
    assert main(["job", *words]) == 2
    printed = capsys.readouterr().err
    assert path in printed
    assert rule in printed
    assert "repair: " in printed
