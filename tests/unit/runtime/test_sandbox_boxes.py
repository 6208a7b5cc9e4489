"""The parts of long-lived sandboxes that start no process."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from forge.errors import OptionError
from forge.runtime.sandbox import CommandResult, Files, PythonResult, SandboxLimits, Snapshot
from forge.runtime.sandbox.box import Box
from forge.runtime.sandbox.box_records import as_snapshot, command_result, python_result
from forge.runtime.sandbox.frames import Spool, Unpacker, pack
from forge.runtime.sandbox.guest_files import WorkFolder
from forge.runtime.sandbox.guest_programs import Call, Kernel, Shell
from forge.runtime.sandbox.kernel import answer, cut
from forge.runtime.sandbox.runner import LaunchedSandbox

PLAN: dict[str, Any] = {
    "work": "/sandbox",
    "limits": {"open_files": 256},
    "box": {"output_bytes": 1000, "shell": "/bin/bash", "kernel": ""},
    "command": ["python"],
}


@pytest.mark.parametrize(
    ("name", "value"), [("open_s", 0), ("wall_s", float("nan")), ("open_files", 16), ("output_bytes", 10)]
)
def test_limits_that_cannot_hold_are_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        SandboxLimits(**{name: value})
    assert caught.value.path == f"SandboxLimits({name}=)"
    assert caught.value.value is value
    assert f"SandboxLimits({name}=" in str(caught.value.repair)


def test_messages_arrive_whole_however_they_are_cut() -> None:
    sent: list[tuple[dict[str, Any], bytes]] = [
        ({"id": 1}, b""),
        ({"id": 2, "path": "\udcff"}, b"\0x" * 500),
        ({}, b"z"),
    ]
    stream = b"".join(pack(header, num_payload=len(payload)) + payload for header, payload in sent)
    for size in (1, 7, 1000, len(stream)):
        unpacker, found = Unpacker(), []
        for start in range(0, len(stream), size):
            found += unpacker.feed(stream[start : start + size])
        assert found == sent


@pytest.mark.parametrize("size", [1, 3, 50_000, 200_000])
def test_a_spool_keeps_the_beginning_and_the_end(size: int) -> None:
    text = bytes(number % 251 for number in range(200_000))
    spool = Spool(1001)
    for start in range(0, len(text), size):
        spool.add(text[start : start + size])
    assert spool.take() == (text[:501], text[-500:], 200_000 - 1001)
    spool.add(b"short")
    assert spool.take() == (b"short", b"", 0), "it starts anew"
    spool.add(b"x" * 700)
    assert spool.take() == (b"x" * 501, b"x" * 199, 0)


def test_results_as_the_policy_reads_them() -> None:
    assert str(CommandResult("", 0)) == "[no output]"
    assert str(CommandResult("a\n", 0)) == "a"
    assert str(CommandResult("a\n", 2)) == "a\n[exit code 2]"
    assert str(PythonResult("", "42")) == "42"
    assert str(PythonResult("out\n", None, "Traceback …")) == "out\nTraceback …"
    base = {"lost": None, "timed_out": False, "seconds": 0.5, "num_head": 4, "left_out": 0}
    killed = command_result({**base, "timed_out": True, "ended": "killed"}, b"half", timeout_s=3)
    assert killed.output == "half"
    assert killed.exit_code is None
    assert str(killed).startswith("half\n[killed after 3 s")
    cut_output = command_result({**base, "left_out": 96, "exit_code": 0}, b"headtail\xff", timeout_s=3)
    assert cut_output.output == "head\n[… 96 bytes left out …]\ntail\ufffd"
    lost = python_result({**base, "lost": "killed by signal 9", "value": "1"}, b"", timeout_s=3)
    assert (
        lost.note == "the Python process had ended (killed by signal 9); this ran in a new one, without its variables"
    )


def test_a_snapshot_gives_its_files() -> None:
    snapshot = Snapshot(
        (("a", "folder", 0o755, 0), ("a/x", "file", 0o755, 2), ("l", "link", 0o777, 3), ("b", "file", 0o644, 1)),
        b"hia/x\xff",
    )
    files = snapshot.files()
    assert files == {"a/x": "hi", "b": b"\xff"}
    assert files.left_out == {"l": "a link to a/x"}
    again = as_snapshot(files)
    assert again.entries == (("a/x", "file", 0o644, 2), ("b", "file", 0o644, 1))
    assert again.files() == files
    assert isinstance(files, Files)
    assert as_snapshot(snapshot) is snapshot


def test_what_a_shell_reports_is_not_trusted() -> None:
    shell = Shell(PLAN)
    assert shell.read_record([b"300", b"/sandbox/d'x", b'declare -x A="1"\n']) == {"exit_code": 44}
    assert b"cd -- '/sandbox/d'\\''x'" in shell.preamble()
    assert b"__forge_return 44; eval 'echo '\\''hi'\\'''" in shell.request(
        Call({"id": 1, "timeout_s": 1.0}, b"echo 'hi'")
    )
    shell.read_record([b"0", b"/elsewhere", b"x" * 300_000])
    assert b"/sandbox/d" in shell.preamble(), "too much to hand to a new shell"
    for status in (b"zero", b"9" * 100_000):
        with pytest.raises(ValueError, match=r"invalid literal|not an exit code"):
            shell.read_record([status, b"", b""])


@pytest.mark.parametrize("record", [b"[]", b"1", b"{", b"\xff"])
def test_what_a_kernel_reports_is_not_trusted(record: bytes) -> None:
    with pytest.raises(ValueError):
        Kernel(PLAN).read_record([record])


def test_a_kernel_reports_texts_alone() -> None:
    long = b"9" * 100_000
    record = b'{"value": ["1"], "error": null, "more": ' + long + b"}"
    assert Kernel(PLAN).read_record([record]) == {"value": "['1']", "error": None}


def cell(code: str, space: dict[str, Any] | None = None) -> dict[str, str | None]:
    before = signal.getsignal(signal.SIGINT)
    try:
        return answer(code, "<cell 1>", {} if space is None else space, 1000)
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_kernel_gives_the_last_value_or_the_traceback() -> None:
    space: dict[str, Any] = {}
    assert cell("x = 20\nx + 1", space) == {"value": "21", "error": None}
    assert cell("x; None", space) == {"value": None, "error": None}
    assert cell("", space) == {"value": None, "error": None}
    error = str(cell("def f():\n    return 1 / 0\nf()")["error"])
    assert error.startswith('Traceback (most recent call last):\n  File "<cell 1>", line 3, in <module>\n    f()')
    assert error.endswith("ZeroDivisionError: division by zero")
    assert "kernel.py" not in error
    assert str(cell("def f(:")["error"]).endswith("SyntaxError: invalid syntax")
    assert str(cell("raise SystemExit(3)")["error"]).endswith("SystemExit: 3")
    assert len(str(cell("'x' * 10_000")["value"])) < 1100
    unprintable = "class E(BaseException):\n    def __str__(self): raise KeyError\nraise E"
    assert str(cell(unprintable)["error"]).endswith("E: <exception str() failed>")
    assert "KeyError" in str(cell("class V:\n    def __repr__(self): raise KeyError\nV()")["error"])


def test_cutting_leaves_out_the_middle() -> None:
    assert cut("abc", 3) == "abc"
    assert cut("a" * 10 + "b" * 10, 4) == "aa\n[… 16 characters left out …]\nbb"


@pytest.fixture
def folder(tmp_path: Path) -> WorkFolder:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "work").mkdir()
    return WorkFolder(str(tmp_path / "work"), uid=None, most_bytes=1000)


def test_files_are_written_and_collected(folder: WorkFolder) -> None:
    folder.write("a/b/c.txt", b"long text")
    folder.write("a/b/c.txt", b"text")
    folder.put([["run.sh", "file", 0o755, 2], ["empty", "folder", 0o755, 0], ["link", "link", 0o777, 1]], b"hia")
    assert folder.read("a/b/c.txt", most_bytes=100) == b"text"
    entries, left_out, data = folder.collect()
    folders, others = ["a", "empty", "a/b"], ["link", "run.sh", "a/b/c.txt"]
    assert [path for path, kind, _, _ in entries if kind == "folder"] == folders
    assert [path for path, kind, _, _ in entries if kind != "folder"] == others
    assert data == b"ahitext"
    assert left_out == []
    assert next(mode for path, _, mode, _ in entries if path == "run.sh") == 0o755
    folder.put(entries, data)
    assert folder.collect() == (entries, left_out, data), "a snapshot can be written over itself"


def test_no_link_leads_out_and_nothing_waits(folder: WorkFolder) -> None:
    os.symlink("../secret", f"{folder.path}/up")
    os.symlink("/", f"{folder.path}/root")
    os.mkfifo(f"{folder.path}/pipe")
    os.mkdir(f"{folder.path}/d")
    for path in ("up", "root/etc/passwd", "../secret"):
        with pytest.raises(OSError, match="leads out of the work folder"):
            folder.read(path, most_bytes=100)
        with pytest.raises(OSError, match="leads out of the work folder"):
            folder.write(path, b"x")
    with pytest.raises(OSError, match="not a regular file"):
        folder.read("pipe", most_bytes=100)
    for use in (lambda: folder.read("d", most_bytes=9), lambda: folder.write("d", b""), lambda: folder.write(".", b"")):
        with pytest.raises(IsADirectoryError):
            use()
    with pytest.raises(FileNotFoundError):
        folder.read("none", most_bytes=100)
    entries, left_out, _ = folder.collect()
    assert [path for path, kind, _, _ in entries if kind == "file"] == []
    assert left_out == [["pipe", "not a regular file"]]


def test_what_does_not_fit_is_left_out(folder: WorkFolder) -> None:
    with open(f"{folder.path}/sparse", "wb") as file:
        file.truncate(1 << 40)
    folder.write("a", b"x" * 600)
    folder.write("b", b"x" * 600)
    entries, left_out, data = folder.collect()
    assert [path for path, *_ in entries] == ["a"]
    assert len(data) == 600
    assert [path for path, _ in left_out] == ["b", "sparse"]
    with pytest.raises(OSError, match="larger than 500 bytes"):
        folder.read("a", most_bytes=500)
    small = WorkFolder(folder.path, uid=None, most_bytes=1000, most_entries=1)
    assert small.collect()[1] == [["b", "more than 1 files"], ["sparse", "more than 1 files"]]


def test_a_folder_that_was_locked_or_removed_is_usable(folder: WorkFolder) -> None:
    os.chmod(folder.path, 0)
    folder.write("a", b"x")
    os.remove(f"{folder.path}/a")
    os.rmdir(folder.path)
    folder.write("a", b"y")
    assert folder.read("a", most_bytes=9) == b"y"


@pytest.fixture
def closed() -> Box:
    return Box(LaunchedSandbox("namespaces", {}, python="/usr/bin/python3"))


def test_a_sandbox_is_used_while_it_is_open(closed: Box) -> None:
    with pytest.raises(OptionError, match="not open"):
        asyncio.run(closed.python("1"))
    asyncio.run(closed.close())


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "/sandboxes/x", "a/../../x"])
def test_paths_outside_are_refused(closed: Box, path: str) -> None:
    with pytest.raises(PermissionError, match="outside the work folder /sandbox"):
        asyncio.run(closed.read_file(path))


def test_time_limits_of_calls_are_checked(closed: Box) -> None:
    with pytest.raises(OptionError) as caught:
        asyncio.run(closed.python("1", timeout_s=0))
    assert caught.value.path == "timeout_s"
