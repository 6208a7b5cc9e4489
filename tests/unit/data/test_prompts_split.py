"""Books and orders: what is held out, what a digest tells, saving a dataset, and going through it epoch by epoch."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import EvaluationConfig, PromptsConfig, PromptSourceConfig
from forge.data.prompts import PromptDataset, PromptOrder, PromptSplit, open_prompts, save_prompts
from forge.errors import ConfigError, DataError
from forge.types import Task


def written(path: Path, questions: Sequence[str], **more: Any) -> PromptSourceConfig:
    path.write_text("".join(json.dumps({"prompt": text, "answer": "1", **more}) + "\n" for text in questions))
    return PromptSourceConfig(path=str(path))


def opened(
    *sources: PromptSourceConfig, evaluation: dict[str, Any] | None = None, seed: int = 0, **prompts: Any
) -> PromptSplit:
    config = PromptsConfig(sources=sources, chat=prompts.pop("chat", False), **prompts)
    return open_prompts(config, evaluation=EvaluationConfig(**(evaluation or {})), seed=seed)


def texts(dataset: PromptDataset | None) -> list[str]:
    assert dataset is not None
    return [str(dataset.read(index).text) for index in range(len(dataset))]


def test_without_evaluation_nothing_is_held_out(tmp_path: Path) -> None:
    sets = opened(written(tmp_path / "a.jsonl", ["a", "b"]), written(tmp_path / "b.jsonl", ["c"]))
    assert texts(sets.train) == ["a", "b", "c"]
    assert sets.heldout is None


def test_tasks_of_episodes_that_hide_something_else_are_different_ones(tmp_path: Path) -> None:
    asks = [{"prompt": "Guess.", "answer": str(number), "secret": number} for number in (1, 2, 3, 4, 4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asks))
    config = PromptsConfig(sources=(PromptSourceConfig(path=str(tmp_path / "a.jsonl")),), chat=False)
    evaluation = EvaluationConfig(fraction=0.5)
    with pytest.raises(ConfigError, match="different"):
        open_prompts(config, evaluation=evaluation, seed=0)
    sets = open_prompts(config, evaluation=evaluation, seed=0, for_episodes=True)
    assert sets.heldout is not None
    held, trained = (
        [each.read(index).metadata["secret"] for index in range(len(each))] for each in (sets.heldout, sets.train)
    )
    assert len(held) == len(set(held)) == 2
    assert not set(held) & set(trained)
    assert set(held) | set(trained) == {1, 2, 3, 4}


@pytest.mark.parametrize(("fraction", "count"), [(0.001, 1), (0.1, 10), (0.25, 25), (0.999, 99)])
def test_a_fraction_is_held_out_and_the_rest_is_trained_on(fraction: float, count: int, tmp_path: Path) -> None:
    questions = [f"q{number}" for number in range(100)]
    sets = opened(written(tmp_path / "a.jsonl", questions), evaluation={"fraction": fraction})
    assert len(texts(sets.heldout)) == count
    assert sorted(texts(sets.train) + texts(sets.heldout)) == sorted(questions)


@settings(max_examples=40, deadline=None)
@given(numbers=st.lists(st.integers(0, 12), min_size=2, max_size=40), fraction=st.floats(0.01, 0.99))
def test_equal_questions_are_never_on_both_sides(
    numbers: list[int], fraction: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spaces = (" ", "  ", "\n", "\t ")
    questions = [f"ask{spaces[place % 4]}{number}" for place, number in enumerate(numbers)]
    source = written(tmp_path_factory.mktemp("split") / "a.jsonl", questions)
    if len(set(numbers)) < 2:
        with pytest.raises(ConfigError, match="cannot be split"):
            opened(source, evaluation={"fraction": fraction})
        return
    sets = opened(source, evaluation={"fraction": fraction})
    train, held = ([text.split()[1] for text in texts(dataset)] for dataset in (sets.train, sets.heldout))
    assert train
    assert held
    assert not set(train) & set(held)
    assert len(set(held)) == len(held), "each held-out question is there once"
    assert sorted(train) == sorted(str(number) for number in numbers if str(number) not in held), "none is lost"


def test_a_conversation_of_one_message_equals_its_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": "same"}, {"messages": [{"role": "user", "content": "same"}]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError) as caught:
        opened(PromptSourceConfig(path=str(path)), evaluation={"fraction": 0.5}, chat=True)
    assert (caught.value.path, caught.value.value) == ("evaluation.fraction", 0.5)
    assert "two different questions" in str(caught.value.rule)
    assert caught.value.repair


def test_what_is_held_out_depends_on_seed_and_content_and_not_on_order(tmp_path: Path) -> None:
    questions = [f"q{number}" for number in range(60)]
    half = {"fraction": 0.5}
    first = set(texts(opened(written(tmp_path / "a.jsonl", questions), evaluation=half).heldout))
    mixed = random.Random(0).sample(questions, 60)
    assert set(texts(opened(written(tmp_path / "b.jsonl", mixed), evaluation=half).heldout)) == first
    others = [
        frozenset(texts(opened(written(tmp_path / "a.jsonl", questions), evaluation=half, seed=seed).heldout))
        for seed in range(6)
    ]
    assert len(set(others)) == 6


def test_at_most_so_many_are_judged_by_and_the_others_stay_out_of_training(tmp_path: Path) -> None:
    source = written(tmp_path / "a.jsonl", [f"q{number}" for number in range(40)])
    whole = opened(source, evaluation={"fraction": 0.5})
    less = opened(source, evaluation={"fraction": 0.5, "max_prompts": 5})
    assert texts(less.train) == texts(whole.train)
    assert len(texts(less.heldout)) == 5
    assert set(texts(less.heldout)) < set(texts(whole.heldout))


def test_what_evaluation_asks_is_left_out_of_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = written(tmp_path / "a.jsonl", ["a", "b", "c", "a"])
    held = written(tmp_path / "b.jsonl", ["x", "a ", "x"])
    with caplog.at_level("INFO", logger="forge.data"):
        sets = opened(train, evaluation={"sources": [held], "fraction": 0.9})
    assert texts(sets.train) == ["b", "c"]
    assert texts(sets.heldout) == ["x", "a "]
    assert "2 prompts are used for evaluation" in caplog.text


def test_evaluation_on_all_that_is_trained_on_is_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "a.jsonl", ["a", "b"])
    with pytest.raises(ConfigError, match="also an evaluation prompt") as caught:
        opened(source, evaluation={"sources": [source]})
    assert caught.value.path == "evaluation.sources"
    assert "something must remain" in str(caught.value.rule)
    assert "evaluation.fraction" in str(caught.value.repair)


def test_no_problem_of_a_small_task_is_both_learnt_and_judged_by() -> None:
    task = PromptSourceConfig(task="arithmetic", num_prompts=60)
    sets = opened(task, evaluation={"sources": [{"task": "arithmetic", "num_prompts": 30}]})
    assert not set(texts(sets.train)) & set(texts(sets.heldout))
    assert len(texts(sets.heldout)) == 30
    assert 30 <= len(sets.train) < 60


def test_no_sources_is_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        opened()
    assert (caught.value.path, caught.value.value) == ("prompts.sources", ())
    assert "task: arithmetic" in str(caught.value.repair)


def test_an_error_of_an_evaluation_source_names_it() -> None:
    with pytest.raises(ConfigError) as caught:
        opened(PromptSourceConfig(task="countdown"), evaluation={"sources": [{"task": "own_parts:Doublings"}]})
    assert caught.value.path == "evaluation.sources[0].task"
    assert caught.value.repair == "did you mean `Doubling`?"


def test_the_digest_tells_whether_prompts_are_still_the_same(tmp_path: Path) -> None:
    def digest(path: Path, questions: Sequence[str], *, more: dict[str, Any] | None = None, **prompts: Any) -> str:
        return opened(written(path, questions, **(more or {})), **prompts).train.digest

    here, there = tmp_path / "a.jsonl", tmp_path / "there.jsonl"
    first = digest(here, ["a", "b"])
    assert digest(there, ["a", "b"]) == first, "files may move"
    others = [
        digest(here, ["b", "a"]),
        digest(here, ["a", "b", "c"]),
        digest(here, ["a", "b"], more={"answer": "2"}),
        digest(here, ["a", "b"], more={"tests": [1]}),
        digest(here, ["a", "b"], template="{prompt}!"),
        digest(here, ["a", "b"], chat=True),
        digest(here, ["a", "b"], chat=True, system_prompt="x"),
    ]
    assert len({first, *others}) == 1 + len(others)


SAVED = [
    {"task": "countdown", "task_args": {"level": 3}, "num_prompts": 20},
    {"task": "arithmetic", "num_prompts": 20},
]


@pytest.mark.parametrize("chat", [True, False])
def test_a_saved_book_reads_back_equal(chat: bool, tmp_path: Path) -> None:
    rows = [
        {"question": "ü \ud800 ☃ {prompt}?", "answer": "it is #### 1,000", "tests": {"in": [1.5, None]}},
        {"question": "other", "answer": "#### 2", "metadata": {"a": 1}},
        {"question": "third", "answer": "#### 3", "metadata": "words"},
    ]
    if chat:
        rows.append({"messages": [{"role": "user", "content": "hello"}], "answer": "#### 4"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [PromptSourceConfig(**source) for source in SAVED]
    around = {"chat": chat, "template": "Q: {prompt}"}
    dataset = opened(*sources, PromptSourceConfig(path=str(tmp_path / "rows.jsonl")), **around).train
    assert save_prompts(dataset, tmp_path / "frozen.jsonl") == len(dataset) == 40 + len(rows)
    again = opened(PromptSourceConfig(path=str(tmp_path / "frozen.jsonl")), **around).train
    assert [again.read(index) for index in range(len(again))] == [dataset.read(index) for index in range(len(dataset))]
    assert again.digest == dataset.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frozen.jsonl", "rows.jsonl"]


def test_a_book_is_saved_under_a_name_that_is_read_again(tmp_path: Path) -> None:
    dataset = opened(PromptSourceConfig(task="arithmetic")).train
    with pytest.raises(DataError) as caught:
        save_prompts(dataset, tmp_path / "frozen.txt")
    assert (caught.value.path, caught.value.value) == (str(tmp_path / "frozen.txt"), ".txt")
    assert ".jsonl" in str(caught.value.rule)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    source = written(tmp_path / "a.jsonl", ["a", "b"])
    dataset = opened(source).train
    (tmp_path / "frozen.jsonl").write_text("before")
    written(tmp_path / "a.jsonl", ["a", "c"])
    with pytest.raises(DataError, match="changed after the run started"):
        save_prompts(dataset, tmp_path / "frozen.jsonl")
    assert (tmp_path / "frozen.jsonl").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 2


class Letters:
    """A dataset of one-letter prompts."""

    def __init__(self, letters: str) -> None:
        self._letters = letters
        self.digest = letters

    def __len__(self) -> int:
        return len(self._letters)

    def read(self, index: int) -> Task:
        return Task(id=self._letters[index], text=self._letters[index])


def walk(order: PromptOrder, numbers: Sequence[int]) -> list[tuple[int, str]]:
    return [(epoch, prompt.id) for epoch, prompt in map(order.at, numbers)]


def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own() -> None:
    letters = "abcdefghijklm"
    seen = walk(PromptOrder(Letters(letters), seed=3), range(13 * 4))
    epochs = ["".join(letter for epoch, letter in seen if epoch == number) for number in range(4)]
    assert ["".join(sorted(epoch)) for epoch in epochs] == [letters] * 4
    assert len({*epochs, letters}) == 5
    assert [epoch for epoch, _ in seen] == [number // 13 for number in range(52)]


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 9), numbers=st.lists(st.integers(0, 60), min_size=1, max_size=30), seed=st.integers(0, 99))
def test_any_number_can_be_asked_for_at_any_time(count: int, numbers: list[int], seed: int) -> None:
    dataset = Letters("abcdefghi"[:count])
    straight = walk(PromptOrder(dataset, seed=seed), range(61))
    assert walk(PromptOrder(dataset, seed=seed), numbers) == [straight[number] for number in numbers]


def test_without_shuffling_the_order_is_the_books() -> None:
    order = PromptOrder(Letters("abc"), seed=0, shuffle=False)
    assert walk(order, range(7)) == [(0, "a"), (0, "b"), (0, "c"), (1, "a"), (1, "b"), (1, "c"), (2, "a")]
    assert len(order) == 3


def test_the_digest_of_an_order_covers_what_decides_it() -> None:
    digests = [
        PromptOrder(Letters("abc"), seed=0).digest,
        PromptOrder(Letters("abc"), seed=1).digest,
        PromptOrder(Letters("abd"), seed=0).digest,
        PromptOrder(Letters("abc"), seed=0, shuffle=False).digest,
    ]
    assert len(set(digests)) == 4
    assert PromptOrder(Letters("abc"), seed=0).digest == digests[0]
    assert PromptOrder(Letters("abc"), seed=1, shuffle=False).digest == digests[3]


def test_numbers_below_0_and_beyond_a_book_are_refused() -> None:
    dataset = opened(PromptSourceConfig(task="arithmetic")).train
    with pytest.raises(IndexError):
        PromptOrder(dataset, seed=0).at(-1)
    for index in (-1, 100):
        with pytest.raises(IndexError):
            dataset.read(index)
