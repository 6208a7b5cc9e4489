"""The SLURM launcher and `forge job slurm` on a real SLURM, whose nodes are hosts of a test network."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from certificates import make_certificates, tls_variables
from killing_sinks import HOLDING, holding
from leftovers import has_ended
from networks import PATIENT, SUPPORT, HostProcess, wait_for
from scaled_runs import APPS, MAIN, TINY, check_run
from slurm_cluster import SlurmCluster, require_slurm

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    require_slurm()
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "slurm", 3, doomed=4) as running:
        yield running


class Desk:
    """A folder on the shared file system, and the host from which jobs are submitted."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self._started: list[HostProcess] = []

    def start(self, *command: str) -> HostProcess:
        """Start a command in the folder."""
        inside = ["env", f"--chdir={self.folder}", "--default-signal=INT", *command]
        self._started.append(self.cluster.start(self.cluster.controller, inside, stderr=self.folder / "stderr"))
        return self._started[-1]

    def clear(self) -> None:
        """End what a test that failed has left."""
        for process in self._started:
            process.kill()
        self.cluster.ask("scancel", "--user=root")

    def ask(self, *command: str) -> str:
        """Run a command to its end; return what it printed."""
        process = self.start(*command)
        printed, _ = process.communicate()
        assert process.wait() == 0, self.stderr()
        return printed.strip()

    def submit(self, *words: str, options: tuple[str, ...] = ()) -> str:
        """Submit what `forge job slurm` prints; return the number of the job."""
        script = self.ask(sys.executable, "-m", "forge.cli", "job", "slurm", *words)
        (self.folder / "job.sh").write_text(script + "\n")
        return self.ask("sbatch", "--parsable", *options, "job.sh")

    def control(self, *overrides: str) -> HostProcess:
        """Start a program whose hosts are the nodes of a job."""
        program = str(SUPPORT / "launched_controller.py")
        return self.start(sys.executable, program, "launcher.kind=slurm", "launcher.bind=host1", *overrides)

    def answer(self, controller: HostProcess, line: str = "") -> Any:
        """Send a line if there is one, and return the controller's next answer."""
        if line:
            controller.write_line(line)
        while (answer := controller.read_line()) and not answer.startswith("{"):
            pass
        assert answer, self.stderr()
        return json.loads(answer)

    def stderr(self) -> str:
        path = self.folder / "stderr"
        return path.read_text() if path.exists() else ""

    def job_named(self, name: str) -> str:
        """Return the number of the newest job with this name."""
        return max((number for number, each in self.cluster.jobs().items() if each == name), key=int)

    def wait_for_text(self, path: Path, text: str, times: int = 1) -> str:
        """Wait until a file has a text so many times; return the file."""
        wait_for(
            lambda: path.exists() and path.read_text().count(text) >= times,
            f"{path} has {text!r} {times} times",
            lambda: f"{path.read_text() if path.exists() else 'no file'}\n{self.stderr()}\n{self.cluster.logs()}",
        )
        return path.read_text()


@pytest.fixture
def desk(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Desk]:
    made = Desk(cluster, tmp_path)
    yield made
    made.clear()


DAEMONS = """
import sys
from pathlib import Path
import psutil
from slurm_cluster import SlurmCluster
with SlurmCluster(Path(sys.argv[1]), 1, doomed=1):
    print(*(each.pid for each in psutil.Process().children(recursive=True)), flush=True)
    sys.stdin.read()
"""


def test_every_daemon_ends_with_the_process_that_has_started_it(tmp_path: Path) -> None:
    require_slurm()
    paths = os.pathsep.join([str(SUPPORT), *filter(None, sys.path)])
    owner = subprocess.Popen(
        [sys.executable, "-c", DAEMONS, str(tmp_path / "slurm")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert owner.stdout is not None
    started = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    assert {"munged", "slurmctld", "slurmd"} <= {each.name() for each in started}
    owner.kill()
    owner.communicate()
    assert all(has_ended(each.pid) for each in started)


# ---- The launcher ---------------------------------------------------------------------------------------------------


def test_ctrl_c_in_the_queue_cancels_the_job(desk: Desk) -> None:
    cluster = desk.cluster
    others = desk.ask("sbatch", "--parsable", "--nodes=3", "--exclusive", "--output=others.log", "--wrap=sleep 3600")
    cluster.wait_for_job(others, "RUNNING")
    program = desk.control("launcher.job_name=queued", "launcher.slurm.nodes=2")
    desk.wait_for_text(desk.folder / "stderr", "is PENDING (Resources)")
    program.send_signal(signal.SIGINT)
    program.communicate()
    assert program.wait() == -signal.SIGINT
    assert cluster.job(desk.job_named("queued"))["JobState"] == "CANCELLED"
    assert cluster.job(others)["JobState"] == "RUNNING"
    cluster.ask("scancel", others)


def test_the_layout_for_64_gpus_runs_on_two_nodes(desk: Desk) -> None:
    """The file of docs/guides/scaling.md, over TLS: a trainer over all nodes, generators on each."""
    names = ",".join(f"DNS:{host.name}" for host in desk.cluster.network.hosts)
    make_certificates(desk.folder, {"cluster": names})
    sizes = ("distributed.hosts=2", "distributed.shard=4", "generator.num_replicas=2", "generator.tensor_parallel=1")
    overrides = (*TINY, *PATIENT, *sizes, "rewards.num_replicas=2", "launcher.slurm.nodes=2", "launcher.bind=host1")
    file = APPS / "qwen3_32b_64gpu_slurm.yaml"
    command = [sys.executable, "-m", "forge.cli", "run", str(MAIN), "--config", str(file), *overrides]
    variables = [f"{name}={value}" for name, value in tls_variables(desk.folder, "cluster").items()]
    printed = desk.ask("env", *variables, *command, "run.name=run")
    assert "Done after 2 steps" in printed
    check_run(desk.folder / "runs" / "run", num_ranks=4)
    workers = (desk.folder / "runs" / "slurm" / f"grpo-qwen3-32b-{desk.job_named('grpo-qwen3-32b')}.log").read_text()
    assert len(re.findall(r"listening at tls://host[234]:22222", workers)) == 2
    assert desk.cluster.job(desk.job_named("grpo-qwen3-32b"))["JobState"] in ("CANCELLED", "COMPLETING")


def address(node: Any) -> str:
    return f"tcp://{node.name}:22222"


DOOMED = tuple(f"launcher.slurm.{key}" for key in ("partition=doomed", "nodes=2", "gpus_per_node=8"))


def test_the_run_continues_without_the_node_that_has_the_batch_script(desk: Desk) -> None:
    """`--no-kill` keeps the job, and the workers do not depend on the srun that has started them."""
    cluster = desk.cluster
    controller = desk.control("launcher.job_name=headless", "launcher.heartbeat_timeout_s=15", *DOOMED)
    before = desk.answer(controller)
    job = cluster.job(desk.job_named("headless"))
    lost = next(node for node in cluster.doomed if node.name == job["BatchHost"])
    (left,) = (name for name in before["places"] if name != address(lost))
    lost.end()
    after = desk.answer(controller, address(lost))
    assert after == {"places": [left] * 2, "states": {address(lost): "lost", left: "ready"}, "answers": 2}
    cluster.wait_until_down(lost)
    assert cluster.job(job["JobId"])["JobState"] == "RUNNING"
    assert desk.answer(controller, address(lost)) == after, (
        "they still serve when SLURM has taken the node from the job"
    )
    controller.communicate()
    assert controller.wait() == 0, desk.stderr()
    assert cluster.job(job["JobId"])["JobState"] in ("CANCELLED", "COMPLETING")


def test_a_job_whose_controller_is_killed_ends_without_intervention(desk: Desk) -> None:
    cluster = desk.cluster
    leases = ("launcher.heartbeat_timeout_s=15", "launcher.lease_s=20")
    controller = desk.control("launcher.job_name=orphaned", *DOOMED, *leases)
    desk.answer(controller)
    job = cluster.job(desk.job_named("orphaned"))["JobId"]
    controller.send_signal(signal.SIGKILL)
    controller.communicate()
    assert cluster.wait_for_job(job, "COMPLETED", "FAILED")["ExitCode"] == "0:0"


# ---- forge job ------------------------------------------------------------------------------------------------------

PROGRAM = """
import signal, sys
from pathlib import Path

def note(text):
    with Path("notes").open("a") as file:
        file.write(text + "\\n")

def stop(number, frame):
    global is_stopping
    if is_stopping:  # SLURM and the supervisor may both send it; a run ignores the copy, too
        return
    is_stopping = True
    note("saved")
    sys.exit(128 + number)

is_stopping = False

signal.signal(signal.SIGTERM, stop)
note("started")
while True:
    signal.pause()
"""


def test_a_preempted_job_saves_and_continues_and_scancel_ends_it(desk: Desk) -> None:
    cluster, notes = desk.cluster, desk.folder / "notes"
    (desk.folder / "main.py").write_text(PROGRAM)
    job = desk.submit("main.py", "launcher.slurm.gpus_per_node=8", "launcher.job_name=preempted")
    desk.wait_for_text(notes, "started")
    urgent = desk.ask(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--output=urgent.log", "--wrap=true"
    )
    cluster.wait_for_job(urgent, "COMPLETED")
    assert notes.read_text() == "started\nsaved\n", "the job that was preempted made room by itself"
    desk.wait_for_text(notes, "started", times=2)
    assert cluster.job(job)["Restarts"] == "1"

    cluster.ask("scancel", job)
    assert desk.wait_for_text(notes, "saved", times=2) == "started\nsaved\n" * 2
    wait_for(lambda: cluster.job(job)["JobState"] == "CANCELLED", "the job was cancelled", cluster.logs)
    assert cluster.job(job)["Restarts"] == "1", "a job that was cancelled is not queued again"


def test_a_run_saves_before_its_time_is_up_and_continues_in_the_next_job(desk: Desk) -> None:
    """The controller in one job, with little time, and its worker in another."""
    cluster = desk.cluster
    config = {
        "run": {"name": "run"},
        "model": {"preset": "tiny"},
        "launcher": {"insecure": True, "job_name": "sft", "slurm": {"time_limit": "60"}},
        "training": {"batch_size": 4, "num_epochs": 1000, "max_seq_len": 128, "learning_rate": 1e-4},
        "data": {"sources": [{"path": str(ROOT / "apps" / "sft" / "sums.jsonl")}], "shuffle": False},
        "checkpointing": {"save_interval": None, "save_interval_s": None},
        "metrics": {"log_interval": 1, "tensorboard": False},
    }
    (desk.folder / "run.yaml").write_text(json.dumps(config))  # JSON is YAML
    gate = desk.folder / "gate"
    os.mkfifo(gate)
    words = (str(ROOT / "apps" / "sft" / "main.py"), "--config", "run.yaml", "launcher.kind=slurm", *PATIENT)
    job = desk.submit("--grace", "30", *words, holding(gate, at_step=3), options=("--mem-per-cpu=100",))
    log = desk.folder / "runs" / "slurm" / f"sft-controller-{job}.log"
    desk.wait_for_text(log, HOLDING)
    first = desk.job_named("sft")
    workers = worker_environments()
    assert [each["SLURM_JOB_ID"] for each in workers] == [first]
    assert not any("SLURM_MEM_PER_CPU" in each for each in workers), "of the controller's job"

    cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    desk.wait_for_text(log, f"*** STEP {job}.0 ON")  # SLURM has sent SIGTERM; until now the run is held after step 3
    gate.write_text("")
    desk.wait_for_text(log, "stopped after step 3;")
    cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    told = desk.wait_for_text(log, "Step 6/")
    assert "resuming after step 3\n" in told
    steps = [int(step) for step in re.findall(r"^Step (\d+)/", told, re.MULTILINE)]
    assert steps == list(range(1, steps[-1] + 1)), "no step is missing, and none was trained twice"
    assert cluster.job(first)["JobState"] == "CANCELLED", "the workers of the first job were let go"
    second = desk.job_named("sft")
    assert int(second) > int(first)

    restarts = cluster.job(job)["Restarts"]
    cluster.ask("scancel", job)
    for each in (job, second):
        wait_for(lambda number=each: cluster.job(number)["JobState"] == "CANCELLED", "both jobs end", cluster.logs)
    assert cluster.job(job)["Restarts"] == restarts
    assert log.read_text().count("stopped after step") == 2, "it saved before it ended"


def worker_environments() -> list[dict[str, str]]:
    """Return the variables of each `forge worker` on the nodes."""
    started = [process for process in psutil.Process().children(recursive=True) if process.is_running()]
    return [each.environ() for each in started if each.cmdline()[1:4] == ["-m", "forge.cli", "worker"]]
