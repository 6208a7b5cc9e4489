"""The log files of a run: one for each process, in the folder `logs` of the run.

This process writes `controller.log` itself. A process that it starts gets the path of its own file in its environment
(`variables`), and everything that it and its children print goes there as well; see `forge.runtime.rank_stub`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from forge.errors import ConfigError
from forge.log_levels import LogFormat, LogOptions
from forge.observe.logs.log_file import BoundedFile, as_record, notice
from forge.observe.logs.records import PROCESS, LevelFilter, make_formatter
from forge.observe.logs.setup import (
    NAME_VARIABLE,
    UnconfiguredHandler,
    console_level,
    file_levels,
    log_format,
    process_name,
    shown_options,
    use_levels,
)

FILE_VARIABLE: Final = "FORGE_LOG_FILE"
"""The log file of a process, in its environment."""
LIMIT_VARIABLE: Final = "FORGE_LOG_MAX_BYTES"
FOLDER_VARIABLE: Final = "FORGE_LOG_DIR"
"""A folder for log files, in place of the run's; and for programs that have no run."""
FOLDER: Final = "logs"
DEFAULT_BYTES: Final = 64 << 20


class FileHandler(logging.Handler):
    """Writes this process's own records to its log file."""

    def __init__(self, file: BoundedFile, *, format: LogFormat, levels: LevelFilter, process: str) -> None:
        super().__init__()
        self._file, self._format, self._process = file, format, process
        self.setFormatter(make_formatter(format, process=process, with_time=True))
        self.addFilter(levels)
        self.addFilter(lambda record: not hasattr(record, PROCESS))  # it is in the other process's file

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._file.write(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
        except Exception:  # noqa: BLE001 - as every handler of `logging` does
            self.handleError(record)

    def note(self, text: str) -> None:
        """Write a line that is not a record: one of what happened to the process."""
        self._file.write(notice(self._process, text, is_json=self._format == "json"))

    def output(self, line: str) -> None:
        """Write a line of what the process prints."""
        data = f"{line}\n".encode("utf-8", "backslashreplace")
        self._file.write(as_record(data, self._process) if self._format == "json" else data)

    def describe_end(self, error: BaseException) -> str:
        """Write the traceback of what has ended the run, and return how it ended."""
        name, text = type(error).__name__, str(error)
        if isinstance(error, Exception):
            record = logging.LogRecord("forge.log", logging.ERROR, "", 0, "the run ended with", None, None)
            record.exc_info = (type(error), error, error.__traceback__)
            self.emit(record)
            return f"ended by {name}"
        return f"ended by {name}: {text}" if text else f"ended by {name}"

    def close(self) -> None:
        self._file.close()
        super().close()


class LogFolder:
    """Where the processes of a run log to.

    Args:
        path: the folder; made when the first file is.
        max_bytes: of the files of one process.
        options: what the program shows on its console; None where it has configured logging itself.
        parent: the process that starts others, where that is not the controller.
    """

    def __init__(self, path: Path, *, max_bytes: int, options: LogOptions | None, parent: str | None = None) -> None:
        self.path, self.max_bytes, self.options = path.absolute(), max_bytes, options
        self._parent = parent
        self._used: set[str] = set()
        self._guard = threading.Lock()

    def claim(self, label: str) -> str:
        """Return the name of a log file that no live process of this controller writes to. `release` frees it."""
        base = file_name(label if self._parent is None else f"{self._parent}.{label}")
        with self._guard:
            names = (base if number == 1 else f"{base}-{number}" for number in range(1, len(self._used) + 2))
            name = next(name for name in names if name not in self._used)
            self._used.add(name)
        return name

    def release(self, name: str) -> None:
        """Free a name: the process that had it has ended."""
        with self._guard:
            self._used.discard(name)

    def file(self, name: str) -> Path:
        """Return the path of a process's log file."""
        return self.path / f"{name}.log"

    def variables(self, name: str) -> dict[str, str]:
        """Return what the process of that name has in its environment."""
        levels = console_level(self.options)
        options = LogOptions(levels, log_format(self.options))
        own = {NAME_VARIABLE: name, FILE_VARIABLE: str(self.file(name)), LIMIT_VARIABLE: str(self.max_bytes)}
        return {**options.variables(), **own}


def file_name(label: str) -> str:
    """Return a label as the name of a file: `generator[1]` becomes `generator-1`."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", label).strip("-.")[:80] or "process"


_current: LogFolder | None = None


def current_folder() -> LogFolder | None:
    """Return where the processes of this program log to; None where nothing has opened a folder."""
    if _current is not None:
        return _current
    return _inherited()


def _inherited() -> LogFolder | None:
    """Return the folder of a process that logs to a file because its parent said so: its children do likewise."""
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return None
    global _current
    options = LogOptions.from_environment("warning")
    limit = int(os.environ.get(LIMIT_VARIABLE, DEFAULT_BYTES))
    _current = LogFolder(Path(path).parent, max_bytes=limit, options=options, parent=process_name())
    return _current


@contextlib.contextmanager
def logging_to(folder: Path, *, max_bytes: int) -> Iterator[LogFolder | None]:
    """Let this process, and those that it starts inside the block, log to files in a folder.

    A folder that is open already stays, and where `max_bytes` is 0 there is none: None is yielded then.
    """
    global _current
    given = os.environ.get(FOLDER_VARIABLE)
    if _current is not None or not max_bytes:
        yield _current
        return
    options = shown_options()
    opened = LogFolder(Path(given) if given else folder, max_bytes=max_bytes, options=options)
    handler = _open_file(opened)
    _current = opened
    how = "ended"
    try:
        with _attached(handler, options):
            yield opened
    except BaseException as error:
        how = handler.describe_end(error)
        raise
    finally:
        _current = None
        handler.note(how)
        handler.close()


@contextlib.contextmanager
def logging_where_asked() -> Iterator[LogFolder | None]:
    """Log to files in the folder that the environment names, if it names one: of a program that has no run."""
    given = os.environ.get(FOLDER_VARIABLE)
    with logging_to(Path(given or FOLDER), max_bytes=DEFAULT_BYTES if given else 0) as folder:
        yield folder


def _open_file(folder: LogFolder) -> FileHandler:
    name = folder.claim(process_name())
    try:
        file = BoundedFile(str(folder.file(name)), max_bytes=folder.max_bytes)
    except OSError as error:
        raise ConfigError(
            f"the log files cannot be written: {error.strerror or error}",
            path=FOLDER_VARIABLE if FOLDER_VARIABLE in os.environ else "run.output_dir",
            value=str(folder.path),
            rule="a folder in which this run may create files",
            repair="choose another one; or set run.max_log_mb=0 for no log files",
        ) from None
    levels = LevelFilter(file_levels(folder.options))
    handler = FileHandler(file, format=log_format(folder.options), levels=levels, process=name)
    handler.note("started")
    return handler


@contextlib.contextmanager
def _attached(handler: FileHandler, options: LogOptions | None) -> Iterator[None]:
    """Add the handler of a file, without a change to what the user's own configuration prints."""
    root, library = logging.getLogger(), logging.getLogger("forge")
    level = library.level
    handlers: list[logging.Handler]
    logger, handlers = (library, [handler]) if options is None else (root, [handler])
    if options is not None:
        use_levels(file_levels(options))
    elif not root.handlers:
        handlers.append(UnconfiguredHandler())
        library.setLevel(logging.INFO)
    for each in handlers:
        logger.addHandler(each)
    try:
        yield
    finally:
        for each in handlers:
            logger.removeHandler(each)
        library.setLevel(level)
        if options is not None:
            use_levels(options.levels)
