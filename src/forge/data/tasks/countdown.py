"""Countdown: reach a target from given numbers."""

from __future__ import annotations

from typing import NamedTuple

from forge.data.mixing import derive
from forge.data.tasks import Arguments, Draws
from forge.types import Task

SIGNS = "+-*/"
QUESTION = (
    "Make {target} from the numbers {numbers}. Use every number exactly once, with {operators} and parentheses, and "
    "answer with the expression."
)
_MAX_ATTEMPTS = 5000
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


class Level(NamedTuple):
    """What the problems of a level are made of."""

    num_numbers: tuple[int, int]
    numbers: tuple[int, int]
    target: tuple[int, int]
    operators: str


LEVELS = {
    1: Level((3, 3), (1, 20), (1, 50), "+-"),
    2: Level((3, 3), (1, 20), (1, 100), "+-*"),
    3: Level((4, 4), (1, 25), (10, 100), "+-*/"),
    4: Level((5, 5), (1, 50), (10, 500), "+-*/"),
    5: Level((6, 6), (1, 100), (100, 999), "+-*/"),
}


class Part(NamedTuple):
    """An expression on the way: its value, its text, and how strongly its last operator binds."""

    value: int
    text: str
    strength: int


class Countdown:
    """Numbers and a target that an expression over all of them reaches. The expression is the answer.

    Numbers are drawn and joined at random, so there is always a solution, on whose way every value is a whole number
    above 0. The target is none of the numbers. They are shown in order of size, so that equal problems read equal.
    """

    num_problems: int | None = None

    def __init__(self, args: Arguments, *, seed: int) -> None:
        args.only(("level", *Level._fields, "question"))
        level = LEVELS[args.whole("level", default=1, low=1, high=len(LEVELS))]
        self._count = args.span("num_numbers", default=level.num_numbers, low=2, high=12)
        self._range = args.span("numbers", default=level.numbers, low=1, high=10**6)
        self._target = args.span("target", default=level.target, low=1, high=10**9)
        self._signs = args.operators("operators", default=level.operators, known=SIGNS)
        self._wording = args.wording("question", default=QUESTION, needed=("numbers", "target"))
        self._args = args
        self._seed = seed
        self.name = args.label

    def read(self, index: int) -> Task:
        """Problem `index`."""
        draws = Draws(derive(self._seed, "countdown", index))
        for _ in range(_MAX_ATTEMPTS):
            numbers = [draws.between(*self._range) for _ in range(draws.between(*self._count))]
            found = join_all(numbers, draws=draws, operators=self._signs)
            if found is not None and self._target[0] <= found.value <= self._target[1] and found.value not in numbers:
                return self._prompt(index, sorted(numbers), found)
        rule = f"reached from the numbers by the operators; in {_MAX_ATTEMPTS} attempts it was not"
        raise self._args.refusal("target", rule, repair="widen the ranges, or allow more operators")

    def _prompt(self, index: int, numbers: list[int], found: Part) -> Task:
        text = (
            self._wording.replace("{target}", str(found.value))
            .replace("{numbers}", ", ".join(map(str, numbers)))
            .replace("{operators}", " ".join(self._signs))
        )
        return Task(
            id=f"{self.name}:{self._seed}:{index}",
            text=text,
            answer=found.text,
            metadata={"task": "countdown", "numbers": numbers, "target": found.value, "operators": self._signs},
        )


def join_all(numbers: list[int], *, draws: Draws, operators: str) -> Part | None:
    """All numbers in one expression, drawn at random; None where no operator joins what is left."""
    parts = [Part(number, str(number), 3) for number in numbers]
    while len(parts) > 1:
        one = parts.pop(draws.below(len(parts)))
        other = parts.pop(draws.below(len(parts)))
        larger, smaller = (one, other) if one.value >= other.value else (other, one)
        fitting = [sign for sign in operators if _fits(sign, larger.value, smaller.value)]
        if not fitting:
            return None
        parts.append(_join(larger, fitting[draws.below(len(fitting))], smaller))
    return parts[0]


def _fits(sign: str, larger: int, smaller: int) -> bool:
    if sign == "-":
        return larger > smaller
    if sign == "*":
        return smaller > 1
    if sign == "/":
        return smaller > 1 and larger % smaller == 0
    return True


def _join(left: Part, sign: str, right: Part) -> Part:
    strength = _PRECEDENCE[sign]
    head = f"({left.text})" if left.strength < strength else left.text
    binds = right.strength > strength or (right.strength == strength and sign in "+*")
    tail = right.text if binds else f"({right.text})"
    value = {
        "+": left.value + right.value,
        "-": left.value - right.value,
        "*": left.value * right.value,
        "/": left.value // right.value,
    }[sign]
    return Part(value, f"{head} {sign} {tail}", strength)
