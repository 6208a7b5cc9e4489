"""Metrics to MLflow. Needs the extra `mlflow`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from forge.errors import ConfigError
from forge.observe.background import Background
from forge.observe.secrets import without_passwords
from forge.observe.sink import Table, Value, closed_error

URI_VARIABLE: Final = "MLFLOW_TRACKING_URI"
_MOST_PARAMS: Final = 100
_MOST_METRICS: Final = 1000
_MOST_CHARACTERS: Final = 4000


class MlflowSink:
    """One run of MLflow, in an experiment that is named as the project.

    It goes to the server that MLFLOW_TRACKING_URI names, or `tracking_uri`; otherwise to a store that all runs of an
    output folder share: `mlflow.db` there, or `mlruns` where mlflow-skinny alone is installed. A server is written to
    on a thread of its own: a slow one does not hold the run up. Numbers are metrics, texts are tags, the configuration
    is parameters, and tables are artifacts that MLflow shows as tables. A name has `_at_` for `@`, and `_` for other
    characters that MLflow does not take.

    A run that resumes at `resume_step` continues the same run of MLflow, whose id is in `folder/mlflow/run_id`.
    Metrics that an earlier process sent after that step stay.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        project: str = "torchforge",
        run_name: str = "run",
        tracking_uri: str | None = None,
        resume_step: int | None = None,
        config: Mapping[str, Value] | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        client_type, self._entities = _import_mlflow()
        uri = tracking_uri or os.environ.get(URI_VARIABLE) or _local_store(Path(folder))
        self._tables: dict[str, dict[str, Any]] = {}
        self._part = "" if resume_step is None else f"_after_{resume_step}"  # a table is written whole
        identity = Path(folder) / "mlflow" / "run_id"
        try:
            self._client = client_type(tracking_uri=uri)
            self._run_id = self._open_run(identity, project, run_name, is_resumed=resume_step is not None)
            self._describe(config or {}, tags)
        except Exception as error:  # noqa: BLE001 - whatever it was, the run cannot be tracked
            raise ConfigError(
                f"MLflow cannot be used: {without_passwords(' '.join(str(error).split()))[:400]}",
                path="metrics.sinks",
                value=without_passwords(uri),
                rule="a tracking server that answers, or a store that can be written",
                repair=f"set {URI_VARIABLE}, or leave it unset for a local store; or remove the sink `mlflow`",
            ) from None
        self._background = Background("forge-mlflow")
        self._closed = False

    def _open_run(self, identity: Path, project: str, run_name: str, *, is_resumed: bool) -> str:
        if is_resumed and identity.exists():
            run_id = identity.read_text(encoding="utf-8").strip()
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        found = self._client.get_experiment_by_name(project)
        experiment = self._client.create_experiment(project) if found is None else found.experiment_id
        run_id = str(self._client.create_run(experiment, run_name=run_name).info.run_id)
        identity.parent.mkdir(parents=True, exist_ok=True)
        identity.write_text(run_id + "\n", encoding="utf-8")
        return run_id

    def _describe(self, config: Mapping[str, Value], tags: Sequence[str]) -> None:
        """Write the parameters, which MLflow keeps as they were first, and the tags."""
        known = self._client.get_run(self._run_id).data.params
        fresh = [
            (_name(key), str(value)[:_MOST_CHARACTERS]) for key, value in config.items() if _name(key) not in known
        ]
        for start in range(0, len(fresh), _MOST_PARAMS):
            params = [self._entities.Param(*pair) for pair in fresh[start : start + _MOST_PARAMS]]
            self._client.log_batch(self._run_id, params=params)
        for tag in tags:
            self._client.set_tag(self._run_id, _name(f"tag.{tag}"), "true")

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        if self._closed:
            raise closed_error(self)
        now_ms, entities = int(time.time() * 1000), self._entities
        numbers = {_name(name): value for name, value in values.items() if not isinstance(value, str)}
        metrics = [entities.Metric(name, float(value), now_ms, step) for name, value in numbers.items()]
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        tags = [entities.RunTag(_name(name), f"step {step}: {text}"[:_MOST_CHARACTERS]) for name, text in texts.items()]
        for start in range(0, max(len(metrics), 1), _MOST_METRICS):
            part = metrics[start : start + _MOST_METRICS]
            if part or tags:
                self._background.submit(partial(self._client.log_batch, self._run_id, metrics=part, tags=tags))
            tags = []

    def write_table(self, step: int, name: str, table: Table) -> None:
        """Add the rows of a step to a table of the run."""
        file = f"{_name(name)}{self._part}.json"
        whole = self._tables.setdefault(file, {"columns": ["step", *table.columns], "data": []})
        whole["data"] = [*whole["data"], *([step, *row] for row in table.rows)][-table.max_rows :]
        text = json.dumps(whole, ensure_ascii=False)
        shown = json.dumps([{"path": each, "type": "table"} for each in self._tables])
        self._background.submit(partial(self._client.log_text, self._run_id, text, file))
        self._background.submit(partial(self._client.set_tag, self._run_id, "mlflow.loggedArtifacts", shown))

    def link(self, name: str, path: Path) -> None:
        """Keep a file of the run as an artifact, and where it is as a tag."""
        self._background.submit(partial(self._client.set_tag, self._run_id, _name(name), str(path.absolute())))
        self._background.submit(partial(self._client.log_artifact, self._run_id, str(path)))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._background.submit(partial(self._client.set_terminated, self._run_id))
            self._background.close()


def _name(name: str) -> str:
    """Return a name as MLflow takes it."""
    return re.sub(r"[^\w./: -]", "_", name.replace("@", "_at_"), flags=re.ASCII)[:250]


def _local_store(folder: Path) -> str:
    """Return the store of all runs beside this one."""
    place = folder.absolute().parent
    place.mkdir(parents=True, exist_ok=True)
    try:
        importlib.metadata.version("mlflow")
    except importlib.metadata.PackageNotFoundError:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no other
        return (place / "mlruns").as_uri()
    return f"sqlite:///{place / 'mlflow.db'}"


def _import_mlflow() -> tuple[Any, Any]:
    try:
        from mlflow import entities
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise ConfigError(
            f"MLflow cannot be used: {error}",
            path="metrics.sinks",
            value="mlflow",
            rule="the package mlflow or mlflow-skinny must be installed",
            repair="pip install 'torchforge[mlflow]', or remove the sink `mlflow`",
        ) from error
    return MlflowClient, entities


def check_installed() -> None:
    """Raise `ConfigError` unless MLflow is installed."""
    _import_mlflow()
