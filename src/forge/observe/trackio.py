"""Metrics to trackio. Needs the extra `trackio`."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from forge.errors import ConfigError
from forge.observe.sink import Table, Value, closed_error

_log = logging.getLogger("forge.observe")


class TrackioSink:
    """One run of trackio, which keeps runs on this machine; `trackio show` displays them.

    Where they lie, and whether they go to a Space or a server, is the environment's to say: TRACKIO_DIR,
    TRACKIO_SPACE_ID, TRACKIO_SERVER_URL. A run that resumes at `resume_step` continues the newest run of its name in
    the project; metrics that an earlier process sent after that step stay. What trackio prints is logged instead.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] = ".",
        *,
        project: str = "torchforge",
        run_name: str = "run",
        resume_step: int | None = None,
        config: Mapping[str, Value] | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self._trackio = _import_trackio()
        described = {**(config or {}), **({"tags": ", ".join(tags)} if tags else {})}
        try:
            with _quietly():
                self._run = self._trackio.init(
                    project=project,
                    name=run_name,
                    config=described,
                    resume="never" if resume_step is None else "allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except Exception as error:  # noqa: BLE001 - whatever it was, the run cannot be tracked
            raise ConfigError(
                f"trackio cannot be used: {' '.join(str(error).split())[:400]}",
                path="metrics.sinks",
                value=project,
                rule="a folder that can be written (TRACKIO_DIR), or a server or Space that answers",
                repair="unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL for a local store; or remove the sink `trackio`",
            ) from None
        self._closed = False

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        if self._closed:
            raise closed_error(self)
        if values:
            self._run.log(dict(values), step=step)

    def write_table(self, step: int, name: str, table: Table) -> None:
        """Log the rows of a step as a table."""
        rows = [list(row) for row in table.rows]
        self._run.log({name: self._trackio.Table(columns=list(table.columns), data=rows)}, step=step)

    def link(self, name: str, path: Path) -> None:
        """Keep a file of the run as an artifact."""
        with _quietly():
            self._run.log_artifact(path, name=name, type=name)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with _quietly():
                self._run.finish()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Log what trackio prints about itself, in place of printing it."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in filter(None, map(str.strip, printed.getvalue().splitlines())):
            _log.debug("trackio: %s", line)


def _import_trackio() -> ModuleType:
    try:
        import trackio
    except ImportError as error:
        raise ConfigError(
            f"trackio cannot be used: {error}",
            path="metrics.sinks",
            value="trackio",
            rule="the package trackio must be installed",
            repair="pip install 'torchforge[trackio]', or remove the sink `trackio`",
        ) from error
    found: ModuleType = trackio
    return found


def check_installed() -> None:
    """Raise `ConfigError` unless trackio is installed."""
    _import_trackio()
