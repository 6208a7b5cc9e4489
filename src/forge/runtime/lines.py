"""Lines: sockets between the processes of one run, open to holders of the run's secret and to nobody else.

Both ends prove that they know the secret before anything else is read from a peer: each sends a fresh nonce, and an
HMAC over both nonces and the direction. The secret never travels, and a recorded or reflected proof is worth nothing.
Everything read before that has a fixed, small size.

A `unix:@name` line stays on the machine and admits processes of this user only. A `tcp:HOST:PORT` line is neither
encrypted nor protected from a machine in between, unless HYPERACTOR_TLS_CERT, _KEY and _CA are set: then it is TLS, and
both ends need a certificate of that CA.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from typing import Final

from forge.errors import ForgeError

TLS_VARIABLES: Final = ("HYPERACTOR_TLS_CERT", "HYPERACTOR_TLS_KEY", "HYPERACTOR_TLS_CA")
LOST_S: Final = 6
"""How long a host may be silent before a connection to it counts as lost."""

_NAME: Final = b"forge/1\n"
_NONCE: Final = 32
_PROOF: Final = hashlib.sha256().digest_size
HELLO_SIZE: Final = len(_NAME) + _NONCE
ANSWER_SIZE: Final = HELLO_SIZE + _PROOF
WELCOME_SIZE: Final = _PROOF


class LineError(ForgeError, ConnectionError):
    """A line could not be opened, its peer is a stranger, or it was lost."""


class Challenge:
    """The admitting side of the greeting, without the socket: send `hello`, read ANSWER_SIZE bytes, send `welcome`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE)
        self.hello: bytes = _NAME + self._nonce

    def welcome(self, answer: bytes) -> bytes:
        """The proof that this side knows the secret too; `LineError` when the answer does not prove it."""
        nonce, proof = answer[len(_NAME) : HELLO_SIZE], answer[HELLO_SIZE:]
        expected = _proof(self._secret, b"dials", self._nonce, nonce)
        if len(answer) != ANSWER_SIZE or not answer.startswith(_NAME) or not hmac.compare_digest(proof, expected):
            raise LineError("a stranger was turned away: it does not know this run's secret")
        return _proof(self._secret, b"admits", self._nonce, nonce)


def _proof(secret: bytes, side: bytes, admitting: bytes, dialling: bytes) -> bytes:
    return hmac.digest(secret, b"forge line " + side + b"\0" + admitting + dialling, "sha256")


def listen(address: str) -> socket.socket:
    """A listening socket at `unix:@name` (Linux abstract name) or `tcp:HOST:PORT` (port 0: any free one)."""
    place = _parse(address)
    try:
        if isinstance(place, str):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            target: str | tuple[object, ...] = place
        else:
            found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0]
            sock, target = socket.socket(found[0], socket.SOCK_STREAM), found[4]
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(target)
            sock.listen(socket.SOMAXCONN)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise LineError(
            f"cannot listen at {address}: {error.strerror or error}",
            path=address,
            rule="an address of this machine that is not in use",
            repair="for tcp, take an address of this machine (launcher.bind) and port 0",
        ) from error
    return sock


def address_of(sock: socket.socket) -> str:
    """Where a listening socket can be reached, as `dial` takes it."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:@{name[1:].decode()}"
    host, port = name[:2]
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


def dial(address: str, secret: bytes, *, timeout_s: float = 10.0) -> socket.socket:
    """Connect to a line: a blocking socket whose peer has proved that it knows `secret`.

    Raises `LineError` when nobody listens there, the peer is a stranger or takes us for one, or time is up.
    """
    place = _parse(address)
    deadline = time.monotonic() + timeout_s
    with _line_errors(f"no line to {address}", address):
        if isinstance(place, str):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            sock = socket.create_connection(place, timeout_s)
        try:
            if isinstance(place, str):
                sock.settimeout(timeout_s)
                sock.connect(place)
            else:
                # Here the small requests are sent: unacknowledged ones must not wait for a host that has vanished.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)
            sock = _prepare(sock, server_side=False)
            _introduce(sock, secret, deadline)
        except BaseException:
            sock.close()
            raise
    sock.settimeout(None)
    return sock


def admit(sock: socket.socket, secret: bytes, *, timeout_s: float = 10.0) -> socket.socket:
    """Make an accepted connection a line: use the socket that is returned. A stranger raises `LineError`, closed.

    Blocks until the peer has spoken or `timeout_s` is over, so do not call it in the thread that accepts.
    """
    deadline = time.monotonic() + timeout_s
    with _line_errors("a connection was not admitted"):
        try:
            sock.settimeout(timeout_s)
            sock = _prepare(sock, server_side=True)
            challenge = Challenge(secret)
            sock.sendall(challenge.hello)
            welcome = challenge.welcome(_receive(sock, ANSWER_SIZE, deadline))
            sock.sendall(welcome)
        except BaseException:
            sock.close()
            raise
    sock.settimeout(None)
    return sock


def tune(sock: socket.socket) -> None:
    """Settings of every connected line: no delay for small messages, and a silent host is noticed within LOST_S."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_S - 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def check_peer(sock: socket.socket) -> None:
    """A process at the other end of a Unix line must be this user's: raises `LineError` otherwise."""
    if sock.family != socket.AF_UNIX:
        return
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.geteuid():
        raise LineError(
            f"process {pid} of user {uid} does not belong to this run",
            path="SO_PEERCRED",
            value=uid,
            rule=f"the peer of a Unix line is a process of this user ({os.geteuid()})",
        )


def has_vanished(sock: socket.socket) -> bool:
    """Whether a tcp peer has not acknowledged anything that was sent for LOST_S: its host is gone, or the way to it.

    TCP_USER_TIMEOUT would say so too, but it also ends connections to a peer that is there and only does not read.
    """
    if sock.family == socket.AF_UNIX:
        return False
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    num_retransmits, (last_ack_ms,) = info[2], struct.unpack_from("I", info, 56)
    return num_retransmits > 0 and bool(last_ack_ms > LOST_S * 1000)


def tls_context(*, server_side: bool) -> ssl.SSLContext | None:
    """How tcp lines are encrypted: as the environment says, or None for not at all."""
    cert, key, authority = (os.environ.get(name) for name in TLS_VARIABLES)
    if not (cert or key or authority):
        return None
    if not (cert and key and authority):
        missing = [name for name in TLS_VARIABLES if not os.environ.get(name)]
        raise LineError(
            "the certificates for tcp lines are incomplete",
            path="environment",
            value=missing,
            rule=f"{', '.join(TLS_VARIABLES)} name PEM files, all or none",
            repair=f"export {missing[0]}=/path/to/file.pem (docs/guides/security.md shows how to make them)",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # who holds a certificate of the CA and the secret belongs here, by whatever name
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(cert, key)
        context.load_verify_locations(authority)
    except OSError as error:  # ssl.SSLError is one
        raise LineError(
            f"the certificates for tcp lines cannot be used: {error}",
            path="environment",
            value=[cert, key, authority],
            rule=f"{', '.join(TLS_VARIABLES)} name PEM files: a certificate, its key and the CA's certificate",
            repair="check the three files (docs/guides/security.md shows how to make them)",
        ) from error
    return context


def _parse(address: str) -> str | tuple[str, int]:
    """An address as the socket module takes it: a name for a Unix line, host and port for tcp."""
    kind, _, place = address.partition(":")
    host, _, port = place.rpartition(":")
    if kind == "unix" and place.startswith("@") and 1 < len(place.encode()) < 108:
        return "\0" + place[1:]
    if kind == "tcp" and host and port.isascii() and port.isdecimal() and int(port) < 1 << 16:
        return (host.removeprefix("[").removesuffix("]"), int(port))
    raise LineError(
        f"{address!r} is no address of a line",
        path="address",
        value=address,
        rule="unix:@name, or tcp:HOST:PORT (an IPv6 host in brackets)",
        repair="for example unix:@forge-1, tcp:127.0.0.1:0 or tcp:[::1]:0",
    )


def _prepare(sock: socket.socket, *, server_side: bool) -> socket.socket:
    """Settings, the peer's user, and TLS: what comes before the greeting."""
    tune(sock)
    check_peer(sock)
    if sock.family == socket.AF_UNIX:
        return sock
    context = tls_context(server_side=server_side)
    return sock if context is None else context.wrap_socket(sock, server_side=server_side)


def _introduce(sock: socket.socket, secret: bytes, deadline: float) -> None:
    """The dialling side of the greeting."""
    hello = _receive(sock, HELLO_SIZE, deadline)
    if not hello.startswith(_NAME):
        raise LineError("what answers there is no line")
    theirs, ours = hello[len(_NAME) :], secrets.token_bytes(_NONCE)
    sock.sendall(_NAME + ours + _proof(secret, b"dials", theirs, ours))
    welcome = _receive(sock, WELCOME_SIZE, deadline)
    if not hmac.compare_digest(welcome, _proof(secret, b"admits", theirs, ours)):
        raise LineError("what answers there does not know this run's secret")


def _receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly `size` bytes before the deadline, however slowly they come."""
    parts = b""
    while len(parts) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the greeting took too long")
        sock.settimeout(left)
        part = sock.recv(size - len(parts))
        if not part:
            raise LineError("the other side hung up during the greeting: it takes us for a stranger, or is ending")
        parts += part
    return parts


@contextlib.contextmanager
def _line_errors(what: str, address: str | None = None) -> Iterator[None]:
    try:
        yield
    except LineError as error:
        raise LineError(
            f"{what}: {error.message}", path=error.path or address, value=error.value, rule=error.rule,
            repair=error.repair,
        ) from error.__cause__  # fmt: skip
    except OSError as error:  # a TimeoutError and an ssl.SSLError are ones
        raise LineError(f"{what}: {error}", path=address) from error
