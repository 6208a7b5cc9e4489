"""`forge run --nproc_per_node`: the script itself, started as several ranks that meet."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from signals import hear_ctrl_c

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


@pytest.mark.parametrize(("code", "is_summarised"), [(2, False), (1, True)])
def test_wrong_input_keeps_its_exit_code_and_its_message_stands_alone(
    folder: Path, code: int, is_summarised: bool
) -> None:
    (folder / "refuses.py").write_text(f"import sys\nprint('this is wrong', file=sys.stderr)\nsys.exit({code})\n")
    ended = forge_run(folder, "--nproc_per_node", "2", "refuses.py")
    assert ended.returncode == code
    assert "this is wrong" in ended.stderr
    assert ("refuses.py FAILED" in ended.stderr) is is_summarised


SAVING = """
import os, signal, sys
from pathlib import Path

rank = os.environ["RANK"]

def save(number, frame):
    Path(f"saved{rank}").write_text(signal.Signals(number).name)
    sys.exit(0)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, save)
os.write(1, b"ready\\n")  # whole, beside that of the other rank
while True:
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_rank_and_is_the_exit_code(folder: Path, number: signal.Signals) -> None:
    (folder / "saving.py").write_text(SAVING)
    command = [sys.executable, "-m", "forge.cli", "run", "--nproc_per_node", "2", "saving.py"]
    with (folder / "errors.txt").open("w") as errors:
        running = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=hear_ctrl_c
        )
        assert running.stdout is not None
        assert [running.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        running.send_signal(number)
        running.communicate(timeout=LIMIT_S)
    said = (folder / "errors.txt").read_text()
    assert running.returncode == 128 + number, said
    assert [(folder / f"saved{rank}").read_text() for rank in range(2)] == [number.name] * 2
    assert "Traceback" not in said


def test_a_rank_that_fails_fails_the_command(folder: Path) -> None:
    (folder / "fail.py").write_text("import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)")
    ended = forge_run(folder, "--nproc-per-node", "2", "fail.py")
    assert ended.returncode != 0
    assert "fail.py" in ended.stderr


SCORE = """
import asyncio
import sys

import forge
from forge import Completion, ForgeActor, Task, RewardActor, endpoint
from forge.config import ForgeConfig, RewardConfig, RewardsConfig, from_command_line


class Importer(ForgeActor):
    @endpoint
    async def places(self) -> tuple[str, str]:
        import beside_the_config
        import in_the_working_directory

        return beside_the_config.__file__, in_the_working_directory.__file__


async def main() -> None:
    from_command_line(ForgeConfig)
    async with forge.run():
        importer = await Importer.as_actor()
        print(*await importer.places.call_one())
        kinds = ("beside_the_config:score", "in_the_working_directory:score")
        functions = tuple(RewardConfig(kind=kind, name=f"r{number}") for number, kind in enumerate(kinds))
        rewards = await RewardActor.as_service(RewardsConfig(functions=functions))
        (found,) = await rewards.score.route(Task("p", text="?"), [Completion((), (1,), (0.0,), None, "x", "stop")])
        print(found.reward, dict(found.failures))


asyncio.run(main())
"""


def test_workers_find_modules_beside_the_configuration_and_in_the_working_directory(tmp_path: Path) -> None:
    for folder, module in (("configs", "beside_the_config"), (".", "in_the_working_directory")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{module}.py").write_text("def score(prompt, completion):\n    return 0.25\n")
    (tmp_path / "configs" / "a.yaml").write_text("{}")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "score.py").write_text(SCORE)
    ended = forge_run(tmp_path, "app/score.py", "--config", "configs/a.yaml")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        f"{tmp_path}/configs/beside_the_config.py {tmp_path}/in_the_working_directory.py",
        "0.5 {}",
    ]
