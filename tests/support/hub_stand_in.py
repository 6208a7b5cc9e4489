"""A stand-in of the Hugging Face hub's HTTP API: real servers on 127.0.0.1, with faults on demand.

It serves `/api/{models,datasets}/REPO/revision/REV?blobs=true` and `/[datasets/]REPO/resolve/REV/FILE` with ranges.
Large files (`lfs`) are answered with a redirect to a second server, another origin, as the hub does with its CDN.
Nothing here waits for time to pass: a blocked answer goes on when the test says so. `run_download` is the command as
`forge` would run it, with waits that are noted instead of slept.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import getproxies

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from forge.cli import download as command


@dataclass
class Seen:
    """One request as it arrived. `server` is hub or cdn."""

    server: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class Fault:
    """What happens to one request for a file (or to one listing) instead of the plain answer.

    `status` answers with it and `headers`. `cut_after` sends so many bytes and closes. `block_after` sends so many
    bytes, sets `reached`, and waits for `go`. `body` replaces the bytes, and their length. `waits_for` comes first.
    """

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    block_after: int | None = None
    body: bytes | None = None
    waits_for: threading.Event | None = None
    ignores_range: bool = False
    lies_about_range: bool = False
    reached: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)


@dataclass
class Repo:
    """A repository at one commit. `listing` overrides fields of the listed files, by path."""

    files: dict[str, bytes]
    commit: str = "a" * 40
    lfs: frozenset[str] = frozenset()
    revisions: frozenset[str] = frozenset({"main"})
    token: str | None = None
    gated: bool = False
    listing: dict[str, dict[str, Any]] = field(default_factory=dict)

    def siblings(self) -> list[dict[str, Any]]:
        return [{**self._sibling(path, body), **self.listing.get(path, {})} for path, body in self.files.items()]

    def _sibling(self, path: str, body: bytes) -> dict[str, Any]:
        blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
        sibling: dict[str, Any] = {"rfilename": path, "size": len(body), "blobId": blob}
        if path in self.lfs:
            sha256 = hashlib.sha256(body).hexdigest()
            sibling["lfs"] = {"sha256": sha256, "size": len(body), "pointerSize": 134}
            sibling["blobId"] = "b" * 40
        return sibling


class HubStandIn:
    """Use as a context manager. `requests` is what arrived, in order; `faults[path]` are used up one per request."""

    def __init__(self, *, certificate: Path | None = None) -> None:
        """With a `certificate` (and its key in the same file) the hub speaks https; the CDN never does."""
        self.repos: dict[str, Repo] = {}
        self.requests: list[Seen] = []
        self.faults: dict[str, list[Fault]] = {}
        self.listing_body: bytes | None = None
        self._used: list[Fault] = []
        self._lock = threading.Lock()
        self._scheme = "http" if certificate is None else "https"
        self._hub = _Server(self, "hub")
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._hub.socket = context.wrap_socket(self._hub.socket, server_side=True)
        self._cdn = _Server(self, "cdn")
        self._threads = [
            threading.Thread(target=server.serve_forever, args=(0.01,)) for server in (self._hub, self._cdn)
        ]

    @property
    def endpoint(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._hub.server_port}"

    @property
    def cdn(self) -> str:
        return f"http://127.0.0.1:{self._cdn.server_port}"

    def fetched(self, file: str) -> list[str | None]:
        """The ranges of the requests that were to deliver `file`, without those that were redirected to the CDN."""
        seen = [one for one in self.requests if one.path.endswith(f"/{file}")]
        last = "cdn" if any(one.server == "cdn" for one in seen) else "hub"
        return [one.range for one in seen if one.server == last]

    def take_fault(self, path: str) -> Fault | None:
        with self._lock:
            waiting = self.faults.get(path)
            if not waiting:
                return None
            self._used.append(waiting.pop(0))
            return self._used[-1]

    def __enter__(self) -> HubStandIn:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for fault in self._used:
            fault.go.set()
        for server, thread in zip((self._hub, self._cdn), self._threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, stand_in: HubStandIn, name: str) -> None:
        self.stand_in, self.name = stand_in, name
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        stand_in = self.server.stand_in
        stand_in.requests.append(Seen(self.server.name, path, self.headers["Range"], self.headers["Authorization"]))
        try:
            if path.startswith("/api/"):
                self._list(url.path, parse_qs(url.query))
            else:
                self._resolve(path)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _list(self, raw_path: str, query: dict[str, list[str]]) -> None:
        _, _, kind, rest = raw_path.split("/", 3)
        name, revision = (unquote(part) for part in rest.split("/revision/"))
        stand_in = self.server.stand_in
        if fault := stand_in.take_fault("listing"):
            self._answer(fault.status or 500, fault.headers)
            return
        repo = stand_in.repos.get(name if kind == "models" else f"datasets/{name}")
        if repo is None:
            self._answer(404, {"X-Error-Code": "RepoNotFound"})
        elif repo.token is not None and not repo.gated and self._token() != repo.token:
            self._answer(401, {"X-Error-Code": "RepoNotFound"})
        elif revision not in repo.revisions | {repo.commit}:
            self._answer(404, {"X-Error-Code": "RevisionNotFound"})
        elif query.get("blobs") != ["true"]:
            self._answer(400, {})
        else:
            body = json.dumps({"id": name, "sha": repo.commit, "siblings": repo.siblings()}).encode()
            self._answer(200, {"Content-Type": "application/json"}, stand_in.listing_body or body)

    def _resolve(self, path: str) -> None:
        name, rest = path[1:].split("/resolve/")
        commit, file = rest.split("/", 1)
        stand_in = self.server.stand_in
        repo = stand_in.repos[name]
        on_hub = self.server.name == "hub"
        if on_hub and repo.token is not None and self._token() != repo.token:
            self._answer(403 if repo.gated else 401, {"X-Error-Code": "GatedRepo" if repo.gated else "RepoNotFound"})
        elif commit != repo.commit or file not in repo.files:
            self._answer(404, {"X-Error-Code": "EntryNotFound"})
        elif on_hub and file in repo.lfs:
            self._answer(302, {"Location": stand_in.cdn + self.path})
        else:
            self._send_file(repo.files[file], stand_in.take_fault(file) or Fault())

    def _send_file(self, content: bytes, fault: Fault) -> None:
        if fault.waits_for is not None:
            fault.waits_for.wait()
        if fault.status is not None:
            self._answer(fault.status, fault.headers)
            return
        content = content if fault.body is None else fault.body
        start, status, headers = 0, 200, {}
        if self.headers["Range"] and not fault.ignores_range:
            start, status = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-")), 206
            if start >= len(content):
                self._answer(416, {"Content-Range": f"bytes */{len(content)}"})
                return
            said = start + 1 if fault.lies_about_range else start
            headers["Content-Range"] = f"bytes {said}-{len(content) - 1}/{len(content)}"
        self._send_head(status, {**headers, "Content-Length": str(len(content) - start)})
        body = content[start:]
        stop = fault.cut_after if fault.cut_after is not None else fault.block_after
        self.wfile.write(body[:stop])
        if fault.block_after is not None:
            fault.reached.set()
            fault.go.wait()
        if fault.cut_after is None and stop is not None:
            self.wfile.write(body[stop:])

    def _token(self) -> str:
        return (self.headers["Authorization"] or "").removeprefix("Bearer ")

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self._send_head(status, {**headers, "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _send_head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean; `requests` has it all."""


@contextlib.contextmanager
def standing_in(repos: dict[str, Repo], *, home: Path, certificate: Path | None = None) -> Iterator[HubStandIn]:
    """A stand-in that serves `repos`, and an environment that leads to it and to no token of the machine."""
    with pytest.MonkeyPatch.context() as patch, HubStandIn(certificate=certificate) as stand_in:
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "HF_OIDC_RESOURCE"):
            patch.delenv(name, raising=False)
        # huggingface_hub reads these once, on import.
        patch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("HF_HOME", str(home))
        patch.setenv("HF_ENDPOINT", stand_in.endpoint)
        stand_in.repos = repos
        # The client of huggingface_hub outlives a test; certificates and proxies are read when it is made.
        has_own_client = certificate is not None or bool(getproxies())
        if has_own_client:
            close_session()
        yield stand_in
        if has_own_client:
            close_session()


def run_download(repo: str, out: Path, *options: str, slept: list[float] | None = None) -> int:
    """`forge download REPO --output-dir OUT OPTIONS`; the waits go to `slept`."""
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["download", repo, "--output-dir", str(out), *options])
    assert args.handler is command.run
    return command.run(args, sleep=(slept if slept is not None else []).append)


def fetched(out: Path) -> dict[str, bytes]:
    """The files below `out`, without the command's own."""
    names = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(".forge-download")}
