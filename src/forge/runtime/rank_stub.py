"""Starts a rank process: as a fork of a process that has imported torch already, or else by itself.

Monarch starts this program for every rank, with `python -I -S`, which takes milliseconds. If a fork server
(`forge.runtime.fork_server`) is named in the environment, the rank is a fork of that one, and there are three
processes:

    stand-in ── what Monarch started: this program; it ends as the rank ends
    keeper ──── the parent of the rank: this program again; it ends the rank when the stand-in has ended
    rank

Each ends with any other, however that one ends. Without a server, and whenever it refuses, this process becomes the
rank, or its parent where the rank has a log file: the stand-in, or the parent, writes what the rank prints
(`forge.runtime.log_pump`).

Only the standard library is imported here, and nothing of `forge`.
"""

from __future__ import annotations

import array
import importlib.machinery
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from forge.runtime.log_pump import Pump

FORK_SERVER = "FORGE_FORK_SERVER"
"""Names the socket of the fork server, in Linux's abstract namespace."""
PRELOAD = "FORGE_PRELOAD"
"""Lists the modules that a rank is going to import, with commas between them."""
OWNER = "FORGE_OWNER_PID"
"""Names the process that asked for this rank, where that is another than its parent and on the same machine."""
ANSWER_S = 60.0
"""How long the server may take: it imports one thing after another."""
LOG_FILE = "FORGE_LOG_FILE"
"""Names the log file of a rank."""
STAND_IN = "FORGE_STAND_IN_PID"
"""Tells a rank the process that writes its log file, which ends after the rank."""
LENGTH = struct.Struct("!I")
PEER = struct.Struct("3i")
FORKED = b"y"
_RANK_MAIN = "forge.runtime.rank_main"


def peer_uid(connection: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket."""
    return int(PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[1])


def write_arguments(arguments: list[bytes], environment: list[bytes]) -> bool:
    """Replace what `/proc/PID/cmdline` and `/proc/PID/environ` show for this process.

    Return False if the kernel does not allow it or there is too little room: the room is what the program was started
    with. The variables of the process itself (`os.environ`) must have been set anew before, because the C library reads
    the old ones from this memory.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        memory = os.open("/proc/self/mem", os.O_WRONLY)
    except OSError:
        return False
    first_argument, last_argument, first_variable, last_variable = map(int, fields[45:49])
    try:
        for words, start, end in (
            (arguments, first_argument, last_argument),
            (environment, first_variable, last_variable),
        ):
            text = b"".join(word + b"\0" for word in words)
            if not start or len(text) > end - start:
                return False
            os.pwrite(memory, text.ljust(end - start, b"\0"), start)
    except OSError:
        return False
    finally:
        os.close(memory)
    return True


def request(environment: Mapping[str, str], preload: Sequence[str]) -> bytes:
    """Return the message that asks for a fork with this environment that has imported these modules."""
    said = {"environment": dict(environment), "folder": os.getcwd(), "preload": list(preload)}
    body = json.dumps(said).encode()
    return LENGTH.pack(len(body)) + body


def _request(address: str) -> socket.socket:
    """Send everything that a fork needs to continue as this process would: environment, folder, standard streams."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("\0" + address)
    if peer_uid(connection) != os.geteuid():
        raise OSError("the fork server belongs to another user")
    message = request(os.environ, [name for name in os.environ.get(PRELOAD, "").split(",") if name])
    streams = array.array("i", [0, 1, 2])
    connection.sendmsg([message[: LENGTH.size]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    connection.sendall(message[LENGTH.size :])
    return connection


def _is_taken_over(connection: socket.socket, masters: list[int]) -> bool:
    """Wait for the answer: whether there is a rank now."""
    readable, _, _ = select.select([connection.fileno(), *masters], [], [], ANSWER_S)
    if any(fd in readable for fd in masters):
        os._exit(1)
    return bool(readable) and connection.recv(1) == FORKED


def _stand_in(connection: socket.socket, masters: list[int], pump: Pump | None) -> None:
    """Wait for the end of the rank, and end in the same way."""
    write_arguments([b"forge-rank-stand-in"], [])  # what searches the environment of processes is to find the rank
    readable, report = _wait([connection.fileno(), *masters], pump), b""
    if connection.fileno() in readable:
        try:
            report = connection.recv(LENGTH.size, socket.MSG_WAITALL)
        except OSError:  # the keeper was killed
            report = b""
    if len(report) != LENGTH.size:  # the keeper was killed, or this rank is not wanted any more
        _finish(pump, "ended with the process that started it")
        os._exit(1)
    _end_like(os.waitstatus_to_exitcode(LENGTH.unpack(report)[0]), pump)


def _wait(descriptors: list[int], pump: Pump | None) -> list[int]:
    """Wait until one of the descriptors can be read, and write what the rank prints meanwhile."""
    if pump is None:
        return select.select(descriptors, [], [])[0]
    pump.leave_streams()
    return pump.wait(descriptors)


def _be_parent(pump: Pump, masters: list[int]) -> None:
    """Start the rank as a child of this process, and end as it ends. Returns in the child alone."""
    rank = os.fork()
    if not rank:
        return
    write_arguments([b"forge-rank-stand-in"], [])
    ended = os.pidfd_open(rank)
    if ended not in _wait([ended, *masters], pump):
        signal.pidfd_send_signal(ended, signal.SIGKILL)
    _, status = os.waitpid(rank, 0)
    _end_like(os.waitstatus_to_exitcode(status), pump)


def _finish(pump: Pump | None, how: str) -> None:
    if pump is not None:
        pump.finish(how)


def _end_like(code: int, pump: Pump | None) -> None:
    _finish(pump, f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}")
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def _keep(rank: int, connection: socket.socket) -> None:
    """Wait for the end of a rank, which is a child of this process, and report it; or for the end of the stand-in."""
    ended = os.pidfd_open(rank)
    readable, _, _ = select.select([ended, connection.fileno()], [], [])
    if ended not in readable:  # the stand-in sends nothing: it has ended
        signal.pidfd_send_signal(ended, signal.SIGKILL)
    _, status = os.waitpid(rank, 0)
    try:
        connection.sendall(LENGTH.pack(status))
    except OSError:  # it has ended
        os._exit(1)
    os._exit(0)


def keeper_command(rank: int, connection: int) -> list[str]:
    """Return the command of a keeper, which the parent of a rank executes."""
    return [sys.executable, "-I", "-S", __file__, str(rank), str(connection)]


def _ask_server(address: str, masters: list[int], pump: Pump | None) -> None:
    """Stand for a fork of the server, and end with it. Return if there is no server, or it refuses."""
    try:
        connection = _request(address)
        is_taken_over = _is_taken_over(connection, masters)
    except OSError:  # no server: what it would have done is done here
        return
    if is_taken_over:
        _stand_in(connection, masters, pump)


def _open_pump() -> Pump | None:
    """Let what is printed from now on go to the log file of the rank, if it has one."""
    if not os.environ.get(LOG_FILE):
        return None
    folder = os.path.dirname(os.path.abspath(__file__))
    log_file = _load("log_file", os.path.join(os.path.dirname(folder), "observe", "logs", "log_file.py"))
    pump: Pump | None = _load("log_pump", os.path.join(folder, "log_pump.py")).open_pump(log_file, os.environ)
    if pump is not None:
        pump.take_streams()
    return pump


def _load(name: str, path: str) -> Any:
    module = types.ModuleType(name)
    importlib.machinery.SourceFileLoader(name, path).exec_module(module)
    return module


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # for the controller, which ends its ranks itself
        signal.signal(number, signal.SIG_IGN)
    if len(sys.argv) > 1:
        _keep(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
    address = os.environ.pop(FORK_SERVER, "")
    pump = _open_pump()
    try:
        parents = {os.getppid(), int(os.environ.get(OWNER, os.getppid()))}
        masters = [os.pidfd_open(pid) for pid in parents] if address or pump is not None else []
        if pump is not None:
            os.environ[STAND_IN] = str(os.getpid())
        if address:
            _ask_server(address, masters, pump)
    except ProcessLookupError:  # the process that asked for the rank has ended
        os._exit(1)
    if pump is not None:
        _be_parent(pump, masters)
    os.environ.pop(PRELOAD, None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, "-m", _RANK_MAIN])


if __name__ == "__main__":
    main()
