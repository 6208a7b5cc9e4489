"""`start_logging`: one call that makes a program log as its user asks.

Records of this program and of all its processes go to standard error, as `FORGE_LOG` and `FORGE_LOG_FORMAT` say, and
while a run has a folder also to files there (`forge.observe.logs.folder`).
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Final

from forge.log_levels import LogFormat, LogLevels, LogOptions, verbosity
from forge.observe.logs.records import LevelFilter, level_number, make_formatter
from forge.observe.terminal import print_above

NAME_VARIABLE: Final = "FORGE_LOG_NAME"
"""What a process is called in log files and in records that others show."""

STARTUP_LOGGER: Final = "forge.startup"
"""Where the phases of a start are logged: to the files, and as JSON. A console shows them otherwise."""

_CHATTY: Final = ("asyncio", "filelock", "fsspec", "httpcore", "httpx", "matplotlib", "numba", "urllib3")
"""Loggers of libraries whose records below a warning say nothing about a run."""


class ConsoleHandler(logging.Handler):
    """Writes records to standard error, above whatever moves at the foot of a terminal."""

    def __init__(self, options: LogOptions) -> None:
        super().__init__()
        self.options = options
        is_ascii = (getattr(sys.stderr, "encoding", None) or "").lower().replace("-", "") != "utf8"
        self.setFormatter(make_formatter(options.format, process=process_name(), is_ascii=is_ascii))
        self.addFilter(LevelFilter(options.levels))
        if options.format == "text":
            self.addFilter(lambda record: record.name != STARTUP_LOGGER)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print_above(self.format(record), to_stderr=True)
        except Exception:  # noqa: BLE001 - as every handler of `logging` does
            self.handleError(record)


class UnconfiguredHandler(logging.Handler):
    """Prints warnings as Python does for a program that has not configured logging. Python stops doing so as soon as
    any handler is added."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and record.levelno >= logging.WARNING and logging.lastResort is not None:
            logging.lastResort.handle(record)


def process_name() -> str:
    """Return what this process is called in logs: `controller`, `rank-1` of a program that was started several times,
    or the name that the process which started it has given it."""
    given = os.environ.get(NAME_VARIABLE)
    if given:
        return given
    return f"rank-{os.environ['RANK']}" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "controller"


def start_logging(default: str = "warning") -> bool:
    """Log to standard error as the environment says: FORGE_LOG, FORGE_LOG_FORMAT, and the flags -v and -q.

    `default` is the level for what they leave open. Call it once, at the start of a program. A program that has
    configured `logging` already keeps what it has; then this does nothing. Returns whether it did anything.

    Example:
        >>> start_logging("info")
        >>> logging.getLogger("my.rewards").info("ready")
    """
    options = LogOptions.from_environment(default)
    root = logging.getLogger()
    if root.handlers:
        return False
    root.addHandler(ConsoleHandler(options))
    use_levels(options.levels)
    return True


def use_levels(levels: LogLevels) -> None:
    """Set the levels of loggers so that all records are made which these levels show."""
    debug_of_others = max(level_number(levels.default or "warning"), logging.INFO)
    logging.getLogger().setLevel(debug_of_others)
    logging.getLogger("forge").setLevel(level_number(levels.of("forge")))
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name, level in levels.named.items():
        logging.getLogger(name).setLevel(level_number(level))


def shown_options() -> LogOptions | None:
    """Return what `start_logging` shows on the console; None where the program has configured logging itself."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, ConsoleHandler):
            return handler.options
    return None


def show_record(record: logging.LogRecord) -> None:
    """Show a record of another process as this program shows its own, in its handlers. Files have it already."""
    root = logging.getLogger()
    for handler in root.handlers or [UnconfiguredHandler()]:
        if record.levelno >= handler.level:
            handler.handle(record)


def console_level(options: LogOptions | None) -> LogLevels:
    """Return the levels at which other processes send their records here."""
    return LogLevels("warning") if options is None else options.levels


def file_levels(options: LogOptions | None) -> LogLevels:
    """Return the levels of log files: everything from `info` on, and what the console shows."""
    return (LogLevels("info") if options is None else options.levels).at_most("info")


def log_format(options: LogOptions | None) -> LogFormat:
    """Return the format of log files."""
    return "text" if options is None else options.format


def is_quiet() -> bool:
    """Whether the user asked for less than the program shows by itself: then nothing of its progress is shown."""
    return verbosity() < 0
