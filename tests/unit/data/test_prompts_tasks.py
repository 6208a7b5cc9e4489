"""Built-in tasks: right answers, each problem by its number alone, and no problem twice."""

from __future__ import annotations

import ast
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import EvaluationConfig, GRPOConfig, InvalidConfig, PromptsConfig, PromptSourceConfig, load
from forge.data.prompts import PromptDataset, open_prompts
from forge.data.tasks import open_task, permuted
from forge.data.tasks.arithmetic import place_in_turns
from forge.errors import ConfigError
from forge.types import Task

OPERATIONS = {
    ast.Add: Fraction.__add__,
    ast.Sub: Fraction.__sub__,
    ast.Mult: Fraction.__mul__,
    ast.Div: Fraction.__truediv__,
}


def value_of(text: str) -> tuple[Fraction, list[int]]:
    """The value of an expression and the numbers in it, by Python's own grammar."""
    numbers: list[int] = []

    def visit(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](visit(node.left), visit(node.right))
        assert isinstance(node, ast.Constant)
        numbers.append(node.value)
        return Fraction(node.value)

    return visit(ast.parse(text, mode="eval").body), numbers


def make(name: str, count: int, *, seed: int = 0, **args: Any) -> list[Task]:
    task = open_task(name, args=args, seed=seed, where="prompts.sources[0]", size=count)
    return [task.read(index) for index in range(count)]


def dataset_of(task: str, *, num_prompts: int | None = None, run_seed: int = 0, **source: Any) -> PromptDataset:
    config = PromptsConfig(sources=(PromptSourceConfig(task=task, num_prompts=num_prompts, **source),))
    return open_prompts(config, evaluation=EvaluationConfig(), seed=run_seed).train


@pytest.mark.parametrize("level", range(1, 6))
def test_arithmetic_has_the_right_answers(level: int) -> None:
    prompts = make("arithmetic", 60, level=level)
    for prompt in prompts:
        expression = prompt.metadata["expression"]
        assert prompt.text == f"What is {expression}?"
        assert prompt.answer == str(value_of(expression)[0])
    terms, high, signs = {1: ({2}, 9, "+"), 2: ({2}, 99, "+-"), 3: ({2, 3}, 99, "+-")}.get(
        level, ({2, 3, 4}, 99, "+-*") if level == 4 else ({3, 4, 5}, 999, "+-*")
    )
    numbers = [number for prompt in prompts for number in value_of(prompt.metadata["expression"])[1]]
    assert {prompt.metadata["num_terms"] for prompt in prompts} == terms
    assert 0 <= min(numbers) < high * 0.1
    assert high * 0.9 < max(numbers) <= high
    assert {sign for sign in "+-*" if any(f" {sign} " in str(prompt.text) for prompt in prompts)} == set(signs)


def test_arithmetic_goes_through_all_its_problems_once() -> None:
    args = {"num_terms": [2, 3], "operands": [0, 3], "operators": "+-"}
    prompts = make("arithmetic", 4**2 * 2 + 4**3 * 4, **args)
    assert len({prompt.text for prompt in prompts}) == len(prompts) == 288
    lengths = [prompt.metadata["num_terms"] for prompt in prompts]
    assert lengths[:64] == [2, 3] * 32
    assert lengths[64:] == [3] * 224
    with pytest.raises(IndexError):
        make("arithmetic", 289, **args)


def test_the_words_of_a_question_are_the_users() -> None:
    (prompt,) = make("arithmetic", 1, question="{expression} =", operands=[7, 7])
    assert (prompt.text, prompt.answer) == ("7 + 7 =", "14")
    (prompt,) = make("countdown", 1, question="{numbers} to {target}")
    assert prompt.text == f"{', '.join(map(str, prompt.metadata['numbers']))} to {prompt.metadata['target']}"


@pytest.mark.parametrize("level", range(1, 6))
def test_countdown_can_always_be_solved(level: int) -> None:
    count, high, low_target, high_target = {
        1: (3, 20, 1, 50),
        2: (3, 20, 1, 100),
        3: (4, 25, 10, 100),
        4: (5, 50, 10, 500),
        5: (6, 100, 100, 999),
    }[level]
    for prompt in make("countdown", 80, level=level):
        numbers, target = prompt.metadata["numbers"], prompt.metadata["target"]
        value, used = value_of(str(prompt.answer))
        assert value == target
        assert sorted(used) == numbers
        assert len(numbers) == count
        assert 1 <= min(numbers) <= max(numbers) <= high
        assert low_target <= target <= high_target
        assert target not in numbers
        assert str(target) in str(prompt.text)


def test_countdown_uses_the_operators_that_it_may() -> None:
    answers = "".join(str(prompt.answer) for prompt in make("countdown", 60, level=3))
    assert set("+-*/()") <= set(answers)
    answers = "".join(str(prompt.answer) for prompt in make("countdown", 60, level=3, operators=["*", "+"]))
    assert set("+*(") <= set(answers)
    assert not set("-/") & set(answers)


@pytest.mark.parametrize("name", ["arithmetic", "countdown"])
def test_a_problem_is_made_by_seed_and_number_alone(name: str) -> None:
    first = make(name, 30, level=3)
    task = open_task(name, args={"level": 3}, seed=0, where="", size=1)
    assert [task.read(index) for index in reversed(range(30))] == first[::-1]
    other = make(name, 30, level=3, seed=1)
    assert len({prompt.text for prompt in first} & {prompt.text for prompt in other}) < 5


ARITHMETIC = ["What is 1 + 42?", "What is 33 - 91 * 94?", "What is 67 - 4 - 78 - 68?"]
COUNTDOWN = ["(13 - 7) * (9 - (30 - 27))", "(44 - 14) * (33 - 30) - 36", "50 - (13 - 8 + 3) + 15"]


def test_problems_are_the_same_on_every_machine() -> None:
    assert [prompt.text for prompt in make("arithmetic", 3, seed=7, level=4)] == ARITHMETIC
    assert [prompt.answer for prompt in make("countdown", 3, seed=7, level=4)] == COUNTDOWN


def test_ids_tell_tasks_arguments_seeds_and_numbers_apart() -> None:
    assert make("arithmetic", 2, seed=3)[1].id == "arithmetic:3:1"
    assert make("countdown", 1, seed=3, level=2, numbers=[1, 30])[0].id == "countdown(level=2,numbers=[1,30]):3:0"
    long = make("arithmetic", 1, question="Please compute {expression} for me, and be very careful.")[0].id
    assert long != make("arithmetic", 1, question="Please compute {expression} for me, and be quite careful.")[0].id
    assert len(long) < 40


def test_a_dataset_of_a_task_has_as_many_different_problems_as_were_asked_for() -> None:
    for task in ("arithmetic", "countdown"):
        dataset = dataset_of(task, num_prompts=300, task_args={"level": 2})
        assert len({dataset.read(index).messages[0]["content"] for index in range(len(dataset))}) == len(dataset) == 300
    assert len(dataset_of("arithmetic")) == 100
    assert len(dataset_of("arithmetic", num_prompts=100)) == 100
    assert len(dataset_of("countdown", task_args={"level": 2})) == 1000


@pytest.mark.parametrize(
    ("task", "args", "rule"),
    [("arithmetic", {}, "at most 100"), ("countdown", {"num_numbers": 2, "numbers": [1, 3]}, "about 8")],
)
def test_more_prompts_than_there_are_problems_is_refused(task: str, args: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match="fewer different problems") as caught:
        dataset_of(task, num_prompts=101, task_args=args)
    assert (caught.value.path, caught.value.value) == ("prompts.sources[0].num_prompts", 101)
    assert rule in str(caught.value.rule)
    assert "lower it" in str(caught.value.repair)


def test_the_seed_of_a_task_is_its_own_or_comes_from_the_run() -> None:
    def digest(**source: Any) -> str:
        return dataset_of("countdown", num_prompts=5, **source).digest

    assert digest() == digest()
    assert digest() != digest(run_seed=1)
    assert digest(seed=4) == digest(seed=4, run_seed=1) != digest(seed=5)


BAD_ARGS = [
    ("arithmetic", {"level": 6}, "level", "from 1 to 5"),
    ("arithmetic", {"level": True}, "level", "from 1 to 5"),
    ("arithmetic", {"levl": 2}, "levl", "one of level, num_terms, operands, operators, question"),
    ("arithmetic", {"num_terms": [3, 2]}, "num_terms", "[lowest, highest]"),
    ("arithmetic", {"num_terms": 1}, "num_terms", "from 2 to 20"),
    ("arithmetic", {"operands": [0, 1, 2]}, "operands", "[lowest, highest]"),
    ("arithmetic", {"operands": "0-9"}, "operands", "[lowest, highest]"),
    ("arithmetic", {"operators": "+/"}, "operators", "some of + - *"),
    ("arithmetic", {"operators": []}, "operators", "some of + - *"),
    ("arithmetic", {"operators": "++"}, "operators", "each once"),
    ("arithmetic", {"operators": {"+": 1}}, "operators", "as text or as a list"),
    ("arithmetic", {"question": "What?"}, "question", "{expression}"),
    ("countdown", {"question": "{numbers}"}, "question", "{numbers} and {target}"),
    ("countdown", {"numbers": [0, 5]}, "numbers", "from 1"),
    ("countdown", {"operators": "-", "target": [500, 600]}, "target", "in 5000 attempts"),
]


@pytest.mark.parametrize(("task", "args", "name", "rule"), BAD_ARGS)
def test_bad_arguments_are_refused_by_their_path(task: str, args: dict[str, Any], name: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataset_of(task, task_args=args)
    assert caught.value.path == f"prompts.sources[0].task_args.{name}"
    assert rule in str(caught.value.rule)
    assert caught.value.repair


def test_unknown_names_come_with_a_suggestion() -> None:
    with pytest.raises(InvalidConfig) as refused:
        load(GRPOConfig, overrides=["prompts.sources=[{task: arithmetics}]"])
    (problem,) = refused.value.problems
    assert (problem.path, problem.value) == ("prompts.sources.0.task", "arithmetics")
    assert problem.repair == "did you mean `arithmetic`?"
    with pytest.raises(ConfigError) as caught:
        dataset_of("arithmetic", task_args={"operator": "+"})
    assert caught.value.repair == "did you mean `operators`?"


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
def test_a_permutation_takes_every_number_to_another(count: int, key: int) -> None:
    assert sorted(permuted(value, count=count, key=key) for value in range(count)) == list(range(count))


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_classes_take_turns_until_each_is_used_up(sizes: list[int]) -> None:
    places = [place_in_turns(sizes, index) for index in range(sum(sizes))]
    assert sorted(places) == [(number, rank) for number, size in enumerate(sizes) for rank in range(size)]
    for index in range(len(sizes) * min(sizes)):
        assert places[index][0] == index % len(sizes)
