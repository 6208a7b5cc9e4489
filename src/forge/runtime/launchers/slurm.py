"""The `slurm` launcher: a job that runs one worker on each of its nodes, for as long as the controller needs them."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from forge.errors import LaunchError
from forge.runtime.hosts import HostTimings
from forge.runtime.jobs import log_pattern, make_log_dir
from forge.runtime.launchers import Allocation, attach_all, check_launcher
from forge.runtime.launchers.submit import (
    check_bind,
    is_listening,
    is_this_host,
    require_program,
    run_command,
    run_regardless,
)
from forge.runtime.sockets import check_tls

if TYPE_CHECKING:
    from forge.config import LauncherConfig

_log = logging.getLogger("forge.runtime")

_WAITING = {
    *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"),
    *("RESIZING", "RESV_DEL_HOLD", "SIGNALING", "STOPPED", "SUSPENDED"),
}
_CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS")
_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
_FIRST_POLL_S, _LONGEST_POLL_S, _WORKER_POLL_S = 1.0, 15.0, 2.0
_MAX_SILENT_POLLS = 5


def job_script(config: LauncherConfig, *, log_dir: Path, python: str = sys.executable) -> str:
    """Return the script that is given to sbatch.

    A node that is lost takes neither the job nor the other workers with it (`--no-kill`, `--wait=0`), and the job is
    never run a second time on its own. A worker serves one run, so the job ends when its controller does.
    """
    slurm = config.slurm
    options = [f"--job-name={config.job_name}", f"--nodes={slurm.nodes}", "--ntasks-per-node=1"]
    if slurm.gpus_per_node:
        options.append(f"--gpus-per-node={slurm.gpus_per_node}")
    named = {"time": slurm.time_limit, "partition": slurm.partition, "account": slurm.account, "qos": slurm.qos}
    options += [f"--{name}={shlex.quote(value)}" for name, value in named.items() if value is not None]
    if slurm.exclusive:
        options += ["--exclusive", "--mem=0"]  # --exclusive alone gives all cores, but only the default memory
    options += ["--no-requeue", "--no-kill", f"--output={shlex.quote(log_pattern(log_dir))}", *slurm.extra_sbatch]
    scheme = "tls" if slurm.tls else "tcp"
    address = f'"{scheme}://${{SLURMD_NODENAME:-$(hostname)}}:{slurm.port}"'
    allowed = " --insecure" if config.insecure and not slurm.tls else ""
    worker = f"exec {shlex.quote(python)} -m forge.cli worker --once{allowed} --address {address}"
    step = "exec srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --label"
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            "",
            f"{step} bash -c {shlex.quote(worker)}",
            "",
        ]
    )


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that the job is submitted with, and gets.

    In a job, as with `forge job slurm`, what SLURM has set for that one is left out: srun would take it for options,
    and give the workers the memory and the tasks of the controller's job.
    """
    if "SLURM_JOB_ID" not in environ:
        return dict(environ)
    return {
        name: value
        for name, value in environ.items()
        if name in _CLUSTER_VARIABLES or not name.startswith(("SLURM_", "SLURMD_", *_GPU_VARIABLES))
    }


@dataclass(frozen=True, slots=True)
class JobState:
    """What squeue says about a job."""

    state: str
    reason: str
    nodes: str


def parse_state(text: str) -> JobState | None:
    """Read `STATE|REASON|NODES`, the format that the launcher asks squeue for. None when there is no job."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    state, _, rest = lines[0].partition("|")
    reason, _, nodes = rest.rpartition("|")
    return JobState(state, reason, nodes)


def launch_checks(config: LauncherConfig) -> tuple[Callable[[], object], ...]:
    """Return what must hold on this machine before a job is submitted: each raises what is wrong."""
    programs = ("sbatch", "squeue", "scontrol", "scancel")
    is_several = config.slurm.nodes > 1
    return (
        *(partial(require_program, program, kind="slurm") for program in programs),
        *([partial(check_bind, config.bind, kind="slurm")] if is_several else []),
        partial(check_launcher, config),
        *([check_tls] if config.slurm.tls else []),
    )


class SlurmLauncher:
    """Submits the job, waits until it runs, attaches to its workers, and cancels it at the end."""

    def __init__(
        self,
        config: LauncherConfig,
        *,
        attach: Callable[..., Awaitable[Allocation]] = attach_all,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._config, self._slurm = config, config.slurm
        self._attach, self._clock, self._sleep = attach, clock, sleep
        self._log_dir = Path.cwd() / config.slurm.log_dir
        self._deadline = 0.0

    async def launch(self) -> Allocation:
        for check in launch_checks(self._config):
            check()
        job = await self._submit_whole()
        try:
            self._deadline = self._clock() + self._slurm.start_timeout_s
            addresses = self._addresses(await self._wait_until_running(job))
            await self._wait_for_workers(job, addresses)
            timings = HostTimings.of(self._config)
            attached = await self._attach(addresses, bind=self._config.bind, timings=timings)
        except BaseException:
            await asyncio.shield(self._cancel(job))
            raise

        async def release() -> None:
            try:
                await attached.release()
            finally:
                await asyncio.shield(self._cancel(job))

        return Allocation(attached.hosts, release)

    async def _submit_whole(self) -> str:
        """Submit the job. A caller that is cancelled meanwhile leaves no job behind whose number is not known."""
        submission = asyncio.ensure_future(self._submit())
        try:
            return await asyncio.shield(submission)
        except asyncio.CancelledError:
            await asyncio.wait([submission])
            if not submission.cancelled() and submission.exception() is None:
                await asyncio.shield(self._cancel(submission.result()))
            raise

    async def _submit(self) -> str:
        make_log_dir(self._log_dir)
        script = job_script(self._config, log_dir=self._log_dir)
        outcome = await run_command(["sbatch", "--parsable"], stdin=script, env=submission_environment(os.environ))
        job = outcome.stdout.strip().split(";")[0]
        if outcome.code != 0 or not job:
            raise LaunchError(
                f"sbatch refused the job: {outcome.words}", path="launcher.slurm", value=script,
                rule="sbatch accepts the job", repair="correct launcher.slurm as sbatch reports above",
            )  # fmt: skip
        _log.warning("SLURM job %s submitted; its log: %s", job, self._log_of(job))
        return job

    def _log_of(self, job: str) -> str:
        return str(self._log_dir / f"{self._config.job_name}-{job}.log")

    async def _ask(self, job: str) -> JobState | None:
        outcome = await run_command(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r|%N"])
        if outcome.code != 0:
            _log.warning("squeue: %s", outcome.words)
            return None
        return parse_state(outcome.stdout)

    async def _wait_until_running(self, job: str) -> list[str]:
        shown: JobState | None = None
        pause, num_silent = _FIRST_POLL_S, 0
        while True:
            seen = await self._ask(job)
            num_silent = num_silent + 1 if seen is None else 0
            if num_silent >= _MAX_SILENT_POLLS:
                raise self._failed(job, JobState("UNKNOWN", f"squeue knew nothing {num_silent} times in a row", ""))
            if seen is not None and seen != shown:
                shown = seen
                _log.warning("SLURM job %s is %s%s", job, seen.state, f" ({seen.reason})" if seen.reason else "")
            if seen is not None and seen.state == "RUNNING":
                return await self._node_names(seen.nodes)
            if seen is not None and seen.state not in _WAITING:
                raise self._failed(job, seen)
            await self._pause(job, pause, waited_for=f"it is {shown.state} ({shown.reason})" if shown else "no state")
            pause = min(2 * pause, _LONGEST_POLL_S)

    async def _wait_for_workers(self, job: str, addresses: Sequence[str]) -> None:
        """Until every worker listens: Python starts slowly from a shared file system, or not at all."""
        while True:
            up = await asyncio.gather(*(is_listening(address) for address in addresses))
            if all(up):
                return
            seen = await self._ask(job)
            if seen is not None and seen.state != "RUNNING":
                raise self._failed(job, seen)
            silent = [address for address, is_up in zip(addresses, up, strict=True) if not is_up]
            await self._pause(job, _WORKER_POLL_S, waited_for=f"no worker listens at {', '.join(silent)}")

    async def _pause(self, job: str, pause: float, *, waited_for: str) -> None:
        left = self._deadline - self._clock()
        if left <= 0:
            raise LaunchError(
                f"SLURM job {job} was not ready within {self._slurm.start_timeout_s:g} s: {waited_for}",
                path="launcher.slurm.start_timeout_s", value=self._slurm.start_timeout_s,
                rule="the job runs, and its workers listen, before this time is over",
                repair=f"raise it, ask for less, or see {self._log_of(job)}; the job was cancelled",
            )  # fmt: skip
        await self._sleep(min(pause, left))

    async def _node_names(self, node_list: str) -> list[str]:
        outcome = await run_command(["scontrol", "show", "hostnames", node_list])
        names = outcome.stdout.split()
        if outcome.code != 0 or len(names) != self._slurm.nodes:
            raise LaunchError(
                f"SLURM gave {len(names)} node(s) instead of {self._slurm.nodes}"
                + (f": {outcome.words}" if outcome.code else ""),
                path="launcher.slurm.nodes", value=node_list, rule=f"a job on {self._slurm.nodes} node(s)",
                repair="remove options from launcher.slurm.extra_sbatch that change the number of nodes",
            )  # fmt: skip
        if not all(is_this_host(name) for name in names):
            check_bind(self._config.bind, kind="slurm")
        return names

    def _addresses(self, nodes: Sequence[str]) -> list[str]:
        scheme = "tls" if self._slurm.tls else "tcp"
        return [f"{scheme}://{node}:{self._slurm.port}" for node in nodes]

    def _failed(self, job: str, seen: JobState) -> LaunchError:
        return LaunchError(
            f"SLURM job {job} ended before its workers could be used: {seen.state} ({seen.reason or 'no reason'})",
            path="launcher.slurm", value=seen.state, rule="the job runs until the controller releases it",
            repair=f"see {self._log_of(job)}, and `scontrol show job {job}`",
        )  # fmt: skip

    async def _cancel(self, job: str) -> None:
        outcome = await run_regardless(["scancel", job])
        if outcome.code != 0 and "invalid job id" not in outcome.words.lower():
            _log.warning("SLURM job %s was not cancelled; run `scancel %s`: %s", job, job, outcome.words)
