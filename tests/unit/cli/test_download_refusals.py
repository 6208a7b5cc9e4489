"""`forge download`: the token and where it goes, and every way in which the command refuses."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from forge.errors import DownloadError
from forge.models.hub_files import Folder, RemoteFile
from forge.models.hub_http import Retry, Token, asked_wait_s, read_endpoint
from hub_stand_in import Fault, HubStandIn, Repo, fetched, run_download, standing_in

REPO = "org/tiny-1.5"
SECRET = "hf_secretsecretsecret"
FILES = {
    "config.json": b'{"hidden_size": 8}',
    "model.safetensors": bytes(range(256)) * 300,
    "original/consolidated.bin": b"o" * 1000,
    "empty.txt": b"",
}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubStandIn]:
    repos = {REPO: Repo(dict(FILES), lfs=frozenset({"model.safetensors"}))}
    with standing_in(repos, home=tmp_path / "hf") as stand_in:
        yield stand_in


def download(out: Path, *options: str, repo: str = REPO, slept: list[float] | None = None) -> int:
    return run_download(repo, out, *options, slept=slept)


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> None:
    """The command ended with 2, and its message has the words and all four fields."""
    message = capsys.readouterr().err
    assert code == 2, message
    for word in ("path:", "rule:", "repair:", *words):
        assert word in message
    assert "Traceback" not in message


class TestToken:
    def test_it_reaches_the_hub_but_no_other_host(self, hub: HubStandIn, tmp_path: Path, monkeypatch: Any) -> None:
        hub.repos[REPO].token = SECRET
        monkeypatch.setenv("HF_TOKEN", f" {SECRET}\n")
        assert download(tmp_path / "out") == 0
        on_cdn = [one for one in hub.requests if one.server == "cdn"]
        assert [one.authorization for one in on_cdn] == [None]
        assert {one.authorization for one in hub.requests if one.server == "hub"} == {f"Bearer {SECRET}"}

    def test_it_follows_a_redirect_on_the_same_origin(self, hub: HubStandIn, tmp_path: Path, monkeypatch: Any) -> None:
        hub.repos[REPO].token = SECRET
        hub.moved["/api/models/old/revision/main"] = f"/api/models/{REPO}/revision/main?blobs=true"
        hub.moved[f"/old/resolve/{'a' * 40}/config.json"] = f"/{REPO}/resolve/{'a' * 40}/config.json"
        monkeypatch.setenv("HF_TOKEN", SECRET)
        assert download(tmp_path / "out", "--allow-patterns", "config.json", repo="old") == 0
        assert hub.requests[-1].authorization == f"Bearer {SECRET}"

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

    def test_it_is_never_shown(self, hub: HubStandIn, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
        assert SECRET not in repr(Token(SECRET, "HF_TOKEN"))
        hub.repos[REPO].token = "another"
        monkeypatch.setenv("HF_TOKEN", SECRET)
        codes = [download(tmp_path / "out"), download(tmp_path / "out", "--token-env", SECRET)]
        monkeypatch.setenv("HF_TOKEN", f"{SECRET}\nX-Evil: 1")
        codes.append(download(tmp_path / "out"))
        message = capsys.readouterr().err
        assert codes == [2, 2, 2]
        assert "the token from HF_TOKEN must be valid" in message
        assert "takes the name of an environment variable" in message
        assert "The token is malformed" in message
        assert SECRET not in message

    def test_an_unreadable_file(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        (tmp_path / "hf" / "token").mkdir(parents=True)
        refused(capsys, download(tmp_path / "out"), "The token file cannot be read", str(tmp_path / "hf" / "token"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the certificate is made with openssl")
class TestHttps:
    @pytest.fixture
    def secure(self, hub: HubStandIn, tmp_path: Path) -> Iterator[Path]:
        """The hub with a certificate that nobody trusts yet; gives the certificate's file."""
        path = tmp_path / "hub.pem"
        make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=hub -addext subjectAltName=IP:127.0.0.1"
        subprocess.run([*make.split(), "-keyout", path, "-out", tmp_path / "cert"], capture_output=True, check=True)
        path.write_text(path.read_text() + (tmp_path / "cert").read_text())
        with standing_in(hub.repos, home=tmp_path / "hf", certificate=path):
            yield path

    def test_an_untrusted_certificate_is_refused_at_once(self, secure: Path, tmp_path: Path, capsys: Any) -> None:
        slept: list[float] = []
        code = download(tmp_path / "out", slept=slept)
        refused(capsys, code, "certificate is not trusted", "self-signed certificate", "SSL_CERT_FILE")
        assert slept == []

    def test_a_trusted_one_is_used(self, secure: Path, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", str(secure))
        assert download(tmp_path / "out", "--allow-patterns", "config.json") == 0
        assert fetched(tmp_path / "out") == {"config.json": FILES["config.json"]}

    def test_a_redirect_never_leaves_https(self, secure: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", str(secure))
        code = download(tmp_path / "out", "--allow-patterns", "model.safetensors")
        refused(capsys, code, "https is never left", "http://127.0.0.1")


class TestRefusals:
    def test_private(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        hub.repos[REPO].token = SECRET
        refused(
            capsys, download(tmp_path / "out"), "401", "private or gated", "set HF_TOKEN", "hf auth login", "licence"
        )
        assert not (tmp_path / "out").exists()

    def test_gated(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        hub.repos[REPO].token, hub.repos[REPO].gated = SECRET, True
        refused(capsys, download(tmp_path / "out"), "403", "is gated", "set HF_TOKEN", "accept the licence")
        assert set(fetched(tmp_path / "out")) <= {"empty.txt"}  # which needs no request

    def test_no_such_repo(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        code = download(tmp_path / "out", repo="org/absent")
        refused(capsys, code, "There is no model repository org/absent on the hub.", "--repo-type")

    def test_no_such_revision(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        code = download(tmp_path / "out", "--revision", "v9")
        refused(capsys, code, f"{REPO} has no revision 'v9'", "--revision")

    def test_a_404_without_the_hubs_word_names_both(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        hub.faults["listing"] = [Fault(status=404)]
        code = download(tmp_path / "out", "--revision", "v9")
        refused(capsys, code, f"no model repository {REPO} on the hub, or it has no revision 'v9'")

    def test_a_file_that_is_gone(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        hub.faults["config.json"] = [Fault(status=404, headers={"X-Error-Code": "EntryNotFound"})]
        refused(capsys, download(tmp_path / "out"), "HTTP 404 EntryNotFound", "config.json")

    def test_any_other_status(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        hub.faults["listing"] = [Fault(status=400)]
        assert download(tmp_path / "out") == 2
        assert "The hub refuses the request." in capsys.readouterr().err

    def test_refused_endpoint(self, hub: HubStandIn, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))  # bound, not listening: every connection is refused
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
            slept: list[float] = []
            refused(capsys, download(tmp_path / "out", slept=slept), "cannot be reached", "refused", "HF_ENDPOINT")
        assert slept == [0.5, 1.0, 2.0, 4.0, 8.0]

    def test_unknown_host(self, hub: HubStandIn, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
        monkeypatch.setenv("HF_ENDPOINT", "http://no-such-host.invalid")
        monkeypatch.setenv("NO_PROXY", "*")
        refused(capsys, download(tmp_path / "out"), "cannot be reached", "http://no-such-host.invalid/api")

    @pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"sha": "main", "siblings": []}', b'{"sha": "%s"}'])
    def test_not_a_hub(self, hub: HubStandIn, tmp_path: Path, capsys: Any, body: bytes) -> None:
        hub.listing_body = body.replace(b"%s", b"a" * 40)
        refused(capsys, download(tmp_path / "out"), "does not answer like a Hugging Face hub")

    def test_the_same_file_twice(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        hub.listing_body = json.dumps({"sha": "a" * 40, "siblings": [{"rfilename": "a"}, {"rfilename": "a"}]}).encode()
        refused(capsys, download(tmp_path / "out"), "does not answer like a Hugging Face hub")

    def test_too_many_files_for_one_listing(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        siblings = [{"rfilename": str(number)} for number in range(50_000)]
        hub.listing_body = json.dumps({"sha": "a" * 40, "siblings": siblings}).encode()
        refused(capsys, download(tmp_path / "out"), "too many files", "50000")

    @pytest.mark.parametrize("value", ["ftp://hub", "hub.test", "http://user:word@hub.test", "http://a b"])
    def test_malformed_endpoint(self, value: str) -> None:
        with pytest.raises(DownloadError, match="malformed") as caught:
            read_endpoint({"HF_ENDPOINT": value})
        assert caught.value.path == "HF_ENDPOINT"

    def test_offline(self) -> None:
        with pytest.raises(DownloadError, match="unset HF_HUB_OFFLINE"):
            read_endpoint({"HF_HUB_OFFLINE": "1"})
        assert read_endpoint({"HF_ENDPOINT": "http://a:1/x/"}) == "http://a:1/x"
        assert read_endpoint({}) == "https://huggingface.co"

    @pytest.mark.parametrize(
        "repo", ["../etc", "a/b/c", "https://huggingface.co/a/b", "a b", "", "a/..", "-a/b", "a--b", "a/b.git", "a/"]
    )
    def test_malformed_repo(self, hub: HubStandIn, tmp_path: Path, capsys: Any, repo: str) -> None:
        if repo.startswith("-"):
            with pytest.raises(SystemExit):
                download(tmp_path / "out", repo=repo)
            return
        refused(capsys, download(tmp_path / "out", repo=repo), "name is malformed", repr(repo))
        assert hub.requests == []

    @pytest.mark.parametrize("revision", ["", "a..b", "a b", "a?b"])
    def test_malformed_revision(self, hub: HubStandIn, tmp_path: Path, capsys: Any, revision: str) -> None:
        refused(capsys, download(tmp_path / "out", "--revision", revision), "revision is malformed")

    @pytest.mark.parametrize(
        "name",
        [
            "../evil",
            "/evil",
            "a/../../evil",
            "a/../b",
            "a//b",
            "./a",
            "a\\..\\b",
            "a\x1b[2J",
            ".forge-download.json",
            "link/evil",
        ],
    )
    def test_names_that_leave_the_directory(self, hub: HubStandIn, tmp_path: Path, capsys: Any, name: str) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "link").symlink_to(tmp_path)
        hub.repos[REPO].files[name] = b"evil"
        refused(capsys, download(out), "name is not allowed", "stays inside the output directory")
        assert fetched(out) == {}
        assert not list(tmp_path.glob("evil"))

    def test_patterns_that_leave_nothing(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        refused(capsys, download(tmp_path / "out", "--allow-patterns", "*.gguf"), "config.json", "*.gguf", *FILES)
        hub.repos[REPO].files = {f"f{number}": b"" for number in range(50)}
        refused(capsys, download(tmp_path / "out", "--ignore-patterns", "*"), "f39, and 10 more")

    def test_an_empty_repo(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        hub.repos[REPO].files = {}
        refused(capsys, download(tmp_path / "out"), "Nothing to fetch", "(none)")

    def test_output_dir_is_a_file(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        (tmp_path / "out").write_text("mine")
        refused(capsys, download(tmp_path / "out"), "output directory is a file", "--output-dir")
        assert hub.requests == []

    def test_output_dir_cannot_be_made(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        (tmp_path / "file").write_text("mine")
        refused(capsys, download(tmp_path / "file" / "out"), "cannot be read or written", "Not a directory")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_output_dir_is_not_writable(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        (tmp_path / "out").mkdir(mode=0o555)
        refused(capsys, download(tmp_path / "out"), "cannot be read or written", "Permission denied")

    def test_output_dir_name_too_long(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        refused(capsys, download(tmp_path / ("x" * 300)), "cannot be read or written", "too long")

    def test_a_directory_stands_where_a_file_goes(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        (tmp_path / "out" / "config.json" / "x").mkdir(parents=True)
        refused(capsys, download(tmp_path / "out"), "cannot be read or written", "config.json")

    def test_a_file_that_cannot_be_looked_at(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        (tmp_path / "config.json").symlink_to("config.json")
        refused(capsys, download(tmp_path), "cannot be read or written", str(tmp_path / "config.json"))

    def test_output_dir_of_another_repo(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        hub.repos["org/other"] = Repo({"other.json": b"{}"})
        assert download(tmp_path / "out") == 0
        refused(capsys, download(tmp_path / "out", repo="org/other"), f"holds another repository: {REPO}")
        assert fetched(tmp_path / "out") == FILES

    def test_two_downloads_at_once(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        descriptor = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        code = download(tmp_path)
        os.close(descriptor)
        refused(capsys, code, "Another download is at work")
        assert download(tmp_path) == 0

    @pytest.mark.parametrize("number", ["0", "65"])
    def test_workers(self, hub: HubStandIn, tmp_path: Path, capsys: Any, number: str) -> None:
        refused(capsys, download(tmp_path / "out", "--max-workers", number), "--max-workers", "from 1 to 64")

    @pytest.mark.parametrize("option", [[], ["--dry-run"]])
    def test_no_space_is_seen_before_anything_is_written(
        self, hub: HubStandIn, tmp_path: Path, capsys: Any, option: list[str]
    ) -> None:
        hub.repos[REPO].listing["model.safetensors"] = {"size": 10**18}
        refused(capsys, download(tmp_path / "out", *option), "not enough space", "10000000000000", "bytes free")
        assert not (tmp_path / "out").exists()

    def test_no_space_while_writing(self, hub: HubStandIn, tmp_path: Path, capsys: Any) -> None:
        sibling = next(one for one in hub.repos[REPO].siblings() if one["rfilename"] == "model.safetensors")
        file = RemoteFile("model.safetensors", sibling["size"], f"sha256:{sibling['lfs']['sha256']}")
        folder = Folder(tmp_path / "out")
        folder.prepare()
        folder.partial(file).symlink_to("/dev/full")  # every write to it fails with ENOSPC
        code = download(tmp_path / "out", "--allow-patterns", file.path)
        refused(capsys, code, "No space is left", "what was fetched is kept", "76800 more bytes are needed")
        assert fetched(tmp_path / "out") == {}


def test_the_wait_that_the_hub_asks_for() -> None:
    now = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)

    def wait(**headers: str) -> float | None:
        message = Message()
        for name, value in headers.items():
            message[name.replace("_", "-")] = value
        return asked_wait_s(message, now=now)

    assert wait() is None
    assert wait(Retry_After="7") == 7
    assert wait(Retry_After="Thu, 01 Jan 2026 12:00:30 GMT") == 30
    assert wait(Retry_After="Thu, 01 Jan 2026 11:00:00 GMT") == 0
    assert wait(Retry_After="soon") is None
    assert wait(RateLimit='"api";r=0;t=55') == 55
    assert [Retry().wait_s(number) for number in (1, 2, 7, 9)] == [0.5, 1.0, 30.0, 30.0]
