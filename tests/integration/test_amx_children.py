"""Where AMX traps, every process that a program starts is kept from it: children, actors, ranks and engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forge import _amx

SUPPORT = Path(__file__).parents[1] / "support"
TRAPPED = {**_amx.LIMITS, _amx.VARIABLE: f"traps@{os.uname().nodename}"}
RANK = """
import json, os, sys, forge
line = json.dumps([os.environ.get(name) for name in {names}])
open(sys.argv[-1] + os.environ["RANK"], "w").write(line)
"""


def run(command: list[str], **variables: str) -> str:
    path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.usefixtures("leaves_nothing")
def test_children_actors_and_engines_inherit_the_limits() -> None:
    found = json.loads(run([sys.executable, str(SUPPORT / "amx_tree.py")]).splitlines()[-1])
    expected = list(TRAPPED.values())
    assert found == {"plain": expected, "actors": [expected, expected], "engine": expected}


def test_ranks_inherit_the_limits(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(names=tuple(TRAPPED)))
    command = [sys.executable, "-m", "forge.cli", "run", "--nproc_per_node", "2", str(script), str(tmp_path / "of-")]
    run(command, **TRAPPED)
    for rank in (0, 1):
        assert json.loads((tmp_path / f"of-{rank}").read_text()) == list(TRAPPED.values())
