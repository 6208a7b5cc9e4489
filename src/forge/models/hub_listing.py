"""What a repository of the hub holds at one commit, and which part of it the user asked for."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import quote

from forge.errors import DownloadError
from forge.models.hub_files import RemoteFile
from forge.models.hub_http import HubClient, NotFound

# Above this many files the hub may leave some out of its listing; half a repository must not pass for a whole one.
_MOST_FILES: Final = 50_000
_NUM_NAMES_SHOWN: Final = 40
_PREFIX: Final = {"model": "", "dataset": "datasets/"}


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

    def url_path(self, file: RemoteFile) -> str:
        """Where the hub serves the file at this commit, below its address."""
        repo = _PREFIX[self.source.repo_type] + quote(self.source.repo)
        return f"/{repo}/resolve/{self.commit}/{quote(file.path)}"


def list_files(client: HubClient, *, source: Source) -> Snapshot:
    """Resolve the revision to a commit and list the files there."""
    _check_source(source)
    kind = f"{source.repo_type}s"
    path = f"/api/{kind}/{quote(source.repo)}/revision/{quote(source.revision, safe='')}?blobs=true"
    try:
        answer = client.get_json(path)
    except NotFound as error:
        raise _not_found(source, error) from error
    commit = answer.get("sha") if isinstance(answer, dict) else None
    siblings = answer.get("siblings") if isinstance(answer, dict) else None
    if not (isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", commit)):
        raise client.not_a_hub(path)
    if not isinstance(siblings, list) or not all(_is_sibling(one) for one in siblings):
        raise client.not_a_hub(path)
    if len({one["rfilename"] for one in siblings}) != len(siblings):
        raise client.not_a_hub(path)
    if len(siblings) >= _MOST_FILES:
        raise DownloadError(
            "The repository has too many files for one listing.",
            path=source.repo,
            value=len(siblings),
            rule=f"fewer than {_MOST_FILES} files, since the hub may leave some out of a longer list",
            repair="fetch it with the hub's own command, `hf download`",
        )
    return Snapshot(source, commit, tuple(_remote_file(one, commit=commit) for one in siblings))


def select(snapshot: Snapshot, *, note: Callable[[str], None]) -> Snapshot:
    """Keep the files that the patterns of the source ask for. An empty choice is an error, not an empty directory."""
    source = snapshot.source
    for pattern in source.allow_patterns:
        if not any(_matches(file.path, [pattern]) for file in snapshot.files):
            note(f"no file matches --allow-patterns {pattern!r}")
    chosen = tuple(
        file
        for file in snapshot.files
        if (not source.allow_patterns or _matches(file.path, source.allow_patterns))
        and not _matches(file.path, source.ignore_patterns)
    )
    if not chosen:
        names = [file.path for file in snapshot.files]
        more = f", and {len(names) - _NUM_NAMES_SHOWN} more" if len(names) > _NUM_NAMES_SHOWN else ""
        shown = ", ".join(names[:_NUM_NAMES_SHOWN]) or "(none)"
        raise DownloadError(
            f"Nothing to fetch. The files of {source.repo} are: {shown}{more}",
            path="--allow-patterns / --ignore-patterns",
            value={"allow": list(source.allow_patterns), "ignore": list(source.ignore_patterns)},
            rule="at least one file of the repository must be left",
            repair="correct the patterns (quote them, or the shell expands them), or leave them out",
        )
    return replace(snapshot, files=chosen)


def _check_source(source: Source) -> None:
    word = r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?"
    name = source.repo.rsplit("/", 1)[-1]
    is_shaped = re.fullmatch(rf"(?:{word}/)?{word}", source.repo, re.ASCII) and len(name) <= 96
    if not is_shaped or "--" in source.repo or ".." in source.repo or source.repo.endswith(".git"):
        raise DownloadError(
            "The repository's name is malformed.",
            path="REPO",
            value=source.repo,
            rule="OWNER/NAME of letters, digits, '-', '_' and '.', as in Qwen/Qwen3-0.6B; not an address",
            repair="copy the name from the top of the repository's page; for a dataset add --repo-type dataset",
        )
    if source.repo_type not in _PREFIX:
        raise DownloadError(
            "The type of repository is unknown.",
            path="--repo-type",
            value=source.repo_type,
            rule=f"one of {', '.join(_PREFIX)}",
            repair="use one of these",
        )
    if not re.fullmatch(r"[\w.+@/-]+", source.revision) or ".." in source.revision:
        raise DownloadError(
            "The revision is malformed.",
            path="--revision",
            value=source.revision,
            rule="a branch, a tag or a commit",
            repair="leave --revision out for the branch main",
        )


def _not_found(source: Source, error: NotFound) -> DownloadError:
    if error.code == "RevisionNotFound":
        return DownloadError(
            f"{source.repo} has no revision {source.revision!r}.",
            path="--revision",
            value=source.revision,
            rule="a branch, a tag or a commit of the repository",
            repair="leave --revision out for the branch main, or look at the repository's list of branches and tags",
        )
    what = f"{source.repo_type} repository {source.repo}"
    or_revision = "" if error.code else f", or it has no revision {source.revision!r}"
    return DownloadError(
        f"There is no {what} on the hub{or_revision}.",
        path="REPO",
        value=source.repo,
        rule="the repository must exist, with this --repo-type",
        repair="check the spelling and --repo-type; if it is private, set HF_TOKEN",
    )


def _is_sibling(one: object) -> bool:
    return isinstance(one, dict) and isinstance(one.get("rfilename"), str) and one["rfilename"] != ""


def _remote_file(sibling: dict[str, object], *, commit: str) -> RemoteFile:
    lfs = sibling.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
    blob, size = sibling.get("blobId"), sibling.get("size")
    if isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256):
        digest = f"sha256:{sha256}"
    elif lfs is None and isinstance(blob, str) and re.fullmatch(r"[0-9a-f]{40}", blob):
        digest = f"git:{blob}"
    else:
        digest = f"commit:{commit}"
    return RemoteFile(str(sibling["rfilename"]), size if isinstance(size, int) and size >= 0 else None, digest)


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, f"{one}*" if one.endswith("/") else one) for one in patterns)
