"""The reward `countdown`: exact arithmetic on what is nothing but arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.errors import DataError
from forge.rewards.countdown import countdown, evaluate
from scored_texts import asked, said

TASK = asked("(3 + 5) * 2", numbers=[3, 5, 2], target=16)

RIGHT = [
    "(3 + 5) * 2", "(3+5)*2 = 16", "Answer: 2*(5+3)", "So the answer is (3 + 5) * 2 = 16.", "(3 + 5) × 2",
    "[3 + 5] * 2",
    "$(3 + 5) \\times 2$", "\\boxed{(3+5) \\cdot 2}", "**(3+5)*2**", "**Answer:** (3+5)*2", "- (3+5)*2",
    "wrong: 3*5\n\n(3+5)*2\n", "<think>3*5*2</think>(3+5)*2", "2*5+3*2" "\n3*2+5*2\n(5+3)*2", "\\( (3 + 5) * 2 \\)",
]  # fmt: skip
WRONG = [
    "", "16", "8*2", "3*5+2", "(3+5)*2*1", "(3+5)*2+3-3", "(3+5)*2 = 17", "(3+5)*2 = 16 = 16", "(3+5)*2 = x",
    "3+5*2", "(3+5)**2", "(3+5)*2 or 3*5", "3 numbers give (3+5)*2", "x(3+5)*2", "(3+5)*2; 1",
    "__import__('os')", "lambda: 16", "(3+5)*2 if 1 else 2",
    "(3+5)*True", "3 5 2", "(3+5)*2.0", "(3+5)*2e0", "3_5", "0x3+5*2", "(3+5)//2", "((3+5)*2", "5/(3-3)+2", "35-2*1",
    "(3+5)*2\nfoo", "(" * 5000 + "3", "1+" * 300 + "1", "-" * 5000, "９", "03+5*2", "16-0*(3+5+2)", "(3,5)*2", "3(5)2",
]  # fmt: skip


@pytest.mark.parametrize("text", RIGHT)
def test_right(text: str) -> None:
    assert countdown(TASK, said(text)) == 1


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:20])
def test_wrong(text: str) -> None:
    assert countdown(TASK, said(text)) == 0


def test_each_number_once_or_at_most_once() -> None:
    task = asked(numbers=[3, 3, 5], target=15)
    assert countdown(task, said("3*5")) == 0
    assert countdown(task, said("3*5"), use="at_most_once") == 1
    assert countdown(task, said("3*5*3/3"), use="at_most_once") == 0
    assert countdown(asked(numbers=[3, 3, 5], target=11), said("3+3+5")) == 1


def test_credit_for_the_form() -> None:
    assert countdown(TASK, said("3*5+2"), form_credit=0.1) == 0.1
    assert countdown(TASK, said("(3+5)*2"), form_credit=0.1) == 1
    assert countdown(TASK, said("3*5"), form_credit=0.1) == 0
    assert countdown(TASK, said("words"), form_credit=0.1) == 0


def test_only_the_operators_of_the_task() -> None:
    task = asked(numbers=[3, 5, 2], target=16, operators="+-")
    assert countdown(task, said("(3+5)*2")) == 0
    assert countdown(asked(numbers=[3, 5, 2], target=16, operators=["+", "*"]), said("(3+5)*2")) == 1
    assert countdown(asked(numbers=[3, 2], target=9, operators="+ - * /"), said("3**2")) == 0
    assert countdown(asked(numbers=[3, 5], target=2, operators="+*"), said("-3+5")) == 0
    assert countdown(asked(numbers=[3, 5], target=2, operators="+-"), said("-3+5")) == 1


def test_inside_a_tag() -> None:
    assert countdown(TASK, said("3*5 <answer>(3+5)*2</answer> done"), within="answer") == 1
    assert countdown(TASK, said("(3+5)*2"), within="answer") == 0


def test_thirds_are_exact() -> None:
    assert countdown(asked(numbers=[8, 3, 8, 3], target=24), said("8/(3-8/3)")) == 1
    assert evaluate("1/3")[0] == Fraction(1, 3)
    assert evaluate("\\frac{1}{3}+1")[0] == Fraction(4, 3)


@pytest.mark.parametrize(
    "metadata",
    [{}, {"numbers": [1]}, {"target": 1}, {"numbers": "12", "target": 3}, {"numbers": [1.5], "target": 3},
     {"numbers": [True], "target": 1}, {"numbers": [1], "target": "1"}, {"numbers": [1], "target": float("nan")}],
)  # fmt: skip
def test_a_prompt_without_the_task_is_named(metadata: dict[str, object]) -> None:
    with pytest.raises(DataError) as caught:
        countdown(asked("x", **metadata), said("1"))
    assert caught.value.path == "task:7"
    assert caught.value.rule
    assert caught.value.repair


trees = st.recursive(
    st.integers(0, 50).map(lambda number: (str(number), Fraction(number), [number])),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
        lambda made: (
            f"({made[0][0]} {made[1]} {made[2][0]})",
            {"+": made[0][1] + made[2][1], "-": made[0][1] - made[2][1], "*": made[0][1] * made[2][1]}[made[1]],
            made[0][2] + made[2][2],
        )
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(trees)
def test_every_expression_is_computed(made: tuple[str, Fraction, list[int]]) -> None:
    text, value, numbers = made
    assert evaluate(text) == (value, numbers)
    task = asked(numbers=numbers[::-1], target=int(value))
    assert countdown(task, said(f"{text} = {value}")) == 1
    assert countdown(task, said(f"{text} = {value + 1}")) == 0
    assert countdown(asked(numbers=[*numbers, 51], target=int(value)), said(text)) == 0


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="0123456789+-*/()=. \n{}\\fracboxed:×÷[]$", max_size=60))
def test_no_text_breaks_it(text: str) -> None:
    assert countdown(TASK, said(text), form_credit=0.5) in (0.0, 0.5, 1.0)
