"""A real SLURM on the hosts of a test network: slurmctld on the first host, slurmd on the others.

    with SlurmCluster(folder, nodes=2) as cluster:
        job = cluster.ask("sbatch", "--parsable", "job.sh")

The hosts share the machine's files, as a cluster with a shared file system, and munged's socket. There are no cgroups
and no accounting. All daemons, jobs and their processes end with the network, that is with the test's process, however
that ends.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pytest

from networks import LIMIT_S, SUPPORT, HostProcess, Network, NetworkHost, require_network, wait_for

PROGRAMS: Final = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
_PATH: Final = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
NUM_GPUS: Final = 8
"""GPUs of each node, as SLURM counts them."""

_CONFIG: Final = """\
ClusterName=forge
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir=/dev/shm/slurmd
SlurmdPidFile=/dev/shm/slurmd.pid
SlurmdLogFile={folder}/slurmd-%h.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
GresTypes=gpu
ReturnToService=2
SlurmdTimeout={node_timeout_s}
KillWait=300
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
NodeName={nodes},{doomed} CPUs=8 RealMemory=1000 Gres=gpu:{num_gpus} State=UNKNOWN
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=300
PartitionName=urgent Nodes={nodes} MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
PartitionName=doomed Nodes={doomed} MaxTime=INFINITE
"""


def require_slurm() -> None:
    """Skip the test where a cluster cannot be started."""
    require_network()
    if missing := [program for program in PROGRAMS if not shutil.which(program, path=_PATH)]:
        packages = "apt-get install slurmctld slurmd slurm-client munge"
        pytest.skip(f"no SLURM here: {', '.join(missing)} not found (Debian: {packages})")


class SlurmCluster:
    """A running cluster.

    Jobs of the partition `urgent` preempt those of `main`, the default, which have 300 seconds of grace.

    Args:
        folder: for its configuration, its state and its logs. Every node sees it.
        nodes: how many nodes the partitions `main` and `urgent` have.
        doomed: how many nodes the partition `doomed` has, for tests that end hosts.
        node_timeout_s: how long a node may be silent before SLURM takes it down.
    """

    def __init__(self, folder: Path, nodes: int, *, doomed: int = 0, node_timeout_s: int = 10) -> None:
        self.folder = folder
        self.network = Network(1 + nodes + doomed)
        self.controller, *hosts = self.network.hosts
        self.nodes, self.doomed = tuple(hosts[:nodes]), tuple(hosts[nodes:])
        self._env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
        try:
            self._write(node_timeout_s)
            self._start()
        except BaseException:
            self.network.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.network.close()

    def _write(self, node_timeout_s: int) -> None:
        (self.folder / "state").mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        names, doomed = (",".join(node.name for node in group) for group in (self.nodes, self.doomed))
        controller = f"{self.controller.name}({self.controller.address})"
        text = _CONFIG.format(
            controller=controller,
            folder=self.folder,
            nodes=names,
            doomed=doomed,
            node_timeout_s=node_timeout_s,
            num_gpus=NUM_GPUS,
        )
        (self.folder / "slurm.conf").write_text(text)
        for number in range(NUM_GPUS):  # SLURM only counts them: no program can open them as GPUs
            (self.folder / f"gpu{number}").touch()
        devices = f"Name=gpu File={self.folder}/gpu[0-{NUM_GPUS - 1}]"
        (self.folder / "gres.conf").write_text(f"AutoDetect=off\n{devices}\n")

    def _start(self) -> None:
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        options += [f"--seed-file={self.folder / 'munge.seed'}", "--force", "--foreground", "--num-threads=2"]
        self.start(self.controller, ["munged", *options])
        wait_for(lambda: (self.folder / "munge.socket").exists(), "munged listens", self.logs)
        self.start(self.controller, ["slurmctld", "-D"])
        for node in (*self.nodes, *self.doomed):
            self.start(node, ["slurmd", "-D"])
        wait_for(self._is_ready, "every node is idle", self.logs)

    def _is_ready(self) -> bool:
        states = self._run(["sinfo", "--noheader", "--Node", "--partition=main,doomed", "--format=%T"])
        return states.returncode == 0 and states.stdout.split() == ["idle"] * len((*self.nodes, *self.doomed))

    def start(self, host: NetworkHost, command: Sequence[str], *, stderr: Path | None = None) -> HostProcess:
        """Start a command on a host, where it finds SLURM's commands and this repository's modules."""
        paths = os.pathsep.join(dict.fromkeys([str(SUPPORT), *filter(None, sys.path)]))
        errors = self.folder / f"{host.name}-{Path(command[0]).name}.err" if stderr is None else stderr
        return host.start(command, env={**self._env, "PYTHONPATH": paths}, stderr=errors)

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        inside = self.controller.namespaces.enter("--net", "--uts", "--mount", "--pid")
        return subprocess.run(
            [*inside, *command], env={**os.environ, **self._env}, capture_output=True, text=True, timeout=LIMIT_S
        )

    def ask(self, *command: str) -> str:
        """Run one of SLURM's commands on the controller's host; return what it printed."""
        done = self._run(command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what SLURM knows about a job, by the names of `scontrol show job`."""
        words = self.ask("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.partition("=")[::2] for word in words)

    def jobs(self) -> dict[str, str]:
        """Return the name of every job that SLURM remembers, by its number."""
        lines = self.ask("squeue", "--noheader", "--states=all", "--format=%i %j").splitlines()
        return dict(line.split(maxsplit=1) for line in lines)

    def wait_for_job(self, number: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of these states, and return what SLURM knows about it."""
        wait_for(lambda: self.job(number)["JobState"] in states, f"job {number} is {' or '.join(states)}", self.logs)
        return self.job(number)

    def wait_until_down(self, node: NetworkHost) -> None:
        """Wait until SLURM has taken a node down that does not answer."""
        asked = ("sinfo", "--noheader", "--nodes", node.name, "--format=%T")
        wait_for(lambda: self.ask(*asked).startswith("down"), f"{node.name} is down", self.logs)

    def logs(self) -> str:
        """Return the ends of all logs."""
        found = [*self.folder.glob("*.log"), *self.folder.glob("*.err")]
        texts = {path.name: path.read_text(errors="replace")[-1500:] for path in sorted(found)}
        return "\n".join(f"== {name}\n{text}" for name, text in texts.items() if text)
