"""The SLURM launcher in a whole program: the job starts a real worker, and Ctrl-C gives a waiting job back."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leftovers import has_ended
from signals import hear_ctrl_c
from stand_in_programs import Programs

RUN = """
import asyncio, logging, os, sys
import forge
from forge import ForgeActor, endpoint
from forge.config import LauncherConfig, SlurmConfig

class Where(ForgeActor):
    @endpoint
    async def parent(self):
        return os.getppid()

async def main():
    async with forge.run(LauncherConfig(kind="slurm", slurm=SlurmConfig(port=int(sys.argv[1])))) as runtime:
        actor = await Where.options(procs=1).as_actor()
        print("hosts", [host.name for host in runtime.hosts], "parents", list((await actor.parent.call()).values()))

asyncio.run(main())
"""


def start_program(programs: Programs, folder: Path, port: int, **kwargs: Any) -> subprocess.Popen[str]:
    script = folder / "program.py"
    script.write_text(RUN)
    env = {**os.environ, "PATH": f"{programs.folder}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, str(script), str(port)]
    return subprocess.Popen(command, cwd=folder, env=env, text=True, preexec_fn=hear_ctrl_c, **kwargs)


def end_job(programs: Programs) -> None:
    file = programs.folder / "job.pid"
    if file.exists():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(file.read_text()), signal.SIGKILL)


def test_a_real_worker_is_started_by_the_job_and_used(tmp_path: Path, held_port: Callable[[], int]) -> None:
    port = held_port()
    programs = Programs(
        tmp_path / "bin",
        {
            "sbatch": [{"out": "7\n", "do": "start"}],
            "srun": [{"do": "run", "node": "127.0.0.1"}],
            "squeue": [{"out": "RUNNING|None|127.0.0.1\n"}],
            "scontrol": [{"out": "127.0.0.1\n"}],
            "scancel": [{"do": "stop"}],
        },
    )
    output = tmp_path / "output.txt"
    with output.open("w") as file:  # a file: ranks inherit it and could keep a pipe open
        program = start_program(programs, tmp_path, port, stdout=file, stderr=file)
    try:
        code = program.wait(timeout=600)
        log = (programs.folder / "job.log").read_text()
        assert code == 0, output.read_text() + log
        job = int((programs.folder / "job.pid").read_text())
        worker = int(log.split("(process ")[1].split(")")[0])
        assert f"hosts ['tcp://127.0.0.1:{port}'] parents [{worker}]" in output.read_text()
        srun = programs.calls("srun")[0]
        assert srun[-3:-1] == ["bash", "-c"]
        assert programs.calls("scancel") == [["scancel", "7"]]
        assert all(has_ended(pid) for pid in (job, worker)), "scancel killed them just now"
    finally:
        program.kill()
        program.wait()
        end_job(programs)


def test_ctrl_c_in_the_queue_gives_the_job_back(tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    programs = Programs(
        tmp_path / "bin",
        {
            "sbatch": [{"out": "41\n"}],
            "squeue": [{"out": "PENDING|Priority|\n"}],
            "scontrol": [{}],
            "scancel": [{"tell": str(told)}],
        },
    )
    reader = os.open(told, os.O_RDONLY | os.O_NONBLOCK)
    program = start_program(programs, tmp_path, 1, stderr=subprocess.PIPE)
    try:
        assert program.stderr is not None
        assert any("is PENDING (Priority)" in line for line in program.stderr)
        program.send_signal(signal.SIGINT)
        assert select.select([reader], [], [], 600)[0], "the job was not cancelled"
        assert programs.calls("scancel") == [["scancel", "41"]]
    finally:
        os.close(reader)
        program.kill()
        program.communicate()
