"""The rewards that compare texts: `exact`, `fuzzy`, `contains`, `regex`."""

from __future__ import annotations

import difflib
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.errors import DataError
from forge.rewards import contains, exact, fuzzy, regex
from forge.rewards.matching import likeness
from forge.types import Completion, Task, Turn
from scored_texts import asked, said


@pytest.mark.parametrize(
    ("answer", "text", "args", "score"),
    [
        ("Paris", "Paris", {}, 1),
        ("Paris", "  Paris\n", {}, 1),
        ("New York", "New \n York", {}, 1),
        ("Paris", "Paris ", {"ignore": []}, 0),
        ("Paris", "paris", {}, 0),
        ("Paris", "PARIS", {"ignore": ["case"]}, 1),
        ("Straße", "STRASSE", {"ignore": ["case"]}, 1),
        ("Paris", "Paris.", {}, 0),
        ("Paris", "«Paris».", {"ignore": ["punctuation"]}, 1),
        ("cafe", "café", {}, 0),
        ("cafe", "café", {"ignore": ["accents"]}, 1),
        ("caf\u00e9", "cafe\u0301", {}, 1),
        ("the cat", "cat", {"ignore": ["articles"]}, 1),
        ("cat", "theatre cat", {"ignore": ["articles"]}, 0),
        ("2", "12", {}, 0),
        ("Paris", "Well.\nParis\n\n", {"take": "last_line"}, 1),
        ("Paris", "", {"take": "last_line"}, 0),
        ("x+1", "so \\boxed{x+1}.", {"take": "boxed"}, 1),
        ("{1}", "so \\boxed{{1}}", {"take": "boxed"}, 1),
        ("Paris", "Paris", {"take": "boxed"}, 0),
        ("Paris", "Well\n#### Paris\nyes", {"take": "marker"}, 1),
        ("Paris", "no <answer>Paris</answer>", {"within": "answer"}, 1),
        ("Paris", "<answer>Rome</answer> <answer>Paris</answer>", {"within": "answer"}, 1),
        ("Paris", "<answer>Paris</answer> <answer>Rome</answer>", {"within": "answer"}, 0),
        ("Paris", "Paris", {"within": "answer"}, 0),
        ("Paris", "<think>hm</think>Paris", {}, 1),
    ],
)
def test_exact(answer: str, text: str, args: dict[str, object], score: int) -> None:
    assert exact(asked(answer), said(text), **args) == score


def test_fuzzy() -> None:
    assert fuzzy(asked("kitten"), said("Kitten")) == 1
    assert fuzzy(asked("abcd"), said("abxd")) == 2 * 3 / 8
    assert fuzzy(asked("abcd"), said("abxd"), threshold=0.8) == 0
    assert fuzzy(asked("abcd"), said("abxd"), threshold=0.75) == 0.75
    assert fuzzy(asked("abcd"), said("wxyz")) == 0
    assert fuzzy(asked("abcd"), said("")) == 0
    assert fuzzy(asked("abcd"), said("abcd"), within="answer") == 0
    assert fuzzy(asked("abcd"), said("x <answer>abcd</answer>"), within="answer") == 1


def common(one: str, other: str) -> int:
    """The longest common subsequence, as the definition says it."""

    @cache
    def at(i: int, j: int) -> int:
        if i == len(one) or j == len(other):
            return 0
        if one[i] == other[j]:
            return 1 + at(i + 1, j + 1)
        return max(at(i + 1, j), at(i, j + 1))

    return at(0, 0)


@settings(max_examples=100, deadline=None)
@given(st.text("abc", max_size=12), st.text("abcd", max_size=12))
def test_likeness_is_what_it_is_said_to_be(one: str, other: str) -> None:
    total = len(one) + len(other)
    assert likeness(one, other) == (2 * common(one, other) / total if total else 1.0)
    assert likeness(one, other) == likeness(other, one)
    assert likeness(one, other) >= difflib.SequenceMatcher(None, one, other, autojunk=False).ratio() - 1e-12


def test_likeness_of_huge_texts() -> None:
    assert likeness("ab" * 10_000, "ba" * 10_000) == 2 * 19_999 / 40_000
    assert 0 < fuzzy(asked("ab" * 500_000), said("ba" * 500_000)) < 0.1


@pytest.mark.parametrize(
    ("answer", "text", "args", "score"),
    [
        ("2", "12", {}, 0),
        ("2", "21", {}, 0),
        ("2", "It is 2.", {}, 1),
        ("2", "It is 2, he said", {}, 1),
        ("2", "2.5", {}, 0),
        ("2", "1.2", {}, 0),
        ("2", "0,2", {}, 0),
        ("2", "2,000", {}, 0),
        ("2", "-2", {}, 0),
        ("2", "−2", {}, 0),
        ("2", "1/2", {}, 0),
        ("2", "2/3", {}, 0),
        ("2", "2%", {}, 0),
        ("2", "x2", {}, 0),
        ("2", "minus 2", {}, 0),
        ("2", "It is negative 2.", {}, 0),
        ("250", "1\u202f250", {}, 0),
        ("250", "1'250", {}, 0),
        ("1", "1\u00a0250", {}, 0),
        ("250", "100 250", {}, 1),
        ("2", "either(2)or", {}, 1),
        ("2", "a,2", {}, 1),
        ("cat", "concatenate", {}, 0),
        ("cat", "The Cat.", {}, 1),
        ("Cat", "the cat", {"ignore_case": False}, 0),
        ("New York", "in New\n  York.", {}, 1),
        ("C++", "I like C++.", {}, 1),
        ("a.c", "abc", {}, 0),
        ("北京", "答案是北京。", {}, 1),
        ("caf\u00e9", "a cafe\u0301.", {}, 1),
        ("Paris", "<think>Paris</think>Rome", {}, 0),
        ("Paris", "Paris <answer>Rome</answer>", {"within": "answer"}, 0),
        (None, "red and blue", {"phrases": ["red", "blue"]}, 1),
        (None, "red", {"phrases": ["red", "blue"]}, 0),
        (None, "red", {"phrases": ["red", "blue"], "need": "any"}, 1),
        (None, "red", {"phrases": ["red", "blue"], "need": "fraction"}, 0.5),
        (None, "x", {"phrases": [" "]}, 0),
    ],
)
def test_contains_whole_words(answer: str | None, text: str, args: dict[str, object], score: float) -> None:
    assert contains(asked(answer), said(text), **args) == score


@pytest.mark.parametrize(
    ("text", "args", "score"),
    [
        ("answer: 18", {"pattern": r"answer: \d+"}, 1),
        ("answer: x", {"pattern": r"answer: \d+"}, 0),
        ("so answer: 18", {"pattern": r"answer: \d+", "whole": True}, 0),
        ("answer: 18", {"pattern": r"answer: \d+", "whole": True}, 1),
        ("17, 18", {"pattern": r"\d+", "group": 0}, 1),
        ("18, 17", {"pattern": r"\d+", "group": 0}, 0),
        ("answer: 18", {"pattern": r"answer:(?P<value>.*)", "group": "value"}, 1),
        ("answer: 180", {"pattern": r"answer:(?P<value>.*)", "group": "value"}, 0),
        ("b", {"pattern": "(a)|b", "group": 1}, 0),
        ("none", {"pattern": r"\d+", "group": 0}, 0),
        ("<think>18", {"pattern": "18"}, 1),
        ("18 <answer>17</answer>", {"pattern": "18", "within": "answer"}, 0),
        ("18", {"pattern": "18", "within": "answer"}, 0),
    ],
)
def test_regex(text: str, args: dict[str, object], score: int) -> None:
    assert regex(asked("18"), said(text), **args) == score


@pytest.mark.parametrize("reward", [exact, fuzzy, contains])
def test_a_missing_answer_is_named(reward: object) -> None:
    with pytest.raises(DataError) as caught:
        reward(asked(None), said("x"))  # type: ignore[operator]
    assert reward.__name__ in caught.value.message  # type: ignore[attr-defined]
    assert (caught.value.path, caught.value.value) == ("task:7", None)
    assert caught.value.rule == "the prompt must have an answer"
    assert caught.value.repair


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40), st.text(min_size=1, max_size=10))
def test_no_text_breaks_them(text: str, answer: str) -> None:
    if not answer.strip():
        return
    every = ("case", "space", "punctuation", "accents", "articles")
    for take in ("all", "boxed", "marker", "last_line"):
        assert exact(asked(answer), said(text), take=take, ignore=every) in (0.0, 1.0)
        assert 0.0 <= fuzzy(asked(answer), said(text), take=take, ignore=every) <= 1.0
    assert contains(asked(answer), said(text)) in (0.0, 1.0)
    assert contains(asked(answer), said(f"so: {answer} .")) == 1.0 or not answer[0].isalnum() or "%" in answer


def test_a_turn_of_an_episode_is_scored_like_a_completion() -> None:
    task, completion = Task("t", answer="4"), Completion((), (5,), (0.0,), None, " 4 ", "stop")
    assert exact(task, Turn.of(completion)) == exact(task, completion) == 1.0
