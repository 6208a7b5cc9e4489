"""Stand-ins for sbatch, squeue, scontrol, scancel, srun and kubectl: real executables that record what they are given.

Each call is a line of `calls.jsonl`. What a program answers is a list of answers in `plan.json`; the last one repeats.
An answer may have `out`, `err`, `code`, and `do`: `start` runs the script from stdin as a job, `stop` ends that job,
`run` replaces the program by the command that follows its options. `tell` names a FIFO to write a line to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# Shell and Python at once: the path of the interpreter may hold spaces, which a #! line cannot.
_PROGRAM = """#!/bin/sh
"exec" "{python}" "-S" "$0" "$@"
import json, os, signal, subprocess, sys
here = os.path.dirname(os.path.abspath(__file__))
name, arguments = os.path.basename(__file__), sys.argv[1:]
stdin = "" if name in ("srun", "bash") else sys.stdin.read()
calls = os.path.join(here, "calls.jsonl")
def earlier():
    try:
        with open(calls) as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        return []
with open(os.path.join(here, "plan.json")) as file:
    plan = json.load(file)
key = next((key for key in plan if [name, *arguments][: len(key.split())] == key.split()), None)
index = sum(1 for call in earlier() if call["key"] == key)
with open(calls, "a") as file:
    file.write(json.dumps(dict(key=key, arguments=[name, *arguments], stdin=stdin)) + "\\n")
if key is None:
    sys.exit(f"no answer planned for {{name}} {{arguments}}")
answer = plan[key][min(index, len(plan[key]) - 1)]
if answer.get("do") == "start":
    script, log = os.path.join(here, "job.sh"), os.path.join(here, "job.log")
    with open(script, "w") as file:
        file.write(stdin)
    with open(log, "w") as file:
        job = subprocess.Popen(
            ["bash", script], stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    with open(os.path.join(here, "job.pid"), "w") as file:
        file.write(str(job.pid))
if answer.get("do") == "stop":
    with open(os.path.join(here, "job.pid")) as file:
        pid = int(file.read())
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        print("the job had ended", file=sys.stderr)
if answer.get("do") == "run":
    command = arguments[[a.startswith("-") for a in arguments].index(False) :]
    os.environ["SLURMD_NODENAME"] = answer["node"]
    os.execvp(command[0], command)
sys.stdout.write(answer.get("out", ""))
sys.stderr.write(answer.get("err", ""))
if "tell" in answer:
    with open(answer["tell"], "w") as file:
        file.write("done\\n")
sys.exit(answer.get("code", 0))
"""


class Programs:
    """A folder of stand-ins, to be put on PATH."""

    def __init__(self, folder: Path, plan: dict[str, list[dict[str, Any]]]) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "plan.json").write_text(json.dumps(plan))
        for name in {key.split()[0] for key in plan}:
            program = folder / name
            program.write_text(_PROGRAM.format(python=sys.executable))
            program.chmod(0o755)

    def calls(self, name: str = "") -> list[list[str]]:
        """The calls so far, as name and arguments; those of one program, if one is named."""
        return [call["arguments"] for call in self._read() if not name or call["arguments"][0] == name]

    def stdin_of(self, name: str) -> str:
        """What the first call of a program read from its standard input."""
        return str(next(call["stdin"] for call in self._read() if call["arguments"][0] == name))

    def _read(self) -> list[dict[str, Any]]:
        calls = self.folder / "calls.jsonl"
        return [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
