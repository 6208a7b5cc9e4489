"""Requests to a Hugging Face hub, made by `huggingface_hub`: what to fetch, when to retry, and what each refusal means.

Callers may rely on three things. The token goes to the hub's own origin only (httpx drops it on a redirect to another)
and appears in no message. A failure that may pass (no connection, HTTP 5xx, 408, 429) is retried a bounded number of
times, after growing waits or the wait that the hub asks for. Everything else is a `DownloadError` that says what to do.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import httpx
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OIDCError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import (
    build_hf_headers,
    filter_repo_objects,
    get_session,
    get_token_to_send,
    hf_raise_for_status,
    parse_ratelimit_headers,
    validate_repo_id,
)

from forge.errors import DownloadError
from forge.models.hub_files import RemoteFile

# Above this many files the hub may leave some out of its listing; half a repository must not pass for a whole one.
_MOST_FILES: Final = 50_000
_NUM_NAMES_SHOWN: Final = 40
_NUM_TRIES: Final = 6
_FIRST_WAIT_S: Final = 0.5
_LONGEST_ASKED_WAIT_S: Final = 600.0

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """What to fetch. Patterns are shell patterns in which `*` also matches `/`; one that ends in `/` means a folder."""

    repo: str
    repo_type: str = "model"
    revision: str = "main"
    allow_patterns: tuple[str, ...] = ()
    ignore_patterns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """The files of a repository at one commit."""

    source: Source
    commit: str
    files: tuple[RemoteFile, ...]


class Hub:
    """A hub as the environment describes it: HF_ENDPOINT, and a token from where `huggingface_hub` looks for one.

    `sleep` is the only way time passes between tries. Safe to use from several threads.
    """

    def __init__(
        self,
        *,
        token_env: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
        note: Callable[[str], None] = lambda text: None,
        timeout_s: float = 30.0,
    ) -> None:
        self.endpoint = _read_endpoint()
        _check_client()
        self.timeout_s = timeout_s
        self._sleep, self._note = sleep, note
        token, self._token_source = _read_token(token_env)
        self._has_token = token is not None
        self._api = HfApi(endpoint=self.endpoint, token=token or False, library_name="torchforge")
        self._headers = build_hf_headers(
            token=token or False, library_name="torchforge", headers={"Accept-Encoding": "identity"}
        )

    def url(self, snapshot: Snapshot, file: RemoteFile) -> str:
        """Return the address of a file at the snapshot's commit."""
        source = snapshot.source
        return hf_hub_url(
            source.repo, file.path, repo_type=source.repo_type, revision=snapshot.commit, endpoint=self.endpoint
        )

    def list_files(self, source: Source) -> Snapshot:
        """Resolve the revision to a commit and list the files there."""
        try:
            validate_repo_id(source.repo)
        except HFValidationError as error:
            raise DownloadError(
                "The repository's name is malformed.",
                path="REPO",
                value=source.repo,
                rule="OWNER/NAME of letters, digits, '-', '_' and '.', as in Qwen/Qwen3-0.6B; not an address",
                repair="copy the name from the top of the repository's page; for a dataset add --repo-type dataset",
            ) from error
        at = f"{self.endpoint}/api/{source.repo_type}s/{source.repo}"

        ask = self._api.dataset_info if source.repo_type == "dataset" else self._api.model_info
        try:
            info = self.attempt(
                lambda: ask(source.repo, revision=source.revision, files_metadata=True, timeout=self.timeout_s),
                at=at,
                source=source,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._not_a_hub(at) from error
        commit, siblings = info.sha, info.siblings
        if siblings is None or not isinstance(commit, str) or not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", commit):
            raise self._not_a_hub(at)
        if len({one.rfilename for one in siblings}) != len(siblings):
            raise self._not_a_hub(at)
        if len(siblings) >= _MOST_FILES:
            raise DownloadError(
                "The repository has too many files for one listing.",
                path=source.repo,
                value=len(siblings),
                rule=f"fewer than {_MOST_FILES} files, since the hub may leave some out of a longer list",
                repair="fetch it with the hub's own command, `hf download`",
            )
        return Snapshot(source, commit, tuple(_remote_file(one, commit=commit) for one in siblings))

    @contextlib.contextmanager
    def open(self, url: str, *, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Request a file from byte `offset` on; yield where the answer starts, there or at 0, and its chunks."""
        headers = {**self._headers, "Range": f"bytes={offset}-"} if offset else self._headers
        with get_session().stream("GET", url, headers=headers, timeout=self.timeout_s) as response:
            if url.startswith("https:") and response.url.scheme != "https":
                raise DownloadError(
                    "The hub redirects to an address that is not safe to follow.",
                    path=url,
                    value=f"{response.url.scheme}://{response.url.host}",
                    rule="https is never left for another scheme",
                    repair="check HF_ENDPOINT and the proxy settings",
                )
            is_range = response.headers.get("Content-Range", "").startswith(f"bytes {offset}-")
            if offset and response.status_code in {206, 416} and not is_range:
                with self.open(url, offset=0) as answer:
                    yield answer
                    return
            hf_raise_for_status(response)
            yield offset if response.status_code == 206 else 0, response.iter_bytes()

    def attempt(
        self,
        action: Callable[[], T],
        *,
        at: str,
        source: Source | None = None,
        num_bytes_received: Callable[[], int] = lambda: 0,
    ) -> T:
        """Call `action`, again after a failure that may pass; a try that received new bytes restarts the count."""
        num_failures, most_bytes = 0, num_bytes_received()
        while True:
            try:
                return action()
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                num_bytes = num_bytes_received()
                num_failures = 1 if num_bytes > most_bytes else num_failures + 1
                most_bytes = max(most_bytes, num_bytes)
                asked_s = _asked_wait_s(error)
                if not _may_pass(error) or num_failures >= _NUM_TRIES or (asked_s or 0) > _LONGEST_ASKED_WAIT_S:
                    raise self._refusal(error, at=at, source=source, num_failures=num_failures) from error
                wait_s = _FIRST_WAIT_S * 2.0 ** (num_failures - 1) if asked_s is None else asked_s
                self._note(f"{at}: {_reason(error)}; trying again in {wait_s:g} s")
                self._sleep(wait_s)

    def _refusal(self, error: Exception, *, at: str, source: Source | None, num_failures: int) -> DownloadError:
        """Translate an error of `huggingface_hub` or httpx."""
        if _may_pass(error):
            asked_s = _asked_wait_s(error)
            asked = f"; the hub asks to wait {asked_s:g} s" if asked_s is not None else ""
            return DownloadError(
                "The hub cannot be reached, or does not deliver.",
                path=at,
                value=_reason(error),
                rule=f"stopped after {num_failures} consecutive failure(s){asked}",
                repair="check the network, the proxy settings and HF_ENDPOINT, then run the command again: it resumes",
            )
        if _is_untrusted(error):
            return DownloadError(
                "The hub's certificate is not trusted.",
                path=at,
                value=_reason(error),
                rule="https certificates are always verified",
                repair="set SSL_CERT_FILE to the certificates of your proxy or mirror",
            )
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if isinstance(error, GatedRepoError) or status in {401, 403}:
            return self._not_allowed(at, _reason(error), is_gated=isinstance(error, GatedRepoError))
        if source is not None and status == 404:
            return _not_found(source, error)
        return DownloadError(
            "The hub refuses the request.",
            path=at,
            value=_reason(error),
            rule="the repository, the revision and the file must exist, at a hub that serves them",
            repair="check the names and --repo-type, HF_ENDPOINT and the proxy settings",
        )

    def _not_allowed(self, at: str, value: str, *, is_gated: bool) -> DownloadError:
        kind = "gated" if is_gated else "private or gated (or does not exist)"
        licence = "accept the licence on the repository's page with the account that owns the token"
        if self._has_token:
            rule = f"the token from {self._token_source} must be valid and have access to it"
            repair = f"set HF_TOKEN to a token with read access, and {licence}"
        else:
            rule = "such a repository needs a token; none was found"
            repair = f"set HF_TOKEN, or run `hf auth login` (once `huggingface-cli login`), and {licence}"
        return DownloadError(f"The repository is {kind}.", path=at, value=value, rule=rule, repair=repair)

    def _not_a_hub(self, at: str) -> DownloadError:
        return DownloadError(
            "The endpoint does not answer like a Hugging Face hub.",
            path=at,
            rule="the answer is a JSON object with `id`, `sha` (a commit) and `siblings` (the files)",
            repair="check HF_ENDPOINT",
        )


def select(snapshot: Snapshot, *, note: Callable[[str], None]) -> Snapshot:
    """Keep the files that the patterns of the source ask for. An empty choice is an error, not an empty directory."""
    source, names = snapshot.source, [file.path for file in snapshot.files]
    for pattern in source.allow_patterns:
        if not any(filter_repo_objects(names, allow_patterns=[pattern])):
            note(f"no file matches --allow-patterns {pattern!r}")
    chosen = set(
        filter_repo_objects(
            names,
            allow_patterns=list(source.allow_patterns) or None,
            ignore_patterns=list(source.ignore_patterns) or None,
        )
    )
    if not chosen:
        more = f", and {len(names) - _NUM_NAMES_SHOWN} more" if len(names) > _NUM_NAMES_SHOWN else ""
        shown = ", ".join(names[:_NUM_NAMES_SHOWN]) or "(none)"
        raise DownloadError(
            f"Nothing to fetch. The files of {source.repo} are: {shown}{more}",
            path="--allow-patterns / --ignore-patterns",
            value={"allow": list(source.allow_patterns), "ignore": list(source.ignore_patterns)},
            rule="at least one file of the repository must match",
            repair="correct the patterns (quote them, or the shell expands them), or leave them out",
        )
    return replace(snapshot, files=tuple(file for file in snapshot.files if file.path in chosen))


def _read_endpoint() -> str:
    if constants.is_offline_mode():
        raise DownloadError(
            "The hub is disabled in this environment.",
            path="HF_HUB_OFFLINE",
            value=os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE"),
            rule="a download needs the network",
            repair="unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE",
        )
    endpoint = os.environ.get("HF_ENDPOINT", "").strip() or "https://huggingface.co"
    if not re.fullmatch(r"https?://[A-Za-z0-9.\-\[\]:]+(/[\w./-]*)?", endpoint, re.ASCII):
        raise DownloadError(
            "The hub's address is malformed.",
            path="HF_ENDPOINT",
            value=endpoint,
            rule="http:// or https://, a host, perhaps a port and a path; no user name",
            repair="unset HF_ENDPOINT, or set it to an address such as https://huggingface.co",
        )
    return endpoint.rstrip("/")


def _check_client() -> None:
    """Make the HTTP client, which reads proxies and certificates from the environment."""
    try:
        get_session()
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
        raise DownloadError(
            "The environment's proxies or certificates cannot be used.",
            path="HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE, SSL_CERT_DIR",
            value=str(error),
            rule="a proxy is http://, https://, or socks5:// if socksio is installed; certificates are a readable file",
            repair="correct the variable, or unset it",
        ) from error


def _read_token(name: str | None) -> tuple[str | None, str]:
    """Return the token, and where it is from: the variable `name` if given, else where `huggingface_hub` looks."""
    if name is not None and not os.environ.get(name, "").strip():
        raise DownloadError(
            "The variable that should hold the token is not set.",
            path="--token-env",
            # A token given by mistake in place of a name must not end up in a log.
            value="<hidden>" if name.startswith("hf_") else name,
            rule="--token-env takes the name of an environment variable, not the token itself",
            repair="export the variable, or leave --token-env out to use HF_TOKEN",
        )
    variables = (name or "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    source = next((one for one in variables if os.environ.get(one, "").strip()), constants.HF_TOKEN_PATH)
    try:
        token = get_token_to_send(None if name is None else os.environ[name].strip())
    except (OSError, ValueError, OIDCError) as error:
        raise DownloadError(
            "The token cannot be read.",
            path=source,
            value=type(error).__name__,
            rule="a text file that holds one token",
            repair="repair or remove the file, or set HF_TOKEN",
        ) from error
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise DownloadError(
            "The token is malformed.",
            path=source,
            value="<hidden>",
            rule="printable ASCII without spaces, on one line",
            repair="copy the token again from the hub's settings page",
        )
    return token, source


def _remote_file(sibling: RepoSibling, *, commit: str) -> RemoteFile:
    if sibling.lfs is not None and re.fullmatch("[0-9a-f]{64}", str(sibling.lfs.sha256)):
        digest = f"sha256:{sibling.lfs.sha256}"
    elif sibling.lfs is None and re.fullmatch("[0-9a-f]{40}", str(sibling.blob_id)):
        digest = f"git:{sibling.blob_id}"
    else:
        digest = f"commit:{commit}"
    return RemoteFile(str(sibling.rfilename), sibling.size, digest)


def _not_found(source: Source, error: Exception) -> DownloadError:
    if isinstance(error, RevisionNotFoundError):
        return DownloadError(
            f"{source.repo} has no revision {source.revision!r}.",
            path="--revision",
            value=source.revision,
            rule="a branch, a tag or a commit of the repository",
            repair="leave --revision out for the branch main, or look at the repository's list of branches and tags",
        )
    is_certain = isinstance(error, HfHubHTTPError) and "X-Error-Code" in error.response.headers
    or_revision = "" if is_certain else f", or it has no revision {source.revision!r}"
    return DownloadError(
        f"There is no {source.repo_type} repository {source.repo} on the hub{or_revision}.",
        path="REPO",
        value=source.repo,
        rule="the repository must exist, with this --repo-type",
        repair="check the spelling and --repo-type; if it is private, set HF_TOKEN",
    )


def _may_pass(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in {408, 429} or error.response.status_code >= 500
    is_connection = isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)
    return is_connection and not _is_untrusted(error)


def _is_untrusted(error: Exception) -> bool:
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


def _asked_wait_s(error: Exception) -> float | None:
    """Return the seconds that `Retry-After` or the hub's `RateLimit` header asks to wait."""
    if not isinstance(error, HfHubHTTPError):
        return None
    headers = error.response.headers
    if headers.get("Retry-After", "").isdecimal():
        return float(headers["Retry-After"])
    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else None


def _reason(error: Exception) -> str:
    if isinstance(error, HfHubHTTPError):
        return f"HTTP {error.response.status_code} {error.response.headers.get('X-Error-Code', '')}".strip()
    return str(error) or type(error).__name__
