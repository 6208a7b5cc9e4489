"""The index of rollouts follows what runs do to their files, and its size is bounded."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from agent_folders import make_agent_groups
from forge.config import RecordConfig
from forge.rollout.record import RolloutRecorder
from forge.rollout.signal import NoSignalGroup
from forge.ui.rollouts.columns import Columns
from forge.ui.rollouts.files import RolloutFolder, name_of, place_of
from forge.ui.rollouts.index import CELLS_PER_ROW, MAX_ROWS, IndexLimits, RolloutIndex, RolloutRows
from forge.ui.rollouts.lines import FLAGS, MAX_LINE, NO_VERSION, Vocabulary, Words, facts_of, parse_line, parse_start
from forge.ui.rollouts.query import in_time, name_row
from run_folders import decode, make_groups, trainer_logprobs, write_rollouts


def recorder(folder: Path, *, resume_step: int | None = None) -> RolloutRecorder:
    return RolloutRecorder(folder / "rollouts", decode=decode, config=RecordConfig(), resume_step=resume_step)


def whole(index: RolloutIndex) -> RolloutRows:
    """The rows when everything is read."""
    index.advance()
    while not index.is_complete:
        index.advance()
    return index.rows()


def names(rows: RolloutRows) -> list[str]:
    return [name_row(rows, int(row)) for row in in_time(rows, newest_first=False)]


def expected(folder: Path) -> list[str]:
    """The names of all lines, read in a simple way."""
    kinds = ["fruitless", "step", "evaluation"]
    found = []
    for path in folder.glob("rollouts/*.jsonl"):
        place = place_of(path.name)
        assert place is not None
        for line in path.open():
            fields = json.loads(line)
            found.append(((place[1], kinds.index(place[0]), fields["group"], fields["index"]), place[0]))
    return [f"{kind}.{step}.{group}.{index}" for (step, _, group, index), kind in sorted(found)]


def test_every_line_is_in_it_with_its_numbers(tmp_path: Path) -> None:
    write_rollouts(tmp_path, range(1, 6))
    rows = whole(RolloutIndex(tmp_path))
    assert names(rows) == expected(tmp_path)
    for row in range(len(rows)):
        kind, step = rows.place(row)
        data = (tmp_path / "rollouts" / name_of((kind, step))).read_bytes()
        start, length = (int(rows.columns[name][row]) for name in ("offset", "length"))
        fields = json.loads(data[start : start + length])
        values = {name: rows.columns[name][row].item() for name in rows.columns}
        assert (values["reward"], values["tokens"]) == (fields["reward"], len(fields["token_ids"]))
        assert values["advantage"] == pytest.approx(fields["advantage"])
        pairs = zip(fields["trainer_logprobs"], fields["logprobs"], strict=True)
        assert values["gap"] == pytest.approx(max(abs(one - other) for one, other in pairs))
        versions = [span[0] for span in fields["versions"]]
        assert (values["oldest"], values["newest"]) == (min(versions), max(versions))
        assert (values["counted"], values["parts"]) == (len(fields["token_ids"]), 1)
        is_cut = fields["finish_reason"] == "length"
        assert (values["masked"] > 0, values["masked_parts"] > 0) == (is_cut, is_cut)
        assert bool(values["flags"] & FLAGS["cut"]) == is_cut
        assert bool(values["flags"] & FLAGS["failed"]) == bool(fields["failures"])
        assert bool(values["flags"] & FLAGS["mixed"]) == (len(set(versions)) > 1)


def test_episodes_of_programs_have_turns_tools_and_faults(tmp_path: Path) -> None:
    groups = make_agent_groups(1)
    recorder(tmp_path).write(1, groups, trainer_logprobs(groups))
    rows = whole(RolloutIndex(tmp_path))
    assert rows.columns["turns"].tolist() == [5, 5]
    flags = [[name for name, bit in FLAGS.items() if value & bit] for value in rows.columns["flags"].tolist()]
    assert flags[1] == ["cut", "mixed", "tools", "broken", "forked", "lost"]
    assert flags[0] == ["cut", "mixed", "limit", "tools", "broken", "forked", "lost"]
    assert rows.vocabulary.tools.all() == ["lookup"]
    assert rows.columns["tools"].tolist() == [1, 1]
    lost = len(groups[0].episodes[0].turns[4])
    assert (rows.columns["tokens"] - rows.columns["counted"]).tolist() == [lost, lost]
    assert rows.columns["masked_parts"].tolist() == [1, 0]  # one ended by a limit


def test_it_follows_a_run_step_by_step(tmp_path: Path) -> None:
    index, writer = RolloutIndex(tmp_path), None
    assert len(whole(index)) == 0
    for step in range(1, 6):
        writer = writer or recorder(tmp_path)
        groups = make_groups(step, num_groups=2, group_size=2)
        writer.write_no_signal(step, NoSignalGroup(70 + step, "no_signal", "all_zero", groups[0]))
        assert names(whole(index)) == expected(tmp_path)
        writer.write_no_signal(step, NoSignalGroup(80 + step, "no_signal", "all_zero", groups[1]))
        assert names(whole(index)) == expected(tmp_path)  # the file has grown
        writer.write(step, groups)
        writer.write_evaluation(step, groups)
        assert names(whole(index)) == expected(tmp_path)
    assert index.rows().generation == 0  # nothing was read twice


def test_a_resumed_run_shows_its_own_steps(tmp_path: Path) -> None:
    write_rollouts(tmp_path, range(1, 9))
    index = RolloutIndex(tmp_path)
    before = whole(index)
    again = recorder(tmp_path, resume_step=3)
    assert names(whole(index)) == expected(tmp_path)
    assert len(os.listdir(tmp_path / "rollouts" / "discarded")) == 5
    again.write(4, make_groups(40, num_groups=1, group_size=3))
    rows = whole(index)
    assert names(rows) == expected(tmp_path)
    assert rows.generation > before.generation
    for row in range(len(before)):
        fields = index.read_fields(before, row)  # rows of before are still those of before, or nothing
        assert (fields is None) == (before.place(row)[1] > 3)
    again.write(4, make_groups(41, num_groups=2, group_size=2))  # the same step again
    assert names(whole(index)) == expected(tmp_path)


def test_a_new_run_in_the_same_folder_starts_over(tmp_path: Path) -> None:
    write_rollouts(tmp_path, range(1, 4))
    index = RolloutIndex(tmp_path)
    whole(index)
    writer = recorder(tmp_path)
    assert len(whole(index)) == 0
    writer.write(1, make_groups(9, num_groups=1, group_size=2))
    assert names(whole(index)) == expected(tmp_path)


def test_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [1])
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    fruitless = path.with_name("fruitless_000002.jsonl")
    fruitless.write_bytes(lines[0] + lines[1][:40])
    index = RolloutIndex(tmp_path)
    assert len(whole(index)) == len(lines) + 1
    with fruitless.open("ab") as file:
        file.write(lines[1][40:])
    rows = whole(index)
    assert len(rows) == len(lines) + 2
    assert rows.num_unreadable == 0


def test_half_a_line_that_a_killed_run_left_is_no_news(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [1])
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    index = RolloutIndex(tmp_path)
    rows = whole(index)
    assert not any(index.advance() for _ in range(3))
    assert (index.rows().version, index.is_complete) == (rows.version, True)
    with path.open("ab") as file:
        file.write(b"x")
    index.advance()
    assert (len(index.rows()), index.is_complete) == (len(rows), True)


def test_lines_that_are_not_episodes_are_counted(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [1])
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    good = path.read_bytes().splitlines(keepends=True)
    fields = json.loads(good[0])
    bad = [b"{}\n", b"nothing\n", b'{"step": 1}\n', b"\xff\xfe\n", b"[" * 5000 + b"\n", b"\n"]
    bad += [json.dumps({**fields, "group": value}).encode() + b"\n" for value in (-1, 1 << 70, "1", None)]
    bad += [json.dumps({**fields, "index": 1 << 40}).encode() + b"\n"]
    path.write_bytes(b"".join(good[:2] + bad + good[2:]))
    rows = whole(RolloutIndex(tmp_path))
    assert (len(rows), rows.num_unreadable) == (len(good), len(bad))
    odd = {**fields, "reward": "x", "advantage": [1], "versions": [["x"], [1 << 40]], "logprobs": [{}], "stats": 3}
    facts = facts_of({**odd, "turns": [{"index": 0, "start": 0, "end": -1}]}, Vocabulary.empty())
    assert facts is not None
    assert (np.isnan(facts[3]), np.isnan(facts[4]), np.isnan(facts[5]), facts[8]) == (True, True, True, NO_VERSION)


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [1])
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    good = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(good[0] + b'"' + b"x" * (2 * MAX_LINE + 17) + b'"\n' + b"".join(good[1:]))
    rows = whole(RolloutIndex(tmp_path))
    assert (len(rows), rows.num_unreadable) == (len(good), 1)


def test_text_with_half_a_character_is_read(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [1])
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    fields = json.loads(path.read_bytes().splitlines()[0])
    line = json.dumps({**fields, "text": "a\ud800b"}).encode()
    found = parse_line(line)
    assert found is not None
    assert found["text"] == "a\ud800b"
    assert parse_start(line[: line.index(b"token_ids")])["step"] == 1


def test_the_newest_steps_are_read_first_and_one_that_is_asked_for_at_once(tmp_path: Path) -> None:
    write_rollouts(tmp_path, range(1, 21), num_groups=1, group_size=2)
    index = RolloutIndex(tmp_path, limits=IndexLimits(slice_files=2))
    index.advance()
    assert set(index.rows().step_column().tolist()) == {19, 20}
    assert 0 < index.rows().progress < 0.2
    index.ensure(("step", 4))
    assert set(index.rows().step_column().tolist()) == {4, 19, 20}
    index.ensure(("step", 99))
    index.advance()
    assert set(index.rows().step_column().tolist()) == {4, 17, 18, 19, 20}
    assert names(whole(index)) == expected(tmp_path)


def test_what_is_told_to_pages_while_it_is_made_is_little(tmp_path: Path) -> None:
    write_rollouts(tmp_path, range(1, 101), num_groups=1, group_size=2)
    index = RolloutIndex(tmp_path, limits=IndexLimits(slice_files=1, told_rows=10))
    told = [index.advance()]
    while not index.is_complete:
        told.append(index.advance())
    assert 5 < sum(told) < 25
    assert told[-1]
    assert not index.advance()


def test_of_more_lines_than_fit_the_newest_are_kept(tmp_path: Path) -> None:
    write_rollouts(tmp_path, range(1, 51), num_groups=1, group_size=2)
    index = RolloutIndex(tmp_path, limits=IndexLimits(max_rows=40))
    rows = whole(index)
    assert rows.is_cut
    assert len(rows) <= 40
    steps = set(rows.step_column().tolist())
    assert steps == set(range(51 - len(steps), 51))
    writer = recorder(tmp_path, resume_step=50)
    for step in range(51, 71):
        writer.write(step, make_groups(step, num_groups=1, group_size=2))
        rows = whole(index)
        assert len(rows) <= 40
        assert max(rows.step_column()) == step
        assert names(rows) == expected(tmp_path)[-len(rows) :]
    index.ensure(("step", 1))
    assert 1 not in index.rows().step_column()


def test_the_memory_of_a_line_is_as_the_guide_says(tmp_path: Path) -> None:
    write_rollouts(tmp_path, range(1, 11))
    rows = whole(RolloutIndex(tmp_path))
    assert sum(column.itemsize for column in rows.columns.values()) == 88 == 4 * CELLS_PER_ROW
    guide = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "ui.md").read_text()
    assert "88 bytes" in guide
    assert f"{MAX_ROWS / 1e6:g} million" in guide
    assert f"{MAX_LINE >> 20} MB" in guide


def test_nothing_outside_the_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_rollouts(tmp_path / "other", [1])
    source = tmp_path / "other" / "rollouts" / "step_000001.jsonl"
    (tmp_path / "run" / "rollouts").symlink_to(source.parent)
    assert len(whole(RolloutIndex(tmp_path / "run"))) == 0
    (tmp_path / "run" / "rollouts").unlink()
    (tmp_path / "run" / "rollouts").mkdir()
    (tmp_path / "run" / "rollouts" / "step_000001.jsonl").symlink_to(source)
    os.mkfifo(tmp_path / "run" / "rollouts" / "step_000002.jsonl")
    (tmp_path / "run" / "rollouts" / "step_000003.jsonl").mkdir()
    assert len(whole(RolloutIndex(tmp_path / "run"))) == 0


def test_a_file_that_becomes_a_link_between_two_looks_is_not_followed(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [1])
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    index = RolloutIndex(tmp_path)
    rows = whole(index)
    moved = path.rename(tmp_path / "moved.jsonl")
    path.symlink_to(moved)
    assert index.read_lines(rows, 0, 0) == b""
    path.unlink()
    path.write_bytes(moved.read_bytes())  # another file with the same name and content
    assert index.read_lines(rows, 0, 0) == b""
    assert names(whole(index)) == expected(tmp_path)


def test_names_of_files(tmp_path: Path) -> None:
    assert place_of("step_000012.jsonl") == ("step", 12)
    assert place_of("evaluation_1234567.jsonl") == ("evaluation", 1234567)
    assert place_of("samples.jsonl") == ("evaluation", 0)
    for name in ("step_12.jsonl", "step_0000012.jsonl", "step_000012.jsonl.part", "other.jsonl", "step_00001٣.jsonl"):
        assert place_of(name) is None
    assert name_of(("step", 12)) == "step_000012.jsonl"


def test_a_folder_is_listed_again_when_it_has_changed(tmp_path: Path) -> None:
    now = [0.0]
    folder = RolloutFolder(tmp_path, clock=lambda: now[0])
    (tmp_path / "rollouts").mkdir()
    os.utime(tmp_path / "rollouts", (100.0, 100.0))
    now[0] = 101.0
    assert folder.files() == {}
    assert folder.files() == {}  # changed a moment ago: there may be more with the same time
    now[0] = 200.0
    assert folder.files() == {}
    assert folder.files() is None
    (tmp_path / "rollouts" / "step_000001.jsonl").write_bytes(b"")
    os.utime(tmp_path / "rollouts", (150.0, 150.0))
    found = folder.files()
    assert found is not None
    assert list(found) == ["step_000001.jsonl"]
    (tmp_path / "rollouts" / "step_000001.jsonl").unlink()
    (tmp_path / "rollouts").rmdir()
    files = folder.files()  # now it is the run's own folder, which has none
    assert files == {}


def test_words_beyond_the_limit_become_one() -> None:
    words = Words(4)
    assert [words.number(word) for word in "abcdea"] == [0, 1, 2, 3, 3, 0]
    assert words.all() == ["a", "b", "c", "(others)"]
    assert [words.find(word) for word in ("a", "d", "(others)")] == [0, None, 3]


def test_columns_keep_what_was_read_from_them() -> None:
    columns = Columns({"a": np.int64, "b": np.float32})
    chance = random.Random(1)
    rows: list[tuple[int, float]] = []
    views = []
    for _ in range(40):
        new = [(chance.randrange(100), chance.random()) for _ in range(chance.randrange(400))]
        columns.add(new)
        rows += new
        views.append((len(rows), columns.views()))
    for count, view in views:
        assert view["a"].tolist() == [row[0] for row in rows[:count]]
    columns.keep(columns["a"] % 2 == 0)
    kept = [row for row in rows if row[0] % 2 == 0]
    assert columns["a"].tolist() == [row[0] for row in kept]
    columns.add([(1, 2.0)])
    assert (columns["a"].tolist()[-1], len(columns)) == (1, len(kept) + 1)
    assert views[-1][1]["a"].tolist() == [row[0] for row in rows]
