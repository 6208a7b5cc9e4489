"""`forge download`: the token and where it goes, and every way in which the command refuses."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import close_session

from hub_stand_in import Fault, HubStandIn, Repo, fetched, run_download, standing_in

REPO = "org/tiny-1.5"
HAS_SOCKS = importlib.util.find_spec("socksio") is not None
SECRET = "hf_secretsecretsecret"
BIG = "model.safetensors"
FILES = {"config.json": b'{"hidden_size": 8}', BIG: bytes(range(256)) * 300, "original/consolidated.bin": b"o" * 1000}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubStandIn]:
    with standing_in({REPO: Repo(dict(FILES), lfs=frozenset({BIG}))}, home=tmp_path / "hf") as stand_in:
        yield stand_in


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def download(out: Path, *options: str, repo: str = REPO, slept: list[float] | None = None) -> int:
    return run_download(repo, out, *options, slept=slept)


def refused(capsys: Any, code: int, *words: str) -> None:
    """Check that the command ended with 2, and that its message has the words and all four fields."""
    message = capsys.readouterr().err
    assert code == 2, message
    for word in ("path:", "rule:", "repair:", *words):
        assert word in message
    assert "Traceback" not in message


class TestToken:
    def test_it_reaches_the_hub_but_no_other_host(self, hub: HubStandIn, out: Path, monkeypatch: Any) -> None:
        hub.repos[REPO].token = SECRET
        monkeypatch.setenv("HF_TOKEN", f" {SECRET}\n")
        assert download(out) == 0
        assert [one.authorization for one in hub.requests if one.server == "cdn"] == [None]
        assert {one.authorization for one in hub.requests if one.server == "hub"} == {f"Bearer {SECRET}"}

    @pytest.mark.parametrize("place", ["HUGGING_FACE_HUB_TOKEN", "file", "--token-env"])
    def test_other_places(self, hub: HubStandIn, tmp_path: Path, monkeypatch: Any, place: str) -> None:
        hub.repos[REPO].token = SECRET
        options = []
        if place == "file":
            (tmp_path / "hf").mkdir()
            (tmp_path / "hf" / "token").write_text(SECRET + "\n")
        elif place == "--token-env":
            monkeypatch.setenv("HF_TOKEN", "hf_wrong")
            monkeypatch.setenv("MY_TOKEN", SECRET)
            options = ["--token-env", "MY_TOKEN"]
        else:
            monkeypatch.setenv(place, SECRET)
        assert download(tmp_path / "out", *options) == 0

    def test_it_is_never_shown(self, hub: HubStandIn, out: Path, monkeypatch: Any, capsys: Any) -> None:
        hub.repos[REPO].token = "another"
        monkeypatch.setenv("HF_TOKEN", SECRET)
        codes = [download(out), download(out, "--token-env", SECRET)]
        monkeypatch.setenv("HF_TOKEN", f"{SECRET} é")
        codes.append(download(out))
        message = capsys.readouterr().err
        assert codes == [2, 2, 2]
        assert "the token from HF_TOKEN must be valid" in message
        assert "takes the name of an environment variable" in message
        assert "The token is malformed" in message
        assert SECRET not in message

    def test_an_unreadable_file(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        (tmp_path / "hf" / "token").mkdir(parents=True)
        refused(capsys, download(tmp_path / "out"), "The token cannot be read", str(tmp_path / "hf" / "token"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the certificate is made with openssl")
def test_https(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """An untrusted certificate is refused at once, a trusted one is used, and a redirect to http is refused."""
    path, out, slept = tmp_path / "hub.pem", tmp_path / "out", list[float]()
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=hub -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*make.split(), "-keyout", path, "-out", tmp_path / "cert"], capture_output=True, check=True)
    path.write_text(path.read_text() + (tmp_path / "cert").read_text())
    repos = {REPO: Repo(dict(FILES), lfs=frozenset({BIG}))}
    with standing_in(repos, home=tmp_path / "hf", certificate=path):
        code = download(out, slept=slept)
        refused(capsys, code, "certificate is not trusted", "self-signed certificate", "SSL_CERT_FILE")
        assert slept == []
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    with standing_in(repos, home=tmp_path / "hf", certificate=path):
        assert download(out, "--allow-patterns", "config.json") == 0
        refused(capsys, download(out, "--allow-patterns", BIG), "https is never left", "http://127.0.0.1")
        assert set(fetched(out)) == {"config.json"}


class TestHub:
    def test_private(self, hub: HubStandIn, out: Path, capsys: Any) -> None:
        hub.repos[REPO].token = SECRET
        refused(capsys, download(out), "401", "private or gated", "set HF_TOKEN", "hf auth login", "licence")
        assert not out.exists()

    def test_gated(self, hub: HubStandIn, out: Path, capsys: Any) -> None:
        hub.repos[REPO].token, hub.repos[REPO].gated = SECRET, True
        refused(capsys, download(out), "403", "is gated", "set HF_TOKEN", "accept the licence")
        assert fetched(out) == {}

    def test_no_such_repo(self, hub: HubStandIn, out: Path, capsys: Any) -> None:
        code = download(out, repo="org/absent")
        refused(capsys, code, "There is no model repository org/absent on the hub.", "--repo-type")

    def test_no_such_revision(self, hub: HubStandIn, out: Path, capsys: Any) -> None:
        refused(capsys, download(out, "--revision", "a b?"), f"{REPO} has no revision 'a b?'", "--revision")

    def test_a_404_without_the_hubs_code_names_both(self, hub: HubStandIn, out: Path, capsys: Any) -> None:
        hub.faults["listing"] = [Fault(status=404)]
        code = download(out, "--revision", "v9")
        refused(capsys, code, f"no model repository {REPO} on the hub, or it has no revision 'v9'")

    def test_a_file_that_is_gone(self, hub: HubStandIn, out: Path, capsys: Any) -> None:
        hub.faults["config.json"] = [Fault(status=404, headers={"X-Error-Code": "EntryNotFound"})]
        refused(capsys, download(out), "HTTP 404 EntryNotFound", "config.json")

    def test_any_other_status(self, hub: HubStandIn, out: Path, capsys: Any) -> None:
        hub.faults["listing"] = [Fault(status=400)]
        refused(capsys, download(out), "The hub refuses the request.", "HTTP 400")

    def test_a_wait_beyond_patience(self, hub: HubStandIn, out: Path, capsys: Any) -> None:
        hub.faults["listing"] = [Fault(status=429, headers={"Retry-After": "86400"})]
        slept: list[float] = []
        refused(capsys, download(out, slept=slept), "the hub asks to wait 86400 s")
        assert slept == []

    def test_no_connection(self, hub: HubStandIn, out: Path, capsys: Any, monkeypatch: Any) -> None:
        slept: list[float] = []
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))  # bound, not listening: every connection is refused
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
            refused(capsys, download(out, slept=slept), "cannot be reached", "refused", "HF_ENDPOINT")
        assert slept == [0.5, 1.0, 2.0, 4.0, 8.0]

    @pytest.mark.parametrize(
        "answer",
        [
            b"<html>",
            b"[]",
            b'{"id": "a", "sha": "main", "siblings": []}',
            b'{"id": "a", "sha": "%s"}' % (b"a" * 40),
            b'{"id": "a", "sha": "%s", "siblings": [{"rfilename": "a"}, {"rfilename": "a"}]}' % (b"a" * 40),
        ],
    )
    def test_not_a_hub(self, hub: HubStandIn, out: Path, capsys: Any, answer: bytes) -> None:
        hub.listing_body = answer
        refused(capsys, download(out), "does not answer like a Hugging Face hub")

    def test_too_many_files_for_one_listing(self, hub: HubStandIn, out: Path, capsys: Any) -> None:
        siblings = [{"rfilename": str(number)} for number in range(50_000)]
        hub.listing_body = json.dumps({"id": REPO, "sha": "a" * 40, "siblings": siblings}).encode()
        refused(capsys, download(out), "too many files", "50000")


class TestInput:
    @pytest.mark.parametrize("value", ["ftp://hub", "hub.test", "http://user:word@hub.test", "http://a b"])
    def test_malformed_endpoint(self, hub: HubStandIn, out: Path, capsys: Any, monkeypatch: Any, value: str) -> None:
        monkeypatch.setenv("HF_ENDPOINT", value)
        refused(capsys, download(out), "address is malformed", "HF_ENDPOINT")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("SSL_CERT_FILE", "/nowhere/ca.pem"),
            ("HTTPS_PROXY", "odd://a b"),
            pytest.param("ALL_PROXY", "socks5://127.0.0.1:1", marks=pytest.mark.skipif(HAS_SOCKS, reason="socksio")),
        ],
    )
    def test_unusable_proxy_or_certificates(
        self, hub: HubStandIn, out: Path, capsys: Any, monkeypatch: Any, name: str, value: str
    ) -> None:
        monkeypatch.setenv(name, value)
        close_session()
        refused(capsys, download(out), name)
        assert hub.requests == []

    def test_offline(self, hub: HubStandIn, out: Path) -> None:
        argv = [sys.executable, "-m", "forge.cli", "download", REPO, "--output-dir", str(out)]
        done = subprocess.run(argv, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
        assert done.returncode == 2
        assert "unset HF_HUB_OFFLINE" in done.stderr
        assert hub.requests == []

    @pytest.mark.parametrize("repo", ["../etc", "a/b/c", "https://huggingface.co/a/b", "a b", "", "a--b", "a/b.git"])
    def test_malformed_repo(self, hub: HubStandIn, out: Path, capsys: Any, repo: str) -> None:
        refused(capsys, download(out, repo=repo), "name is malformed", repr(repo))
        assert hub.requests == []

    def test_patterns_that_leave_nothing(self, hub: HubStandIn, out: Path, capsys: Any) -> None:
        refused(capsys, download(out, "--allow-patterns", "*.gguf"), "*.gguf", *FILES)
        hub.repos[REPO].files = {f"f{number}": b"" for number in range(50)}
        refused(capsys, download(out, "--ignore-patterns", "*"), "f39, and 10 more")
        hub.repos[REPO].files = {}
        refused(capsys, download(out), "Nothing to fetch", "(none)")

    @pytest.mark.parametrize("number", ["0", "65"])
    def test_workers(self, hub: HubStandIn, out: Path, capsys: Any, number: str) -> None:
        refused(capsys, download(out, "--max-workers", number), "--max-workers", "from 1 to 64")


class TestOutputDir:
    @pytest.mark.parametrize(
        "name",
        ["../evil", "/evil", "a/../b", "a//b", "./a", "a\\..\\b", "a\x1b[2J", ".forge-download.json", "link/evil"],
    )
    def test_names_that_leave_it(self, hub: HubStandIn, tmp_path: Path, out: Path, capsys: Any, name: str) -> None:
        out.mkdir()
        (out / "link").symlink_to(tmp_path)
        hub.repos[REPO].files[name] = b"evil"
        refused(capsys, download(out), "name is not allowed", "stays inside the output directory")
        assert fetched(out) == {}
        assert not list(tmp_path.glob("evil"))

    def test_it_is_a_file(self, hub: HubStandIn, out: Path, capsys: Any) -> None:
        out.write_text("mine")
        refused(capsys, download(out), "output directory is a file", "--output-dir")
        refused(capsys, download(out / "deeper"), "cannot be read or written", "Not a directory")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_it_is_not_writable(self, hub: HubStandIn, out: Path, capsys: Any) -> None:
        out.mkdir(mode=0o555)
        refused(capsys, download(out), "cannot be read or written", "Permission denied")

    def test_its_name_is_too_long(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        refused(capsys, download(tmp_path / ("x" * 300)), "cannot be read or written", "too long")

    def test_something_else_stands_where_a_file_goes(self, hub: HubStandIn, out: Path, capsys: Any) -> None:
        (out / "config.json" / "x").mkdir(parents=True)
        refused(capsys, download(out), "cannot be read or written", "config.json")
        shutil.rmtree(out / "config.json")
        (out / "config.json").symlink_to("config.json")
        refused(capsys, download(out), "cannot be read or written", str(out / "config.json"))

    def test_it_holds_another_repo(self, hub: HubStandIn, out: Path, capsys: Any) -> None:
        hub.repos["org/other"] = Repo({"other.json": b"{}"})
        assert download(out) == 0
        refused(capsys, download(out, repo="org/other"), f"holds another repository: {REPO}")
        assert fetched(out) == FILES

    def test_two_downloads_at_once(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        descriptor = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        code = download(tmp_path)
        os.close(descriptor)
        refused(capsys, code, "Another download is using")
        assert download(tmp_path) == 0

    @pytest.mark.parametrize("option", [[], ["--dry-run"]])
    def test_no_space_is_seen_before_anything_is_written(
        self, hub: HubStandIn, out: Path, capsys: Any, option: list[str]
    ) -> None:
        hub.repos[REPO].listing[BIG] = {"size": 10**18}
        refused(capsys, download(out, *option), "not enough space", "10000000000000", "bytes free")
        assert not out.exists()
