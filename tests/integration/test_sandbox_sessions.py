"""Long-lived sandboxes with the real boundary, and what hostile code does in them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge.runtime.sandbox import Box, SandboxError, SandboxLimits, find
from forge.runtime.sandbox.detection import _make
from forge.runtime.sandbox.runner import LaunchedSandbox
from sandboxes import BOUNDARIES, boundary, launcher_server

pytestmark = pytest.mark.usefixtures("leaves_nothing")

MIB = 1024**2
LIMITS = SandboxLimits(
    wall_s=200, memory_bytes=256 * MIB, processes=12, file_bytes=8 * MIB, folder_bytes=16 * MIB, output_bytes=4096
)
SLEEPERS = "cat /proc/[0-9]*/comm | grep -c sleep"
SHORT_S = 1.0
"""A time limit for what never ends. Nothing that is to succeed has it."""
HALF_S = 5.0
"""A time limit for what never ends and is to have begun."""


@pytest.fixture(scope="module", params=BOUNDARIES)
def backend(request: pytest.FixtureRequest) -> LaunchedSandbox:
    return boundary(request.param)


@pytest.fixture(scope="module")
def any_backend() -> LaunchedSandbox:
    for isolation in ("namespaces", "bubblewrap"):
        if find(isolation).works:  # type: ignore[arg-type]
            return _make(isolation, None)  # type: ignore[arg-type]
    pytest.skip("there is no boundary here: " + find("namespaces").detail)


def use(backend: LaunchedSandbox, body: Callable[[Box], Awaitable[Any]], limits: SandboxLimits = LIMITS) -> Any:
    """Run a coroutine with an open sandbox, and see that nothing is left of it."""

    before = set(psutil.Process().children())  # such as Python's own tracker of shared memory, of another test

    async def inside() -> Any:
        async with asyncio.timeout(500), Box(backend, limits=limits) as box:
            found = await body(box)
            below = [each for each in psutil.Process().children(recursive=True) if each not in before]
        assert below
        assert psutil.wait_procs(below, timeout=60)[1] == [], "everything ends with the sandbox"
        return found

    return asyncio.run(inside())


def test_the_shell_keeps_its_state(backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        first = await box.bash(
            "mkdir -p a/b; cd a/b; export NAME='x y'; own=1; f() { echo f$1; }; echo out; echo err >&2; false"
        )
        assert (first.output, first.exit_code, first.timed_out, first.note) == ("out\nerr\n", 1, False, "")
        assert (await box.bash("echo $? $PWD $NAME $own; f 2")).output == "1 /sandbox/a/b x y 1\nf2\n"
        assert (await box.bash("cat; echo 'it'\"'\"'s'")).output == "it's\n", "standard input is empty"
        assert (await box.bash("if then")).exit_code == 2
        assert (await box.bash("break; continue; return 3; echo $?")).exit_code == 0
        assert (await box.bash("printf 'a\\xffb\\0c'")).output == "a\ufffdb\0c"
        background = await box.bash("mkfifo go; (read -t 600 line <go; echo $line) & echo started")
        assert background.output == "started\n"
        assert (await box.bash("echo late >go; wait")).output == "late\n"
        assert "exec 200" in str(await box.bash("exec 200>&1; echo exec 200"))
        several = await asyncio.gather(*(box.bash(f"echo {number}") for number in range(5)))
        assert [each.output for each in several] == [f"{number}\n" for number in range(5)]
        assert (await box.bash("echo \0")).exit_code == 2
        assert (await box.bash("echo " + "x" * 200_000 + " | wc -c")).output == "200001\n"
        assert (
            await box.bash("printf '#!/bin/sh\\necho ran\\n' >s; chmod +x s; ./s; python3 -c 'print(6 * 7)'")
        ).output == "ran\n42\n"

    use(backend, body)


def test_the_kernel_keeps_its_variables(backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        first = await box.python("import os, sys\nx = 20\nprint('out'); print('err', file=sys.stderr)\nx + 1")
        assert (first.output, first.value, first.error, first.note) == ("out\nerr\n", "21", None, "")
        assert (await box.python("x, os.getcwd(), input")).value == "(20, '/sandbox', <built-in function input>)"
        assert str((await box.python("def f():\n    return x / 0\nf()")).error).endswith(
            "ZeroDivisionError: division by zero"
        )
        assert "EOFError" in str((await box.python("input()")).error)
        assert "SystemExit" in str((await box.python("exit(3)")).error)
        assert (
            await box.python("import pickle\nclass C: pass\nx, type(pickle.loads(pickle.dumps(C()))) is C")
        ).value == "(20, True)"
        assert (await box.python("os.write(1, b'\\xff')")).output == "\ufffd"
        forked = await box.python("child = os.fork()\nif child: os.waitpid(child, 0)\nx")
        assert (forked.value, forked.note) == ("20", ""), "a fork is not a second kernel"
        assert (await box.python("sys.stdout.close(); os.close(1); x")).value == "20"

    use(backend, body)


def test_a_command_that_takes_too_long(backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        await box.python("kept = 1")
        await box.bash("mkdir d; cd d; export KEPT=2; lost=3; (setsid sleep 1000 &) ; sleep 1000 &")
        assert (await box.bash(f'until [ "$({SLEEPERS})" = 2 ]; do :; done')).exit_code == 0
        late = await box.bash(
            "echo half; trap '' TERM INT HUP; cd /; export KEPT=9; while :; do :; done", timeout_s=HALF_S
        )
        assert (late.output, late.exit_code, late.timed_out) == ("half\n", None, True)
        assert str(late).startswith(
            f"half\n[killed after {HALF_S:g} s, with everything that ran in the background; the next"
        )
        after = await box.bash(f"echo $PWD $KEPT [$lost]; {SLEEPERS}")
        assert (after.output, after.note) == ("/sandbox/d 2 []\n0\n", "")
        assert (await box.python("kept")).value == "1", "the kernel is not the shell's"
        stopped = await box.bash("kill -STOP $$", timeout_s=SHORT_S)
        assert stopped.timed_out
        assert (await box.bash("echo $KEPT")).output == "2\n"

    use(backend, body)


def test_code_that_takes_too_long(backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        await box.bash("kept=1")
        assert (await box.python("x = 5")).note == ""
        late = await box.python("print('half')\nwhile True: pass", timeout_s=HALF_S)
        assert (late.output, late.timed_out) == ("half\n", True)
        assert str(late.error).endswith("KeyboardInterrupt")
        assert (await box.python("x")).value == "5", "an interrupt keeps the variables"
        stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
        killed = await box.python(stubborn, timeout_s=SHORT_S)
        assert killed.timed_out
        assert "its variables are lost" in killed.note
        assert "NameError" in str((await box.python("x")).error)
        assert (await box.bash("echo $kept")).output == "1\n", "the shell is not the kernel's"

    use(backend, body)


def test_hostile_commands_are_outcomes(backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        ended = await box.bash("echo bye; exit 3")
        assert (ended.output, ended.exit_code) == ("bye\n", 3)
        assert "the shell ended (exited with 3)" in ended.note
        assert (await box.bash("exec ls /")).exit_code == 0
        assert (await box.bash("kill -9 $$")).exit_code == -9
        await box.python("1")
        await box.bash("kill -9 1; kill -INT 1; kill -TERM 1; kill -STOP 1; prlimit -p 1 -n1 -t1; kill -9 -1")
        assert (await box.bash("echo alive")).output == "alive\n"
        assert "ended (killed by signal 9)" in (await box.python("1")).note
        flood = await box.bash("head -c 100000000 /dev/zero | tr '\\0' x; echo end")
        assert flood.exit_code == 0
        assert len(flood.output) < 5000
        assert flood.output.endswith("xend\n")
        assert "[… 99995908 bytes left out …]" in flood.output
        bomb = await box.bash("bomb() { bomb | bomb & }; bomb 2>/dev/null; while :; do :; done", timeout_s=SHORT_S)
        assert bomb.timed_out
        assert (await box.bash("/bin/echo usable")).output == "usable\n"
        await box.bash("bomb() { while :; do (:) & done; }; bomb 2>/dev/null & exit 0")
        assert (await box.bash("echo started")).output == "started\n", "though processes multiply in the background"
        await box.bash("while :; do :; done", timeout_s=SHORT_S)
        assert (await box.bash("/bin/echo usable")).output == "usable\n"
        assert (await box.bash("head -c 20000000 /dev/zero >large")).exit_code != 0
        full = await box.bash("rm -f large; for i in 1 2 3 4; do head -c 6000000 /dev/zero >f$i; done")
        assert "No space left" in full.output
        with pytest.raises(OSError, match="No space left"):
            await box.write_file("more", "x" * 5_000_000)
        await box.bash("rm -rf /sandbox /tmp/* ~ 2>/dev/null; chmod 0 /sandbox; true")
        await box.write_file("still", "there")
        assert await box.files() == {"still": "there"}
        memory = await box.bash("python3 -c 'x = bytearray(1 << 30)'")
        assert (memory.exit_code, "MemoryError" in memory.output) == (1, True)

    use(backend, body)


def test_hostile_code_is_an_outcome(backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        assert "ended (exited with 7)" in (await box.python("import os; os._exit(7)")).note
        assert "MemoryError" in str((await box.python("x = bytearray(1 << 30)")).error)
        assert "RecursionError" in str((await box.python("def f(): f()\nf()")).error)
        flood = await box.python("print('x' * 10_000_000)\n'y' * 10_000_000")
        assert len(str(flood)) < 20_000
        forge_record = (
            "import os, struct\nfor fd in range(3, 300):\n    try: os.write(fd, b'[1]\\0')\n    except OSError: pass"
        )
        await box.python(forge_record)
        assert (await box.python("6 * 7")).value == "42"
        closes = await box.python("import os; os.closerange(0, 300)", timeout_s=SHORT_S)
        assert "its variables are lost" in closes.note
        assert (await box.python("6 * 7")).value == "42"
        await box.python("import threading, time, _thread\nthreading.Thread(target=lambda: time.sleep(1e6)).start()")
        deep = await box.python(
            "import os\nfor _ in range(1500):\n    os.mkdir('d' * 20)\n    os.chdir('d' * 20)\nos.chdir('/sandbox')"
        )
        assert deep.error is None
        await box.write_file("ok", "1")
        await box.python(
            "[open(f'/tmp/{name}.py', 'w').write('1 / 0') for name in ('ast', 'json', 'types')]; os._exit(0)"
        )
        assert (await box.python("6 * 7")).value == "42", "a file in /tmp is no module of the kernel"
        found = await box.files()
        assert found == {"ok": "1"}
        assert list(found.left_out.values())[-1] == "File name too long"

    use(backend, body)


def test_the_policy_does_not_cause_failures_of_the_infrastructure(backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        await box.bash("chmod 0 /tmp /sandbox; exit")
        assert (await box.bash("echo usable; ls /tmp")).output == "usable\n"
        await box.bash("chmod 0 /tmp /sandbox")
        assert (await box.python("6 * 7")).value == "42"
        stop = "import os, signal, threading\ndef stop():\n    while True: os.kill(-1, signal.SIGSTOP)\n"
        await box.python(stop + "threading.Thread(target=stop).start()")
        late = await box.bash("echo started", timeout_s=SHORT_S)
        assert late.timed_out or late.output == "started\n"
        await box.bash("exit", timeout_s=SHORT_S)
        assert str(await box.bash("echo again", timeout_s=SHORT_S))
        for path in ("\ud800", "a\0b", "x" * 300, "a/" * 3000):
            for use_file in (box.read_file(path), box.write_file(path, "x"), box.put({path: "x"})):
                with pytest.raises(OSError):
                    await use_file
        records = LIMITS.open_files - 11
        for record in (b"9" * 100_000 + b"\0\0\0", b"0\0" * 3 + b"0\0" * 3, b"x" * 5_000_000):
            await box.write_file("record", record)
            await box.bash(f"cat record >/proc/$$/fd/{records}; cat record >&{records}", timeout_s=SHORT_S)
        await box.python("import os; os.kill(os.getpid(), 9)")
        assert (await box.bash("echo alive")).output == "alive\n"
        assert (await box.python("6 * 7")).value == "42"

    use(backend, body)


def test_nothing_of_ours_is_visible(backend: LaunchedSandbox) -> None:
    async def body(box: Box, port: int) -> None:
        own = str(Path(__file__).resolve())
        secret = await box.bash(
            f"cat {own} /etc/shadow; ls /proc/1/fd /proc/1/cwd/; cat /proc/1/environ /proc/1/mem; env"
        )
        assert own not in secret.output.replace(f"{own}: No such file", "")
        assert "FORGE" not in secret.output
        assert "root:" not in secret.output
        command = await box.bash("tr '\\0' '\\n' </proc/1/cmdline; ls /proc/self/fd")
        assert str(Path(sys.prefix)) not in command.output
        assert command.output.split()[-4:] == ["0", "1", "2", "3"], "nothing is inherited"
        fds = await box.python("import os; sorted(map(int, os.listdir('/proc/self/fd')))[:3]")
        assert fds.value in ("[0, 1, 2]", None)
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5)"
        assert "Error" in str((await box.python(connect)).error)
        assert "refused" in (await box.bash(f": <>/dev/tcp/127.0.0.1/{port} || echo refused")).output
        unshare = "import ctypes; ctypes.CDLL(None).unshare(0x10000000)"
        assert (await box.python(unshare)).value == "-1"
        assert (await box.bash("touch /usr/x /x /etc/x")).exit_code == 1

    with socket.create_server(("127.0.0.1", 0)) as server:
        use(backend, lambda box: body(box, server.getsockname()[1]))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_files_snapshots_and_copies(backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        await box.put({"src/a.py": "A = 1\n", "data.bin": b"\xff\0"})
        await box.write_file("/sandbox/notes/n.txt", "grüße")
        made = await box.bash(
            "ln -s src/a.py l; ln -s /etc/passwd p; mkfifo q; mkdir e; chmod +x src/a.py; cat notes/n.txt"
        )
        assert (made.output, made.exit_code) == ("grüße", 0)
        assert await box.read_file("src/a.py") == b"A = 1\n"
        assert await box.read_file("l") == b"A = 1\n"
        files = await box.files()
        assert files == {"src/a.py": "A = 1\n", "data.bin": b"\xff\0", "notes/n.txt": "grüße"}
        assert files.left_out == {"l": "a link to src/a.py", "p": "a link to /etc/passwd", "q": "not a regular file"}
        for path in ("p", "q", "none", "src"):
            with pytest.raises(OSError):
                await box.read_file(path)
        with pytest.raises(OSError, match="larger than"):
            await box.write_file("x", b"x" * (8 * MIB + 1))
        await box.python("variable = 1")
        snapshot = await box.snapshot()
        async with Box(backend, limits=LIMITS) as other:
            await other.put(snapshot)
            listing = "find . -printf '%p %y %m %l\\n' | sort"
            assert (await other.bash(listing)).output == (await box.bash("rm q; " + listing)).output
            assert "NameError" in str((await other.python("variable")).error)
            await other.bash("echo changed >src/a.py")
        assert await box.read_file("src/a.py") == b"A = 1\n"

    use(backend, body)


def test_a_cancelled_call_kills_its_command(any_backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        await box.bash("mkfifo go")
        for run, text in (
            (box.bash, "echo >go; sleep 1000"),
            (box.python, "open('go', 'w').close()\nwhile True: pass"),
        ):
            running = asyncio.create_task(run(text))
            waiting = asyncio.create_task(run("0"))
            reader = box.python if run == box.bash else box.bash
            await reader("open('go').read()" if run == box.bash else "cat go")
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert not (await waiting).timed_out, "the next call runs"
        assert (await box.bash(SLEEPERS)).output == "0\n"

    use(any_backend, body)


def test_what_kills_a_sandbox_from_outside_is_a_failure(backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        await box.bash("mkfifo up")
        await box.write_file("a", "as another user, which must not change what happens")
        running = asyncio.create_task(box.bash("echo >up; sleep 1000"))
        await box.python("open('up').read()")
        (launcher,) = launcher_server().children()
        launcher.kill()
        with pytest.raises(SandboxError, match="its launcher died") as caught:
            await running
        assert caught.value.kind == "sandbox_died"
        with pytest.raises(SandboxError):
            await box.python("1")

    use(backend, body)


def test_a_sandbox_closes_when_its_time_is_over(any_backend: LaunchedSandbox) -> None:
    async def body(box: Box) -> None:
        with pytest.raises(SandboxError, match="open for longer than 10 s") as caught:
            await box.bash("sleep 1000")
        assert caught.value.kind == "sandbox_open_time"

    use(any_backend, body, SandboxLimits(wall_s=200, open_s=10))  # it is to start meanwhile


def test_a_sandbox_that_cannot_start_is_a_failure(any_backend: LaunchedSandbox) -> None:
    plan = {**any_backend._plan, "readable": ["/usr\0bad"]}
    broken = LaunchedSandbox(any_backend.isolation, plan, python="/usr/bin/python3")
    with pytest.raises(SandboxError) as caught:
        use(broken, lambda box: box.bash("echo"))
    assert caught.value.kind == "sandbox_start"


def test_many_at_once_without_threads(any_backend: LaunchedSandbox) -> None:
    async def one(number: int) -> str:
        async with Box(any_backend, limits=LIMITS) as box:
            await box.bash(f"echo {number} >mine")
            return (await box.bash("cat mine")).output

    async def all_of_them() -> None:
        before = set(threading.enumerate())
        found = await asyncio.gather(*(one(number) for number in range(40)))
        assert found == [f"{number}\n" for number in range(40)]
        assert set(threading.enumerate()) <= before

    asyncio.run(all_of_them())


OWNER = """
import asyncio, sys
from forge.runtime.sandbox import Box, open_sandbox
async def main():
    async with Box(open_sandbox(sys.argv[1])) as box:
        await box.bash("(setsid sleep 1000 &); sleep 1000 &")
        await box.python("import subprocess; subprocess.Popen(['sleep', '1000'])")
        print("up", box.work, flush=True)
        await box.bash("sleep 1000")
asyncio.run(main())
"""


@pytest.mark.parametrize("isolation", ["namespaces", "bubblewrap", "process"])
def test_everything_is_gone_when_the_owner_is_killed(isolation: str) -> None:
    finding = find(isolation)  # type: ignore[arg-type]
    if not finding.works:
        pytest.skip(f"{isolation} does not work here: {finding.detail}")
    with subprocess.Popen([sys.executable, "-c", OWNER, isolation], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        word, work = owner.stdout.readline().split()
        assert word == "up"
        below = psutil.Process(owner.pid).children(recursive=True)
        assert len(below) >= 8, "server, launcher, first process, shell, kernel and three programs"
        owner.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(below, timeout=300)[1] == []
    if isolation == "process":
        assert not os.path.exists(os.path.dirname(work))


def test_process_isolation_has_the_same_calls() -> None:
    async def body(box: Box) -> None:
        await box.put({"a": "1"})
        assert (await box.bash("cat a; sleep 1000 &")).output == "1"
        assert (await box.bash("sleep 1000", timeout_s=SHORT_S)).timed_out
        assert (await box.python("open('a').read()")).value == "'1'"
        assert await box.files() == {"a": "1"}
        folders.append(os.path.dirname(box.work))
        assert os.path.isdir(folders[0])

    folders: list[str] = []
    use(_make("process", None), body)
    assert not os.path.exists(folders[0])
