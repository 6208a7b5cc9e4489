"""`forge ui` and `forge run --ui` as processes: what they print, what they open, and when they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forge.cli import main
from run_folders import make_grpo_run

LIMIT_S = 600
ADDRESS = re.compile(r"Runs of (\S+) at (http://127\.0\.0\.1:\d+)(/\S*)\?token=(\S+)")


def environment(**more: str) -> dict[str, str]:
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER", "SSH_CONNECTION")
    return {name: value for name, value in os.environ.items() if name not in hidden} | more


@contextmanager
def started(*words: object, **more: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "forge.cli", *map(str, words)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**more)
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def address(line: str) -> tuple[str, str, str]:
    found = ADDRESS.fullmatch(line.strip())
    assert found is not None, line
    return found[2], found[3], found[4]


def get(base: str, path: str, token: str) -> Any:
    asked = urllib.request.Request(f"{base}{path}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
        return json.load(answer)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    make_grpo_run(tmp_path / "a", num_steps=2)
    with started("ui", tmp_path) as process:
        assert process.stdout is not None
        base, path, token = address(process.stdout.readline())
        assert path == "/"
        assert get(base, "/api/run?run=a", token)["run"]["lastStep"] == 2
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out, err) == (0, "", "")


def test_a_browser_gets_a_ticket_and_the_terminal_the_token(tmp_path: Path) -> None:
    make_grpo_run(tmp_path / "runs" / "a b", num_steps=1)
    opened, browser = tmp_path / "opened", tmp_path / "browser"
    os.mkfifo(opened)
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    with started("ui", tmp_path / "runs", "--run", "a b", BROWSER=f"{browser} %s") as process:
        assert process.stdout is not None
        base, path, token = address(process.stdout.readline())
        assert path == "/run/a%20b"
        url = opened.read_text().strip()
        assert token not in url
        assert url.startswith(f"{base}/run/a%20b?ticket=")


def test_over_ssh_it_says_how_to_get_there(tmp_path: Path) -> None:
    with started("ui", tmp_path, SSH_CONNECTION="1.2.3.4 5 6.7.8.9 22") as process:
        assert process.stdout is not None
        base, _, _ = address(process.stdout.readline())
        port = base.rpartition(":")[2]
        assert f"ssh -L {port}:127.0.0.1:{port} " in process.stdout.readline()


def test_it_loads_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys, asyncio; from pathlib import Path; from forge.ui.server import *\n"
        "async def main():\n"
        "    async with serve_ui(UiOptions(Path(sys.argv[1]))): pass\n"
        "asyncio.run(main()); print({'torch', 'monarch', 'transformers', 'datasets'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def test_what_cannot_be_served_is_an_error_of_the_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", str(tmp_path / "none"), "--no-open"]) == 2
    assert main(["ui", str(tmp_path), "--no-open", "--host", "0.0.0.0"]) == 2
    told = capsys.readouterr().err
    assert "forge ui: there is no such folder of runs" in told
    assert "forge ui: the UI and its token would be reachable from other machines without TLS" in told


SCRIPT = """
import sys
from pathlib import Path
print("begun", sys.argv[1:], flush=True)
(waited,) = [word for word in sys.argv if word.startswith("wait=")]
Path(waited.partition("=")[2]).open("rb").read()
print("done", flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> tuple[Path, Path]:
    """A program that runs until something is written into a pipe."""
    script, pipe = tmp_path / "main.py", tmp_path / "pipe"
    script.write_text(SCRIPT)
    os.mkfifo(pipe)
    return script, pipe


@pytest.mark.parametrize("supervise", [(), ("--supervise",)])
def test_beside_a_run_it_ends_with_it(program: tuple[Path, Path], tmp_path: Path, supervise: tuple[str, ...]) -> None:
    script, pipe = program
    words = ["run.name=mine", f"run.output_dir={tmp_path}/out", f"wait={pipe}"]
    with started("run", *supervise, script, words[0], "--ui", *words[1:]) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        base, path, token = address(process.stderr.readline())
        assert path == "/run/mine"
        assert process.stdout.readline().startswith("begun ['run.name=mine', 'run.output_dir=")
        assert get(base, "/api/runs", token)["root"] == str(tmp_path / "out")
        pipe.write_text("x")
        assert process.stdout.readline() == "done\n"
        assert process.wait(LIMIT_S) == 0
        assert process.stderr.read() == ""  # the UI has closed it, too


def test_a_ui_that_is_kept_outlives_the_run(program: tuple[Path, Path], tmp_path: Path) -> None:
    script, pipe = program
    with started("run", "--keep-ui", script, f"run.output_dir={tmp_path}/out", f"wait={pipe}") as process:
        assert process.stderr is not None
        base, _, token = address(process.stderr.readline())
        told = process.stderr.readline()
        number = int(re.fullmatch(r"The UI stays when the run has ended: kill (\d+) ends it\.\n", told)[1])  # type: ignore[index]
        handle = os.pidfd_open(number)
        try:
            pipe.write_text("x")
            assert process.wait(LIMIT_S) == 0
            assert get(base, "/api/runs", token)["runs"] == []
        finally:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            os.close(handle)
        assert process.stderr.read() == ""


def test_it_can_wait_for_a_process_that_has_ended(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with started("ui", tmp_path, "--until", ended.pid) as process:
        assert process.wait(LIMIT_S) == 0
