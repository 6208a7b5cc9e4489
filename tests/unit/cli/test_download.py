"""`forge download`: what it fetches, and what it prints."""

from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from hub_stand_in import HubStandIn, Repo, fetched, run_download, standing_in

REPO = "org/tiny-1.5"
FILES = {
    "config.json": b'{"hidden_size": 8}',
    "model.safetensors": bytes(range(256)) * 300,
    "original/consolidated.bin": b"o" * 1000,
    "empty.txt": b"",
}
CHILD = """
import argparse, sys
from forge.cli.download import add_parser
parser = argparse.ArgumentParser()
add_parser(parser.add_subparsers())
args = parser.parse_args(sys.argv[1:])
sys.exit(args.handler(args))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubStandIn]:
    repos = {REPO: Repo(dict(FILES), lfs=frozenset({"model.safetensors"}))}
    with standing_in(repos, home=tmp_path / "hf") as stand_in:
        yield stand_in


def download(out: Path, *options: str, repo: str = REPO, slept: list[float] | None = None) -> int:
    return run_download(repo, out, *options, slept=slept)


def test_every_file_arrives_and_the_last_line_tells(
    hub: HubStandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "out"
    assert download(out) == 0
    assert fetched(out) == FILES
    assert not (out / ".forge-download").exists()
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1
    for word in (str(out), "4 files", "77818 bytes", "0 already there", "main = " + "a" * 40):
        assert word in printed.out
    assert sorted(printed.err.splitlines())[0] == "fetched: config.json, 18 bytes"
    assert len(printed.err.splitlines()) == 4
    record = json.loads((out / ".forge-download.json").read_text())
    files = record.pop("files")
    assert set(files) == set(FILES)
    assert record == {
        "repo": REPO,
        "repo_type": "model",
        "revision": "main",
        "commit": "a" * 40,
        "complete": True,
        "num_files": 4,
        "num_bytes": 77818,
        "num_files_present": 0,
    }


def test_quiet_prints_the_last_line_only(hub: HubStandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert download(tmp_path / "out", "--quiet") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert len(printed.out.splitlines()) == 1


def test_patterns_choose_and_a_pattern_without_a_match_is_noted(
    hub: HubStandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert download(tmp_path / "a", "--ignore-patterns", "*.safetensors", "original/") == 0
    assert set(fetched(tmp_path / "a")) == {"config.json", "empty.txt"}
    assert download(tmp_path / "b", "--allow-patterns", "*.json", "*.bin", "none.*", "--ignore-patterns", "*.bin") == 0
    assert set(fetched(tmp_path / "b")) == {"config.json"}
    assert "no file matches --allow-patterns 'none.*'" in capsys.readouterr().err


def test_dry_run_writes_nothing(hub: HubStandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert download(out, "--dry-run") == 0
    assert not out.exists()
    assert "4 of 4 files to fetch" in capsys.readouterr().out
    assert download(out, "--allow-patterns", "config.json") == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    capsys.readouterr()
    assert download(out, "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "already there  config.json" in printed
    assert "to fetch       model.safetensors, 76.8 kB (76800 bytes)" in printed
    assert "3 of 4 files to fetch" in printed
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_revision_and_dataset(hub: HubStandIn, tmp_path: Path) -> None:
    hub.repos["datasets/org/data"] = Repo(
        {"train 1.jsonl": b"{}\n"}, commit="c" * 40, revisions=frozenset({"refs/pr/1"})
    )
    assert download(tmp_path / "out", "--repo-type", "dataset", "--revision", "refs/pr/1", repo="org/data") == 0
    assert fetched(tmp_path / "out") == {"train 1.jsonl": b"{}\n"}
    assert hub.requests[-1].path == f"/datasets/org/data/resolve/{'c' * 40}/train 1.jsonl"


def test_progress_bar_on_a_terminal(hub: HubStandIn, tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    argv = [sys.executable, "-m", "forge.cli", "download", REPO, "--output-dir", str(tmp_path / "out")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=terminal, text=True) as child:
        os.close(terminal)
        shown = read_terminal(controller)
        last = child.communicate()[0]
    os.close(controller)
    assert child.returncode == 0
    assert b"77.8k/77.8k" in shown
    assert b"fetched:" not in shown
    assert "4 files" in last


def read_terminal(controller: int) -> bytes:
    """Everything until the other end closes, which Linux reports as EIO."""
    shown = b""
    while True:
        try:
            shown += os.read(controller, 1 << 16)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return shown


def test_help_loads_nothing_heavy() -> None:
    listing = "print(sorted({'tqdm', 'ssl', 'torch', 'forge.models'} & set(sys.modules)))"
    probe = CHILD.replace("args = parser", f"{listing}\nargs = parser")
    argv = [sys.executable, "-c", probe, "download", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "[]"
    assert "--ignore-patterns" in done.stdout
