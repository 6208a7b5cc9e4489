"""A folder of checkpoints: names, the keep rule, resuming, leftovers and the lock. No tensors."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from forge.errors import CheckpointError
from forge.trainer.checkpoint_folder import (
    CheckpointInfo,
    FileRecord,
    WriterLock,
    best_checkpoint,
    checkpoint_name,
    checkpoints_to_delete,
    clean,
    damaged_files,
    delete,
    find_checkpoint,
    list_checkpoints,
    next_sequence,
    prune,
    publish,
    read_checkpoint,
    write_record,
)


def make(folder: Path, step: int, *, sequence: int | None = None, metric: float | None = None) -> CheckpointInfo:
    """A complete checkpoint with one file."""
    path = folder / checkpoint_name(step)
    path.mkdir(parents=True)
    (path / "data").write_bytes(b"abc")
    info = CheckpointInfo(
        path=path,
        step=step,
        sequence=step if sequence is None else sequence,
        time="2026-01-01T00:00:00+00:00",
        metric=metric,
        world_size=2,
        torch_version="2.13.0",
        extra={"epoch": 1},
        files={"data": FileRecord(3, hashlib.sha256(b"abc").hexdigest())},
    )
    write_record(info, folder=path)
    return info


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    info = make(tmp_path, 120, metric=0.25)
    assert info.path.name == "step-00000120"
    assert read_checkpoint(info.path) == info


def test_names_keep_their_order_beyond_eight_digits(tmp_path: Path) -> None:
    make(tmp_path, 123_456_789)
    make(tmp_path, 99_999_999)
    assert [info.step for info in list_checkpoints(tmp_path)] == [99_999_999, 123_456_789]


def test_only_complete_checkpoints_are_listed_in_order_of_completion(tmp_path: Path) -> None:
    make(tmp_path, 200, sequence=0)
    make(tmp_path, 100, sequence=1)
    for other in ("step-00000300.partial-x", "step-00000050.trash-x", "step-00000020.replaced-x", "notes", "step-3"):
        (tmp_path / other).mkdir()
    assert [info.step for info in list_checkpoints(tmp_path)] == [200, 100]
    assert next_sequence(tmp_path) == 2
    assert list_checkpoints(tmp_path / "nowhere") == ()


@pytest.mark.parametrize(
    ("metrics", "keep", "keep_best", "deleted"),
    [
        ([None, None, None], 2, True, [0]),
        ([None], 1, True, []),
        ([0.1, 0.3, 0.2], 1, True, [1]),
        ([0.1, 0.3, 0.2], 1, False, [0, 1]),
        ([0.2, 0.2, 0.3, 0.4], 1, True, [1, 2]),
        ([0.3, 0.2, 0.1], 2, True, [0]),
        ([float("nan"), 0.5, None, None], 1, True, [0, 2]),
    ],
)
def test_the_keep_rule(
    tmp_path: Path, metrics: list[float | None], keep: int, keep_best: bool, deleted: list[int]
) -> None:
    info = make(tmp_path, 0)
    infos = [dataclasses.replace(info, step=i, sequence=i, metric=metric) for i, metric in enumerate(metrics)]
    found = checkpoints_to_delete(infos, keep=keep, keep_best=keep_best)
    assert [info.step for info in found] == deleted


def test_the_best_is_the_lowest_finite_metric(tmp_path: Path) -> None:
    info = make(tmp_path, 0)
    infos = [dataclasses.replace(info, step=i, metric=m) for i, m in enumerate([None, 2.0, float("-inf"), 1.0])]
    assert best_checkpoint(infos) == infos[3]
    assert best_checkpoint(infos[:1]) is None


def test_pruning_deletes_what_the_rule_lets_go(tmp_path: Path) -> None:
    for step, metric in [(1, 0.5), (2, 0.1), (3, 0.4), (4, 0.3)]:
        make(tmp_path, step, metric=metric)
    prune(tmp_path, keep=1, keep_best=True)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_an_empty_folder_starts_anew(tmp_path: Path, resume: str) -> None:
    assert find_checkpoint(tmp_path, resume=resume) is None
    assert find_checkpoint(tmp_path / "nowhere", resume=resume) is None


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_the_latest_is_gone_on_from(tmp_path: Path, resume: str) -> None:
    make(tmp_path, 1)
    latest = make(tmp_path, 2)
    assert find_checkpoint(tmp_path, resume=resume) == latest


def test_never_refuses_a_folder_with_checkpoints(tmp_path: Path) -> None:
    make(tmp_path, 7)
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(tmp_path, resume="never")
    assert (caught.value.path, caught.value.value) == (str(tmp_path), "step-00000007")
    assert "resume=never" in str(caught.value.rule)
    rest = "a run that is done continues with a larger training.max_steps; in Python, set checkpointing.resume=auto "
    rest += "instead of --resume"
    expected = "add --resume to continue that run, or run.name=NAME for a new one in its own folder"
    assert caught.value.repair == f"{expected}; {rest}"


def test_a_name_that_is_free_is_given_where_the_run_is_known(tmp_path: Path) -> None:
    run = tmp_path / "grpo"
    make(run / "checkpoints", 7)
    with pytest.raises(CheckpointError, match=r"run\.name=NAME"):  # without its configuration it may be anything
        find_checkpoint(run / "checkpoints", resume="never")
    (run / "config.yaml").touch()
    for name in ("grpo-2", "grpo-3"):
        with pytest.raises(CheckpointError) as caught:
            find_checkpoint(run / "checkpoints", resume="never")
        expected = f"or run.name={name} for a new one in its own folder, or remove {run} to start over; a run"
        assert expected in str(caught.value.repair)
        (tmp_path / name).mkdir()


@pytest.mark.parametrize(("place", "value"), [("", "no complete checkpoint"), ("nowhere", "no such folder")])
def test_must_insists_on_a_checkpoint(tmp_path: Path, place: str, value: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(tmp_path / place, resume="must")
    assert (caught.value.path, caught.value.value) == (str(tmp_path / place), value)
    assert "checkpointing.resume=auto" in str(caught.value.repair)


def test_a_path_names_a_checkpoint_anywhere(tmp_path: Path) -> None:
    old = make(tmp_path / "other", 1)
    make(tmp_path / "other", 2)
    assert find_checkpoint(tmp_path / "here", resume=str(old.path)) == old


@pytest.mark.parametrize(
    ("place", "value"),
    [("other", "a folder"), ("other/step-00000009", "nothing"), ("other/step-00000001/data", "a file")],
)
def test_a_path_without_a_checkpoint_is_refused_with_the_one_that_was_meant(
    tmp_path: Path, place: str, value: str
) -> None:
    meant = make(tmp_path / "other", 1)
    with pytest.raises(CheckpointError, match="no checkpoint here") as caught:
        find_checkpoint(tmp_path, resume=str(tmp_path / place))
    assert (caught.value.path, caught.value.value) == (str(tmp_path / place), value)
    assert "checkpoint.json" in str(caught.value.rule)
    if value != "a file":
        assert str(meant.path) in str(caught.value.repair)


def test_a_half_checkpoint_is_refused_even_by_its_path(tmp_path: Path) -> None:
    make(tmp_path, 1).path.rename(tmp_path / "step-00000001.partial-x")
    with pytest.raises(CheckpointError, match="not a complete checkpoint") as caught:
        read_checkpoint(tmp_path / "step-00000001.partial-x")
    assert caught.value.path == str(tmp_path / "step-00000001.partial-x")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2, "files": {}}', '{"format": 1, "files": {"a": 1}}'])
def test_a_record_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    record = make(tmp_path, 1).path / "checkpoint.json"
    record.write_text(text)
    for look in (lambda: read_checkpoint(record.parent), lambda: list_checkpoints(tmp_path)):
        with pytest.raises(CheckpointError, match="cannot be read") as caught:
            look()
        assert caught.value.path == str(record)
        assert caught.value.repair
    assert next_sequence(tmp_path) == 0  # what cannot be read does not stop a run from saving


def test_a_complete_name_without_a_record_is_named(tmp_path: Path) -> None:
    (make(tmp_path, 1).path / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        list_checkpoints(tmp_path)


def test_damage_is_found(tmp_path: Path) -> None:
    info = make(tmp_path, 1)
    data = info.path / "data"
    assert damaged_files(info, names=["data"], digests=True) == ()
    data.write_bytes(b"abd")
    assert damaged_files(info, names=["data"], digests=False) == ()
    assert damaged_files(info, names=["data"], digests=True) == ("data has other content than was written",)
    data.write_bytes(b"ab")
    assert damaged_files(info, names=["data"], digests=False) == ("data has 2 bytes instead of 3",)
    data.unlink()
    assert damaged_files(info, names=["data"], digests=False) == ("data is missing",)
    assert damaged_files(info, names=[], digests=True) == ()


def test_publishing_replaces_one_of_the_same_step(tmp_path: Path) -> None:
    make(tmp_path, 1, sequence=0)
    partial = tmp_path / "step-00000001.partial-x"
    make(tmp_path / "elsewhere", 1, sequence=5).path.rename(partial)
    publish(partial, target=tmp_path / "step-00000001")
    assert [info.sequence for info in list_checkpoints(tmp_path)] == [5]
    assert names(tmp_path) == ["elsewhere", "step-00000001"]


def test_cleaning_removes_leftovers_and_puts_back_what_was_being_replaced(tmp_path: Path) -> None:
    kept = make(tmp_path, 1)
    make(tmp_path, 2).path.rename(tmp_path / "step-00000002.replaced-x")
    make(tmp_path / "elsewhere", 1).path.rename(tmp_path / "step-00000001.replaced-x")
    for name in ("step-00000003.partial-x", "step-00000004.trash-x"):
        (tmp_path / name / "deep").mkdir(parents=True)
    clean(tmp_path)
    assert names(tmp_path) == ["elsewhere", "step-00000001", "step-00000002"]
    assert list_checkpoints(tmp_path)[0] == kept


def test_what_cannot_be_deleted_is_left_as_trash_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "step-00000001.trash-x").write_text("a file where a folder should be")
    with pytest.warns(RuntimeWarning, match="could not be deleted"):
        delete(tmp_path / "step-00000001.trash-x")


def test_deleting_what_is_gone_does_nothing(tmp_path: Path) -> None:
    delete(tmp_path / "step-00000001")


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    assert lock.is_held
    with pytest.raises(CheckpointError, match="Another run is writing") as caught:
        WriterLock(tmp_path / ".")
    assert caught.value.path == str(tmp_path)
    assert "this process" in str(caught.value.value)
    assert "read_only=True" in str(caught.value.repair)
    lock.release()
    lock.release()
    WriterLock(tmp_path).release()


def test_the_record_is_plain_json_with_a_format(tmp_path: Path) -> None:
    record = json.loads((make(tmp_path, 1).path / "checkpoint.json").read_text())
    assert record["format"] == 1
    assert "path" not in record
