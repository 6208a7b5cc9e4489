"""A process that has imported torch, and starts rank processes as forks of itself.

Importing torch, a model's definition and the trainer takes seconds of CPU time in every new process. A fork has them
already: a service that replaces a replica is back sooner and takes less from the others, and sixteen ranks start in
little more than the time of one. A server has one thread and does nothing but import and fork: what it imports starts
no thread and touches no device (`_why_not` checks both), and Monarch, which does, is imported in the ranks.

A rank is the same as one that was started by itself: the server has the same variables that libraries read when they
are loaded (`load_time`), and the rank gets all others, its folder, its standard streams, and its own command line and
environment in `/proc`. If the server dies, its ranks live on: their parent is a keeper (`forge.runtime.rank_stub`).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import select
import signal
import site
import socket
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Final

from forge.runtime import rank_stub
from forge.runtime.rank_stub import LENGTH, PEER, PRELOAD, peer_uid, write_arguments

PADDING: Final = "FORGE_PADDING"
"""Makes room for the environment of the ranks, which `/proc` shows where the server's was."""
PADDING_BYTES: Final = 96 * 1024
_COUNT_BY_NVML: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Lets torch find out whether there are GPUs without starting CUDA, which would make forks unable to use them."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STREAMS: Final = 3
_REQUEST_LIMIT_S: Final = 10.0
_IDLE_LIMIT_S: Final = 60.0
"""How long a server waits for a request if its owner did not start it: it may not be needed again."""
_MAX_REQUEST: Final = 16 * 2**20
_LOAD_TIME: Final = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "VECLIB_", "NUMEXPR_", "ONEDNN_", "DNNL_", "ATEN_"),
    *("LD_", "PYTHON", "MALLOC_", "GLIBC_", "LC_", "TORCH", "PYTORCH", "TRITON", "CUDA_", "CUBLAS", "NVIDIA_", "NCCL_"),
    *("TRANSFORMERS_", "HF_", "HUGGINGFACE_", "TOKENIZERS_", "XDG_", "BNB_", "BITSANDBYTES_", "USE_", "FORGE_AMX"),
)
_LOAD_TIME_NAMES: Final = frozenset({"HOME", "LANG", "LANGUAGE", "TZ", "PATH"})
_OF_A_RANK: Final = frozenset({"CUDA_VISIBLE_DEVICES", "PYTHONPATH"})
_started_with: Final[dict[str, str]] = {}
"""The variables of the server before it imported anything."""


def load_time(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries may read when they are loaded; a rank and its server agree in them."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name.startswith(_LOAD_TIME) or name in _LOAD_TIME_NAMES) and name not in _OF_A_RANK
    }


@dataclass(frozen=True, slots=True)
class Rank:
    """What a fork continues as. Without standard streams it asks whether there could be such a fork."""

    environment: dict[str, str]
    folder: str
    preload: tuple[str, ...]
    streams: tuple[int, ...]


def receive(connection: socket.socket) -> Rank:
    """Read a request: of a stand-in, which sends its standard streams along, or of the owner."""
    head, streams, _, _ = socket.recv_fds(connection, LENGTH.size, _STREAMS, socket.MSG_WAITALL)
    try:
        if len(head) != LENGTH.size or len(streams) not in (0, _STREAMS):
            raise ValueError("the request is incomplete")
        (length,) = LENGTH.unpack(head)
        if length > _MAX_REQUEST:
            raise ValueError(f"the request has {length} bytes")
        said = json.loads(_read(connection, length))
        environment = {str(name): str(value) for name, value in said["environment"].items()}
        preload = tuple(str(name) for name in said["preload"])
        return Rank(environment, str(said["folder"]), preload, tuple(streams))
    except BaseException:
        for fd in streams:
            os.close(fd)
        raise


def _read(connection: socket.socket, length: int) -> bytes:
    body = bytearray()
    while len(body) < length:
        part = connection.recv(length - len(body))
        if not part:
            raise ValueError("the request is incomplete")
        body += part
    return bytes(body)


def module_search_path(first: str, pythonpath: str, current: Sequence[str], before: str) -> list[str]:
    """Return `sys.path` of a process with another `PYTHONPATH` and first folder than this one's, which was `before`."""
    replaced = {os.path.abspath(folder) for folder in before.split(os.pathsep) if folder} - _site_folders()
    last = [folder for folder in current[0 if sys.flags.safe_path else 1 :] if folder not in replaced]
    chosen = [os.path.abspath(folder) for folder in pythonpath.split(os.pathsep) if folder]
    return [*([] if sys.flags.safe_path else [first]), *dict.fromkeys([*chosen, *last])]


@functools.cache
def _site_folders() -> set[str]:
    """Return the folders that the interpreter adds because a `.pth` file names them, as editable installs do."""
    found = set()
    for place in site.getsitepackages():
        for file in Path(place).glob("*.pth"):
            lines = file.read_text(errors="replace").splitlines()
            found |= {os.path.abspath(os.path.join(place, line.strip())) for line in lines if os.path.isabs(line)}
    return found


def _moved(rank: Rank) -> str | None:
    """Return a module that the rank would import from elsewhere than this process has.

    Where its search path is another, that may be any, also one that a library imports.
    """
    path = module_search_path(rank.folder, rank.environment.get("PYTHONPATH", ""), sys.path, _started_with_path())
    for name in {name.partition(".")[0] for name in rank.preload} & sys.modules.keys():
        own, found = sys.modules[name].__spec__, PathFinder.find_spec(name, path)
        if own is not None and (found is None or found.origin != own.origin):
            return name
    if path == sys.path:
        return None
    loaded = [name for name, module in list(sys.modules.items()) if "." not in name and _has_file(module)]
    return next((name for name in loaded if _place(name, path) != _place(name, sys.path)), None)


def _has_file(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return spec is not None and spec.has_location


def _place(name: str, path: list[str]) -> str | None:
    """Return where a module lies on a search path; None where something else finds it, or nothing does."""
    found = PathFinder.find_spec(name, path)
    return None if found is None else found.origin


def _started_with_path() -> str:
    return _started_with.get("PYTHONPATH", "")


def surroundings(pid: int | str) -> dict[str, str]:
    """Return what a fork inherits from its parent and cannot leave, or would not notice: namespaces, limits, cores."""
    folder = Path("/proc", str(pid))
    status = folder.joinpath("status").read_text().splitlines()
    return {
        **{f"the {place.name} namespace": os.readlink(place) for place in sorted(folder.joinpath("ns").iterdir())},
        "the control group": folder.joinpath("cgroup").read_text(),
        "the resource limits": folder.joinpath("limits").read_text(),
        "the CPU affinity": next((line for line in status if line.startswith("Cpus_allowed:")), ""),
    }


def _elsewhere(connection: socket.socket) -> str | None:
    """Return in what the process that asks lives elsewhere than this one: a fork would live here."""
    pid = PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[0]
    own = surroundings("self")
    try:
        its = surroundings(pid)
    except OSError as error:
        return f"its /proc entry ({error.strerror})"
    return next((name for name, value in own.items() if its.get(name) != value), None)


@contextlib.contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Have the variables of a rank while modules are imported for it. What these modules set themselves stays."""
    own = dict(os.environ)
    given = {name: value for name, value in environment.items() if own.get(name) != value}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in (name for name, value in given.items() if os.environ.get(name) == value):
            if name in own:
                os.environ[name] = own[name]
            else:
                del os.environ[name]


def _why_not(rank: Rank) -> str | None:
    """Import what a rank needs; return why it cannot be a fork of this process."""
    if load_time(rank.environment) != load_time(_started_with):
        return "libraries would be loaded with other variables"
    if (moved := _moved(rank)) is not None:
        return f"{moved} would be imported from another folder"
    if sum(len(word) + 1 for word in _shown(rank.environment)) > PADDING_BYTES:
        return "its environment is too large"
    with _variables(rank.environment):
        for name in (name for name in rank.preload if name not in sys.modules):
            importlib.import_module(name)
    if _is_poisoned():
        return "what was imported has asked CUDA for its devices"
    num_threads = len(os.listdir("/proc/self/task"))
    return f"what was imported has started {num_threads - 1} threads" if num_threads > 1 else None


class ForkServer:
    """Serves the requests of stand-ins, one at a time, until its owner ends, or it was idle for `idle_limit_s`."""

    def __init__(self, listener: socket.socket, owner: int, idle_limit_s: float | None = None) -> None:
        self._listener = listener
        self._owner = os.pidfd_open(owner)
        self._idle_limit_s = idle_limit_s

    def serve(self) -> Rank | None:
        """Fork for every request. Return None when that is over; in a fork, return what it continues as."""
        while True:
            readable, _, _ = select.select([self._listener.fileno(), self._owner], [], [], self._idle_limit_s)
            if self._owner in readable or not readable:
                return None
            rank = self._accept()
            if rank is not None:
                return rank

    def _accept(self) -> Rank | None:
        connection, _ = self._listener.accept()
        connection.settimeout(_REQUEST_LIMIT_S)
        try:
            if peer_uid(connection) != os.geteuid():
                raise ValueError("it belongs to another user")
            rank = receive(connection)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            print(f"forge: the fork server refuses a request: {error}", file=sys.stderr)
            connection.close()
            return None
        try:
            other = _elsewhere(connection)
            reason = _why_not(rank) if other is None else f"it would differ in {other}"
        except Exception as error:  # noqa: BLE001 - the rank itself says so, where its caller sees it
            self._reply(connection, f"{type(error).__name__}: {error}")
            os._exit(1)  # half of a module may be loaded: the next server starts afresh
        if reason is None and rank.streams and self._fork(rank, connection):
            return rank
        for fd in rank.streams:
            os.close(fd)
        if reason is not None or not rank.streams:
            self._reply(connection, reason)
        return None

    def _reply(self, connection: socket.socket, reason: str | None) -> None:
        """Say why no fork is made; nothing if it could be."""
        try:
            connection.sendall((reason or "").encode())
        except OSError:  # it has ended
            pass
        finally:
            connection.close()

    def _fork(self, rank: Rank, connection: socket.socket) -> bool:
        """Return True in the rank and False in the server."""
        gc.collect()
        gc.freeze()  # collections in the forks do not touch, and so copy, the pages of what is here
        if os.fork():
            connection.close()
            return False
        for end in (self._listener.fileno(), self._owner):
            os.close(end)
        for number in (*_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        pid = os.fork()
        if pid:
            _keep(pid, connection)
        connection.close()
        _become(rank)
        return True


def _keep(rank: int, connection: socket.socket) -> None:
    """Become the keeper of a rank, which is a small program: nothing of what was imported is needed for it."""
    try:
        connection.settimeout(None)
        connection.sendall(rank_stub.FORKED)
        connection.set_inheritable(True)
        command = rank_stub.keeper_command(rank, connection.fileno())
        os.execve(command[0], command, {})
    finally:  # the stand-in has ended, or the program cannot be started
        os.kill(rank, signal.SIGKILL)
        os._exit(1)


def _can_rename() -> bool:
    """Return whether this process may change what `/proc` shows of it."""
    shown = []
    for name in ("cmdline", "environ"):
        with open(f"/proc/self/{name}", "rb") as file:
            shown.append(file.read().removesuffix(b"\0").split(b"\0"))
    return write_arguments(*shown)


def _shown(environment: Mapping[str, str]) -> list[bytes]:
    return [os.fsencode(name) + b"=" + os.fsencode(value) for name, value in environment.items()]


def _is_poisoned() -> bool:
    """Return whether a fork of this process could not use the GPUs: something imported has asked CUDA for them.

    The fork that tries it also ends the threads of numpy's OpenBLAS, which starts them again when it needs them.
    """
    found, answer = os.pipe()
    if os.fork() == 0:
        os.write(answer, b"%d" % ("torch" in sys.modules and sys.modules["torch"].cuda._is_in_bad_fork()))
        os._exit(0)
    os.close(answer)
    try:
        return os.read(found, 1) != b"0"
    finally:
        os.close(found)


def _become(rank: Rank) -> None:
    """Give this fork what the process that it stands for would have been started with."""
    for target, fd in enumerate(rank.streams):
        os.dup2(fd, target)
        os.close(fd)
    set_by_imports = {name: value for name, value in os.environ.items() if _started_with.get(name) != value}
    set_by_imports.pop(_COUNT_BY_NVML, None)
    os.environ.clear()
    os.environ.update(set_by_imports | rank.environment)
    os.environ.pop(PRELOAD, None)
    os.chdir(rank.folder)
    arguments = [os.fsencode(word) for word in (sys.executable, "-m", "forge.runtime.rank_main")]
    write_arguments(arguments, _shown(os.environ))
    sys.path[:] = module_search_path(
        rank.folder, rank.environment.get("PYTHONPATH", ""), sys.path, _started_with_path()
    )
    if "forge.observe.tracing" in sys.modules:
        sys.modules["forge.observe.tracing"].read_environment()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the forks of one process must not draw the same numbers


def _end_with_owner() -> None:
    """Let SIGIO end this process, but no fork of it, when its owner has ended, also while it imports something.

    Standard input is a pipe whose other end the owner has; so have its forks, while they live. Servers of one owner
    share it, and SIGIO goes to one process for each time that it is opened.
    """
    own = os.open("/proc/self/fd/0", os.O_RDONLY | os.O_NONBLOCK)
    os.dup2(own, 0)
    os.close(own)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:
        os._exit(0)


def main() -> None:
    listener, owner = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    os.environ.pop(PADDING, None)
    _started_with.update(os.environ)
    os.environ.setdefault(_COUNT_BY_NVML, "1")
    for number in (*_SIGNALS, signal.SIGCHLD):  # the kernel collects keepers that have ended
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # see `forge.runtime.forking`
    is_own = stat.S_ISFIFO(os.fstat(0).st_mode)
    if is_own:
        with contextlib.suppress(OSError):  # of a system that has no such signal: what is imported is then finished
            _end_with_owner()
    if not _can_rename():
        return  # nothing would find the ranks by their environment; so they are started by themselves
    try:
        server = ForkServer(listener, owner, None if is_own else _IDLE_LIMIT_S)
    except ProcessLookupError:  # the owner has ended meanwhile
        os._exit(0)
    rank = server.serve()
    if rank is None:
        os._exit(0)  # nothing here needs an orderly end
    atexit.register(gc.unfreeze)  # libraries count what the collector has left when the interpreter ends
    from forge.runtime import rank_main

    sys.argv = [rank_main.__file__ or ""]
    rank_main.main()


if __name__ == "__main__":
    main()
