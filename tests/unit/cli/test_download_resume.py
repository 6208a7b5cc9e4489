"""`forge download`: interruptions, faults on the wire, and what is fetched again."""

from __future__ import annotations

import hashlib
import json
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge.cli import download as command
from forge.models.hub import download as fetch
from forge.models.hub import plan_download
from forge.models.hub_files import Folder
from forge.models.hub_http import HubClient, Retry
from forge.models.hub_listing import Source, list_files
from hub_stand_in import Fault, HubStandIn, Repo, fetched, run_download, standing_in
from signals import hear_ctrl_c

REPO = "org/tiny"
BIG = "model.safetensors"
BODY = bytes(range(256)) * 4000
FILES = {"config.json": b"{}", BIG: BODY}

# Says on its standard output how many bytes are on disk, so that the test knows when to strike.
CHILD = """
import argparse, sys
from forge.cli import download as command

class Told(command.Silence):
    total = 0
    def advance(self, num_bytes):
        self.total += num_bytes
        print(self.total, flush=True)

parser = argparse.ArgumentParser()
command.add_parser(parser.add_subparsers())
sys.exit(command.run(parser.parse_args(sys.argv[1:]), progress=Told()))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubStandIn]:
    with standing_in({REPO: Repo(dict(FILES), lfs=frozenset({BIG}))}, home=tmp_path / "hf") as stand_in:
        yield stand_in


def download(out: Path, *options: str, slept: list[float] | None = None) -> int:
    return run_download(REPO, out, *options, slept=slept)


def partials(out: Path) -> list[bytes]:
    return [path.read_bytes() for path in (out / ".forge-download").glob("*.partial")]


def strike(hub: HubStandIn, out: Path, how: signal.Signals) -> tuple[int, str]:
    """Run the command in a process, and send it a signal when half of the large file is on disk."""
    half = len(BODY) // 2
    hub.faults[BIG] = [Fault(block_after=half)]
    argv = [sys.executable, "-c", CHILD, "download", REPO, "--output-dir", str(out), "--allow-patterns", BIG]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) == half:
                break
        child.send_signal(how)
        message = child.communicate()[1]
    assert fetched(out) == {}
    assert partials(out) == [BODY[:half]]
    return child.returncode, message


def test_kill_9_and_the_next_call_continues(hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
    code, _ = strike(hub, tmp_path, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert download(tmp_path) == 0
    assert hub.fetched(BIG) == [None, f"bytes={len(BODY) // 2}-"]
    assert fetched(tmp_path) == FILES
    assert not (tmp_path / ".forge-download").exists()


def test_ctrl_c_keeps_the_partial_and_says_that_it_resumes(hub: HubStandIn, tmp_path: Path) -> None:
    code, message = strike(hub, tmp_path, signal.SIGINT)
    assert code == 130
    assert "Run the same command again: it resumes." in message
    assert "Traceback" not in message
    assert json.loads((tmp_path / ".forge-download.json").read_text())["complete"] is False
    assert download(tmp_path) == 0
    assert hub.fetched(BIG) == [None, f"bytes={len(BODY) // 2}-"]
    assert fetched(tmp_path) == FILES


def test_a_cut_connection_continues_in_the_same_call(hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
    hub.faults[BIG] = [Fault(cut_after=1000), Fault(cut_after=500)]
    slept: list[float] = []
    assert download(tmp_path, slept=slept) == 0
    assert hub.fetched(BIG) == [None, "bytes=1000-", "bytes=1500-"]
    assert slept == [0.5, 0.5]  # new bytes arrived each time: the waits do not grow
    assert fetched(tmp_path) == FILES
    assert f"the connection ended after 1000 of {len(BODY)} bytes; trying again in 0.5 s" in capsys.readouterr().err


def test_a_silent_connection_is_left_and_continued(hub: HubStandIn, tmp_path: Path) -> None:
    hub.faults[BIG] = [Fault(block_after=1000)]
    client = HubClient(hub.endpoint, retry=Retry(sleep=[].append), timeout_s=0.2)
    plan = plan_download(list_files(client, source=Source(REPO)), folder=Folder(tmp_path), max_workers=1)
    report = fetch(plan, folder=Folder(tmp_path), client=client, progress=command.Silence(), max_workers=1)
    assert hub.fetched(BIG) == [None, "bytes=1000-"]
    assert (report.num_files, report.num_bytes) == (2, len(BODY) + 2)


def test_tries_are_bounded_and_the_partial_stays(hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
    hub.faults[BIG] = [Fault(cut_after=1000)] + [Fault(cut_after=0)] * 5
    slept: list[float] = []
    assert download(tmp_path, slept=slept) == 2
    assert "given up after 6 failure(s) in a row" in capsys.readouterr().err
    assert slept == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert BIG not in fetched(tmp_path)
    assert partials(tmp_path) == [BODY[:1000]]
    assert download(tmp_path) == 0
    assert hub.fetched(BIG)[-1] == "bytes=1000-"


def test_a_hub_that_ignores_ranges_is_read_from_the_start(hub: HubStandIn, tmp_path: Path) -> None:
    hub.faults[BIG] = [Fault(cut_after=1000), Fault(ignores_range=True)]
    assert download(tmp_path) == 0
    assert fetched(tmp_path) == FILES


def test_a_hub_that_ignores_ranges_and_cuts_does_not_keep_us_for_ever(hub: HubStandIn, tmp_path: Path) -> None:
    hub.faults[BIG] = [Fault(cut_after=1000, ignores_range=True) for _ in range(20)]
    assert download(tmp_path) == 2
    assert len(hub.fetched(BIG)) == 6


@pytest.mark.parametrize("fault", [Fault(lies_about_range=True), Fault(status=416)])
def test_a_range_that_does_not_fit_starts_over(hub: HubStandIn, tmp_path: Path, fault: Fault) -> None:
    hub.faults[BIG] = [Fault(cut_after=1000), fault]
    assert download(tmp_path) == 0
    assert hub.fetched(BIG) == [None, "bytes=1000-", None]
    assert fetched(tmp_path) == FILES


@pytest.mark.parametrize("status", [500, 503, 408])
def test_a_passing_failure_of_the_hub_is_tried_again(hub: HubStandIn, tmp_path: Path, status: int) -> None:
    hub.faults["listing"] = [Fault(status=status)]
    hub.faults["config.json"] = [Fault(status=status), Fault(status=status)]
    slept: list[float] = []
    assert download(tmp_path, slept=slept) == 0
    assert slept == [0.5, 0.5, 1.0]


def test_too_many_requests_waits_as_long_as_asked(hub: HubStandIn, tmp_path: Path) -> None:
    hub.faults["config.json"] = [Fault(status=429, headers={"Retry-After": "42"})]
    slept: list[float] = []
    assert download(tmp_path, slept=slept) == 0
    assert slept == [42.0]


def test_a_wait_beyond_patience_is_an_error(hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
    hub.faults["listing"] = [Fault(status=429, headers={"Retry-After": "86400"})]
    slept: list[float] = []
    assert download(tmp_path, slept=slept) == 2
    assert slept == []
    assert "the hub asks to wait 86400 s" in capsys.readouterr().err


def test_complete_files_are_not_fetched_again(hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
    assert download(tmp_path) == 0
    num_requests = len(hub.requests)
    assert download(tmp_path) == 0
    (tmp_path / ".forge-download.json").unlink()  # without the record the digests are computed
    assert download(tmp_path) == 0
    assert [one.path for one in hub.requests[num_requests:]] == [f"/api/models/{REPO}/revision/main"] * 2
    assert capsys.readouterr().out.count("2 already there") == 2


def test_a_damaged_record_is_no_obstacle(hub: HubStandIn, tmp_path: Path) -> None:
    (tmp_path / ".forge-download.json").write_text('{"files": [')
    assert download(tmp_path) == 0
    assert json.loads((tmp_path / ".forge-download.json").read_text())["complete"] is True


def test_a_changed_file_is_fetched_again_and_the_others_are_not(hub: HubStandIn, tmp_path: Path) -> None:
    assert download(tmp_path) == 0
    hub.repos[REPO].files["config.json"] = b"[]"  # as long as before
    hub.repos[REPO].commit = "d" * 40
    hub.requests.clear()
    assert download(tmp_path) == 0
    assert [one.path for one in hub.requests[1:]] == [f"/{REPO}/resolve/{'d' * 40}/config.json"]
    assert fetched(tmp_path) == {**FILES, "config.json": b"[]"}


def test_a_file_changed_here_is_fetched_again(hub: HubStandIn, tmp_path: Path) -> None:
    assert download(tmp_path) == 0
    (tmp_path / BIG).write_bytes(b"x" * len(BODY))
    assert download(tmp_path) == 0
    assert fetched(tmp_path) == FILES


def test_a_partial_of_the_old_content_is_not_continued(hub: HubStandIn, tmp_path: Path) -> None:
    strike(hub, tmp_path, signal.SIGKILL)
    hub.repos[REPO].files[BIG] = BODY[::-1]
    assert download(tmp_path) == 0
    assert hub.fetched(BIG) == [None, None]
    assert fetched(tmp_path)[BIG] == BODY[::-1]
    assert not (tmp_path / ".forge-download").exists()


def test_a_partial_longer_than_the_file_starts_over(hub: HubStandIn, tmp_path: Path) -> None:
    strike(hub, tmp_path, signal.SIGKILL)
    next((tmp_path / ".forge-download").glob("*.partial")).write_bytes(BODY + b"more")
    assert download(tmp_path) == 0
    assert fetched(tmp_path) == FILES


def test_a_whole_partial_needs_no_request(hub: HubStandIn, tmp_path: Path) -> None:
    strike(hub, tmp_path, signal.SIGKILL)
    next((tmp_path / ".forge-download").glob("*.partial")).write_bytes(BODY)
    assert download(tmp_path) == 0
    assert hub.fetched(BIG) == [None]
    assert fetched(tmp_path) == FILES


@pytest.mark.parametrize(
    ("name", "body"),
    [(BIG, b"x" * len(BODY)), (BIG, BODY[:-1]), (BIG, BODY + b"x"), ("config.json", b"[]")],
    ids=["digest", "shorter", "longer", "git-digest"],
)
def test_wrong_bytes_never_appear(hub: HubStandIn, tmp_path: Path, capsys: Any, name: str, body: bytes) -> None:
    hub.faults[name] = [Fault(body=body)]
    assert download(tmp_path, "--max-workers", "1") == 2
    message = capsys.readouterr().err
    assert "did not arrive as the hub describes it" in message
    assert f"path:   {name}" in message
    assert name not in fetched(tmp_path)
    assert download(tmp_path) == 0
    assert fetched(tmp_path) == FILES


def test_a_damaged_partial_is_found_out(hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
    strike(hub, tmp_path, signal.SIGKILL)
    next((tmp_path / ".forge-download").glob("*.partial")).write_bytes(b"\0" * 5000)
    assert download(tmp_path) == 2
    assert hashlib.sha256(BODY).hexdigest() in capsys.readouterr().err
    assert BIG not in fetched(tmp_path)
    assert download(tmp_path) == 0
    assert fetched(tmp_path) == FILES


def test_a_hub_that_gives_neither_size_nor_digest(hub: HubStandIn, tmp_path: Path) -> None:
    hub.repos[REPO].lfs = frozenset()
    hub.repos[REPO].listing = {name: {"size": None, "blobId": None} for name in FILES}
    hub.faults[BIG] = [Fault(cut_after=1000)]
    assert download(tmp_path) == 0
    assert hub.fetched(BIG) == [None, "bytes=1000-"]
    assert fetched(tmp_path) == FILES
    num_requests = len(hub.requests)
    assert download(tmp_path) == 0
    assert len(hub.requests) == num_requests + 1


def test_the_files_that_were_done_before_an_error_stay(hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
    hub.repos[REPO].files["a.json"] = b"a"
    hub.faults["a.json"] = [Fault(status=404)]
    assert download(tmp_path, "--max-workers", "1") == 2
    assert fetched(tmp_path) == FILES
    record = json.loads((tmp_path / ".forge-download.json").read_text())
    assert (record["complete"], record["num_files"], sorted(record["files"])) == (False, 2, sorted(FILES))
    assert download(tmp_path) == 0
    assert "2 already there" in capsys.readouterr().out


def test_an_error_stops_the_other_files_and_they_continue_later(hub: HubStandIn, tmp_path: Path) -> None:
    blocked = Fault(block_after=1000)
    hub.faults = {BIG: [blocked], "config.json": [Fault(status=404, waits_for=blocked.reached)]}
    assert download(tmp_path) == 2
    assert fetched(tmp_path) == {}
    blocked.go.set()  # the worker that was left behind gets its bytes now, and must not write them
    for thread in threading.enumerate():
        if thread.name == "forge-download":
            thread.join()
    assert [len(partial) <= 1000 for partial in partials(tmp_path) if partial] in ([], [True])
    assert download(tmp_path) == 0
    assert fetched(tmp_path) == FILES


def test_a_full_file_system_keeps_the_partial(hub: HubStandIn, tmp_path: Path) -> None:
    limit = 300_000

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    argv = [sys.executable, "-c", CHILD, "download", REPO, "--output-dir", str(tmp_path), "--allow-patterns", BIG]
    child = subprocess.run(argv, capture_output=True, text=True, preexec_fn=small_files, check=False)
    assert child.returncode == 2
    assert "No space is left for the download; what was fetched is kept." in child.stderr
    assert "more bytes are needed" in child.stderr
    assert partials(tmp_path) == [BODY[:limit]]
    assert download(tmp_path) == 0
    assert hub.fetched(BIG) == [None, f"bytes={limit}-"]
    assert fetched(tmp_path) == FILES
