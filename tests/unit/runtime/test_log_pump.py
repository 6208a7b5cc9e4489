"""What ranks print, on its way to a file and a console: the program that starts a rank, with other programs in its
place, and the relay that shows lines and records."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge.observe.logs import log_file
from forge.observe.logs.records import to_fields
from forge.observe.terminal import set_foot
from forge.runtime import log_pump, rank_stub
from forge.runtime.control import control
from forge.runtime.log_pump import BURST, Pump
from forge.runtime.process_watch import LocalWatch
from forge.runtime.relay import Relay, close_relay, relay
from forge.runtime.reports import RecordSender, Reports

LIMIT_S = 600


def environment(folder: Path, **more: str) -> dict[str, str]:
    own = {"FORGE_LOG_FILE": str(folder / "a-0.log"), "FORGE_LOG_NAME": "a-0", "FORGE_LOG_MAX_BYTES": str(1 << 20)}
    return {**os.environ, **own, **more}


STUB = """
import sys
from forge.runtime import rank_stub
rank_stub._RANK_MAIN = "a_rank"
sys.argv = ["rank_stub"]
rank_stub.main()
"""
"""The program that starts a rank, with the module `a_rank` for the rank's."""


def start(folder: Path, rank: str, **more: str) -> subprocess.CompletedProcess[str]:
    (folder / "a_rank.py").write_text(rank)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", STUB],
        env=environment(folder, PYTHONPATH=path, **more),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def written(folder: Path) -> list[str]:
    return (folder / "a-0.log").read_text().splitlines()


def test_everything_that_a_rank_prints_is_in_its_file_and_its_output_on_the_console(tmp_path: Path) -> None:
    rank = """
import os, sys
print("out", flush=True)
print("err", file=sys.stderr, flush=True)
os.system("echo from a child")
os.write(2, b"native\\n")
print("no end of line", end="", flush=True)
sys.exit(3)
"""
    ended = start(tmp_path, rank)
    assert ended.returncode == 3
    assert ended.stdout == "[a-0] out\n[a-0] from a child\n[a-0] no end of line\n", "that of a worker, on another host"
    assert ended.stderr == ""
    lines = written(tmp_path)
    assert "): started ====" in lines[0]
    assert lines[-1].endswith("exit code 3 ====")
    text = "\n".join(lines[1:])
    for stream in (["out\n", "from a child\n", "no end of line"], ["err\n", "native\n"]):  # each in order; which is
        places = [text.index(words) for words in stream]  # read first is chance
        assert places == sorted(places)


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV, "killed by SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "killed by SIGKILL"),
        ("import os; os._exit(0)", 0, "exit code 0"),
        ("raise RuntimeError('broke')", 1, "exit code 1"),
    ],
)
def test_the_last_words_of_a_rank_that_crashes_are_not_lost(how: str, code: int, words: str, tmp_path: Path) -> None:
    ended = start(tmp_path, f"import os\nos.write(2, b'last words\\n' * 10000)\n{how}\n")
    assert ended.returncode == code
    lines = written(tmp_path)
    assert lines.count("last words") == 10_000
    assert words in lines[-1]


def test_a_rank_that_floods_its_log_does_not_fill_the_disk(tmp_path: Path) -> None:
    rank = "import sys\nfor number in range(200_000): print('a flood, line', number)\nprint('end', file=sys.stderr)\n"
    ended = start(tmp_path, rank, FORGE_LOG_MAX_BYTES=str(1 << 18))
    assert ended.returncode == 0
    assert sum(path.stat().st_size for path in tmp_path.glob("a-0.log*")) <= 1 << 18
    files = sorted(
        tmp_path.glob("a-0.log*"), reverse=True
    )  # the newest last; the last lines may be the first of a file
    kept = [line for path in files for line in path.read_text().splitlines()]
    assert "end" in kept
    assert kept[-2] in ("end", "a flood, line 199999"), "two pipes, in either order"
    shown = ended.stdout.splitlines()
    assert BURST <= len(shown) < 10_000
    assert any("more lines are in" in line for line in shown)
    numbers = [int(line.split()[-1]) for line in shown if "a flood" in line]
    hidden = sum(int(line.split()[2]) for line in shown if "more lines" in line)
    assert len(numbers) + hidden == 200_000, "every line was shown, or counted"


def test_json_files_have_an_object_for_each_line(tmp_path: Path) -> None:
    record = '{"time": "2026-01-01T00:00:00+00:00", "level": "info", "message": "ours"}'
    rank = f"import sys\nprint('out')\nprint({record!r}, flush=True)\nprint('half', end='', file=sys.stderr)\n"
    start(tmp_path, rank, FORGE_LOG_FORMAT="json")
    records = [json.loads(line) for line in written(tmp_path)]
    assert {record["message"] for record in records[1:-1]} == {"out", "ours", "half"}
    assert records[-1]["message"].startswith("exit code 0")


def test_a_file_that_cannot_be_written_leaves_the_output_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = start(tmp_path, "print('out')", FORGE_LOG_FILE=str(tmp_path / "file" / "a-0.log"))
    assert (ended.returncode, ended.stdout) == (0, "out\n")
    assert "cannot be written" in ended.stderr
    assert "a-0 logs here" in ended.stderr


def test_without_a_file_nothing_is_between_a_rank_and_its_output(tmp_path: Path) -> None:
    ended = start(tmp_path, "import os\nprint(os.environ.get('FORGE_STAND_IN_PID'))", FORGE_LOG_FILE="")
    assert ended.stdout == "None\n"


def test_a_rank_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Its parent, which pumps its output, sees the end of its own."""
    (tmp_path / "a_rank.py").write_text("import os, signal\nos.write(1, b'%d\\n' % os.getpid())\nsignal.pause()\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUB!r}]); __import__('signal').pause()"
    process = subprocess.Popen(
        [sys.executable, "-c", middle], env=environment(tmp_path, PYTHONPATH=path), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    rank = int(process.stdout.readline().removeprefix("[a-0] "))
    ended = os.pidfd_open(rank)
    process.kill()
    process.wait()
    assert select.select([ended], [], [], LIMIT_S)[0]
    os.close(ended)
    process.stdout.read()  # until the last of them has closed it
    process.stdout.close()
    assert "killed by SIGKILL" in written(tmp_path)[-1]


# ---- The console of the controller


class Lines:
    """Takes what is printed, in place of a terminal."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, bool]] = []

    def print(self, line: str, *, to_stderr: bool = False) -> None:
        self.lines.append((line, to_stderr))


@pytest.fixture
def printed() -> Iterator[Lines]:
    lines = Lines()
    set_foot(lines)
    yield lines
    set_foot(None)


def closed(relayed: Relay) -> None:
    control().start(relayed.close()).result(LIMIT_S)


def test_the_relay_shows_output_and_records(printed: Lines, caplog: pytest.LogCaptureFixture) -> None:
    relayed = Relay()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(f"\0{relayed.address}")
        sender.send(json.dumps({"process": "rewards-0", "output": ["one", "two"]}).encode())
        for broken in (b"", b"{", b"[]", b'{"process": "x"}', b"\xff"):
            sender.send(broken)
        record = logging.LogRecord("forge.x", logging.WARNING, "", 0, "%s things", ("two",), None)
        relayed.put("trainer-0", to_fields(record))
        closed(relayed)
    assert printed.lines == [("[rewards-0] one", True), ("[rewards-0] two", True)]
    (shown,) = [each for each in caplog.records if each.name == "forge.x"]
    assert (shown.getMessage(), shown.forge_process) == ("two things", "trainer-0")  # type: ignore[attr-defined]


def test_the_relay_of_a_process_is_opened_once_and_closed_once(printed: Lines) -> None:
    first = relay()
    assert relay() is first
    control().start(close_relay()).result(LIMIT_S)
    control().start(close_relay()).result(LIMIT_S)
    second = relay()
    assert second is not first
    control().start(close_relay()).result(LIMIT_S)


def test_a_console_that_is_not_read_stops_neither_the_control_loop_nor_a_rank(tmp_path: Path) -> None:
    """The pump keeps what the console does not take, a bounded number of lines, and counts the rest."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as blocked:
        blocked.bind("\0forge-test-console-" + os.urandom(8).hex())
        address = blocked.getsockname().decode()[1:]
        pump = Pump(log_file, environment(tmp_path, FORGE_LOG_CONSOLE=address))
        for number in range(1000):
            pump._take(pump.out, [b"line %d" % number])
        console = pump._console
        assert console.blocked >= 0
        assert len(console._waiting) + console._num_hidden <= 1000
        assert len(console._waiting) <= 2 * BURST
        received = 0
        blocked.setblocking(False)
        while True:
            try:
                received += len(json.loads(blocked.recv(1 << 18))["output"])
            except BlockingIOError:
                if console.blocked < 0:
                    break
                console.flush()
        assert received + console._num_hidden == 1000
        pump.finish("exit code 0")


def test_a_console_that_has_gone_takes_nothing_more(tmp_path: Path) -> None:
    relayed = Relay()
    pump = Pump(log_file, environment(tmp_path, FORGE_LOG_CONSOLE=relayed.address))
    closed(relayed)
    pump._take(pump.out, [b"line"])
    assert pump._console.blocked < 0
    pump.finish("exit code 0")
    other = Pump(log_file, environment(tmp_path, FORGE_LOG_CONSOLE="forge-none"))
    other.finish("exit code 0")
    for each in (pump, other):
        for fd in (each.out, each.err, each._out_end, each._err_end):
            os.close(fd)


def test_a_long_line_is_shown_in_parts(tmp_path: Path) -> None:
    ended = start(tmp_path, "print('x' * 20000)")
    assert [len(line) for line in ended.stdout.splitlines()] == [len("[a-0] ") + part for part in (8192, 8192, 3616)]
    assert "x" * 20000 in written(tmp_path)


# ---- Records of other processes


def test_records_come_in_order_and_a_flood_is_counted() -> None:
    class Root(Reports):
        def __init__(self) -> None:
            super().__init__()
            self.sent: list[tuple[str, tuple[str, dict[str, object]]]] = []

        def send(self, kind: str, body: tuple[str, dict[str, object]]) -> None:
            self.sent.append((kind, body))

    root = Root()
    sender = RecordSender(root, process="trainer-0")
    for number in range(1000):
        sender.handle(logging.LogRecord("forge.x", logging.INFO, "", 0, "number %d", (number,), None))
    assert 200 <= len(root.sent) < 1000
    messages = [str(body[1]["message"]) for _, body in root.sent]
    assert messages[:2] == ["number 0", "number 1"]
    time.sleep(0.05)
    sender.handle(logging.LogRecord("forge.x", logging.INFO, "", 0, "the end", (), None))
    last = str(root.sent[-1][1][1]["message"])
    assert last.startswith("the end (")
    assert last.endswith(" records before this are in the log file only)")


def test_several_may_watch_one_process() -> None:
    """The rank's, and its log file's owner see the end of a process that is both for a moment."""

    async def body() -> list[str]:
        watch, seen, all_seen = LocalWatch(), list[str](), asyncio.Event()

        def note(who: str) -> None:
            seen.append(who)
            if len(seen) == 2:
                all_seen.set()

        process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        await watch.watch(process.pid, lambda: note("first"))
        await watch.watch(process.pid, lambda: note("second"))
        await watch.kill([process.pid])
        async with asyncio.timeout(LIMIT_S):
            await all_seen.wait()
        process.wait()
        await watch.kill([process.pid])
        await watch.close()
        return seen

    assert sorted(asyncio.run(body())) == ["first", "second"]


def test_the_stub_needs_nothing_of_the_library() -> None:
    """`python -I -S` of its file: with a log file it loads two more files by their paths."""
    program = f"""
import sys
sys.argv = ["x"]
import importlib.machinery, types
module = types.ModuleType("rank_stub")
importlib.machinery.SourceFileLoader("rank_stub", {rank_stub.__file__!r}).exec_module(module)
import os
os.environ["FORGE_LOG_FILE"] = ""
module._open_pump()
module._load("log_pump", {log_pump.__file__!r})
module._load("log_file", {log_file.__file__!r})
assert not [name for name in sys.modules if name.startswith("forge") or name in ("asyncio", "logging", "subprocess")]
"""
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, timeout=LIMIT_S)
