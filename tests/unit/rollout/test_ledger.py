"""The ledger: one line for each group, and what a resumed run makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.errors import CheckpointError, DataError
from forge.rollout.ledger import Ledger, LedgerLine, check_ledger, read_ledger


def lines(step: int, *groups: int) -> list[LedgerLine]:
    return [LedgerLine(step, group, 0, f"p{group}", "trained") for group in groups]


def written(path: Path) -> Path:
    ledger = Ledger(path)
    for step in (1, 2, 3):
        ledger.write(lines(step, 2 * step, 2 * step + 1))
    ledger.close()
    return path


def test_a_resumed_run_keeps_what_its_checkpoint_stands_on(tmp_path: Path) -> None:
    path = written(tmp_path / "ledger.jsonl")
    with open(path, "ab") as file:
        file.write(b'{"step": 4, "gro')  # a kill in the middle of a write
    ledger = Ledger(path, resume_step=2)
    assert ledger.committed == {2, 3, 4, 5}
    ledger.write(lines(3, 9))
    ledger.close()
    assert [line.group for line in read_ledger(path)] == [2, 3, 4, 5, 9]
    assert [line.group for line in read_ledger(tmp_path / "ledger.discarded.jsonl")] == [6, 7]


def test_what_several_resumes_move_aside_is_all_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "ledger.jsonl")
    for step in (2, 1):
        Ledger(path, resume_step=step).close()
    assert [line.group for line in read_ledger(path)] == [2, 3]
    assert [line.group for line in read_ledger(tmp_path / "ledger.discarded.jsonl")] == [6, 7, 4, 5]


def test_a_new_run_begins_with_an_empty_ledger(tmp_path: Path) -> None:
    ledger = Ledger(written(tmp_path / "ledger.jsonl"))
    ledger.close()
    assert ledger.committed == frozenset()
    assert len(list(read_ledger(tmp_path / "ledger.discarded.jsonl"))) == 6


def test_a_ledger_with_a_group_twice_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "ledger.jsonl")
    with open(path, "ab") as file:
        file.write(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(CheckpointError, match="twice") as caught:
        Ledger(path, resume_step=9)
    assert caught.value.value == [2]


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "ledger.jsonl")
    path.write_bytes(b'{"step": 1}\n' + path.read_bytes())
    with pytest.raises(DataError, match="cannot be read") as caught:
        Ledger(path, resume_step=9)
    assert caught.value.path == f"{path}:1"


def test_adding_up() -> None:
    check_ledger(lines(1, 0, 2), pending=[1], next_number=3)
    with pytest.raises(CheckpointError, match="does not add up") as caught:
        check_ledger(lines(1, 0, 2), pending=[2], next_number=4)
    assert caught.value.value == "twice: [2], lost: [1, 3]"
