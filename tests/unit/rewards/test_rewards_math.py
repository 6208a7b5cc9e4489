"""The rewards `math` and `answer_in_tags`."""

from __future__ import annotations

import threading

import pytest

from forge.errors import DataError
from forge.rewards import answer_in_tags, math
from forge.rewards.numbers import plain_numbers
from scored_texts import asked, said


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("\\frac{1}{2}", "The answer is $0.5$.", 1),
        ("1/2", "\\boxed{\\frac{2}{4}}", 1),
        ("2", "12", 0),
        ("2", "The answer is 12", 0),
        ("18 dollars", "So \\boxed{18}", 1),
        ("18", "\\boxed{17} or rather \\boxed{18}", 1),
        ("17", "\\boxed{17} or rather \\boxed{18}", 0),
        ("17\n#### 18", "#### 18", 1),
        ("x^2+1", "\\boxed{1+x^2}", 1),
        ("(x+1)^2", "\\boxed{x^2+2x+1}", 1),
        ("x^2+1", "\\boxed{x^2-1}", 0),
        ("\\{1,2\\}", "$\\{2,1\\}$", 1),
        ("[0,1)", "$[0,1]$", 0),
        ("2\\sqrt{3}", "$\\sqrt{12}$", 1),
        ("50%", "$0.5$", 1),
        ("18", "\\boxed{18", 0),
        ("18", "", 0),
        ("18", "<think>18", 0),
        ("18", "<think>17</think> \\boxed{18}", 1),
        ("0", "\\boxed{1 000 000}", 0),
        ("0", "It is 1\u202f000\u202f000", 0),
        ("0", "It is 1, 000", 0),
        ("0", "\\boxed{1 000 00}", 0),
        ("1000000", "\\boxed{1 000 000}", 1),
        ("1000000", "It is 1\u202f000\u202f000", 1),
        ("1 000 000", "\\boxed{1000000}", 1),
        ("250", "It is 1'250.", 0),
        ("7", "The answer is minus 7", 0),
        ("-7", "The answer is minus 7", 1),
        ("-7", "\\boxed{negative 7}", 1),
        ("7", "It is 10 minus 7", 0),
        ("3", "\\boxed{10 minus 7}", 1),
        ("3", "\\boxed{\\frac{{6}}{{2}}}", 1),
    ],
)
def test_what_is_the_same_is_right(answer: str, text: str, score: int) -> None:
    assert math(asked(answer), said(text)) == score


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("1 000 000", "1000000"),
        ("x = 1\u202f234,5", "x = 1234,5"),
        ("3 4 5", "3 4 5"),
        ("1 000 2 000", "1000 2000"),
        ("1.05 and 1, 05", "1.05 and 105"),
        ("x_1 000", "x_1000"),
        ("is minus 7, or plus or minus 8", "is -7, or \\pm 8"),
        ("a minus b", "a minus b"),
        ("minus minus 7", "minus -7"),
    ],
)
def test_numbers_in_plain_form(text: str, plain: str) -> None:
    assert plain_numbers(text) == plain


def test_options() -> None:
    assert math(asked("1/3"), said("$0.3333$"), digits=3) == 1
    assert math(asked("1/3"), said("$0.3333$")) == 0
    assert math(asked("x+1"), said("$y+1$"), strict=False) == 1
    assert math(asked("x+1"), said("$y+1$")) == 0
    assert math(asked("18"), said("17 <answer>18</answer>"), within="answer") == 1
    assert math(asked("17"), said("17 <answer>18</answer>"), within="answer") == 0
    assert math(asked("17"), said("17"), within="answer") == 0


def test_it_runs_in_a_thread() -> None:
    """math-verify by itself sets an alarm, which only the main thread may."""
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(math(asked("3/4"), said("$0.75$"))))
    thread.start()
    thread.join()
    assert scores == [1.0]


@pytest.mark.parametrize("answer", [None, "", "$"])
def test_an_answer_that_is_no_mathematics_is_named(answer: str | None) -> None:
    with pytest.raises(DataError) as caught:
        math(asked(answer), said("18"))
    assert caught.value.path == "task:7"
    assert caught.value.value == answer
    assert caught.value.rule
    assert caught.value.repair


@pytest.mark.parametrize(
    ("text", "args", "score"),
    [
        ("<answer>18</answer>", {}, 1),
        ("so <answer> 18 dollars </answer> or 19", {}, 1),
        ("18", {"form_credit": 0.1}, 0),
        ("<answer></answer>", {"form_credit": 0.1}, 0),
        ("<answer>17</answer>", {"form_credit": 0.1}, 0.1),
        ("<answer>17</answer>", {}, 0),
        ("<answer>17</answer><answer>18</answer>", {}, 1),
        ("<answer>1<answer>18</answer>", {}, 1),
        ("</answer>18<answer>", {"form_credit": 0.1}, 0),
        ("<answer>18", {"form_credit": 0.1}, 0),
        ("<result>18</result>", {"tag": "result"}, 1),
        ("<answer>36/2</answer>", {"match": "math"}, 1),
        ("<answer>18</answer>", {"match": "exact"}, 1),
        ("<answer>18.0</answer>", {"match": "exact"}, 0),
    ],
)
def test_an_answer_in_tags(text: str, args: dict[str, object], score: float) -> None:
    assert answer_in_tags(asked("18"), said(text), **args) == score
