"""Lines admit who knows the secret, and turn everyone else away without harm."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import secrets
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from forge.errors import ForgeError
from forge.runtime import sockets
from forge.runtime.sockets import ConnectionFailure

SECRET = b"s" * 32
GUIDE = Path(__file__).parents[3] / "docs/guides/security.md"
ADDRESSES = ["unix", "tcp:127.0.0.1:0", "tcp:[::1]:0"]

Admit = Callable[..., "Future[socket.socket]"]


def fresh(address: str) -> str:
    return f"unix:@forge-test-{secrets.token_hex(8)}" if address == "unix" else address


@pytest.fixture(params=ADDRESSES)
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with sockets.listen(fresh(request.param)) as sock:
        yield sock


@pytest.fixture
def admit() -> Iterator[Admit]:
    """Accept the next connection of a listener and admit it, in another thread."""
    pool = ThreadPoolExecutor(4)

    def start(listener: socket.socket, secret: bytes = SECRET, timeout_s: float = 60.0) -> Future[socket.socket]:
        return pool.submit(lambda: sockets.accept(listener.accept()[0], secret, timeout_s=timeout_s))

    yield start
    pool.shutdown()


def bare(listener: socket.socket) -> socket.socket:
    """A connection of somebody who knows the address and nothing else."""
    sock = socket.socket(listener.family)
    sock.settimeout(60)
    sock.connect(listener.getsockname())
    return sock


def test_both_sides_can_talk(listener, admit):
    admitted = admit(listener)
    with sockets.connect(sockets.address_of(listener), SECRET) as near, admitted.result(60) as far:
        assert near.gettimeout() is None
        assert far.gettimeout() is None
        near.sendall(b"there")
        assert far.recv(5) == b"there"
        far.sendall(b"back")
        assert near.recv(4) == b"back"


def test_the_address_is_what_was_asked_for():
    name = fresh("unix")
    with sockets.listen(name) as sock:
        assert sockets.address_of(sock) == name
    with sockets.listen("tcp:localhost:0") as sock:
        assert re.fullmatch(r"tcp:(127\.0\.0\.1|\[::1\]):\d+", sockets.address_of(sock))
    with sockets.listen("tcp:[::1]:0") as sock:
        assert re.fullmatch(r"tcp:\[::1\]:\d+", sockets.address_of(sock))


def test_who_does_not_know_the_secret_is_turned_away(listener, admit):
    admitted = admit(listener)
    with pytest.raises(ConnectionFailure, match="has another secret"):
        sockets.connect(sockets.address_of(listener), b"x" * 32)
    with pytest.raises(ConnectionFailure, match="does not know this run's secret"):
        admitted.result(60)


def test_a_listener_that_does_not_know_the_secret_is_not_believed(listener):
    def impostor() -> None:
        with listener.accept()[0] as sock:
            sock.sendall(sockets.ServerHandshake(b"x" * 32).hello)
            sock.recv(sockets.RESPONSE_SIZE, socket.MSG_WAITALL)
            sock.sendall(bytes(sockets.WELCOME_SIZE))

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(ConnectionFailure, match="the peer does not know this run's secret"):
        sockets.connect(sockets.address_of(listener), SECRET)
    thread.join()


def test_a_proof_cannot_be_reflected_or_used_twice():
    first, second = sockets.ServerHandshake(SECRET), sockets.ServerHandshake(SECRET)
    answer, welcome = answer_to(first)
    assert first.welcome(answer) == welcome
    for challenge, stolen in ((second, answer), (first, answer[: sockets.HELLO_SIZE] + welcome), (first, answer[:-1])):
        with pytest.raises(ConnectionFailure):
            challenge.welcome(stolen)
    with pytest.raises(ConnectionFailure):
        first.welcome(b"forge/0\n" + answer[8:])


def answer_to(challenge: sockets.ServerHandshake) -> tuple[bytes, bytes]:
    """What a true peer answers, and what it expects to be told in return: as `connect` makes and checks them."""
    theirs, ours = challenge.hello[8:], secrets.token_bytes(32)
    answer = challenge.hello[:8] + ours + sockets._proof(SECRET, b"dials", theirs, ours)
    return answer, sockets._proof(SECRET, b"admits", theirs, ours)


def test_what_answers_and_is_no_line_is_recognised(listener):
    def serve() -> None:
        with listener.accept()[0] as sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 10)
            done.wait(600)

    done = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(ConnectionFailure, match="does not speak this protocol"):
        sockets.connect(sockets.address_of(listener), SECRET)
    done.set()
    thread.join()


def test_garbage_is_turned_away(listener, admit):
    admitted = admit(listener)
    with bare(listener) as sock:
        sock.sendall(b"\xff" * sockets.RESPONSE_SIZE)
        with pytest.raises(ConnectionFailure, match="secret"):
            admitted.result(60)


def test_silence_and_slowness_run_out_of_time_however_they_are_spread(listener, admit):
    admitted = admit(listener, timeout_s=0.2)
    with bare(listener) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the time may be up before it is sent
            sock.sendall(b"f")
        with pytest.raises(ConnectionFailure, match="not admitted"):
            admitted.result(60)
    with pytest.raises(ConnectionFailure, match="cannot connect to"):  # nobody accepts
        sockets.connect(sockets.address_of(listener), SECRET, timeout_s=0.2)


def test_a_greeting_that_trickles_in_cannot_be_drawn_out(listener, admit):
    """Each byte comes well before the time is up, and the last one would come long after."""
    admitted = admit(listener, timeout_s=0.2)
    with bare(listener) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while not admitted.done():
                sock.sendall(b"f")
                threading.Event().wait(0.02)
        with pytest.raises(ConnectionFailure, match=r"took too long|timed out"):
            admitted.result(60)


def test_who_hangs_up_is_turned_away(listener, admit):
    admitted = admit(listener)
    bare(listener).close()
    with pytest.raises(ConnectionFailure, match="not admitted"):
        admitted.result(60)


def test_nobody_there_is_an_error_that_names_the_address():
    with sockets.listen("tcp:127.0.0.1:0") as sock:
        address = sockets.address_of(sock)
    for nowhere in (address, fresh("unix")):
        with pytest.raises(ConnectionFailure, match=f"cannot connect to {re.escape(nowhere)}") as caught:
            sockets.connect(nowhere, SECRET)
        assert caught.value.path == nowhere


@pytest.mark.parametrize(
    "address",
    ["", "unix:name", "unix:@", "unix:@" + "n" * 108, "tcp:host", "tcp::1", "tcp:host:-1", "tcp:h:65536", "udp:h:1"],
)
def test_an_address_that_is_none_names_the_rule(address):
    for attempt in (sockets.listen, lambda address: sockets.connect(address, SECRET)):
        with pytest.raises(ConnectionFailure) as caught:
            attempt(address)
        assert caught.value.value == address
        assert "unix:@name" in caught.value.rule
        assert caught.value.repair


def test_an_address_that_is_taken_or_not_of_this_machine_is_told():
    with sockets.listen(fresh("unix")) as sock, pytest.raises(ConnectionFailure, match="cannot listen") as caught:
        sockets.listen(sockets.address_of(sock))
    assert caught.value.repair
    with pytest.raises(ConnectionFailure, match="cannot listen"):
        sockets.listen("tcp:192.0.2.1:0", insecure=True)  # reserved for documentation


def test_the_error_is_a_connection_error_and_travels():
    error = pickle.loads(pickle.dumps(ConnectionFailure("lost", path="here", repair="again")))
    assert isinstance(error, ForgeError)
    assert isinstance(error, ConnectionError)
    assert (error.message, error.path, error.repair) == ("lost", "here", "again")


def test_tcp_lines_notice_a_host_that_has_vanished(admit):
    with sockets.listen("tcp:127.0.0.1:0") as listener:
        admitted = admit(listener)
        with sockets.connect(sockets.address_of(listener), SECRET) as near, admitted.result(60) as far:
            for sock in (near, far):
                idle, interval, count = (
                    sock.getsockopt(socket.IPPROTO_TCP, name)
                    for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                assert idle + interval * count <= sockets.LOST_S
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert not sockets.has_vanished(sock)
            assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == sockets.LOST_S * 1000
            assert far.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_though_it_knows_the_secret(admit):
    with sockets.listen(fresh("unix")) as listener:
        admitted = admit(listener)
        program = (
            "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX)\n"
            "s.connect('\\0' + sys.argv[1].removeprefix('unix:@')); s.recv(1)"
        )
        subprocess.run([sys.executable, "-c", program, sockets.address_of(listener)], check=True, timeout=600)
        with pytest.raises(ConnectionFailure, match="of user 65534 does not belong to this run"):
            admitted.result(60)


@pytest.fixture
def certificates(tmp_path, monkeypatch) -> Path:
    """The three files, made as the guide says, in the environment."""
    make_certificates(tmp_path)
    for name, file in zip(sockets.TLS_VARIABLES, ("host.crt", "host.key", "ca.crt"), strict=True):
        monkeypatch.setenv(name, str(tmp_path / file))
    return tmp_path


def make_certificates(folder: Path) -> None:
    blocks = re.findall(r"```bash\n# recipe: \w+\n(.*?)```", GUIDE.read_text(), re.S)
    script = "\n".join(["set -euo pipefail", *blocks, "certificate host DNS:elsewhere"])
    subprocess.run(["bash", "-c", script], cwd=folder, check=True, capture_output=True, timeout=600)


@pytest.fixture(params=ADDRESSES[1:])
def tcp_listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with sockets.listen(request.param) as sock:
        yield sock


def test_with_certificates_tcp_lines_are_encrypted(certificates, tcp_listener, admit):
    admitted = admit(tcp_listener)
    with sockets.connect(sockets.address_of(tcp_listener), SECRET) as near, admitted.result(60) as far:
        for sock in (near, far):
            assert isinstance(sock, ssl.SSLSocket)
            assert sock.version() == "TLSv1.3"
            assert sock.getpeercert()["subject"] == ((("commonName", "host"),),)
        near.sendall(b"there")
        assert far.recv(5) == b"there"


def test_a_certificate_of_another_authority_is_refused(certificates, tcp_listener, admit):
    (other := certificates / "other").mkdir()
    make_certificates(other)
    wrong = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    wrong.check_hostname, wrong.verify_mode = False, ssl.CERT_NONE
    for with_certificate in (True, False):
        if with_certificate:
            wrong.load_cert_chain(other / "host.crt", other / "host.key")
        else:
            wrong = ssl._create_unverified_context()
        admitted = admit(tcp_listener)
        with bare(tcp_listener) as plain, wrong.wrap_socket(plain) as sock, pytest.raises(ssl.SSLError):
            sock.recv(1)
        with pytest.raises(ConnectionFailure, match="not admitted"):
            admitted.result(60)


def test_a_plain_connection_to_an_encrypted_line_is_refused(certificates, tcp_listener, admit):
    admitted = admit(tcp_listener)
    with bare(tcp_listener) as sock:
        sock.sendall(b"x" * sockets.RESPONSE_SIZE)
        with pytest.raises(ConnectionFailure, match="not admitted"):
            admitted.result(60)


def test_the_secret_is_needed_with_certificates_too(certificates, tcp_listener, admit):
    admitted = admit(tcp_listener)
    with pytest.raises(ConnectionFailure, match="secret"):
        sockets.connect(sockets.address_of(tcp_listener), b"x" * 32)
    with pytest.raises(ConnectionFailure, match="does not know this run's secret"):
        admitted.result(60)


def test_certificates_that_are_incomplete_or_broken_are_told_and_never_ignored(certificates, tcp_listener, monkeypatch):
    monkeypatch.delenv(sockets.TLS_VARIABLES[2])
    with pytest.raises(ConnectionFailure, match="incomplete") as caught:
        sockets.connect(sockets.address_of(tcp_listener), SECRET)
    assert caught.value.value == [sockets.TLS_VARIABLES[2]]
    assert caught.value.repair
    monkeypatch.setenv(sockets.TLS_VARIABLES[2], str(certificates / "absent.crt"))
    with pytest.raises(ConnectionFailure, match="cannot be used") as caught:
        sockets.tls_context(server_side=True)
    assert caught.value.repair
