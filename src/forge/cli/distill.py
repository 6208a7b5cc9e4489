"""`forge distill CONFIG [overrides]`: store a teacher's logprobs of the data of a run."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from forge.cli.config import AnyOrderParser
from forge.log_levels import add_log_flags

if TYPE_CHECKING:
    from forge.data.teacher_logprobs import StoreFacts

_REPORT_S = 10.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `distill`."""
    parser = subparsers.add_parser(
        "distill",
        help="store a teacher's top-k logprobs for the data of a run",
        description="Ask a teacher for its likeliest tokens at every token of the data that counts in the loss, and "
        "store their logprobs. A run with the same configuration (forge run distill) then learns from them without "
        "the teacher. A command that was stopped continues, and data that was added is added to the store.",
        epilog="example: forge distill distill/tiny_offline teacher.path=models/teacher",
    )
    parser.__class__ = AnyOrderParser  # overrides may stand between options
    parser.add_argument(
        "words",
        metavar="CONFIG|OVERRIDE",
        nargs="+",
        help="YAML files or recipes, and a.b=c or ~a.b for any key; overrides win",
    )
    add_log_flags(parser)
    parser.set_defaults(handler=_distill)


def _distill(arguments: argparse.Namespace) -> int:
    import asyncio

    from forge.config import DistillConfig, add_module_folders, load, split_words
    from forge.loops.stored_teacher import store_folder
    from forge.loops.storing import store_logprobs
    from forge.observe.logs import start_logging
    from forge.recipes import make_inputs, read_command

    command = read_command(*split_words(arguments.words))
    if (status := make_inputs(command.settings, command="forge distill")) != 0:
        return status
    add_module_folders(command.files)
    config = load(DistillConfig, files=command.files, overrides=command.words)
    start_logging("warning")
    reported = time.monotonic()

    def report(facts: StoreFacts, total: int) -> None:
        nonlocal reported
        if time.monotonic() - reported > _REPORT_S:
            reported = time.monotonic()
            print(f"{facts.num_samples:,} of {total:,} samples are on disk", flush=True)

    facts = asyncio.run(store_logprobs(config, report=report))
    print(f"{facts.num_samples:,} samples, {facts.num_tokens:,} tokens, top {facts.k} of {facts.teacher}")
    print(f"stored in {store_folder(config)}")
    return 0
