"""Authenticated sockets between the processes of one run: both ends hold the run's secret.

Both ends prove that they know the secret before anything else is read from a peer: each sends a fresh nonce, and an
HMAC over both nonces and the direction. The secret is never sent, and a recorded or reflected proof is worthless.
Everything read before that has a fixed, small size.

A `unix:@name` socket stays on the machine and admits processes of this user only. A `tcp:HOST:PORT` socket is neither
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

from forge.errors import ForgeError, LaunchError
from forge.runtime.exposure import check_exposure

TLS_VARIABLES: Final = ("HYPERACTOR_TLS_CERT", "HYPERACTOR_TLS_KEY", "HYPERACTOR_TLS_CA")
LOST_S: Final = 6
"""How long a host may be silent before a connection to it counts as lost."""

_NAME: Final = b"forge/1\n"
_NONCE: Final = 32
_PROOF: Final = hashlib.sha256().digest_size
HELLO_SIZE: Final = len(_NAME) + _NONCE
RESPONSE_SIZE: Final = HELLO_SIZE + _PROOF
WELCOME_SIZE: Final = _PROOF


class ConnectionFailure(ForgeError, ConnectionError):
    """A connection could not be opened, its peer failed authentication, or it was lost."""


class ServerHandshake:
    """The accepting side's handshake, without the socket: send `hello`, read RESPONSE_SIZE bytes, send `welcome`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE)
        self.hello: bytes = _NAME + self._nonce

    def welcome(self, answer: bytes) -> bytes:
        """Return this side's proof that it knows the secret. Raise `ConnectionFailure` when the peer's is wrong."""
        nonce, proof = answer[len(_NAME) : HELLO_SIZE], answer[HELLO_SIZE:]
        expected = _proof(self._secret, b"dials", self._nonce, nonce)
        if len(answer) != RESPONSE_SIZE or not answer.startswith(_NAME) or not hmac.compare_digest(proof, expected):
            raise ConnectionFailure("a peer was rejected: it does not know this run's secret")
        return _proof(self._secret, b"admits", self._nonce, nonce)


def _proof(secret: bytes, side: bytes, admitting: bytes, dialling: bytes) -> bytes:
    return hmac.digest(secret, b"forge line " + side + b"\0" + admitting + dialling, "sha256")


def listen(address: str, *, insecure: bool = False) -> socket.socket:
    """Return a listening socket at `unix:@name` (Linux abstract name) or `tcp:HOST:PORT` (port 0: any free one).

    Raise `InsecureBindError` for an address that other machines can reach, unless there is TLS or `insecure` is set.
    """
    place = _parse(address)
    if not (insecure or isinstance(place, str) or tls_context(server_side=True)):
        check_exposure(
            place[0],
            what="a port of this run",
            path=address,
            value=place[0],
            repair=f"set {', '.join(TLS_VARIABLES)} (docs/guides/security.md), or launcher.insecure=true on a network "
            "where you trust every machine and user",
        )
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
        raise ConnectionFailure(
            f"cannot listen at {address}: {error.strerror or error}",
            path=address,
            rule="an address of this machine that is not in use",
            repair="for tcp, take an address of this machine (launcher.bind) and port 0",
        ) from error
    return sock


def address_of(sock: socket.socket) -> str:
    """Return where a listening socket can be reached, as `connect` takes it."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:@{name[1:].decode()}"
    host, port = name[:2]
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


def connect(address: str, secret: bytes, *, timeout_s: float = 10.0) -> socket.socket:
    """Return a blocking socket whose peer has proved that it knows `secret`.

    Raises `ConnectionFailure` when nothing listens there, one side does not know the secret, or time is up.
    """
    place = _parse(address)
    deadline = time.monotonic() + timeout_s
    with _connection_errors(f"cannot connect to {address}", address):
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
            _authenticate(sock, secret, deadline)
        except BaseException:
            sock.close()
            raise
    sock.settimeout(None)
    return sock


def accept(sock: socket.socket, secret: bytes, *, timeout_s: float = 10.0) -> socket.socket:
    """Authenticate an accepted connection and return the socket to use.

    Closes it and raises `ConnectionFailure` if the peer does not know the secret.

    Blocks until the peer has responded or `timeout_s` is over, so do not call it in the thread that accepts.
    """
    deadline = time.monotonic() + timeout_s
    with _connection_errors("a connection was not admitted"):
        try:
            sock.settimeout(timeout_s)
            sock = _prepare(sock, server_side=True)
            challenge = ServerHandshake(secret)
            sock.sendall(challenge.hello)
            welcome = challenge.welcome(_receive(sock, RESPONSE_SIZE, deadline))
            sock.sendall(welcome)
        except BaseException:
            sock.close()
            raise
    sock.settimeout(None)
    return sock


def tune(sock: socket.socket) -> None:
    """Set options of a connected socket: no delay for small messages; a silent host is noticed within LOST_S."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_S - 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def check_peer(sock: socket.socket) -> None:
    """Raise `ConnectionFailure` unless the process at the other end of a Unix socket is this user's."""
    if sock.family != socket.AF_UNIX:
        return
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.geteuid():
        raise ConnectionFailure(
            f"process {pid} of user {uid} does not belong to this run",
            path="SO_PEERCRED",
            value=uid,
            rule=f"the peer of a Unix socket is a process of this user ({os.geteuid()})",
        )


def has_vanished(sock: socket.socket) -> bool:
    """Return whether a TCP peer has acknowledged nothing for LOST_S: its host or the network is gone.

    TCP_USER_TIMEOUT would detect it too, but it also ends connections to a live peer that does not read.
    """
    if sock.family == socket.AF_UNIX:
        return False
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    num_retransmits, (last_ack_ms,) = info[2], struct.unpack_from("I", info, 56)
    return num_retransmits > 0 and bool(last_ack_ms > LOST_S * 1000)


def tls_context(*, server_side: bool) -> ssl.SSLContext | None:
    """Return how TCP connections are encrypted, from the environment; None for not at all."""
    cert, key, authority = (os.environ.get(name) for name in TLS_VARIABLES)
    if not (cert or key or authority):
        return None
    if not (cert and key and authority):
        missing = [name for name in TLS_VARIABLES if not os.environ.get(name)]
        raise ConnectionFailure(
            "the certificates for tcp connections are incomplete",
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
        raise ConnectionFailure(
            f"the certificates for tcp connections cannot be used: {error}",
            path="environment",
            value=[cert, key, authority],
            rule=f"{', '.join(TLS_VARIABLES)} name PEM files: a certificate, its key and the CA's certificate",
            repair="check the three files (docs/guides/security.md shows how to make them)",
        ) from error
    return context


def check_tls(what: str = "the controller") -> None:
    """Raise `LaunchError` unless the environment names all certificates that one end of a tls:// connection needs."""
    missing = [name for name in TLS_VARIABLES if not os.environ.get(name)]
    if missing:
        raise LaunchError(
            f"{what} needs its certificates",
            path="environment",
            value=missing,
            rule=f"with tls://, {', '.join(TLS_VARIABLES)} name PEM files",
            repair=f"export {missing[0]}=/path/to/file.pem (docs/guides/security.md shows how to make them)",
        )


def _parse(address: str) -> str | tuple[str, int]:
    """Return an address as the socket module takes it: a name for a Unix socket, host and port for TCP."""
    kind, _, place = address.partition(":")
    host, _, port = place.rpartition(":")
    if kind == "unix" and place.startswith("@") and 1 < len(place.encode()) < 108:
        return "\0" + place[1:]
    if kind == "tcp" and host and port.isascii() and port.isdecimal() and int(port) < 1 << 16:
        return (host.removeprefix("[").removesuffix("]"), int(port))
    raise ConnectionFailure(
        f"{address!r} is not an address",
        path="address",
        value=address,
        rule="unix:@name, or tcp:HOST:PORT (an IPv6 host in brackets)",
        repair="for example unix:@forge-1, tcp:127.0.0.1:0 or tcp:[::1]:0",
    )


def _prepare(sock: socket.socket, *, server_side: bool) -> socket.socket:
    """Set options, check the peer's user and start TLS: what comes before the handshake."""
    tune(sock)
    check_peer(sock)
    if sock.family == socket.AF_UNIX:
        return sock
    context = tls_context(server_side=server_side)
    return sock if context is None else context.wrap_socket(sock, server_side=server_side)


def _authenticate(sock: socket.socket, secret: bytes, deadline: float) -> None:
    """Run the connecting side of the handshake."""
    hello = _receive(sock, HELLO_SIZE, deadline)
    if not hello.startswith(_NAME):
        raise ConnectionFailure("the peer does not speak this protocol")
    theirs, ours = hello[len(_NAME) :], secrets.token_bytes(_NONCE)
    sock.sendall(_NAME + ours + _proof(secret, b"dials", theirs, ours))
    welcome = _receive(sock, WELCOME_SIZE, deadline)
    if not hmac.compare_digest(welcome, _proof(secret, b"admits", theirs, ours)):
        raise ConnectionFailure("the peer does not know this run's secret")


def _receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Receive exactly `size` bytes before the deadline, however slowly they come."""
    parts = b""
    while len(parts) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left)
        part = sock.recv(size - len(parts))
        if not part:
            raise ConnectionFailure(
                "the peer closed the connection during the handshake: it has another secret, or is ending"
            )
        parts += part
    return parts


@contextlib.contextmanager
def _connection_errors(what: str, address: str | None = None) -> Iterator[None]:
    try:
        yield
    except ConnectionFailure as error:
        raise ConnectionFailure(
            f"{what}: {error.message}", path=error.path or address, value=error.value, rule=error.rule,
            repair=error.repair,
        ) from error.__cause__  # fmt: skip
    except OSError as error:  # a TimeoutError and an ssl.SSLError are ones
        raise ConnectionFailure(f"{what}: {error}", path=address) from error
