"""`forge run --nproc_per_node`: the script itself, started as several ranks that meet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 600

RANK = """
import json, os, sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
facts = {
    "total": total.item(),
    "world": dist.get_world_size(),
    "threads": os.environ["OMP_NUM_THREADS"],
    "argv": sys.argv[1:],
}
Path(f"rank{dist.get_rank()}.json").write_text(json.dumps(facts))
dist.destroy_process_group()
"""

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def forge_run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forge.cli", "run", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "a.yaml").write_text("{}")
    return tmp_path


def test_two_ranks_of_a_script_meet(folder: Path) -> None:
    ended = forge_run(folder, "--nproc_per_node", "2", "rank.py", "--config", "a.yaml", "run.seed=7")
    assert ended.returncode == 0, ended.stderr
    facts = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    expected = {"total": 3.0, "world": 2, "threads": "1", "argv": ["--config", "a.yaml", "run.seed=7"]}
    assert facts == [expected, expected]
    assert not (folder / "rank2.json").exists()


def test_a_rank_that_fails_fails_the_command(folder: Path) -> None:
    (folder / "fail.py").write_text("import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)")
    ended = forge_run(folder, "--nproc-per-node", "2", "fail.py")
    assert ended.returncode != 0
    assert "fail.py" in ended.stderr
