"""`forge download`: a repository of the Hugging Face hub into a directory, resumable."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Never

if TYPE_CHECKING:
    from tqdm import tqdm

    from forge.models.hub import Plan, Progress
    from forge.models.hub_files import RemoteFile

_INTERRUPTED = 130
_USER_ERROR = 2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `download`."""
    parser = subparsers.add_parser(
        "download",
        help="fetch a model or a dataset from the Hugging Face hub; continues after an interruption",
        description="Fetch a repository of the Hugging Face hub into a directory. Run the same command again after an "
        "interruption: it continues. The token is taken from HF_TOKEN, HUGGING_FACE_HUB_TOKEN or the hub's token file; "
        "HF_ENDPOINT names another hub.",
    )
    parser.add_argument("repo", metavar="REPO", help="OWNER/NAME, as in Qwen/Qwen3-0.6B")
    parser.add_argument("--output-dir", metavar="DIR", type=Path, required=True, help="where the files go")
    parser.add_argument("--repo-type", choices=("model", "dataset"), default="model", help="default: %(default)s")
    parser.add_argument("--revision", metavar="REV", default="main", help="branch, tag or commit; default: %(default)s")
    parser.add_argument(
        "--ignore-patterns",
        metavar="P",
        nargs="+",
        action="extend",
        default=[],
        help="skip files that match, as in '*.bin' 'original/*'; default: none",
    )
    parser.add_argument(
        "--allow-patterns", metavar="P", nargs="+", action="extend", default=[], help="fetch only files that match"
    )
    parser.add_argument("--token-env", metavar="NAME", help="take the token from this environment variable")
    parser.add_argument("--max-workers", metavar="N", type=int, default=8, help="files at once; default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="show what would be fetched, and write nothing")
    parser.add_argument("--quiet", action="store_true", help="print only the last line, and errors")
    parser.set_defaults(handler=run)


def run(
    args: argparse.Namespace, *, sleep: Callable[[float], None] = time.sleep, progress: Progress | None = None
) -> int:
    """Carry out the command and return its exit code. `sleep` and `progress` are seams for programs and tests."""
    from forge.errors import DownloadError

    shown = progress or _choose_progress(quiet=args.quiet, with_bar=not args.dry_run)
    try:
        line = _download(args, sleep=sleep, progress=shown)
    except DownloadError as error:
        _close(shown)
        print(f"forge download: {error}", file=sys.stderr)
        return _USER_ERROR
    except KeyboardInterrupt:
        _close(shown)
        print(
            "forge download: interrupted; what was fetched is kept. Run the same command again: it resumes.",
            file=sys.stderr,
        )
        return _INTERRUPTED
    _close(shown)
    print(line)
    return 0


def _download(args: argparse.Namespace, *, sleep: Callable[[float], None], progress: Progress) -> str:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when huggingface_hub is imported
    from forge.models.hub import download, plan_download
    from forge.models.hub_files import Folder
    from forge.models.hub_requests import Hub, Source, select

    _check_workers(args.max_workers)
    source = Source(args.repo, args.repo_type, args.revision, tuple(args.allow_patterns), tuple(args.ignore_patterns))
    hub = Hub(token_env=args.token_env, sleep=sleep, note=progress.note)
    folder = Folder(args.output_dir)
    chosen = select(hub.list_files(source), note=progress.note)
    plan = plan_download(chosen, folder=folder, max_workers=args.max_workers)
    if args.dry_run:
        _print_plan(plan)
        folder.check_space(plan.num_bytes_to_fetch)
        return (
            f"dry run: {len(plan.missing)} of {len(plan.snapshot.files)} files to fetch into {args.output_dir}, "
            f"{_bytes(plan.num_bytes_to_fetch)}; revision {source.revision} = {plan.snapshot.commit}"
        )
    record = download(plan, folder=folder, hub=hub, progress=progress, max_workers=args.max_workers)
    return (
        f"{source.repo} is in {args.output_dir}: {record['num_files']} files, {_bytes(record['num_bytes'])}, "
        f"{record['num_files_present']} already there; revision {source.revision} = {record['commit']}"
    )


def _check_workers(max_workers: int) -> None:
    from forge.errors import DownloadError

    if not 1 <= max_workers <= 64:
        raise DownloadError(
            "The number of workers is out of range.",
            path="--max-workers",
            value=max_workers,
            rule="from 1 to 64",
            repair="leave --max-workers out for 8",
        )


def _print_plan(plan: Plan) -> None:
    there = set(plan.present)
    for file in plan.snapshot.files:
        size = "size unknown" if file.size is None else _bytes(file.size)
        print(f"{'already there' if file in there else 'to fetch':<13}  {file.path}, {size}")


def _bytes(num_bytes: int) -> str:
    size, unit = float(num_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{num_bytes} bytes" if unit == "bytes" else f"{size:.1f} {unit} ({num_bytes} bytes)"


def _choose_progress(*, quiet: bool, with_bar: bool) -> Progress:
    if quiet:
        return Silence()
    return _Bar() if with_bar and sys.stderr.isatty() else _Lines()


def _close(progress: Progress) -> None:
    if isinstance(progress, _Bar):
        progress.close()


class Silence:
    """Shows nothing; the base of those that do."""

    def begin(self, num_bytes: int, *, num_bytes_present: int) -> None:
        pass

    def advance(self, num_bytes: int) -> None:
        pass

    def finish(self, file: RemoteFile, *, was_present: bool) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class _Lines(Silence):
    """A line per file, for logs."""

    def finish(self, file: RemoteFile, *, was_present: bool) -> None:
        size = "" if file.size is None else f", {_bytes(file.size)}"
        self.note(f"{'already there' if was_present else 'fetched'}: {file.path}{size}")

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class _Bar(Silence):
    """One bar over all bytes, for terminals."""

    def __init__(self) -> None:
        self._bar: tqdm[Never] | None = None

    def begin(self, num_bytes: int, *, num_bytes_present: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=num_bytes, initial=num_bytes_present, unit="B", unit_scale=True, file=sys.stderr)

    def advance(self, num_bytes: int) -> None:
        if self._bar is not None:
            self._bar.update(num_bytes)

    def note(self, text: str) -> None:
        if self._bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
