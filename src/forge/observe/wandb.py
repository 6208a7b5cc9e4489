"""Metrics to Weights & Biases. Needs the extra `wandb`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from forge.errors import ConfigError
from forge.observe.sink import Table, Value, closed_error


class WandbSink:
    """One run of Weights & Biases, whose local files lie in `folder/wandb`.

    Whether it goes online is the environment's to say, as for every program that uses wandb: `WANDB_MODE=offline`
    keeps everything in the folder for `wandb sync`. The run's identity is kept in the folder, so that a run that
    resumes at `resume_step` continues the same curves. Weights & Biases does not take a step twice: where an
    earlier process came further than its last checkpoint, the metrics that it sent stay. Standard output is left alone.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        project: str = "torchforge",
        run_name: str = "run",
        resume_step: int | None = None,
        config: Mapping[str, Value] | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self._wandb = wandb = _import_wandb()
        self.folder = Path(folder)
        (self.folder / "wandb").mkdir(parents=True, exist_ok=True)
        identity = _identity(self.folder / "wandb" / "run_id", keep=resume_step is not None)
        try:
            self._run = wandb.init(
                project=project,
                name=run_name,
                id=identity,
                dir=os.fspath(self.folder),
                resume="allow",
                config=dict(config or {}),
                tags=list(tags),
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"Weights & Biases cannot be used: {' '.join(str(error).split())}",
                path="metrics.wandb",
                value=True,
                rule="a login (`wandb login`, or WANDB_API_KEY), and a server that answers",
                repair="log in; or set WANDB_MODE=offline, which keeps everything in the run's folder for "
                "`wandb sync`; or set metrics.wandb=false",
            ) from None
        self._closed = False

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        if self._closed:
            raise closed_error(self)
        self._run.log(dict(values), step=step)

    def write_table(self, step: int, name: str, table: Table) -> None:
        """Log the rows of a step as a table."""
        rows = [list(row) for row in table.rows]
        self._run.log({name: self._wandb.Table(columns=list(table.columns), data=rows)}, step=step)

    def link(self, name: str, path: Path) -> None:
        """Keep where a file of the run is in its summary."""
        self._run.summary[name] = str(path.absolute())

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._run.finish()


def _import_wandb() -> ModuleType:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"Weights & Biases cannot be used: {error}",
            path="metrics.wandb",
            value=True,
            rule="the package wandb must be installed",
            repair="pip install 'torchforge[wandb]', or set metrics.wandb to false",
        ) from error
    return wandb


def _identity(path: Path, *, keep: bool) -> str:
    """Return the run's identity: the one in the file for a resumed run, else a new one, written to the file."""
    if keep and path.exists():
        return path.read_text(encoding="utf-8").strip()
    identity = uuid.uuid4().hex[:12]
    path.write_text(identity + "\n", encoding="utf-8")
    return identity


def check_installed() -> None:
    """Raise `ConfigError` unless wandb is installed."""
    _import_wandb()
