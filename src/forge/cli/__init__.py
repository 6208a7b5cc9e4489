"""The `forge` command. Each subcommand is a module here, which loads what it needs only when it runs."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence

from forge.errors import ForgeError
from forge.log_levels import apply_log_flags


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    from forge._version import __version__
    from forge.cli import (
        algorithms,
        chaos,
        chat,
        config,
        control,
        copy,
        diagnose,
        distill,
        doctor,
        download,
        env,
        episode,
        eval,
        history,
        hosts,
        import_config,
        job,
        league,
        plan,
        quickstart,
        recipes,
        replay,
        report,
        rewards,
        run,
        scale,
        serve,
        template,
        ui,
        worker,
    )

    parser = argparse.ArgumentParser(
        prog="forge", description="TorchForge: post-training of language models as one plain Python program."
    )
    parser.add_argument("--version", action="version", version=f"forge {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    evaluating, serving = (ui, report, diagnose, replay, history, eval, league), (distill, chat, serve)
    authoring = (config, import_config, algorithms, rewards, episode, env, template)
    beginning = (quickstart, recipes, copy)
    running = (run, job, control, scale, hosts, chaos, plan)
    for module in (*beginning, *running, *evaluating, *serving, *authoring, download, doctor, worker):
        module.add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted.

    Output that is no longer read (`forge rewards | head`) ends a command quietly, with 1.
    """
    if None in (sys.stdin, sys.stdout, sys.stderr):
        from forge.observe.console import open_missing_streams

        open_missing_streams()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # what fails here would fail when Python ends, where nothing can catch it
    except OSError as error:
        if error.filename is None:
            from forge.observe.console import discard_output

            discard_output()
        if not isinstance(error, BrokenPipeError):
            print(f"forge: {_os_error(error)}", file=sys.stderr)
        return 1


def _run(arguments: Sequence[str] | None) -> int:
    parsed = make_parser().parse_args(arguments)
    try:
        if hasattr(parsed, "log_level"):
            apply_log_flags(parsed)
        return int(parsed.handler(parsed))
    except ForgeError as error:
        print(f"forge {parsed.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _os_error(error: OSError) -> str:
    """What the system refused, and of which file: of standard output where no file is named and a device is full."""
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"{error.filename}: {reason}"
    is_output = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    return f"standard output: {reason}" if is_output else reason
