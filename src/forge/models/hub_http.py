"""HTTP to a Hugging Face hub: the token, redirects, retries, and what each refusal means.

A caller may rely on three things. The token goes to the hub's own origin only, never along a redirect to another host,
and appears in no message. A failure that may pass (no connection, 5xx, 429) is tried again a bounded number of times,
with growing waits or the wait that the hub asks for. Everything else is a `DownloadError` that says what to do.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Final, TypeVar
from urllib.parse import urlsplit

from forge.errors import DownloadError

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
RESUMES: Final = "run the same command again: it continues where this one stopped"

T = TypeVar("T")


@dataclass(frozen=True)
class Token:
    """A secret and where it was found. Only the place is ever shown."""

    secret: str = field(repr=False)
    source: str


@dataclass(frozen=True)
class Retry:
    """How often and how patiently a failure that may pass is tried again. `sleep` is the only way time passes."""

    num_tries: int = 6
    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0
    longest_asked_wait_s: float = 600.0
    sleep: Callable[[float], None] = time.sleep

    def wait_s(self, num_failures: int) -> float:
        return min(self.first_wait_s * 2.0 ** (num_failures - 1), self.longest_wait_s)


class PassingFailure(Exception):
    """A failure worth another try.

    `wait_s` is the wait that the hub asks for; `progressed` says that new bytes arrived, so the count of failures
    starts again; `is_bad_range` says that the hub has no bytes at the offset asked for.
    """

    def __init__(
        self, reason: str, *, wait_s: float | None = None, progressed: bool = False, is_bad_range: bool = False
    ) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.progressed = progressed
        self.is_bad_range = is_bad_range


class NotFound(DownloadError):
    """The hub answered 404; `code` is its own word for what is missing, or empty."""

    code: str = ""


def read_endpoint(environ: Mapping[str, str]) -> str:
    """The hub's address: HF_ENDPOINT, or the public hub. Refuses offline mode, since nothing could be fetched in it."""
    if environ.get("HF_HUB_OFFLINE", "").strip().lower() in {"1", "true", "yes", "on"}:
        raise DownloadError(
            "The hub is switched off in this environment.",
            path="HF_HUB_OFFLINE",
            value=environ["HF_HUB_OFFLINE"],
            rule="a download needs the network",
            repair="unset HF_HUB_OFFLINE",
        )
    endpoint = environ.get("HF_ENDPOINT", "").strip() or DEFAULT_ENDPOINT
    if not re.fullmatch(r"https?://[A-Za-z0-9.\-\[\]:]+(/[\w./-]*)?", endpoint, re.ASCII):
        raise DownloadError(
            "The hub's address is malformed.",
            path="HF_ENDPOINT",
            value=endpoint,
            rule="http:// or https://, a host, perhaps a port and a path; no user name",
            repair=f"unset HF_ENDPOINT, or set it to an address such as {DEFAULT_ENDPOINT}",
        )
    return endpoint.rstrip("/")


def read_token(environ: Mapping[str, str], *, name: str | None = None) -> Token | None:
    """The token in the variable `name`, else in HF_TOKEN, HUGGING_FACE_HUB_TOKEN, else in the hub's token file."""
    if name is not None:
        if not environ.get(name, "").strip():
            raise DownloadError(
                "The variable that should hold the token is not set.",
                path="--token-env",
                # A token given by mistake in place of a name must not end up in a log.
                value="<hidden>" if name.startswith("hf_") else name,
                rule="--token-env takes the name of an environment variable, not the token itself",
                repair="export the variable, or leave --token-env out to use HF_TOKEN",
            )
        return _checked_token(environ[name], source=name)
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if environ.get(variable, "").strip():
            return _checked_token(environ[variable], source=variable)
    path = _token_file(environ)
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DownloadError(
            "The token file cannot be read.",
            path=str(path),
            value=type(error).__name__,
            rule="a text file that holds one token",
            repair="repair or remove the file, or set HF_TOKEN",
        ) from error
    return _checked_token(text, source=str(path)) if text.strip() else None


def _token_file(environ: Mapping[str, str]) -> Path:
    if environ.get("HF_TOKEN_PATH"):
        return Path(environ["HF_TOKEN_PATH"]).expanduser()
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(home).expanduser() / "token"


def _checked_token(text: str, *, source: str) -> Token:
    secret = text.strip()
    if not re.fullmatch(r"[!-~]+", secret):
        raise DownloadError(
            "The token is malformed.",
            path=source,
            value="<hidden>",
            rule="printable ASCII without spaces, on one line",
            repair="copy the token again from the hub's settings page",
        )
    return Token(secret, source)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, parts.port or default


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but leaves the token behind as soon as one leaves the origin it was meant for."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is None:
            return None
        before, after = _origin(req.full_url), _origin(newurl)
        if (before[0], after[0]) != ("http", "http") and after[0] != "https":
            raise DownloadError(
                "The hub redirects to an address that is not safe to follow.",
                path=req.full_url.split("?")[0],
                value=f"{after[0]}://{after[1]}",
                rule="https is never left for another scheme",
                repair="check HF_ENDPOINT and the proxy settings",
            )
        if before != after:
            request.remove_header("Authorization")
        return request


class HubClient:
    """Requests to one hub. Safe to use from several threads; holds no connection between requests."""

    def __init__(
        self,
        endpoint: str,
        *,
        token: Token | None = None,
        retry: Retry | None = None,
        timeout_s: float = 30.0,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.retry = retry or Retry()
        self.timeout_s = timeout_s
        self._token = token
        self._note = note or (lambda text: None)
        self._opener = urllib.request.build_opener(_Redirects())

    def open(self, path: str, *, offset: int = 0) -> http.client.HTTPResponse:
        """One GET, from byte `offset` on. Raises `PassingFailure` or `DownloadError`; 416 is a `PassingFailure`."""
        url = self.endpoint + path
        headers = {"User-Agent": "torchforge", "Accept-Encoding": "identity"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token.secret}"
        if offset:
            headers["Range"] = f"bytes={offset}-"
        try:
            response: http.client.HTTPResponse = self._opener.open(
                urllib.request.Request(url, headers=headers), timeout=self.timeout_s
            )
        except urllib.error.HTTPError as answer:
            with answer:
                raise self._refusal(answer, url) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise _untrusted(url, error.reason) from error
            raise PassingFailure(str(error.reason)) from error
        except (OSError, http.client.HTTPException) as error:
            raise PassingFailure(str(error) or type(error).__name__) from error
        return response

    def get_json(self, path: str) -> object:
        """The JSON answer to a GET, tried as often as `retry` allows."""

        def read() -> bytes:
            with self.open(path) as response:
                try:
                    return response.read()
                except (OSError, http.client.HTTPException) as error:
                    raise PassingFailure(str(error) or type(error).__name__) from error

        body = self.attempt(read, path=path)
        try:
            answer: object = json.loads(body)
        except ValueError as error:
            raise self.not_a_hub(path) from error
        return answer

    def attempt(self, action: Callable[[], T], *, path: str) -> T:
        """Call `action` until it returns, raises something else than `PassingFailure`, or the tries are used up."""
        num_failures = 0
        while True:
            try:
                return action()
            except PassingFailure as failure:
                num_failures = 1 if failure.progressed else num_failures + 1
                asked_s = failure.wait_s
                if num_failures >= self.retry.num_tries or (asked_s or 0) > self.retry.longest_asked_wait_s:
                    raise self._given_up(failure, path=path, num_failures=num_failures) from failure
                wait_s = self.retry.wait_s(num_failures) if asked_s is None else asked_s
                self._note(f"{path}: {failure}; trying again in {wait_s:g} s")
                self.retry.sleep(wait_s)

    def not_a_hub(self, path: str) -> DownloadError:
        return DownloadError(
            "The endpoint does not answer like a Hugging Face hub.",
            path=self.endpoint + path,
            rule="the answer is a JSON object with `sha` (a commit) and `siblings` (the files)",
            repair="check HF_ENDPOINT",
        )

    def _given_up(self, failure: PassingFailure, *, path: str, num_failures: int) -> DownloadError:
        asked = f"; the hub asks to wait {failure.wait_s:g} s" if failure.wait_s is not None else ""
        return DownloadError(
            "The hub cannot be reached, or does not deliver.",
            path=self.endpoint + path,
            value=str(failure),
            rule=f"given up after {num_failures} failure(s) in a row{asked}",
            repair=f"check the network, the proxy settings and HF_ENDPOINT, then {RESUMES}",
        )

    def _refusal(self, answer: urllib.error.HTTPError, url: str) -> DownloadError | PassingFailure:
        status, code = answer.code, answer.headers.get("X-Error-Code", "")
        if status in {408, 429} or status >= 500:
            return PassingFailure(f"HTTP {status}", wait_s=asked_wait_s(answer.headers, now=datetime.now(UTC)))
        if status == 416:
            return PassingFailure("HTTP 416: the range is not there", is_bad_range=True)
        value = f"HTTP {status} {code}".strip()
        if status in {401, 403}:
            return self._not_allowed(url, value, is_gated=code == "GatedRepo")
        if status == 404:
            missing = NotFound(
                "The hub does not have it.",
                path=url,
                value=value,
                rule="the repository, the revision and the file must exist",
                repair="check the names, and --repo-type",
            )
            missing.code = code
            return missing
        return DownloadError(
            "The hub refuses the request.", path=url, value=value, repair="check HF_ENDPOINT and the proxy settings"
        )

    def _not_allowed(self, url: str, value: str, *, is_gated: bool) -> DownloadError:
        kind = "gated" if is_gated else "private or gated (or does not exist)"
        licence = "accept the licence on the repository's page with the account that owns the token"
        if self._token is None:
            rule = "such a repository needs a token; none was found"
            repair = f"set HF_TOKEN, or run `hf auth login` (once `huggingface-cli login`), and {licence}"
        else:
            rule = f"the token from {self._token.source} must be valid and have access to it"
            repair = f"set HF_TOKEN to a token with read access, and {licence}"
        return DownloadError(f"The repository is {kind}.", path=url, value=value, rule=rule, repair=repair)


def asked_wait_s(headers: Message, *, now: datetime) -> float | None:
    """The seconds that `Retry-After` (a number or a date) or the hub's own `RateLimit` header asks to wait."""
    text = str(headers.get("Retry-After", "")).strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if text:
        try:
            then = parsedate_to_datetime(text)
        except ValueError:
            return None
        return max(0.0, ((then if then.tzinfo else then.replace(tzinfo=UTC)) - now).total_seconds())
    limit = re.search(r"\bt\s*=\s*(\d+)", str(headers.get("RateLimit", "")))
    return float(limit[1]) if limit else None


def _untrusted(url: str, reason: ssl.SSLCertVerificationError) -> DownloadError:
    return DownloadError(
        "The hub's certificate is not trusted.",
        path=url,
        value=reason.verify_message,
        rule="https certificates are always verified",
        repair="set SSL_CERT_FILE to the certificates of your proxy or mirror",
    )
