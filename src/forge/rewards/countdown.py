"""The reward `countdown`: an expression that makes the target out of the given numbers."""

from __future__ import annotations

import ast
import re
from collections import Counter
from fractions import Fraction
from typing import Annotated, Literal

from annotated_types import Ge, Le

from forge.errors import DataError
from forge.rewards.regions import boxed, last_line, needed_metadata, region
from forge.types import Answer, Task

_LONGEST_EXPRESSION = 400
_SIGNS = str.maketrans("×·⋅∗÷∕−–[]{}$`", "****//--()()  ")
_LATEX = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\left": "", r"\right": ""} | dict.fromkeys(
    (r"\(", r"\)", r"\[", r"\]"), " "
)
_FRACTION = re.compile(r"\\[dtc]?frac\s?\{([0-9+\-*/() .]{1,200})\}\s?\{([0-9+\-*/() .]{1,200})\}")
_ALLOWED = re.compile(r"[0-9+\-*/() \t]*")
_TOUCHING = re.compile(r"[^\W\d][0-9(]|[0-9)][^\W\d]")
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


class _Refused(Exception):
    """The text is not an expression of the required kind."""


def countdown(
    prompt: Task,
    completion: Answer,
    *,
    use: Literal["exactly_once", "at_most_once"] = "exactly_once",
    within: str | None = None,
    form_credit: Annotated[float, Ge(0), Le(1)] = 0.0,
) -> float:
    r"""1 when the completion's expression makes the target out of the given numbers, else 0.

    `numbers`, `target` and perhaps `operators` ("+-*/" without it) come from the prompt's metadata. The expression is
    the last \boxed{}, or the only one in the last line that is not blank; `= 24` behind it must be true. Each number is
    used `exactly_once` or `at_most_once`; an expression that keeps this rule and misses the target earns `form_credit`.
    Computed exactly, with + - * / and parentheses only.
    """
    numbers, target = _task(prompt)
    operators = "".join(prompt.metadata.get("operators", "+-*/"))
    text = region(completion.text, within=within)
    answer = None if text is None else boxed(text) or last_line(text)
    if answer is None:
        return 0.0
    try:
        value, used = evaluate(answer, operators=operators)
    except _Refused:
        return 0.0
    given, taken = Counter(numbers), Counter(used)
    if taken != given if use == "exactly_once" else taken - given:
        return 0.0
    return 1.0 if value == target else float(form_credit)


def evaluate(text: str, *, operators: str = "+-*/") -> tuple[Fraction, list[int]]:
    """The value of an expression and the numbers in it. Raises for anything that is not plain arithmetic.

    Nothing is executed: the text is parsed, and only whole numbers, parentheses and the operators are computed with.
    The length of the text bounds the work.
    """
    expression, claim = _expression(text)
    try:
        tree = ast.parse(expression, mode="eval").body
        used: list[int] = []
        value = _value(tree, operators=operators, used=used)
    except (SyntaxError, ValueError, MemoryError, RecursionError, ZeroDivisionError) as error:
        raise _Refused(str(error)) from error
    if claim is not None and claim != value:
        raise _Refused(f"it claims {claim}, and its value is {value}")
    if not used:
        raise _Refused("it has no numbers")
    return value, used


def _expression(text: str) -> tuple[str, Fraction | None]:
    """The expression in a line, and the number that it is said to be equal to."""
    if len(text) > 2 * _LONGEST_EXPRESSION:
        raise _Refused("it is too long")
    text = _FRACTION.sub(r"((\1)/(\2))", text)
    for command, sign in _LATEX.items():
        text = text.replace(command, sign)
    text = _only_run(text.translate(_SIGNS).rpartition(":")[2])
    expression, equals, claimed = text.partition("=")
    expression = expression.strip()
    if len(expression) > _LONGEST_EXPRESSION or not _ALLOWED.fullmatch(expression):
        raise _Refused("it contains more than numbers, + - * / and parentheses")
    if not equals:
        return expression, None
    claim = re.fullmatch(r"\s*(-?\s?[0-9]{1,30}(?:\.[0-9]{1,30}|/[1-9][0-9]{0,29})?)\s*", claimed)
    if claim is None:
        raise _Refused("the text after = is not a number")
    return expression, Fraction(claim[1].replace(" ", ""))


def _only_run(text: str) -> str:
    """The one stretch of arithmetic in a line of words; the whole line where more numbers or names stand in it."""
    text = re.sub(r"\A[-*•]\s+", "", text.strip().strip("*_")).rstrip("*_.,;! ")
    runs = [run for run in re.findall(r"[0-9+\-*/()=. \t]+", text) if re.search(r"[0-9]", run)]
    return runs[0].strip(" \t.") if len(runs) == 1 and not _TOUCHING.search(text) else text


def _value(node: ast.expr, *, operators: str, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and "-" in operators:
        return -_value(node.operand, operators=operators, used=used)
    sign = _OPERATORS.get(type(node.op)) if isinstance(node, ast.BinOp) else None
    if isinstance(node, ast.BinOp) and sign is not None and sign in operators:
        left = _value(node.left, operators=operators, used=used)
        right = _value(node.right, operators=operators, used=used)
        if sign == "+":
            return left + right
        if sign == "-":
            return left - right
        return left * right if sign == "*" else left / right
    raise _Refused(f"{type(node).__name__} is not allowed")


def _task(prompt: Task) -> tuple[list[int], Fraction]:
    numbers = needed_metadata(prompt, "numbers", reward="countdown")
    target = needed_metadata(prompt, "target", reward="countdown")
    whole = isinstance(numbers, list | tuple) and all(type(number) is int and number >= 0 for number in numbers)
    if not whole or type(target) not in (int, float) or target != target or abs(target) == float("inf"):
        raise DataError(
            "The reward `countdown` cannot read the prompt's metadata.",
            path=prompt.id,
            value={"numbers": numbers, "target": target},
            rule="`numbers` must be a list of whole numbers from 0 on, and `target` a number",
            repair="use prompts of the task `countdown`",
        )
    return list(numbers), Fraction(target)
