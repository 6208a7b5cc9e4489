"""Batches: their size, their order over epochs and sources, their counts, and validation beside them."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from byte_tokenizer import ByteTokenizer, content, names, open_train, write_lines, write_texts
from forge.config import DataConfig, SourceConfig, TrainingConfig, ValidationConfig
from forge.data import Loaders, open_loaders
from forge.data.loader import count_batches
from forge.data.opening import open_indexed_corpus
from forge.data.samples import Encoder
from forge.errors import ConfigError, DataError


def test_without_packing_a_row_is_a_sample_and_an_epoch_ends_with_its_last_batch(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", 10)
    loader = open_train(
        {"sources": [{"path": str(path)}], "packing": False, "shuffle": False},
        batch_size=2,
        gradient_accumulation_steps=2,
        num_epochs=2,
    )
    seen = [(loader.epoch, loader.batch_in_epoch, len(batch)) for batch in loader]
    assert seen == [(0, 1, 4), (0, 2, 4), (0, 3, 2), (1, 1, 4), (1, 2, 4), (1, 3, 2)]
    assert next(loader, None) is None
    assert loader.counters.samples == loader.counters.rows == 20
    loader.rewind()
    assert names(next(loader)) == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3", "a.jsonl:4"]
    assert loader.counters.samples == 4


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_has_every_sample_as_often_as_its_weight_says(tmp_path: Path, packing: bool) -> None:
    write_texts(tmp_path / "a.jsonl", 10)
    write_texts(tmp_path / "b.jsonl", 6)
    write_texts(tmp_path / "c.jsonl", 4)
    sources = [
        {"path": str(tmp_path / name), "weight": weight}
        for name, weight in (("a.jsonl", 0.5), ("b.jsonl", 1), ("c.jsonl", 2))
    ]
    loader = open_train({"sources": sources, "packing": packing}, batch_size=2, num_epochs=2, max_seq_len=40)
    epochs: list[Counter[str]] = [Counter(), Counter()]
    for batch in loader:
        epochs[loader.epoch].update(names(batch))
    for epoch in epochs:
        assert {epoch[f"b.jsonl:{line}"] for line in range(1, 7)} == {1}
        assert {epoch[f"c.jsonl:{line}"] for line in range(1, 5)} == {2}
        assert sum(epoch[f"a.jsonl:{line}"] for line in range(1, 11)) == 5
    assert {epochs[0][f"a.jsonl:{line}"] + epochs[1][f"a.jsonl:{line}"] for line in range(1, 11)} == {1}


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", 30)

    def run(seed: int) -> list[Any]:
        return [content(batch) for batch in open_train({"sources": [{"path": str(path)}]}, seed=seed, batch_size=3)]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_streams_are_mixed_in_proportion_and_read_to_their_ends(tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", 12)
    write_texts(tmp_path / "b.jsonl", 3)
    sources = [{"path": str(tmp_path / "a.jsonl"), "weight": 2}, {"path": str(tmp_path / "b.jsonl")}]
    common = {"sources": sources, "streaming": True, "packing": False}
    ordered = [names(batch)[0] for batch in open_train({**common, "shuffle": False}, batch_size=1)]
    assert ordered[:6] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1", "a.jsonl:3", "a.jsonl:4", "b.jsonl:2"]
    mixed = [
        [
            name
            for batch in open_train({**common, "shuffle_buffer": 4}, seed=seed, batch_size=1)
            for name in names(batch)
        ]
        for seed in (0, 0, 1)
    ]
    assert mixed[0] == mixed[1] != mixed[2]
    assert sorted(mixed[0]) == sorted(ordered)
    assert mixed[0] != ordered
    assert all(int(name.partition(":")[2]) <= place + 4 for place, name in enumerate(mixed[0]))


def test_epochs_of_a_stream_differ_only_when_shuffled(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", 20)
    data = {"sources": [{"path": str(path)}], "streaming": True, "packing": False, "shuffle_buffer": 8}
    epochs = [names(batch) for batch in open_train(data, batch_size=20, num_epochs=2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])


def test_a_buffer_leaves_hardly_any_neighbours(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", 200)
    data = {"sources": [{"path": str(path)}], "streaming": True, "packing": False, "shuffle_buffer": 50}
    (batch,) = open_train(data, batch_size=200)
    lines = [int(name.partition(":")[2]) for name in names(batch)]
    assert sum(abs(here - there) == 1 for here, there in pairwise(lines)) < 10


def test_packing_fills_rows_and_says_how_well(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", 200)
    loader = open_train({"sources": [{"path": str(path)}], "pack_lookahead": 32}, batch_size=4, max_seq_len=64)
    seen: list[str] = []
    for batch in loader:
        assert batch.num_tokens <= 4 * 64
        seen += names(batch)
    assert sorted(seen) == sorted(f"a.jsonl:{line}" for line in range(1, 201))
    assert loader.fill_rate > 0.95
    assert loader.counters.rows < 80


@pytest.mark.parametrize("packing", [True, False])
def test_the_count_of_batches_is_exact_with_dropped_samples_and_weights(tmp_path: Path, packing: bool) -> None:
    write_texts(tmp_path / "a.jsonl", 50)
    write_texts(tmp_path / "b.jsonl", 21, prefix="other ")
    sources = [{"path": str(tmp_path / "a.jsonl"), "weight": 0.5}, {"path": str(tmp_path / "b.jsonl")}]
    data = {"sources": sources, "packing": packing, "pack_lookahead": 8}
    loader = open_train(data, batch_size=3, num_epochs=3, max_seq_len=20)
    counted = loader.count_batches()
    assert counted is not None
    assert counted.exact
    assert loader.counters.oversize == 0  # counting leaves no trace
    found = Counter(loader.epoch for _ in loader)
    assert counted.per_epoch == tuple(found[epoch] for epoch in range(3))
    assert counted.total == sum(found.values())
    assert loader.counters.oversize > 0


def test_of_many_samples_the_count_is_an_estimate_and_a_stream_has_none(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", 600)
    data = DataConfig(sources=(SourceConfig(path=str(path)),), pack_lookahead=16)
    training = TrainingConfig(batch_size=2, max_seq_len=64)
    corpus = open_indexed_corpus(data.sources, data=data, seed=0)
    tokenizer = ByteTokenizer()
    encoder = Encoder(tokenizer, data=data, max_seq_len=64)
    guess = count_batches(corpus, encoder, data=data, training=training, exact_up_to=200)
    assert tokenizer.num_calls == 200
    truth = count_batches(corpus, encoder, data=data, training=training)
    assert truth.exact
    assert not guess.exact
    assert abs(guess.total - truth.total) <= 0.1 * truth.total
    assert open_train({"sources": [{"path": str(path)}], "streaming": True}).count_batches() is None


@pytest.mark.parametrize("streaming", [True, False])
def test_auto_says_which_format_it_chose(tmp_path: Path, streaming: bool, caplog: pytest.LogCaptureFixture) -> None:
    write_texts(tmp_path / "a.jsonl", 2)
    write_lines(tmp_path / "b.jsonl", [{"prompt": "Q", "response": "A"}])
    sources = [{"path": str(tmp_path / "a.jsonl")}, {"path": str(tmp_path / "b.jsonl")}]
    with caplog.at_level(logging.INFO, logger="forge.data"):
        loader = open_train({"sources": sources, "streaming": streaming})
    assert loader.formats == ("text", "prompt_response")
    assert "b.jsonl: the format is prompt_response" in caplog.text


@pytest.mark.parametrize("streaming", [True, False])
def test_bad_records_are_named_or_counted(tmp_path: Path, streaming: bool) -> None:
    path = write_texts(tmp_path / "a.jsonl", 5)
    path.write_text("{broken\n" + path.read_text() + '{"text": 3}\n')
    data = {"sources": [{"path": str(path)}], "streaming": streaming, "packing": False}
    with pytest.raises(DataError) as caught:
        open_train(data)
    assert caught.value.path == f"{path}:1"
    named = {**data, "sources": [{"path": str(path), "format": "text"}], "shuffle": False}
    with pytest.raises(DataError) as caught:
        next(open_train(named))
    assert caught.value.path == f"{path}:1"
    loader = open_train({**data, "on_bad_record": "skip"})
    assert sorted(name for batch in loader for name in names(batch)) == [f"a.jsonl:{line}" for line in range(2, 7)]
    assert loader.counters.bad == loader.counters.dropped == 2


def test_an_epoch_without_a_sample_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", 5, prefix="long enough to be dropped")
    loader = open_train({"sources": [{"path": str(path)}]}, max_seq_len=4, num_epochs=3)
    with pytest.raises(DataError, match="no sample to train on") as caught:
        next(loader)
    assert caught.value.value["oversize"] == 5


def test_an_empty_stream_and_no_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no records"):
        open_train({"sources": [{"path": str(tmp_path / "a.jsonl")}], "streaming": True})
    with pytest.raises(ConfigError) as caught:
        open_train({})
    assert caught.value.path == "data.sources"


def open_both(data: dict[str, Any], validation: dict[str, Any], *, seed: int = 0) -> Loaders:
    return open_loaders(
        DataConfig.model_validate(data),
        training=TrainingConfig(batch_size=4, num_epochs=2),
        tokenizer=ByteTokenizer(),
        seed=seed,
        validation=ValidationConfig.model_validate(validation),
        read_ahead=0,
    )


def test_what_is_held_out_is_never_trained_on(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", 40)
    data = {"sources": [{"path": str(path), "weight": 2}]}
    runs = []
    for _ in range(2):
        with open_both(data, {"fraction": 0.25}) as loaders:
            assert loaders.validation is not None
            held = [name for batch in loaders.validation for name in names(batch)]
            loaders.validation.rewind()
            assert [name for batch in loaders.validation for name in names(batch)] == held
            trained = {name for batch in loaders.train for name in names(batch)}
        assert len(held) == len(set(held)) == 10
        assert not trained & set(held)
        assert len(trained) == 30
        runs.append(held)
    assert runs[0] == runs[1]
    with open_both(data, {"fraction": 0.25}, seed=1) as loaders:
        assert loaders.validation is not None
        assert [name for batch in loaders.validation for name in names(batch)] != runs[0]


def test_validation_may_have_sources_of_its_own_and_a_limit(tmp_path: Path) -> None:
    train = write_texts(tmp_path / "a.jsonl", 10)
    write_texts(tmp_path / "v.jsonl", 9)
    write_texts(tmp_path / "w.jsonl", 9)
    own = {"sources": [{"path": str(tmp_path / "v.jsonl")}, {"path": str(tmp_path / "w.jsonl")}]}
    for streaming in (False, True):
        data = {"sources": [{"path": str(train)}], "streaming": streaming}
        with open_both(data, {**own, "max_samples": 7}) as loaders:
            assert loaders.validation is not None
            held = [name for batch in loaders.validation for name in names(batch)]
            assert len(set(held)) == 7
            assert {name[0] for name in held} == {"v", "w"}
        with open_both(data, own) as loaders:
            assert loaders.validation is not None
            assert sum(len(batch) for batch in loaders.validation) == 18
        with open_both(data, {}) as loaders:
            assert loaders.validation is None


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", 1)
    with pytest.raises(DataError, match="nothing to hold out") as caught:
        open_both({"sources": [{"path": str(path)}]}, {"fraction": 0.5})
    assert caught.value.path == "validation.fraction"
    with pytest.raises(ConfigError, match="stream cannot be split"):
        open_both({"sources": [{"path": str(path)}], "streaming": True}, {"fraction": 0.5})
