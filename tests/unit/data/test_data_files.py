"""Every kind of file gives the same records, each by its place, whole or from the middle."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import SourceConfig
from forge.data import open_indexed, open_stream
from forge.data.files import read_file
from forge.data.formats import wanted_columns
from forge.data.sources import find_files
from forge.errors import DataError

WANTED = wanted_columns({})
RECORDS = [{"text": text} for text in ("one", 'a "quote", [brackets] {and} \\', "zwei ü\n☃", "four")]


def as_lines(path: Path) -> list[int]:
    lines = [json.dumps(record, ensure_ascii=False) for record in RECORDS]
    path.write_bytes("\n".join([lines[0], "", "  ", *lines[1:]]).encode())
    return [1, 4, 5, 6]


def as_array(path: Path) -> list[int]:
    path.write_text(json.dumps(RECORDS, ensure_ascii=False, indent=1))
    return [2, 5, 8, 11]


def as_json_of_lines(path: Path) -> list[int]:
    return as_lines(path)


def zipped(write: Callable[[Path], list[int]]) -> Callable[[Path], list[int]]:
    def run(path: Path) -> list[int]:
        lines = write(path)
        path.write_bytes(gzip.compress(path.read_bytes()))
        return lines

    return run


def as_parquet(path: Path) -> list[int]:
    table = pyarrow.Table.from_pylist([{**record, "unused": b"\x00"} for record in RECORDS])
    pyarrow.parquet.write_table(table, path, row_group_size=3)
    return [0, 1, 2, 3]


KINDS = {
    "a.jsonl": as_lines,
    "a.json": as_array,
    "b.json": as_json_of_lines,
    "a.jsonl.gz": zipped(as_lines),
    "a.json.gz": zipped(as_array),
    "a.parquet": as_parquet,
}


@pytest.mark.parametrize("name", KINDS)
def test_indexed_and_streamed_records_are_those_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    lines = KINDS[name](path)
    expected = [(f"{path}:{line}", record) for line, record in zip(lines, RECORDS, strict=True)]
    config = SourceConfig(path=str(path))
    indexed = open_indexed(config, wanted=WANTED)
    found = [indexed.read(index) for index in (3, 0, 2, 1)]
    assert [(record.place, record.value()) for record in found] == [expected[index] for index in (3, 0, 2, 1)]

    stream = open_stream(config, wanted=WANTED)
    everything = list(stream.records(None))
    assert [(record.place, record.value()) for _, record in everything] == expected
    for number, (mark, _) in enumerate(everything):
        again = [(record.place, record.value()) for _, record in stream.records(mark)]
        assert again == expected[number:]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(values=st.lists(JSON, max_size=5), indent=st.sampled_from([None, 0, 2]), chunk=st.integers(1, 9))
def test_an_array_is_cut_into_its_elements(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], indent: int | None, chunk: int
) -> None:
    path = tmp_path_factory.mktemp("array") / "x.json"
    text = json.dumps(values, ensure_ascii=False, indent=indent)
    path.write_text(text)
    found = list(read_file(path, wanted=WANTED, chunk_size=chunk))
    assert [json.loads(item.raw) for item in found if isinstance(item.raw, bytes)] == values
    data = path.read_bytes()
    for item in found:
        assert isinstance(item.raw, bytes)
        assert data[item.offset : item.offset + len(item.raw)] == item.raw
        assert item.line == 1 + data.count(b"\n", 0, item.offset)


@pytest.mark.parametrize(
    ("text", "line"),
    [('[{"text": "a"}', 1), ('[{"text": "a"},\n,{}]', 2), ('[{"text": "a"}]\n7', 1), ('[\n{"text": "a', 1)],
)
def test_a_broken_array_is_refused(text: str, line: int, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"array|comma") as caught:
        list(read_file(path, wanted=WANTED))
    assert caught.value.path == f"{path}:{line}"
    assert caught.value.rule is not None
    assert "array of objects" in caught.value.rule


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"text": "a"}\n'), ("a.json", '[{"text": "a"}]')):
        path = tmp_path / name
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
        source = open_indexed(SourceConfig(path=str(path)), wanted=WANTED)
        assert [source.read(index).value() for index in range(len(source))] == [{"text": "a"}]


def test_a_folder_and_a_pattern_name_files_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json", "c.parquet", "README.md", ".hidden.jsonl"):
        (tmp_path / name).write_text("")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "d.jsonl").write_text("")
    assert [path.name for path in find_files(str(tmp_path))] == ["a.json", "b.jsonl", "c.parquet"]
    assert [path.name for path in find_files(f"{tmp_path}/**/*.jsonl")] == ["b.jsonl", "d.jsonl"]


def test_files_of_a_folder_follow_each_other_and_say_where_a_record_lies(tmp_path: Path) -> None:
    as_lines(tmp_path / "a.jsonl")
    as_parquet(tmp_path / "b.parquet")
    as_array(tmp_path / "c.json")
    config = SourceConfig(path=str(tmp_path))
    indexed = open_indexed(config, wanted=WANTED)
    streamed = list(open_stream(config, wanted=WANTED).records(None))
    places = [indexed.read(index).place for index in range(len(indexed))]
    assert places == [record.place for _, record in streamed]
    assert [Path(place).name for place in places[3:6]] == ["a.jsonl:6", "b.parquet:0", "b.parquet:1"]
    assert [indexed.read(index).value() for index in range(12)] == RECORDS * 3
    middle, _ = streamed[7]
    resumed = [record.place for _, record in open_stream(config, wanted=WANTED).records(middle)]
    assert resumed == places[7:]


def test_what_is_not_there_or_not_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data at") as caught:
        find_files(str(tmp_path / "nowhere*.jsonl"))
    assert caught.value.path == str(tmp_path / "nowhere*.jsonl")
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"x\.csv is not a kind of file") as caught:
        find_files(f"{tmp_path}/*")
    assert caught.value.repair is not None
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no records"):
        open_indexed(SourceConfig(path=str(tmp_path / "empty.jsonl")), wanted=WANTED)


def test_files_that_are_not_what_their_name_says_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("nothing of the kind")
    with pytest.raises(DataError, match="as Parquet"):
        open_indexed(SourceConfig(path=str(tmp_path / "x.parquet")), wanted=WANTED)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        open_indexed(SourceConfig(path=str(tmp_path / "x.jsonl.gz")), wanted=WANTED)
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"]}), tmp_path / "y.parquet")
    with pytest.raises(DataError, match="no column") as caught:
        open_indexed(SourceConfig(path=str(tmp_path / "y.parquet")), wanted=WANTED)
    assert caught.value.value == ["question"]


def test_a_digest_changes_with_the_content_and_not_with_the_place(tmp_path: Path) -> None:
    def digests(name: str, text: str) -> tuple[str, str]:
        (tmp_path / name).write_text(text)
        config = SourceConfig(path=str(tmp_path / name))
        return open_indexed(config, wanted=WANTED).digest, open_stream(config, wanted=WANTED).digest

    first = digests("a.jsonl", '{"text": "a"}')
    assert digests("b.jsonl", '{"text": "a"}') == first
    other = digests("a.jsonl", '{"text": "b"}')
    assert other[0] != first[0]
    assert other[1] != first[1]


def test_a_record_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n[1]\n{"text": \n{"text": "\xff"}\n')
    source = open_indexed(SourceConfig(path=str(path)), wanted=WANTED)
    for index, what in ((1, "a JSON array, not an object"), (2, "not JSON"), (3, "not JSON")):
        with pytest.raises(DataError, match=what) as caught:
            source.read(index).value()
        assert caught.value.path == f"{path}:{index + 1}"
        assert caught.value.repair is not None
