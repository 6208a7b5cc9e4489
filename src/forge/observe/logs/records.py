"""Log records as text, as JSON, and as what one process sends to another."""

from __future__ import annotations

import datetime
import json
import logging
from typing import Any, Final

from forge.log_levels import LogFormat, LogLevels

PROCESS: Final = "forge_process"
"""The attribute of a record that came from another process: the name of that process."""


class LineFormatter(logging.Formatter):
    """`WARNING forge.grpo: …`, with the process where the record is of another one; with the time in a file."""

    def __init__(self, *, with_time: bool = False) -> None:
        super().__init__()
        self._with_time = with_time

    def format(self, record: logging.LogRecord) -> str:
        process = getattr(record, PROCESS, None)
        source = record.name if process is None else f"{process} {record.name}"
        text = f"{record.levelname} {source}: {record.getMessage()}"
        if self._with_time:
            text = f"{_local_time(record.created)} {text}"
        details = _details(record)
        return text if details is None else f"{text}\n{details}"


class JsonFormatter(logging.Formatter):
    """One JSON object on one line; with `is_ascii` for a stream that is not UTF-8."""

    def __init__(self, process: str, *, is_ascii: bool = False) -> None:
        super().__init__()
        self._process, self._is_ascii = process, is_ascii

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": getattr(record, PROCESS, None) or self._process,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if (details := _details(record)) is not None:
            fields["exception"] = details
        return json.dumps(fields, ensure_ascii=self._is_ascii, default=repr)


def make_formatter(
    format: LogFormat, *, process: str, with_time: bool = False, is_ascii: bool = False
) -> logging.Formatter:
    """Return the formatter of a handler. `process` is the name of this process, which JSON records have."""
    return JsonFormatter(process, is_ascii=is_ascii) if format == "json" else LineFormatter(with_time=with_time)


class LevelFilter(logging.Filter):
    """Lets through what reaches the level of its logger."""

    def __init__(self, levels: LogLevels) -> None:
        super().__init__()
        self.levels = levels
        self._known: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        least = self._known.get(record.name)
        if least is None:
            least = self._known[record.name] = level_number(self.levels.of(record.name))
        return record.levelno >= least


def level_number(level: str) -> int:
    """Return a level as `logging` counts them."""
    return int(logging.getLevelNamesMapping()[level.upper()])


def to_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return what another process needs of a record: plain values, with the traceback as text."""
    return {
        "created": record.created,
        "levelno": record.levelno,
        "name": record.name,
        "message": record.getMessage(),
        "details": _details(record),
        "pid": record.process,
    }


def from_fields(fields: dict[str, Any], *, process: str) -> logging.LogRecord:
    """Return the record that another process has sent."""
    record = logging.LogRecord(str(fields["name"]), int(fields["levelno"]), "", 0, str(fields["message"]), None, None)
    record.created, record.process = float(fields["created"]), fields["pid"]
    record.exc_text = fields["details"]
    setattr(record, PROCESS, process)
    return record


def _local_time(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03}"


def _details(record: logging.LogRecord) -> str | None:
    """Return the traceback and the stack of a record, as text."""
    if record.exc_info and record.exc_text is None:
        record.exc_text = logging.Formatter().formatException(record.exc_info)
    parts = [part for part in (record.exc_text, record.stack_info) if part]
    return "\n".join(parts) or None
