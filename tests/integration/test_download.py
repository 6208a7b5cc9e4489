"""`forge download`: what it fetches, what it prints, and how it resumes."""

from __future__ import annotations

import errno
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge.cli.download import Silence
from forge.models.hub import download as fetch
from forge.models.hub import plan_download
from forge.models.hub_files import Folder
from forge.models.hub_requests import Hub, Source
from hub_stand_in import Fault, HubStandIn, Repo, fetched, run_download, standing_in
from signals import hear_ctrl_c

REPO = "org/tiny-1.5"
BIG = "model.safetensors"
BODY = bytes(range(256)) * 4000
HALF = len(BODY) // 2
FILES = {"config.json": b"{}", BIG: BODY, "original/consolidated.bin": b"o" * 1000, "empty.txt": b""}

# Prints how many bytes are on disk, so that the test knows when to send a signal.
CHILD = """
import argparse, sys
from forge.cli import download as command

class Bytes(command.Silence):
    total = 0
    def advance(self, num_bytes):
        self.total += num_bytes
        print(self.total, flush=True)

parser = argparse.ArgumentParser()
command.add_parser(parser.add_subparsers())
print(sorted({'tqdm', 'ssl', 'torch', 'forge.models', 'huggingface_hub'} & set(sys.modules)), flush=True)
sys.exit(command.run(parser.parse_args(sys.argv[1:]), progress=Bytes()))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubStandIn]:
    with standing_in({REPO: Repo(dict(FILES), lfs=frozenset({BIG}))}, home=tmp_path / "hf") as stand_in:
        yield stand_in


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "out"


def download(out: Path, *options: str, repo: str = REPO, slept: list[float] | None = None) -> int:
    return run_download(repo, out, *options, slept=slept)


def partials(out: Path) -> list[bytes]:
    return [path.read_bytes() for path in (out / ".forge-download").glob("*.partial")]


def interrupt(hub: HubStandIn, out: Path, how: signal.Signals) -> tuple[int, str]:
    """Run the command in a process, and send it a signal when half of the large file is on disk."""
    hub.faults[BIG] = [Fault(block_after=HALF)]
    argv = [sys.executable, "-c", CHILD, "download", REPO, "--output-dir", str(out), "--allow-patterns", BIG]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line == f"{HALF}\n":
                break
        child.send_signal(how)
        message = child.communicate()[1]
    assert fetched(out) == {}
    assert partials(out) == [BODY[:HALF]]
    return child.returncode, message


def test_every_file_arrives_with_a_report_and_a_record(hub: HubStandIn, out: Path, capsys: Any) -> None:
    assert download(out) == 0
    assert fetched(out) == FILES
    assert not (out / ".forge-download").exists()
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1
    for word in (str(out), "4 files", "1025002 bytes", "0 already there", "main = " + "a" * 40):
        assert word in printed.out
    assert sorted(printed.err.splitlines())[0] == "fetched: config.json, 2 bytes"
    assert len(printed.err.splitlines()) == 4
    record = json.loads((out / ".forge-download.json").read_text())
    assert set(record.pop("files")) == set(FILES)
    assert record == {
        "repo": REPO,
        "repo_type": "model",
        "revision": "main",
        "commit": "a" * 40,
        "complete": True,
        "num_files": 4,
        "num_bytes": 1025002,
        "num_files_present": 0,
    }


def test_quiet_prints_the_last_line_only(hub: HubStandIn, out: Path, capsys: Any) -> None:
    assert download(out, "--quiet") == 0
    printed = capsys.readouterr()
    assert (printed.err, len(printed.out.splitlines())) == ("", 1)


def test_patterns_choose_and_a_pattern_without_a_match_is_noted(hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
    assert download(tmp_path / "a", "--ignore-patterns", "*.safetensors", "original/") == 0
    assert set(fetched(tmp_path / "a")) == {"config.json", "empty.txt"}
    assert download(tmp_path / "b", "--allow-patterns", "*.json", "*.bin", "none.*", "--ignore-patterns", "*.bin") == 0
    assert set(fetched(tmp_path / "b")) == {"config.json"}
    assert "no file matches --allow-patterns 'none.*'" in capsys.readouterr().err


def test_dry_run_writes_nothing(hub: HubStandIn, out: Path, capsys: Any) -> None:
    assert download(out, "--dry-run") == 0
    assert not out.exists()
    assert "4 of 4 files to fetch" in capsys.readouterr().out
    assert download(out, "--allow-patterns", "config.json") == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert download(out, "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "already there  config.json" in printed
    assert "to fetch       model.safetensors, 1.0 MB (1024000 bytes)" in printed
    assert "3 of 4 files to fetch" in printed
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_revision_and_dataset(hub: HubStandIn, out: Path) -> None:
    data = Repo({"train 1.jsonl": b"{}\n"}, commit="c" * 40, revisions=frozenset({"refs/pr/1"}))
    hub.repos["datasets/org/data"] = data
    assert download(out, "--repo-type", "dataset", "--revision", "refs/pr/1", repo="org/data") == 0
    assert fetched(out) == data.files
    assert hub.requests[-1].path == f"/datasets/org/data/resolve/{'c' * 40}/train 1.jsonl"


def test_progress_bar_on_a_terminal(hub: HubStandIn, out: Path) -> None:
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    argv = [sys.executable, "-m", "forge.cli", "download", REPO, "--output-dir", str(out)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=terminal, text=True) as child:
        os.close(terminal)
        shown = read_terminal(controller)
        last = child.communicate()[0]
    os.close(controller)
    assert child.returncode == 0
    assert b"1.03M/1.03M" in shown
    assert b"fetched:" not in shown
    assert "4 files" in last
    assert {one.path for one in hub.requests if one.path.startswith("/api/")} == {f"/api/models/{REPO}/revision/main"}


def read_terminal(controller: int) -> bytes:
    """Read until the other end closes, which Linux reports as EIO."""
    shown = b""
    while True:
        try:
            shown += os.read(controller, 1 << 16)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return shown


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, "download", "--help"], capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == "[]"
    assert "--ignore-patterns" in done.stdout


def test_resume_after_kill_9(hub: HubStandIn, out: Path) -> None:
    assert interrupt(hub, out, signal.SIGKILL)[0] == -signal.SIGKILL
    assert download(out) == 0
    assert hub.fetched(BIG) == [None, f"bytes={HALF}-"]
    assert fetched(out) == FILES
    assert not (out / ".forge-download").exists()


def test_resume_after_ctrl_c(hub: HubStandIn, out: Path) -> None:
    code, message = interrupt(hub, out, signal.SIGINT)
    assert code == 130
    assert "Run the same command again: it resumes." in message
    assert "Traceback" not in message
    assert json.loads((out / ".forge-download.json").read_text())["complete"] is False
    hub.repos[REPO].files[BIG] = BODY[::-1]  # the partial belongs to the old content
    assert download(out) == 0
    assert hub.fetched(BIG) == [None, None]
    assert fetched(out) == {**FILES, BIG: BODY[::-1]}


def test_resume_after_a_full_disk(hub: HubStandIn, out: Path) -> None:
    limit = 300_000
    argv = [sys.executable, "-c", CHILD, "download", REPO, "--output-dir", str(out), "--allow-patterns", BIG]
    child = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        check=False,
    )
    assert child.returncode == 2
    assert "No space is left for the download; fetched files are kept." in child.stderr
    assert "more bytes are needed" in child.stderr
    assert download(out) == 0
    assert hub.fetched(BIG) == [None, f"bytes={limit}-"]
    assert fetched(out) == FILES


def test_a_cut_connection_continues_in_the_same_call(hub: HubStandIn, out: Path, capsys: Any) -> None:
    hub.faults[BIG] = [Fault(cut_after=1000), Fault(cut_after=500)]
    slept: list[float] = []
    assert download(out, slept=slept) == 0
    assert hub.fetched(BIG) == [None, "bytes=1000-", "bytes=1500-"]
    assert slept == [0.5, 0.5]  # new bytes arrived each time: the waits do not grow
    assert fetched(out) == FILES
    assert "trying again in 0.5 s" in capsys.readouterr().err


def test_a_silent_connection_is_left_and_continued(hub: HubStandIn, out: Path) -> None:
    hub.faults[BIG] = [Fault(block_after=1000)]
    slow = Hub(sleep=[].append, timeout_s=5.0)  # no other request may take that long
    plan = plan_download(slow.list_files(Source(REPO)), folder=Folder(out), max_workers=1)
    record = fetch(plan, folder=Folder(out), hub=slow, progress=Silence(), max_workers=1)
    assert hub.fetched(BIG) == [None, "bytes=1000-"]
    assert (record["num_files"], record["num_bytes"]) == (4, 1025002)


def test_tries_are_bounded_and_the_partial_stays(hub: HubStandIn, out: Path, capsys: Any) -> None:
    hub.faults[BIG] = [Fault(cut_after=1000)] + [Fault(cut_after=0)] * 5
    slept: list[float] = []
    assert download(out, "--max-workers", "1", slept=slept) == 2  # the largest first: no other one is begun
    assert "after 6 consecutive failure(s)" in capsys.readouterr().err
    assert slept == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert partials(out) == [BODY[:1000]]
    assert download(out) == 0
    assert hub.fetched(BIG)[-1] == "bytes=1000-"


def test_a_hub_that_ignores_ranges_and_cuts_is_left(hub: HubStandIn, out: Path) -> None:
    hub.faults[BIG] = [Fault(cut_after=1000, ignores_range=True) for _ in range(20)]
    assert download(out) == 2
    assert len(hub.fetched(BIG)) == 6


@pytest.mark.parametrize("fault", [Fault(ignores_range=True), Fault(lies_about_range=True), Fault(status=416)])
def test_an_answer_to_another_range_starts_over(hub: HubStandIn, out: Path, fault: Fault) -> None:
    hub.faults[BIG] = [Fault(cut_after=1000), fault]
    assert download(out) == 0
    assert fetched(out) == FILES


@pytest.mark.parametrize("status", [500, 503, 408])
def test_a_passing_failure_of_the_hub_is_retried(hub: HubStandIn, out: Path, status: int) -> None:
    hub.faults["listing"] = [Fault(status=status)]
    hub.faults["config.json"] = [Fault(status=status), Fault(status=status)]
    slept: list[float] = []
    assert download(out, slept=slept) == 0
    assert slept == [0.5, 0.5, 1.0]


@pytest.mark.parametrize("headers", [{"Retry-After": "42"}, {"RateLimit": '"api";r=0;t=42'}])
def test_too_many_requests_waits_as_long_as_asked(hub: HubStandIn, out: Path, headers: dict[str, str]) -> None:
    hub.faults["config.json"] = [Fault(status=429, headers=headers)]
    slept: list[float] = []
    assert download(out, slept=slept) == 0
    assert slept == [42.0]


def test_complete_files_are_not_fetched_again(hub: HubStandIn, out: Path, capsys: Any) -> None:
    assert download(out) == 0
    num_requests = len(hub.requests)
    assert download(out) == 0
    (out / ".forge-download.json").write_text('{"files": [')  # without a record the digests are computed
    assert download(out) == 0
    assert [one.path for one in hub.requests[num_requests:]] == [f"/api/models/{REPO}/revision/main"] * 2
    assert capsys.readouterr().out.count("4 already there") == 2


def test_a_file_that_differs_is_fetched_again_and_the_others_are_not(hub: HubStandIn, out: Path) -> None:
    assert download(out) == 0
    hub.repos[REPO].files["config.json"] = b"[]"  # as long as before
    hub.repos[REPO].commit = "d" * 40
    (out / BIG).write_bytes(b"x" * len(BODY))
    hub.requests.clear()
    assert download(out) == 0
    assert {one.path for one in hub.requests[1:]} == {f"/{REPO}/resolve/{'d' * 40}/{n}" for n in ("config.json", BIG)}
    assert fetched(out) == {**FILES, "config.json": b"[]"}


@pytest.mark.parametrize(
    ("name", "body"),
    [(BIG, b"x" * len(BODY)), (BIG, BODY[:-1]), (BIG, BODY + b"x"), ("config.json", b"[]")],
    ids=["digest", "shorter", "longer", "git-digest"],
)
def test_wrong_bytes_never_appear(hub: HubStandIn, out: Path, capsys: Any, name: str, body: bytes) -> None:
    hub.faults[name] = [Fault(body=body)]
    assert download(out, "--max-workers", "1") == 2
    message = capsys.readouterr().err
    assert "did not match the hub" in message
    assert f"path:   {name}" in message
    assert name not in fetched(out)
    assert download(out) == 0
    assert fetched(out) == FILES


@pytest.mark.parametrize(("partial", "code"), [(BODY, 0), (BODY + b"more", 0), (b"\0" * 5000, 2)])
def test_a_changed_partial_does_no_harm(hub: HubStandIn, out: Path, partial: bytes, code: int) -> None:
    hub.faults[BIG] = [Fault(cut_after=1000)] + [Fault(cut_after=0)] * 5
    assert download(out, "--max-workers", "1") == 2  # the largest first: no other one is begun
    (found,) = (out / ".forge-download").glob("*.partial")
    found.write_bytes(partial)
    assert download(out) == code
    assert download(out) == 0
    assert fetched(out) == FILES


def test_a_hub_that_gives_neither_size_nor_digest(hub: HubStandIn, out: Path) -> None:
    hub.repos[REPO].lfs = frozenset()
    hub.repos[REPO].listing = {name: {"size": None, "blobId": None} for name in FILES}
    hub.faults[BIG] = [Fault(cut_after=1000)]
    assert download(out) == 0
    assert hub.fetched(BIG) == [None, "bytes=1000-"]
    assert fetched(out) == FILES
    num_requests = len(hub.requests)
    assert download(out) == 0
    assert len(hub.requests) == num_requests + 1


def test_the_files_that_were_done_before_an_error_stay(hub: HubStandIn, out: Path, capsys: Any) -> None:
    hub.repos[REPO].files["a.json"] = b"a"
    hub.faults["a.json"] = [Fault(status=404)]
    assert download(out, "--max-workers", "1") == 2
    record = json.loads((out / ".forge-download.json").read_text())
    assert (record["complete"], record["num_files"], len(fetched(out))) == (False, 3, 3)
    assert download(out) == 0
    assert "3 already there" in capsys.readouterr().out


def test_an_error_stops_the_other_files(hub: HubStandIn, out: Path) -> None:
    blocked = Fault(block_after=1000)
    hub.faults = {BIG: [blocked], "config.json": [Fault(status=404, waits_for=blocked.reached)]}
    assert download(out, "--allow-patterns", BIG, "config.json") == 2
    blocked.go.set()  # the worker that was left behind gets its bytes now, and must not write them
    for thread in threading.enumerate():
        if thread.name == "forge-download":
            thread.join()
    assert all(len(partial) <= 1000 for partial in partials(out))
    assert fetched(out) == {}
    assert download(out) == 0
    assert fetched(out) == FILES
