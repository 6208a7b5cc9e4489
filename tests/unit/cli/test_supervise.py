"""`forge run --supervise`: when a crashed run is started again, and with what."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from forge.cli import main, supervise
from forge.cli.run_folder import RunFolder, remove_dead_sockets
from forge.cli.supervise import Crash, Limits, is_final, next_action

LIMIT_S = 600
leaves_nothing = pytest.mark.usefixtures("leaves_nothing")


def crashes(*each: tuple[int | None, int | None]) -> list[Crash]:
    """Crashes by the step of the newest checkpoint and the last step."""
    return [Crash(1, None if saved is None else (saved, saved), step) for saved, step in each]


def test_the_wait_doubles_until_there_is_a_new_checkpoint() -> None:
    limits = Limits(max_restarts=20, max_same_step=20, backoff_s=1.0, max_backoff_s=5.0)
    seen = crashes((None, None), (None, 3), (None, 3), (None, 4), (5, 6), (5, 7))
    delays = [next_action(seen[: count + 1], limits).delay_s for count in range(len(seen))]
    assert delays == [1.0, 2.0, 4.0, 5.0, 1.0, 2.0]


def test_crashes_after_one_step_end_it_early_and_others_after_max_restarts() -> None:
    limits = Limits(max_restarts=4, max_same_step=3)
    same = next_action(crashes((5, 7), (5, 7), (5, 7)), limits)
    assert (same.kind, same.reason) == (
        "stop",
        "it crashed 3 times in a row after step 7, without a new checkpoint",
    )
    assert next_action(crashes((5, 7), (5, 7), (5, 8), (5, 7)), limits).kind == "restart"
    assert next_action(crashes((5, 7), (5, 7), (6, 7)), limits).kind == "restart"
    many = next_action(crashes((5, 6), (5, 7), (5, 8), (5, 9), (5, 6)), limits)
    assert (many.kind, many.reason) == (
        "stop",
        "it crashed 5 times in a row without a new checkpoint, and --max-restarts is 4",
    )
    never = next_action(crashes((5, 7)), Limits(max_restarts=0))
    assert never.reason == "it crashed once without a new checkpoint, and --max-restarts is 0"


def test_what_ends_the_command_and_what_is_a_crash() -> None:
    final = [0, 2, 130, 143, 129, -signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP]
    assert all(is_final(status) for status in final)
    assert not any(is_final(status) for status in (1, 3, 134, -signal.SIGKILL, -signal.SIGSEGV))


PROGRAM = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

count = len(list(Path(".").glob("start-*")))
Path(f"start-{count}").write_text(json.dumps({"argv": sys.argv[1:], "pid": os.getpid()}))

def save(step, sequence):
    folder = Path(f"runs/mine/checkpoints/step-{step:08d}")
    folder.mkdir(parents=True)
    record = {"format": 1, "step": step, "sequence": sequence, "time": "", "metric": None, "world_size": 1,
              "torch_version": "", "extra": {}, "files": {}}
    (folder / "checkpoint.json").write_text(json.dumps(record))

def reach(step):
    with Path("runs/mine/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\\n")

"""

CRASHES = (
    PROGRAM
    + """
if count == 0:
    stays = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    Path("left").write_text(str(stays.pid))
    save(4, 0)
    os.kill(os.getpid(), signal.SIGKILL)
if count == 1:
    raise RuntimeError("the first crash")
print("done")
"""
)


def supervised(folder: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "main.py").write_text(program)
    (folder / "a.yaml").write_text("run: {name: mine}\nmine: {key: 1}\n")
    command = [sys.executable, "-m", "forge.cli", "run", "--supervise", "--restart-backoff", "0.01", "main.py"]
    command += ["--config", "a.yaml", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def starts(folder: Path) -> list[list[str]]:
    number = len(list(folder.glob("start-*")))
    return [json.loads((folder / f"start-{count}").read_text())["argv"] for count in range(number)]


def events(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "runs/mine/supervisor.jsonl").read_text().splitlines()]


@leaves_nothing
def test_a_crashed_run_starts_again_without_what_it_left_behind(tmp_path: Path) -> None:
    ended = supervised(tmp_path, CRASHES, "--resume")
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
    own = ["--config", "a.yaml", "--resume"]  # holds until there is a new checkpoint
    assert starts(tmp_path) == [own, [*own, "--resume", "auto"], [*own, "--resume", "auto"]]
    assert not psutil.pid_exists(int((tmp_path / "left").read_text()))
    first, second, end = events(tmp_path)
    assert (first["status"], first["checkpoint"], first["num_killed"]) == (-9, [0, 4], 1)
    assert (second["status"], second["checkpoint"], second["num_killed"]) == (1, [0, 4], 0)
    assert "RuntimeError: the first crash" in "\n".join(second["tail"])  # type: ignore[arg-type]
    assert (end["event"], end["status"]) == ("end", 0)
    assert "ended with SIGKILL" in ended.stderr
    assert "restart 2, from the checkpoint of step 4, in 0.02 s" in ended.stderr


@leaves_nothing
def test_it_stops_with_the_last_traceback_after_three_crashes_at_one_step(tmp_path: Path) -> None:
    ended = supervised(tmp_path, PROGRAM + "reach(7)\nraise RuntimeError('again and again')\n")
    assert ended.returncode == 1
    assert starts(tmp_path) == [["--config", "a.yaml", "--resume", "auto"]] * 3
    stopped = ended.stderr.partition("the run is not started again: ")[2]
    assert stopped.startswith("it crashed 3 times in a row after step 7, without a new checkpoint.")
    assert "  | RuntimeError: again and again" in stopped
    assert [event.get("action") for event in events(tmp_path)] == ["restart", "restart", "stop"]


@leaves_nothing
def test_refused_input_ends_it_at_once(tmp_path: Path) -> None:
    ended = supervised(tmp_path, PROGRAM + "sys.exit(2)\n")
    assert ended.returncode == 2
    assert len(starts(tmp_path)) == 1


STOPS = (
    PROGRAM
    + """
def stop(number, frame):
    Path("stopped").write_text(signal.Signals(number).name)
    sys.exit(128 + number)

signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
signal.pause()
"""
)


def start(folder: Path) -> subprocess.Popen[str]:
    (folder / "main.py").write_text(STOPS)
    command = [sys.executable, "-m", "forge.cli", "run", "main.py", "run.name=mine", "--supervise"]
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


@leaves_nothing
def test_a_signal_is_passed_on_and_two_supervisors_do_not_share_a_folder(tmp_path: Path) -> None:
    with start(tmp_path) as first:
        command = [sys.executable, "-m", "forge.cli", "run", "--supervise", "main.py", "run.name=mine"]
        second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        first.send_signal(signal.SIGTERM)
        assert first.wait(LIMIT_S) == 143
    assert (tmp_path / "stopped").read_text() == "SIGTERM"
    assert second.returncode == 2
    assert "another supervisor runs in this folder" in second.stderr
    assert f"value:  'process {first.pid} on " in second.stderr
    assert "repair: end the other one, or choose another run.name" in second.stderr
    assert len(starts(tmp_path)) == 1


@leaves_nothing
def test_a_run_saves_and_ends_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    with start(tmp_path) as supervisor:
        run = psutil.Process(json.loads((tmp_path / "start-0").read_text())["pid"])
        supervisor.kill()
        supervisor.wait(LIMIT_S)
        assert psutil.wait_procs([run], timeout=LIMIT_S)[1] == []
    assert (tmp_path / "stopped").read_text() == "SIGTERM"


@pytest.mark.parametrize(
    ("words", "path", "rule"),
    [
        (["--max-restarts", "2"], "--max-restarts", "only with --supervise"),
        (["--supervise", "--max-restarts", "-1"], "--max-restarts", "--max-restarts is 0 or more"),
        (["--supervise", "--restart-backoff", "nan"], "--restart-backoff", "--restart-backoff is 0 or more"),
    ],
)
def test_flags_that_make_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], path: str, rule: str
) -> None:
    (tmp_path / "main.py").write_text("")
    assert main(["run", *words, str(tmp_path / "main.py")]) == 2
    printed = capsys.readouterr().err
    assert f"path:   {path}" in printed
    assert f"rule:   {rule}" in printed


def test_the_supervisor_imports_no_torch() -> None:
    code = "import forge.cli.supervise, forge.config.command_line, forge.trainer.checkpoint_folder, sys; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0


def checkpoint(folder: Path, step: int, sequence: int, *, is_damaged: bool = False) -> None:
    place = folder / f"step-{step:08d}"
    place.mkdir(parents=True)
    (place / "data").write_bytes(b"other" if is_damaged else b"bytes")
    record = {"format": 1, "step": step, "sequence": sequence, "time": "2026-01-01T00:00:00+00:00", "metric": None}
    record |= {"world_size": 1, "torch_version": "2", "extra": {}}
    digest = hashlib.sha256(b"bytes").hexdigest()
    files = {"data": {"size": 5, "sha256": digest}}
    (place / "checkpoint.json").write_text(json.dumps({**record, "files": files}))


def test_damaged_checkpoints_are_set_aside_while_an_older_one_stays(tmp_path: Path) -> None:
    for step, is_damaged in ((2, True), (4, False), (6, True), (8, True)):
        checkpoint(tmp_path, step, step, is_damaged=is_damaged)
    folder = RunFolder(tmp_path, tmp_path)
    moved = folder.set_damaged_aside()
    assert [path.name.partition("-")[2].partition(".")[0] for path in moved] == ["00000008", "00000006"]
    assert all(path.name.partition(".")[2].startswith("damaged-") for path in moved)
    assert folder.newest_checkpoint() == (4, 4)
    assert folder.set_damaged_aside() == []


def test_the_only_checkpoint_is_never_set_aside(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2, 0, is_damaged=True)
    assert RunFolder(tmp_path, tmp_path).set_damaged_aside() == []


def test_sockets_that_nothing_listens_on_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = {}
    for name in ("dead00", "alive0", "files0", "empty0"):
        made[name] = tmp_path / f".tmp{name}"
        made[name].mkdir()
    (made["files0"] / "data").touch()
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as alive:
        dead.bind(str(made["dead00"] / "s"))
        dead.close()
        alive.bind(str(made["alive0"] / "s"))
        alive.listen()
        assert remove_dead_sockets(since=2**40) == 0
        assert remove_dead_sockets(since=0) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmpalive0", ".tmpempty0", ".tmpfiles0"]


@pytest.mark.parametrize(("statuses", "num_looks"), [((0,), 0), ((1, 0), 2), ((1, 1, 0), 3)])
def test_sockets_are_looked_for_after_each_crash_and_once_more_at_the_end(
    statuses: tuple[int, ...], num_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    ends = iter(statuses)
    monkeypatch.setattr(supervise, "remove_dead_sockets", looks.append)
    monkeypatch.setattr(supervise, "kill_leftovers", lambda: 0)
    monkeypatch.setattr(supervise.Supervisor, "_run_once", lambda self, words: (next(ends), []))
    monkeypatch.setattr(supervise.Supervisor, "_wait", lambda self, seconds: None)
    assert supervise.Supervisor(("true",), None, limits=Limits()).run() == 0
    assert len(looks) == num_looks
    assert len(set(looks)) <= 1, "what any of the runs left is looked for"
