"""A loader that goes on from a saved state gives what the first one would have given, token for token."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_tokenizer import ByteTokenizer, content, open_train, write_texts
from forge.config import DataConfig, TrainingConfig, ValidationConfig
from forge.data import IndexedCorpus, Layout, Record, open_loaders
from forge.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of lines, one of Parquet, one under gzip, one array; some records are bad."""
    folder = tmp_path_factory.mktemp("resume")
    write_texts(folder / "a.jsonl", 23, prefix="a")
    write_texts(folder / "b.jsonl", 11, prefix="b")
    with (folder / "a.jsonl").open("a") as file:
        file.write("\nnot json\n")
    rows = [{"text": f"p{number}" + "y" * (number * 5 % 17)} for number in range(13)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "c.parquet", row_group_size=4)
    lines = "".join(json.dumps({"text": f"z{number}" + "w" * (number * 3 % 29)}) + "\n" for number in range(9))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "e.json").write_text(json.dumps(rows[:7], indent=1))
    return folder


def settings_of(folder: Path, **data: Any) -> dict[str, Any]:
    sources = [
        {"path": str(folder / "[ab].jsonl"), "weight": 1.5},
        {"path": str(folder / "c.parquet"), "weight": 0.5},
        {"path": str(folder / "d.jsonl.gz")},
        {"path": str(folder / "e.json")},
    ]
    return {"sources": sources, "on_bad_record": "skip", **data}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    streaming=st.booleans(),
    packing=st.booleans(),
    shuffle=st.booleans(),
    oversize=st.sampled_from(["drop", "truncate"]),
    numbers=st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(1, 3), st.integers(0, 5)),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_from_any_cut_the_rest_is_the_same(
    folder: Path,
    streaming: bool,
    packing: bool,
    shuffle: bool,
    oversize: str,
    numbers: tuple[int, int, int, int],
    cuts: tuple[float, float],
) -> None:
    lookahead, buffer, batch_size, seed = numbers
    data = settings_of(
        folder,
        streaming=streaming,
        packing=packing,
        shuffle=shuffle,
        oversize=oversize,
        pack_lookahead=lookahead,
        shuffle_buffer=buffer,
    )
    training = {"batch_size": batch_size, "num_epochs": 2, "max_seq_len": 20}
    whole = open_train(data, seed=seed, **training)
    expected = [content(batch) for batch in whole]
    at = sorted(round(cut * len(expected)) for cut in cuts)

    found: list[Any] = []
    state = None
    for start, stop in zip([0, *at], [*at, None], strict=True):
        loader = open_train(data, seed=seed, **training)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
            assert loader.state_dict() == state
        found += (
            [content(batch) for batch in loader]
            if stop is None
            else [content(next(loader)) for _ in range(stop - start)]
        )
        state = loader.state_dict()
    assert found == expected
    assert state == whole.state_dict()
    assert loader.counters == whole.counters


@pytest.mark.parametrize("streaming", [False, True])
def test_reading_ahead_changes_neither_batches_nor_states(folder: Path, streaming: bool) -> None:
    data = settings_of(folder, streaming=streaming, shuffle_buffer=7, pack_lookahead=5)
    plain = open_train(data, batch_size=2, num_epochs=2, max_seq_len=40)
    with open_train(data, read_ahead=3, batch_size=2, num_epochs=2, max_seq_len=40) as ahead:
        for batch in plain:
            assert content(next(ahead)) == content(batch)
            assert ahead.state_dict() == plain.state_dict()
            assert (ahead.epoch, ahead.counters) == (plain.epoch, plain.counters)
        assert next(ahead, None) is None
        middle = next(iter(open_train(data, batch_size=2, max_seq_len=40)))
        ahead.rewind()
        assert content(next(ahead)) == content(middle)


def test_a_state_is_small_and_holds_no_tokens(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", 400)
    data = {"sources": [{"path": str(path)}], "pack_lookahead": 50}
    loader = open_train(data, batch_size=2, max_seq_len=60)
    next(loader)
    state = loader.state_dict()
    assert len(json.dumps(state)) < 1000
    assert len(state["place"]["held"]) == 50
    tokenizer = ByteTokenizer()
    again = open_loaders(
        DataConfig.model_validate(data),
        training=TrainingConfig(batch_size=2, max_seq_len=60),
        tokenizer=tokenizer,
        seed=0,
        read_ahead=0,
    ).train
    again.load_state_dict(state)
    next(again)
    assert tokenizer.num_calls < 100  # what waited and what came, not what was over


def test_a_state_goes_on_under_another_batch_size_without_losing_a_sample(folder: Path) -> None:
    data = settings_of(folder, pack_lookahead=9)
    first = open_train(data, batch_size=2, max_seq_len=40)
    given_before = [identity for _ in range(3) for identity in next(first).identities]
    second = open_train({**data, "packing": False}, batch_size=5, max_seq_len=40)
    second.load_state_dict(first.state_dict())
    given_after = [identity for batch in second for identity in batch.identities]
    rest = [identity for batch in first for identity in batch.identities]
    assert given_before
    assert sorted(given_after) == sorted(rest)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_state_of_other_data_is_refused(tmp_path: Path, streaming: bool) -> None:
    path = write_texts(tmp_path / "a.jsonl", 20)
    other = write_texts(tmp_path / "b.jsonl", 20, prefix="b")
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(path.read_bytes())
    data: dict[str, Any] = {"sources": [{"path": str(path)}], "streaming": streaming, "shuffle_buffer": 4}
    loader = open_train(data, batch_size=2)
    next(loader)
    state = json.loads(json.dumps(loader.state_dict()))

    def refused(*, seed: int = 0, **changed: Any) -> DataError:
        with pytest.raises(DataError, match="the state does not fit") as caught:
            open_train({**data, **changed}, seed=seed, batch_size=2).load_state_dict(state)
        assert caught.value.rule
        assert caught.value.repair
        return caught.value

    assert refused(seed=1).path == "run.seed"
    assert refused(streaming=not streaming).path == "data.streaming"
    assert refused(sources=[{"path": str(path)}, {"path": str(other)}]).path == "data.sources"
    assert refused(sources=[{"path": str(path), "weight": 2}]).path == str(path)
    assert "another content" in refused(sources=[{"path": str(other)}]).message
    refused(shuffle=False)
    open_train({**data, "sources": [{"path": str(copy)}]}, batch_size=2).load_state_dict(state)  # moved, the same
    path.write_text(path.read_text() + '{"text": "one more"}\n')
    assert refused().path == str(path)


def test_a_state_of_another_split_is_refused(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", 20)
    data = DataConfig.model_validate({"sources": [{"path": str(path)}]})
    whole = open_train({"sources": [{"path": str(path)}]})
    split = open_loaders(
        data,
        training=TrainingConfig(),
        tokenizer=ByteTokenizer(),
        seed=0,
        validation=ValidationConfig(fraction=0.2),
    )
    with split, pytest.raises(DataError, match="another length"):
        whole.load_state_dict(split.train.state_dict())


def test_what_is_no_state_is_refused(tmp_path: Path) -> None:
    loader = open_train({"sources": [{"path": str(write_texts(tmp_path / "a.jsonl", 2))}]})
    with pytest.raises(DataError, match="not a state of a data loader"):
        loader.load_state_dict({"step": 3})


def test_a_stream_that_lost_records_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    filler = "x" * 70_000
    records = [filler, *(str(number) for number in range(20)), filler]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in records))
    data = {"sources": [{"path": str(path)}], "streaming": True, "shuffle_buffer": 30, "oversize": "truncate"}
    loader = open_train(data, batch_size=1, max_seq_len=8)
    next(loader)
    state = loader.state_dict()
    path.write_text(path.read_text().replace('"0"}\n{"text": "1"}', '"0", "n": ["a", 1]}'))  # the ends are as before
    again = open_train(data, batch_size=1, max_seq_len=8)
    again.load_state_dict({**state, "corpus": again.state_dict()["corpus"]})
    with pytest.raises(DataError, match="fewer records than when the state was saved"):
        next(again)


class Gate(ByteTokenizer):
    """Counts what it encodes, and fails at the text `stop`."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()
        self.reached = threading.Semaphore(0)

    def encode_text(self, text: str) -> list[int]:
        self.threads.add(threading.current_thread().name)
        self.reached.release()
        if text == "stop":
            raise OSError("the tokenizer's file is gone")
        return super().encode_text(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        raise NotImplementedError


def open_gate(path: Path, gate: Gate, *, read_ahead: int) -> Any:
    data = DataConfig.model_validate({"sources": [{"path": str(path)}], "packing": False, "shuffle": False})
    return open_loaders(
        data, training=TrainingConfig(batch_size=1), tokenizer=gate, seed=0, read_ahead=read_ahead
    ).train


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "forge-data"]


def test_an_error_in_the_background_is_raised_after_what_was_made_before(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n{"text": "stop"}\n')
    gate = Gate()
    loader = open_gate(path, gate, read_ahead=8)
    assert [len(next(loader)), len(next(loader))] == [1, 1]
    state = loader.state_dict()
    for _ in range(2):  # asked again, it fails again
        with pytest.raises(OSError, match="file is gone"):
            next(loader)
    assert loader.state_dict() == state
    assert gate.threads == {"forge-data"}
    assert loader_threads() == []


def test_reading_ahead_is_bounded_and_close_ends_the_thread(tmp_path: Path) -> None:
    gate = Gate()
    loader = open_gate(write_texts(tmp_path / "a.jsonl", 50), gate, read_ahead=2)
    next(loader)
    for _ in range(4):  # the one given, two that are ready, one in the making
        assert gate.reached.acquire(timeout=600)
    assert not gate.reached.acquire(timeout=0.2)
    assert len(loader_threads()) == 1
    state = loader.state_dict()
    loader.close()
    assert loader_threads() == []
    assert loader.state_dict() == state
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_a_loader_that_is_dropped_ends_its_thread(tmp_path: Path) -> None:
    loader = open_gate(write_texts(tmp_path / "a.jsonl", 50), Gate(), read_ahead=2)
    next(loader)
    assert len(loader_threads()) == 1
    del loader
    assert loader_threads() == []


def test_asking_for_the_position_does_not_go_over_all_records_each_time() -> None:
    class Counted:
        name = "counted"
        asked = 0

        @property
        def digest(self) -> str:
            Counted.asked += 1
            return "d"

        def __len__(self) -> int:
            return 5

        def read(self, index: int) -> Record:
            raise NotImplementedError

    layouts = [Layout("text", {})]
    corpus = IndexedCorpus([Counted()], layouts=layouts, weights=[1.0], seed=0, shuffle=True)
    first = corpus.identity()
    first["sources"][0]["name"] = "changed by whoever got it"
    assert corpus.identity()["sources"][0]["name"] == "counted"
    assert Counted.asked == 1
