"""The access log: a JSON line for every request, without prompts, completions and keys."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forge.errors import ConfigError

if TYPE_CHECKING:
    from forge.generator.openai.requests_open import RequestRecord

STDOUT: Final = "stdout"


class AccessLog:
    """Appends to a file, or to stdout. A file that was moved away, by logrotate for example, is opened anew.

    A line that cannot be written is reported on stderr, and the request is answered all the same.
    """

    def __init__(self, place: str | None) -> None:
        self._handler: logging.Handler | None = None
        if place == STDOUT:
            self._handler = logging.StreamHandler(sys.stdout)
        elif place is not None:
            try:
                self._handler = WatchedFileHandler(Path(place).expanduser(), encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    "the access log cannot be written",
                    path="serve.access_log",
                    value=place,
                    rule=f"`stdout`, or a file that can be written: {error.strerror or error}",
                    repair="choose another file, or remove the key for none",
                ) from None

    def write(self, record: RequestRecord) -> None:
        """Write the line of a request that has ended."""
        if self._handler is None:
            return
        line = {
            "time": datetime.fromtimestamp(record.arrived, UTC).isoformat(timespec="milliseconds"),
            "request_id": record.id,
            "client": record.client,
            "route": record.route,
            "status": record.status,
            "model": record.model,
            "prompt_tokens": record.num_prompt_tokens,
            "completion_tokens": record.num_tokens,
            "seconds": round(record.seconds, 6),
            "ttft": None if record.first_token_s is None else round(record.first_token_s, 6),
            "versions": sorted(record.versions),
            "error": record.error,
        }
        self._handler.handle(logging.makeLogRecord({"msg": json.dumps(line)}))

    def close(self) -> None:
        """Close the file."""
        if self._handler is not None:
            self._handler.close()
