"""What every sink promises, whatever it writes to."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from foreign_packages import MLFLOW, TRACKIO
from foreign_sinks import PROJECT, ForeignSink, ForeignSinks
from forge.envs.external.venvs import VenvError, python_of
from forge.observe import ConsoleSink, JsonlSink, MetricsLog, Sink, TensorBoardSink, Value, WandbSink, read_jsonl
from forge.observe.sink import Table
from forge.testing import ListSink

Written = list[tuple[int, str, Value]]


@dataclass
class Place:
    """Somewhere that figures go: how to open a sink there, and what a reader finds there afterwards."""

    open: Callable[[int | None], Sink]
    read: Callable[[], Written]


def jsonl_place(folder: Path) -> Place:
    path = folder / "new" / "metrics.jsonl"

    def read() -> Written:
        return [(line.step, name, value) for line in read_jsonl(path) for name, value in line.values.items()]

    return Place(lambda resume_step: JsonlSink(path, resume_step=resume_step), read)


def tensorboard_place(folder: Path) -> Place:
    place = folder / "new" / "tensorboard"

    def read() -> Written:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(place), size_guidance={"scalars": 0, "tensors": 0}).Reload()
        tags = events.Tags()
        written: Written = [(item.step, tag, item.value) for tag in tags["scalars"] for item in events.Scalars(tag)]
        for tag in tags["tensors"]:
            written += [(item.step, tag, item.tensor_proto.string_val[0].decode()) for item in events.Tensors(tag)]
        return sorted(written, key=lambda item: item[0])

    return Place(lambda resume_step: TensorBoardSink(place, resume_step=resume_step), read)


def wandb_place(folder: Path) -> Place:
    def read() -> Written:
        import wandb
        from wandb.proto.wandb_internal_pb2 import Record

        wandb.teardown()  # its process writes on after the run's end, and is done when it has ended itself
        written: Written = []
        for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
            for data in wandb_records(path.read_bytes()):
                record = Record.FromString(data)
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                step = items.get("_step", record.history.step.num)
                written += [(step, name, value) for name, value in items.items() if not name.startswith("_")]
        return [(step, name, math.nan if value == "NaN" else value) for step, name, value in written]

    return Place(lambda resume_step: WandbSink(folder, resume_step=resume_step), read)


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of an offline run: a LevelDB log, in blocks of 32 KiB, after a header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


TRACKERS: dict[str, Sequence[str]] = {"mlflow": MLFLOW, "trackio": TRACKIO}
running: dict[str, ForeignSinks] = {}
"""The processes that have foreign sinks, each in a venv of its own, for all tests of this module."""


def foreign(kind: str, folder: Path) -> ForeignSinks:
    if kind not in running:
        try:
            python = python_of(TRACKERS[kind])
        except VenvError as error:
            pytest.skip(str(error))
        environ = {
            "TRACKIO_DIR": str(folder.parent / "trackio"),
            "MLFLOW_TRACKING_URI": "",
            "GIT_PYTHON_REFRESH": "quiet",
        }
        running[kind] = ForeignSinks(python, kind, environ)
    return running[kind]


def tracker_place(folder: Path, kind: str) -> Place:
    """A tracker in a venv of its own, with a local store. Runs have names that no other test has."""
    sinks, run, name = foreign(kind, folder), folder / "runs" / "run", f"{folder.name}-{folder.parent.name}"

    def opened(resume_step: int | None) -> Sink:
        options = {"folder": str(run), "project": PROJECT, "run_name": name, "resume_step": resume_step}
        return ForeignSink(sinks, **options)

    def read() -> Written:
        return [tuple(item) for item in sinks.ask("read", folder=str(run), name=name)["written"]]

    return Place(opened, read)


def console_place(folder: Path) -> Place:
    stream = io.StringIO()

    def read() -> Written:
        written: Written = []
        for line in stream.getvalue().splitlines():
            first, *rest = line.split(" | ")
            for name, text in (part.split(": ") for part in rest):
                number = text.replace(".", "").replace("-", "").isdigit() or text in ("nan", "inf", "-inf")
                written.append((int(first.removeprefix("Step ")), name, float(text) if number else text))
        return written

    return Place(lambda resume_step: ConsoleSink(log_interval=1, resume_step=resume_step, stream=stream), read)


def list_place(folder: Path, *, in_a_log: bool = False) -> Place:
    sinks: list[ListSink] = []

    def opened(resume_step: int | None) -> Sink:
        sinks.append(ListSink())
        return MetricsLog({"list": sinks[-1]}) if in_a_log else sinks[-1]

    def read() -> Written:
        return [(step, name, value) for step, values in sinks[-1].entries for name, value in values.items()]

    return Place(opened, read)


PLACES: dict[str, Callable[[Path], Place]] = {
    "jsonl": jsonl_place,
    "tensorboard": tensorboard_place,
    "wandb": wandb_place,
    "mlflow": lambda folder: tracker_place(folder, "mlflow"),
    "trackio": lambda folder: tracker_place(folder, "trackio"),
    "console": console_place,
    "list": list_place,
    "log": lambda folder: list_place(folder, in_a_log=True),
}
KEEPING = {name: PLACES[name] for name in ("jsonl", "tensorboard")}


@pytest.fixture(scope="module", autouse=True)
def without_network() -> Iterator[None]:
    """Weights & Biases in its offline mode; its process ends with the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        yield
    for sinks in running.values():
        sinks.end()
    running.clear()
    import wandb

    wandb.teardown()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return PLACES[request.param](tmp_path)


def test_what_was_written_can_be_read(place: Place) -> None:
    sink = place.open(None)
    assert isinstance(sink, Sink)
    sink.write(1, {"reward/mean": 0.5, "count": 3})
    sink.write(2, {"reward/mean": -2.25, "note": "first"})
    sink.write(2, {"later/part": 1.5})
    sink.close()
    expected = [
        (1, "reward/mean", 0.5),
        (1, "count", 3),
        (2, "reward/mean", -2.25),
        (2, "note", "first"),
        (2, "later/part", 1.5),
    ]
    assert sorted(place.read(), key=lambda item: item[:2]) == sorted(expected, key=lambda item: item[:2])


def test_figures_that_are_not_finite_are_figures(place: Place) -> None:
    sink = place.open(None)
    sink.write(1, {"worst": math.nan})
    sink.write(2, {"worst": 1.0})
    sink.close()
    (_, _, first), second = place.read()
    assert isinstance(first, float)
    assert math.isnan(first)
    assert second == (2, "worst", 1.0)


def test_an_empty_step_is_no_error(place: Place) -> None:
    sink = place.open(None)
    sink.write(1, {})
    sink.close()
    assert place.read() == []


def test_what_was_taken_does_not_change_with_the_callers_mapping(place: Place) -> None:
    sink = place.open(None)
    values: dict[str, Value] = {"figure": 1.0}
    sink.write(1, values)
    values["figure"] = 2.0
    sink.write(2, values)
    values.clear()
    sink.close()
    assert place.read() == [(1, "figure", 1.0), (2, "figure", 2.0)]


def test_closing_twice_is_closing_once_and_nothing_is_taken_after_it(place: Place) -> None:
    sink = place.open(None)
    sink.write(1, {"figure": 1.0})
    sink.close()
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.write(2, {"figure": 2.0})
    assert place.read() == [(1, "figure", 1.0)]


@pytest.mark.parametrize("kind", KEEPING)
def test_what_was_written_is_there_without_closing(kind: str, tmp_path: Path) -> None:
    place = KEEPING[kind](tmp_path)
    sink = place.open(None)
    sink.write(1, {"figure": 1.0})
    assert place.read() == [(1, "figure", 1.0)]
    sink.close()


@pytest.mark.parametrize("kind", KEEPING)
def test_a_run_that_goes_on_has_each_step_once(kind: str, tmp_path: Path) -> None:
    place = KEEPING[kind](tmp_path)
    for resume_step, steps, worth in [(None, range(1, 8), 1.0), (4, range(5, 7), 2.0), (5, range(6, 9), 3.0)]:
        sink = place.open(resume_step)
        for step in steps:
            sink.write(step, {"figure": worth})
        sink.close()
    worths = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 2.0, 6: 3.0, 7: 3.0, 8: 3.0}
    assert place.read() == [(step, "figure", worth) for step, worth in worths.items()]


@pytest.mark.parametrize("kind", KEEPING)
def test_a_new_run_in_an_old_place_starts_empty(kind: str, tmp_path: Path) -> None:
    place = KEEPING[kind](tmp_path)
    for worth in (1.0, 2.0):
        sink = place.open(None)
        for step in (0, int(worth)):
            sink.write(step, {"figure": worth})
        sink.close()
    assert place.read() == [(0, "figure", 2.0), (2, "figure", 2.0)]


def test_weights_and_biases_without_a_login_is_a_configuration_to_correct(tmp_path: Path) -> None:
    """In a process of its own: wandb looks for a login in the environment and the home directory."""
    code = "import sys; from forge.observe import WandbSink; WandbSink(sys.argv[1])"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_BASE_URL": "http://127.0.0.1:1"}
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    *_, error = ended.stderr.partition("forge.errors.ConfigError: ")
    assert error.startswith("Weights & Biases cannot be used: "), ended.stderr
    for words in ("path:   metrics.wandb", "`wandb login`", "WANDB_MODE=offline", "metrics.wandb=false"):
        assert words in error
    assert "The above exception" not in ended.stderr, "the errors of wandb itself are not shown"


def test_weights_and_biases_knows_a_run_that_goes_on(tmp_path: Path) -> None:
    identities = []
    for resume_step in (None, 1, None):
        sink = WandbSink(tmp_path, resume_step=resume_step, config={"a.b": 1}, tags=["baseline"])
        sink.write(1 if resume_step is None else 2, {"figure": 1.0})
        sink.write_table(2, "samples/evaluation", Table(("prompt", "reward"), [["a", 0.5]]))
        sink.link("report", tmp_path / "report.html")
        sink.close()
        identities.append((tmp_path / "wandb" / "run_id").read_text().strip())
    first, resumed, new = identities
    assert first == resumed != new
    import wandb

    wandb.teardown()
    names = sorted(path.stem for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert names == sorted(f"run-{identity}" for identity in identities)


@pytest.mark.parametrize("kind", TRACKERS)
def test_a_tracker_has_the_configuration_tags_tables_and_files_of_a_run(kind: str, tmp_path: Path) -> None:
    sinks, run = foreign(kind, tmp_path), tmp_path / "runs" / "run"
    report = tmp_path / "report.html"
    report.write_text("<html></html>")
    config = {
        "training.learning_rate": 1e-3,
        "run.name": "x",
        "model.path": "null",
        **{f"many.{n}": n for n in range(150)},
    }
    name = f"described-{tmp_path.name}"
    for resume_step, steps in ((None, (1, 2)), (2, (3,))):
        options = {"folder": str(run), "project": PROJECT, "run_name": name, "resume_step": resume_step}
        sink = ForeignSink(sinks, **options, config=config, tags=["baseline", "lr=3e-4"])
        for step in steps:
            sink.write(step, {"evaluation/pass@8": step / 10})
            sink.write_table(step, "samples/evaluation", Table(("prompt", "reward"), [["a", 0.5], ["b", step]]))
        sink.link("report", report)
        sink.close()
    found = sinks.ask("read", folder=str(run), name=name)
    assert [value for _, _, value in found["written"] if isinstance(value, float)] == [0.1, 0.2, 0.3]
    assert str(found["params"]["training.learning_rate"]) == "0.001"
    assert str(found["params"]["many.149"]) == "149"
    if kind == "mlflow":
        assert (found["status"], found["name"], found["project"]) == ("FINISHED", name, PROJECT)
        assert {key for _, key, value in found["written"] if isinstance(value, float)} == {"evaluation/pass_at_8"}
        assert (found["tags"]["tag.baseline"], found["tags"]["tag.lr_3e-4"]) == ("true", "true")
        assert found["tags"]["report"] == str(report)
        assert "report.html" in found["files"]
        first, second = (found["tables"][f"samples/evaluation{part}.json"] for part in ("", "_after_2"))
        assert first["columns"] == second["columns"] == ["step", "prompt", "reward"]
        assert first["data"] == [[1, "b", 1], [2, "a", 0.5], [2, "b", 2]], "the newest rows"
        assert second["data"] == [[3, "a", 0.5], [3, "b", 3]]
    else:
        assert found["params"]["tags"] == "baseline, lr=3e-4"
        assert found["tables"]["samples/evaluation"] == [{"prompt": "a", "reward": 0.5}, {"prompt": "b", "reward": 3}]


def test_mlflow_that_cannot_be_reached_is_a_configuration_to_correct(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sinks = foreign("mlflow", tmp_path)
    with pytest.raises(ValueError, match="ConfigError: MLflow cannot be used: ") as caught:
        ForeignSink(sinks, folder=str(tmp_path / "run"), tracking_uri=(tmp_path / "file" / "mlruns").as_uri())
    for words in ("path:   metrics.sinks", "MLFLOW_TRACKING_URI", "remove the sink `mlflow`"):
        assert words in str(caught.value)


@pytest.mark.parametrize("kind", TRACKERS)
def test_a_tracker_that_is_not_installed_is_a_configuration_to_correct(kind: str) -> None:
    from forge.config import MetricsConfig
    from forge.observe.log import sink_errors

    (error,) = sink_errors(MetricsConfig(sinks=({"kind": kind},)))
    assert error.path == "metrics.sinks"
    assert error.value == kind
    assert "must be installed" in (error.rule or "")
    assert error.repair == f"pip install 'torchforge[{kind}]', or remove the sink `{kind}`"
