"""Sinks whose packages cannot share our environment: `ForeignSinks` drives them in a venv of their own.

As a program, run by the Python of that venv, it carries out one command a line: open a sink, write, close, read what
the tracker has kept.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge.observe.sink import Table, Value

PROJECT = "torchforge-tests"


class ForeignSinks:
    """A process in another venv that has sinks of one kind."""

    def __init__(self, python: Path, kind: str, environ: Mapping[str, str]) -> None:
        import forge

        path = os.pathsep.join([str(Path(forge.__file__).parents[1]), str(Path(__file__).parent)])
        self._process = subprocess.Popen(
            [str(python), __file__, kind],
            env={**os.environ, **environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        """Carry out a command; raise what it raises."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"command": command, **arguments}), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise ValueError(f"{answer['error']}: {answer['text']}")
        return answer["value"]

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=600)
        assert self._process.stdout is not None
        self._process.stdout.close()


class ForeignSink:
    """One of its sinks."""

    def __init__(self, sinks: ForeignSinks, **options: Any) -> None:
        self._sinks = sinks
        self._number = sinks.ask("open", options=options)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        self._sinks.ask("write", number=self._number, step=step, values=dict(values))

    def write_table(self, step: int, name: str, table: Table) -> None:
        rows = [list(row) for row in table.rows]
        self._sinks.ask(
            "write_table", number=self._number, step=step, name=name, rows=rows, columns=list(table.columns)
        )

    def link(self, name: str, path: Path) -> None:
        self._sinks.ask("link", number=self._number, name=name, path=str(path))

    def close(self) -> None:
        self._sinks.ask("close", number=self._number)


# ---- In the other venv


class Server:
    """Carries out commands with the sinks of one kind."""

    def __init__(self, kind: str) -> None:
        module = importlib.import_module(f"forge.observe.{kind}")
        self._factory = {"mlflow": "MlflowSink", "trackio": "TrackioSink"}[kind]
        self._open = getattr(module, self._factory)
        self._sinks: list[Any] = []
        self.read = {"mlflow": read_mlflow, "trackio": read_trackio}[kind]

    def open(self, options: dict[str, Any]) -> int:
        self._sinks.append(self._open(**options))
        return len(self._sinks) - 1

    def write(self, number: int, step: int, values: dict[str, Any]) -> None:
        self._sinks[number].write(step, values)

    def write_table(self, number: int, step: int, name: str, rows: Sequence[Any], columns: Sequence[str]) -> None:
        self._sinks[number].write_table(step, name, replace(Table(columns, rows), max_rows=3))

    def link(self, number: int, name: str, path: str) -> None:
        self._sinks[number].link(name, Path(path))

    def close(self, number: int) -> None:
        self._sinks[number].close()


def read_mlflow(folder: str, **_: Any) -> dict[str, Any]:
    """All that a local store has of the newest run of a folder."""
    from mlflow.tracking import MlflowClient

    place = Path(folder)
    store = place.absolute().parent / "mlflow.db"
    uri = f"sqlite:///{store}" if store.exists() else (place.absolute().parent / "mlruns").as_uri()
    client = MlflowClient(tracking_uri=uri)
    run_id = (place / "mlflow" / "run_id").read_text().strip()
    run = client.get_run(run_id)
    metrics = [each for name in run.data.metrics for each in client.get_metric_history(run_id, name)]
    written = [(each.step, each.key, each.value) for each in sorted(metrics, key=lambda each: each.timestamp)]
    for name, text in run.data.tags.items():
        if text.startswith("step "):
            step, _, value = text.removeprefix("step ").partition(": ")
            written.append((int(step), name, value))
    files = {item.path: item.file_size for item in client.list_artifacts(run_id)}
    tables = {path: json.loads(_text_of(client, run_id, path)) for path in files if path.endswith(".json")}
    nested = [item.path for item in client.list_artifacts(run_id, "samples")] if "samples" in files else []
    tables |= {path: json.loads(_text_of(client, run_id, path)) for path in nested}
    experiment = client.get_experiment(run.info.experiment_id).name
    return {
        "written": written,
        "params": run.data.params,
        "tags": run.data.tags,
        "status": run.info.status,
        "name": run.info.run_name,
        "files": sorted(files),
        "tables": tables,
        "project": experiment,
        "num_runs": len(client.search_runs([run.info.experiment_id])),
    }


def _text_of(client: Any, run_id: str, path: str) -> str:
    return Path(client.download_artifacts(run_id, path)).read_text()


def read_trackio(name: str, **_: Any) -> dict[str, Any]:
    """All that the local store has of the newest run of a name."""
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs(PROJECT, name)
    kept = [
        (line["step"], key, value) for line in logs for key, value in line.items() if key not in ("step", "timestamp")
    ]
    written = [each for each in kept if not isinstance(each[2], dict)]
    tables = {key: value["_value"] for _, key, value in kept if isinstance(value, dict)}
    config = SQLiteStorage.get_run_config(PROJECT, name)
    return {"written": written, "tables": tables, "params": config, "num_runs": len(SQLiteStorage.get_runs(PROJECT))}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # what trackers print goes nowhere near it
    os.dup2(2, 1)
    server = Server(sys.argv[1])
    for line in sys.stdin:
        asked = json.loads(line)
        command = asked.pop("command")
        try:
            answer = {"value": getattr(server, command)(**asked)}
        except Exception as error:  # noqa: BLE001 - raised in the test's process
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
