"""The server: its address, its secrets and its lifetime."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from forge.envs.chat_api.errors import JsonErrorRunner
from forge.envs.chat_api.listening import HttpListener, bind
from forge.errors import ConfigError, DataError
from forge.runtime.exposure import check_exposure, is_loopback_only
from forge.ui.access import Access
from forge.ui.hub import Hub
from forge.ui.routes import make_app

_CUT_S: Final = 1.0
"""How long answers that are being sent may take when the server ends."""


@dataclass(frozen=True, slots=True)
class UiOptions:
    """Where a server listens, and what it shows.

    Attributes:
        runs_dir: the folder of runs.
        host, port: the address; port 0 for one that is free.
        tls_cert, tls_key: PEM files, for HTTPS.
        insecure: whether plain HTTP is allowed on an address that other machines reach.
        interval_s: how often files are looked at.
        control: whether runs of this machine and user may be changed from the page.
        send_limit_s: how long a client may take nothing of what is sent to it, before its connection is closed.
    """

    runs_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    interval_s: float = 0.5
    control: bool = False
    send_limit_s: float = 30.0


class UiServer:
    """A server that runs.

    Attributes:
        base_url: its address, without the token.
        hub: what it shows.
    """

    def __init__(self, base_url: str, access: Access, hub: Hub, listener: HttpListener) -> None:
        self.base_url, self.hub = base_url, hub
        self._access, self._listener = access, listener

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._listener.port

    @property
    def token(self) -> str:
        """The secret that gives access."""
        return self._access.token

    @property
    def num_waiting(self) -> int:
        """How many connections have not sent the token or a cookie."""
        return self._listener.num_waiting

    def url(self, run: str | None = None) -> str:
        """Return the address of the list, or of a run, with the token."""
        return f"{self.base_url}{_place(run)}?token={self.token}"

    def ticket_url(self, run: str | None = None) -> str:
        """Return an address that is good for one browser, once: for a command line, which others can see."""
        return f"{self.base_url}{_place(run)}?ticket={self._access.new_ticket()}"


def _place(run: str | None) -> str:
    return "/" if run is None else f"/run/{quote(run.encode('utf-8', 'surrogateescape'))}"


@contextlib.asynccontextmanager
async def serve_ui(options: UiOptions) -> AsyncIterator[UiServer]:
    """Serve the runs of a folder until the block ends."""
    check_runs_dir(options.runs_dir)
    tls = _checked_tls(options)
    if options.control and tls is None:
        check_exposure(
            options.host,
            what="the control of runs",
            path="--control",
            value=options.host,
            repair="give --tls-cert and --tls-key, or reach it through a tunnel (ssh -L)",
        )
    hub = Hub(options.runs_dir.resolve(), interval_s=options.interval_s)
    async with contextlib.AsyncExitStack() as stack:
        sockets = _bind(options)
        for sock in sockets:
            stack.callback(sock.close)
        port = int(sockets[0].getsockname()[1])
        access = Access(names=_names(options.host), port=port, has_tls=tls is not None)
        app = make_app(hub, access, control=options.control)
        runner = JsonErrorRunner(app, handler_cancellation=True, shutdown_timeout=_CUT_S, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        stack.push_async_callback(hub.close)
        await hub.open()
        listener = HttpListener(runner, sockets, tls=tls, send_limit_s=options.send_limit_s)
        stack.callback(listener.close)
        yield UiServer(_base_url(options.host, port, has_tls=tls is not None), access, hub, listener)


def check_runs_dir(folder: Path) -> None:
    """Raise `DataError` if there is no such folder."""
    if not folder.is_dir():
        raise DataError(
            "there is no such folder of runs",
            path="RUNS_DIR",
            value=str(folder),
            rule="a folder with runs in it, run.output_dir of their configurations",
            repair="check the path; it is relative to the working directory",
        )


def _names(host: str) -> tuple[str, ...]:
    """Return the host names that requests may have."""
    if is_loopback_only(host):
        return (host,)
    return (host, socket.gethostname(), socket.getfqdn())


def _base_url(host: str, port: int, *, has_tls: bool) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{'https' if has_tls else 'http'}://{f'[{shown}]' if ':' in shown else shown}:{port}"


def _bind(options: UiOptions) -> list[socket.socket]:
    try:
        if not 0 <= options.port <= 65535:
            raise OSError(errno.EACCES, "a port is a number from 0 to 65535")
        return bind(options.host, options.port)
    except OSError as error:
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise ConfigError(
            "the UI cannot listen",
            path="--port" if is_port else "--host",
            value=options.port if is_port else options.host,
            rule=f"an address of this machine that is free: {error.strerror or error}",
            repair="leave --port out for any that is free" if is_port else "use 127.0.0.1",
        ) from None


def _checked_tls(options: UiOptions) -> ssl.SSLContext | None:
    """Return how connections are encrypted; None for not at all, which only loopback and `insecure` allow."""
    if options.tls_cert is None and options.tls_key is None:
        if not options.insecure:
            check_exposure(
                options.host,
                what="the UI and its token",
                path="--host",
                value=options.host,
                repair="give --tls-cert and --tls-key, reach it through a tunnel (ssh -L), or add --insecure where the "
                "network is trusted or encrypts by itself",
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if options.tls_cert is None or options.tls_key is None:
            raise OSError("one of the two is missing")
        context.load_cert_chain(options.tls_cert, options.tls_key)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"the UI's certificate cannot be used: {error}",
            path="--tls-key" if options.tls_key is None else "--tls-cert",
            value=str(options.tls_key if options.tls_key is None else options.tls_cert),
            rule="PEM files: --tls-cert a certificate, --tls-key its private key",
            repair="give both, and check that this user can read them",
        ) from None
    return context
