"""Logging in a rank: to its own file, and to the console of the program that started the run."""

from __future__ import annotations

import logging
import os
import sys
from typing import Final

from forge.log_levels import LEVELS_VARIABLE, LogOptions
from forge.observe.logs.folder import FILE_VARIABLE
from forge.observe.logs.records import LevelFilter, make_formatter
from forge.observe.logs.setup import STARTUP_LOGGER, file_levels, process_name, start_logging, use_levels
from forge.observe.phases import PHASES_VARIABLE, set_listener
from forge.runtime.rank_stub import STAND_IN
from forge.runtime.reports import RecordSender, reports

NO_LOG_FILE: Final = 0
"""Stands for the process that writes a log file, where there is none."""


def start_rank_logging() -> int:
    """Log as the controller asks, in a rank or a process that it has started. Return the process that writes its log
    file; `NO_LOG_FILE` where it has none.

    A module that has configured logging while this process imported it keeps what it has.
    """
    writer = int(os.environ.get(STAND_IN, NO_LOG_FILE)) if os.environ.get(FILE_VARIABLE) else NO_LOG_FILE
    if os.environ.get(PHASES_VARIABLE) == "1":
        set_listener(lambda event: reports().send("phase", (event.process, tuple(event[1:]))))
    root = logging.getLogger()
    if root.handlers or LEVELS_VARIABLE not in os.environ:
        return writer
    if writer == NO_LOG_FILE:
        start_logging()
        return writer
    options = LogOptions.from_environment("warning")
    own = logging.StreamHandler(sys.__stderr__)  # which goes to the file, in order with what else is printed there
    own.setFormatter(make_formatter(options.format, process=process_name(), with_time=True))
    own.addFilter(LevelFilter(file_levels(options)))
    shown = RecordSender(reports(), process=process_name())
    shown.addFilter(LevelFilter(options.levels))
    shown.addFilter(lambda record: record.name != STARTUP_LOGGER)
    for handler in (own, shown):
        root.addHandler(handler)
    use_levels(file_levels(options))
    return writer
