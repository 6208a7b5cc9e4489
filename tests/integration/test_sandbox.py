"""Hostile programs in a sandbox. They are run nowhere else, and reach for loopback addresses at most."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from forge.errors import LaunchError, OptionError
from forge.rewards.code import code
from forge.runtime.sandbox import Limits, Sandbox, find, open_sandbox, survey
from forge.types import Completion, Task
from sandboxes import BOUNDARIES, boundary

pytestmark = pytest.mark.usefixtures("leaves_nothing")

MIB = 1024**2
SMALL = Limits(wall_s=200, cpu_s=5, memory_bytes=256 * MIB, processes=4, output_bytes=64 * 1024)


@pytest.fixture(scope="module", params=BOUNDARIES)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """Every isolation that is a boundary."""
    return boundary(request.param)


@pytest.fixture
def processes_before() -> Iterator[None]:
    """Fail if a process of a sandbox's user is left, wherever in the tree it is. Those of tests that run beside this
    one end within their limits; what is left behind here would stay."""
    yield
    _, left = psutil.wait_procs([process for process in psutil.process_iter() if is_program(process)], timeout=300)
    assert left == []


def is_program(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[-1:] == ["/tmp/main.py"]
    except psutil.NoSuchProcess:
        return False


def errors_of(sandbox: Sandbox, program: str) -> dict[str, str]:
    """Run a program that defines `attempts`, and say for each what came of it: an error's name, or `done`."""
    harness = """
import json
found = {}
for name, attempt in attempts.items():
    try:
        attempt()
    except BaseException as error:
        found[name] = type(error).__name__
    else:
        found[name] = "done"
print(json.dumps(found))
"""
    outcome = sandbox.run(program + harness, limits=SMALL)
    assert outcome.exit_code == 0, outcome
    found: dict[str, str] = json.loads(outcome.stdout)
    return found


def test_a_program_reads_and_writes_and_exits(sandbox: Sandbox) -> None:
    program = "import sys; print(sys.stdin.read().upper()); print('x', file=sys.stderr); sys.exit(7)"
    outcome = sandbox.run(program, stdin="grüße" * 50_000, limits=Limits())
    assert outcome.stdout == "GRÜSSE" * 50_000 + "\n"
    assert (outcome.stderr, outcome.exit_code, outcome.timed_out, outcome.killed_for) == ("x\n", 7, False, None)
    assert outcome.seconds > 0
    assert sandbox.run("import os; os.abort()").exit_code == -6
    assert sandbox.run("import sys; sys.stdin.close()", stdin="unread" * 100_000).exit_code == 0
    assert sandbox.run("import os; os.write(1, b'\\xff!')").stdout == "\ufffd!"


def test_runs_share_nothing(sandbox: Sandbox) -> None:
    assert sandbox.run("open('kept', 'w').write('x')").exit_code == 0
    outcome = sandbox.run("import os; print(sorted(os.listdir('.')), os.getcwd())")
    assert outcome.stdout == "['main.py'] /tmp\n"
    libraries = sandbox.run("import math, json, re, ssl, sqlite3, decimal, multiprocessing; exit(0)")
    assert libraries.exit_code == 0, libraries.stderr


def test_files_and_environment_of_ours_are_out_of_reach(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    tmp_path.chmod(0o755)
    os.environ["FORGE_TEST_SECRET"] = "secret"
    try:
        program = f"""
import os, pathlib
def environ_of_all():
    numbers = [name for name in os.listdir('/proc') if name.isdigit()]
    texts = [os.environb] + [pathlib.Path('/proc', name, 'environ').read_bytes() for name in numbers]
    assert b'FORGE_TEST_SECRET' in repr(texts).encode()
attempts = {{
    "shadow": lambda: open('/etc/shadow').read(),
    "our file": lambda: open({str(secret)!r}).read(),
    "our source": lambda: open({__file__!r}).read(),
    "environment": environ_of_all,
    "write /usr": lambda: open('/usr/here', 'w'),
    "write /": lambda: open('/here', 'w'),
    "write /etc": lambda: open('/etc/passwd', 'a'),
    "write /dev": lambda: open('/dev/here', 'w'),
    "disks": lambda: [open('/dev/' + name) for name in ('sda', 'vda', 'mem', 'kmsg')],
    "kernel": lambda: open('/proc/sys/kernel/hostname', 'w').write('x'),
    "become root": lambda: os.setuid(0),
    "own folder": lambda: open('/tmp/here', 'w').write('x'),
}}
"""
        found = errors_of(sandbox, program)
    finally:
        del os.environ["FORGE_TEST_SECRET"]
    allowed = {name for name, result in found.items() if result == "done"}
    assert allowed == {"own folder"}, found


def test_no_network_and_no_way_out(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = errors_of(
            sandbox,
            f"""
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    if getattr(libc, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)
attempts = {{
    "connect": lambda: socket.create_connection(('127.0.0.1', {port}), timeout=5),
    "listen": lambda: socket.create_server(('127.0.0.1', 0)),
    "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port})),
    "raw": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "user namespace": lambda: call('unshare', 0x10000000),
    "mount": lambda: call('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, None),
    "chroot": lambda: os.chroot('/tmp'),
    "trace": lambda: call('ptrace', 16, 1, 0, 0),
    "kill launcher": lambda: os.kill(os.getppid(), 9) or os.kill(os.getppid(), 0) or 1 / 0,
    "memory without limit": lambda: os.memfd_create('x'),
    "shared memory": lambda: call('shmget', 0, 1 << 20, 0o1600),
    "pair": lambda: socket.socketpair(),
}}
""",
        )
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert found.pop("pair") == "done"
    assert found.pop("kill launcher") in ("PermissionError", "ZeroDivisionError")  # refused, or without effect
    assert set(found.values()) <= {"PermissionError", "OSError"}, found


def test_memory_files_and_processes_are_limited(sandbox: Sandbox) -> None:
    found = errors_of(
        sandbox,
        """
import os
def fork_bomb():
    held = []
    try:
        for _ in range(100):
            pid = os.fork()
            if pid == 0:
                os.close(shut)
                os.read(gate, 1)
                os._exit(0)
            held.append(pid)
    finally:
        os.close(shut)
        for pid in held:
            os.waitpid(pid, 0)
        assert len(held) < 8, len(held)
gate, shut = os.pipe()
def fill_folder():
    for number in range(100):
        with open(f'/tmp/{number}', 'wb') as file:
            file.write(bytes(8 << 20))
def many_files():
    return [open('/dev/null') for _ in range(1000)]
attempts = {
    "memory": lambda: bytearray(1 << 30),
    "large file": lambda: open('/tmp/large', 'wb').write(bytes(17 << 20)),
    "open files": many_files,
    "fork bomb": fork_bomb,
    "folder": fill_folder,
}
""",
    )
    assert found == {
        "memory": "MemoryError",
        "large file": "OSError",
        "open files": "OSError",
        "fork bomb": "BlockingIOError",
        "folder": "OSError",
    }


STUBBORN = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU):
    signal.signal(number, signal.SIG_IGN)
"""


def test_a_program_may_not_run_for_ever(sandbox: Sandbox, processes_before: None) -> None:
    short = Limits(wall_s=1.0, cpu_s=5)
    outcome = sandbox.run(STUBBORN + "while True: time.sleep(60)", limits=short)
    assert (outcome.timed_out, outcome.killed_for) == (True, "time")
    assert outcome.exit_code == -9
    outcome = sandbox.run("while True: pass", limits=Limits(wall_s=300, cpu_s=1))
    assert (outcome.timed_out, outcome.killed_for) == (False, "cpu"), outcome
    outcome = sandbox.run("while True: print('x' * 1000)", limits=SMALL)
    assert (outcome.killed_for, len(outcome.stdout)) == ("output", 64 * 1024)
    outcome = sandbox.run("import sys\nwhile True: sys.stderr.write('x' * 1000)", limits=SMALL)
    assert (outcome.killed_for, len(outcome.stderr)) == ("output", 64 * 1024)


def test_nobody_ignores_the_end_of_processor_time() -> None:
    outcome = open_sandbox("process").run(STUBBORN + "while True: pass", limits=Limits(wall_s=300, cpu_s=1))
    assert (outcome.exit_code, outcome.timed_out, outcome.killed_for) == (-9, False, "cpu"), outcome


def test_daemons_die_with_their_program(sandbox: Sandbox, processes_before: None) -> None:
    program = """
import os, time
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print('daemon', flush=True)
        os.write(writing, b'x')
        while True:
            time.sleep(60)
    os._exit(0)
os.wait()
os.read(reading, 1)
"""
    outcome = sandbox.run(program, limits=Limits(wall_s=300))
    assert (outcome.stdout, outcome.exit_code, outcome.killed_for) == ("daemon\n", 0, None)
    outcome = sandbox.run(program + "while True: time.sleep(60)", limits=Limits(wall_s=0.5))
    assert outcome.timed_out


def test_a_program_may_delete_its_folder(sandbox: Sandbox) -> None:
    program = "import shutil; shutil.rmtree('/tmp', ignore_errors=True); shutil.rmtree('/usr/bin', ignore_errors=True)"
    outcome = sandbox.run(program + "; print('alive')")
    assert outcome.stdout == "alive\n"
    assert Path(tempfile.gettempdir()).is_dir()
    assert sandbox.run("print(1)").stdout == "1\n"


def test_everything_dies_with_the_library(sandbox: Sandbox, processes_before: None) -> None:
    """The process that asked for the run is killed without warning while the program runs."""
    program = "import os\nos.fork() or os.setsid()\nprint('up', flush=True)\nimport time\nwhile True: time.sleep(60)"
    plan = sandbox.plan(program, folder="/tmp", limits=SMALL)  # type: ignore[attr-defined]
    code = """
import json, sys
from forge.runtime.sandbox import Limits
from forge.runtime.sandbox.runner import Run
class TellingRun(Run):
    def _read(self, key):
        super()._read(key)
        if self._texts["stdout"].count(b"up") == 2:
            print("up", flush=True)
TellingRun(json.loads(sys.argv[1]), b"", limits=Limits(wall_s=300)).to_its_end()
"""
    with subprocess.Popen([sys.executable, "-c", code, json.dumps(plan)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        below = psutil.Process(holder.pid).children(recursive=True)
        assert sum(is_program(each) for each in below) == 2
        holder.kill()
    assert psutil.wait_procs(below, timeout=600)[1] == []


def test_process_is_used_only_by_name_and_still_limits() -> None:
    finding = find("process")
    assert finding.works, finding.detail
    sandbox = open_sandbox("process")
    assert sandbox.isolation == "process"
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""
import os, socket
attempts = {{
    "connect": lambda: socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=5),
    "memory": lambda: bytearray(1 << 30),
    "write": lambda: open({str(Path(__file__).with_name("here"))!r}, 'w'),
    "own folder": lambda: (open('here', 'w').write('x'), os.makedirs('a/b'), os.chmod('a', 0)),
}}
"""
        assert errors_of(sandbox, program) == {
            "connect": "PermissionError",
            "memory": "MemoryError",
            "write": "PermissionError",
            "own folder": "done",
        }
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while True: time.sleep(60)\nprint(os.getcwd())"
    outcome = sandbox.run(daemon)
    assert outcome.exit_code == 0
    assert not Path(outcome.stdout.strip()).exists()
    assert sandbox.run("import time\nwhile True: time.sleep(60)", limits=Limits(wall_s=0.3)).timed_out


def test_auto_takes_a_boundary_or_refuses() -> None:
    assert [finding.isolation for finding in survey()] == ["bubblewrap", "namespaces", "process"]
    if any(finding.works for finding in survey()[:2]):
        assert open_sandbox().isolation in ("bubblewrap", "namespaces")
    else:
        with pytest.raises(LaunchError, match="cannot isolate untrusted programs"):
            open_sandbox()


def test_another_interpreter_brings_its_packages() -> None:
    if not any(finding.works for finding in survey()[:2]):
        pytest.skip("there is no boundary here")
    outcome = open_sandbox(python=sys.executable).run(
        "import numpy; print(numpy.arange(3).sum())", limits=Limits(wall_s=200, cpu_s=100)
    )
    assert outcome.stdout == "3\n", outcome.stderr
    with pytest.raises(OptionError) as caught:
        open_sandbox("namespaces", python="/no/such/python")
    assert caught.value.value == "/no/such/python"


def score(program: str, *tests: object, **args: object) -> float:
    completion = Completion((1,), (2,), (0.0,), None, f"So:\n```python\n{program}\n```\n", "stop")
    return code(Task("p", metadata={"tests": tests, "setup": "import math"}), completion, **args)  # type: ignore[arg-type]


def test_the_reward_for_code() -> None:
    if not any(finding.works for finding in survey()[:2]):
        pytest.skip("there is no boundary here")
    tests = ("assert f(2) == 4", "assert f(3) == 9", "assert f(-1) == math.pi")
    assert score("def f(x): return x * x", *tests) == pytest.approx(2 / 3)
    assert score("def f(x): return x * x", *tests, credit="all") == 0.0
    assert score("def f(x): return x * x", *tests[:2], "syntax error", "assert f(1) == 1") == pytest.approx(3 / 4)
    loops = "def f(x):\n    while x == 3: pass\n    return x * x"
    assert score(loops, *tests, limits={"wall_s": 60, "cpu_s": 1}) == pytest.approx(1 / 3)
    pairs = ({"stdin": "2\n", "stdout": "4"}, {"stdin": "3\n", "stdout": "9"})
    assert score("print(int(input()) ** 2)", *pairs) == 1.0
    assert score("print(int(input()) * 2)", *pairs) == 0.5
    assert score("print(int(input()) * 2)", *reversed(pairs), credit="all") == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import builtins; builtins.exec = builtins.compile = lambda *_: None",
        "import os; os.write = print",
        "class AssertionError(BaseException): pass",
        "raise KeyboardInterrupt",
        "import json, sys; json.loads = lambda *_: {}; sys.stdin = None",
        "for number in range(9): print('\\n', number)",
    ],
)
def test_tests_are_not_passed_by_tricks(program: str) -> None:
    if not any(finding.works for finding in survey()[:2]):
        pytest.skip("there is no boundary here")
    assert score(program, "assert 1 == 2", "assert undefined") == 0.0
