"""Journals on disk: what survives a kill, and what must not be replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge.envs.state import EpisodeKey
from forge.rollout.journal_file import JournalFile, prune_journals

KEY = EpisodeKey(1, 2, 3)


def turn(*versions: int) -> dict[str, Any]:
    spans = [{"version": version, "start": 0, "end": 1} for version in versions]
    return {"kind": "turn", "key": [0], "prompt": "digest", "completion": {"versions": spans}}


def written(folder: Path, *entries: dict[str, Any]) -> Path:
    file = JournalFile.of(str(folder), KEY)
    for entry in entries:
        file.write(entry)
    file.close()
    assert file.path is not None
    return file.path


def test_entries_are_read_again_in_their_order(tmp_path: Path) -> None:
    entries = [turn(4), {"kind": "record", "key": [0], "value": 7}, turn(4, 5)]
    assert written(tmp_path, *entries).name == "2-3.jsonl"
    assert JournalFile.of(str(tmp_path), KEY).read(oldest_version=4) == entries


def test_a_line_that_a_kill_cut_off_is_left_out_and_written_over(tmp_path: Path) -> None:
    path = written(tmp_path, turn(4))
    with path.open("ab") as file:
        file.write(b'{"kind": "tu')
    again = JournalFile.of(str(tmp_path), KEY)
    assert again.read(oldest_version=0) == [turn(4)]
    again.write(turn(5))
    again.close()
    assert JournalFile.of(str(tmp_path), KEY).read(oldest_version=0) == [turn(4), turn(5)]


def test_a_line_without_its_end_does_not_join_the_next_one(tmp_path: Path) -> None:
    path = written(tmp_path, turn(4), turn(5))
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    again = JournalFile.of(str(tmp_path), KEY)
    assert again.read(oldest_version=0) == [turn(4)]
    again.write(turn(6))
    again.close()
    assert JournalFile.of(str(tmp_path), KEY).read(oldest_version=0) == [turn(4), turn(6)]


def test_turns_of_weights_that_are_too_old_are_not_replayed(tmp_path: Path) -> None:
    path = written(tmp_path, turn(4), turn(3))
    file = JournalFile.of(str(tmp_path), KEY)
    assert file.read(oldest_version=4) == []
    assert file.was_stale
    assert not path.exists()


def test_a_resume_removes_what_weights_sampled_whose_steps_it_takes_again(tmp_path: Path) -> None:
    kept = written(tmp_path, turn(4), turn(5))
    undone = JournalFile.of(str(tmp_path), EpisodeKey(1, 2, 4))
    undone.write(turn(5, 6))
    undone.close()
    prune_journals(tmp_path, newest_version=5)
    assert list(tmp_path.iterdir()) == [kept]
    prune_journals(tmp_path, newest_version=-1)
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_nothing_is_kept() -> None:
    file = JournalFile.of(None, KEY)
    file.write(turn(1))
    assert file.read(oldest_version=0) == []
    file.clear()


def test_journals_of_opponents_from_later_weights_are_pruned(tmp_path: Path) -> None:
    """A version of the policy that answered for an opponent may be other weights after a resume, too. It has no part in
    staleness."""
    kept = written(tmp_path, {**turn(), "policy": "version 5"})
    prune_journals(tmp_path, newest_version=5)
    assert list(tmp_path.iterdir()) == [kept]
    assert len(JournalFile.of(str(tmp_path), KEY).read(oldest_version=8)) == 1
    prune_journals(tmp_path, newest_version=4)
    assert list(tmp_path.iterdir()) == []


def test_journals_of_groups_that_may_get_another_task_are_pruned(tmp_path: Path) -> None:
    kept = written(tmp_path, turn(4))
    prune_journals(tmp_path, newest_version=5, groups={KEY.group})
    assert list(tmp_path.iterdir()) == [kept]
    prune_journals(tmp_path, newest_version=5, groups={KEY.group + 1})
    assert list(tmp_path.iterdir()) == []
