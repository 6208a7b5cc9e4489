"""Sums, differences and products of whole numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from forge.data.mixing import derive
from forge.data.tasks import Arguments, permuted
from forge.types import Task

SIGNS = "+-*"
QUESTION = "What is {expression}?"


class Level(NamedTuple):
    """What the problems of a level are made of."""

    num_terms: tuple[int, int]
    operands: tuple[int, int]
    operators: str


LEVELS = {
    1: Level((2, 2), (0, 9), "+"),
    2: Level((2, 2), (0, 99), "+-"),
    3: Level((2, 3), (0, 99), "+-"),
    4: Level((2, 4), (0, 99), "+-*"),
    5: Level((3, 5), (0, 999), "+-*"),
}


class Arithmetic:
    """An expression such as `3 + 4 * 5` and its value, by the usual precedence.

    All problems with the same number of terms are numbered, and a seeded permutation takes an index to one of them. So
    no problem comes twice, and how many there are is known. Numbers of terms take turns until the rarer ones are used
    up: otherwise nearly all problems would have the most terms.
    """

    def __init__(self, args: Arguments, *, seed: int) -> None:
        args.only(("level", *Level._fields, "question"))
        level = LEVELS[args.whole("level", default=1, low=1, high=len(LEVELS))]
        terms = args.span("num_terms", default=level.num_terms, low=2, high=20)
        self._low, self._high = args.span("operands", default=level.operands, low=0, high=10**9)
        self._signs = args.operators("operators", default=level.operators, known=SIGNS)
        self._wording = args.wording("question", default=QUESTION, needed=("expression",))
        self._seed = seed
        self._lengths = range(terms[0], terms[1] + 1)
        span = self._high - self._low + 1
        self._sizes = [span**length * len(self._signs) ** (length - 1) for length in self._lengths]
        self.name = args.label
        self.num_problems: int | None = sum(self._sizes)

    def read(self, index: int) -> Task:
        """Problem `index`."""
        turn, rank = place_in_turns(self._sizes, index)
        length = self._lengths[turn]
        number = permuted(rank, count=self._sizes[turn], key=derive(self._seed, "arithmetic", length))
        operands: list[int] = []
        for _ in range(length):
            number, digit = divmod(number, self._high - self._low + 1)
            operands.append(self._low + digit)
        signs: list[str] = []
        for _ in range(length - 1):
            number, digit = divmod(number, len(self._signs))
            signs.append(self._signs[digit])
        expression = str(operands[0]) + "".join(
            f" {sign} {operand}" for sign, operand in zip(signs, operands[1:], strict=True)
        )
        return Task(
            id=f"{self.name}:{self._seed}:{index}",
            text=self._wording.replace("{expression}", expression),
            answer=str(value_of(operands, signs)),
            metadata={"task": "arithmetic", "expression": expression, "num_terms": length},
        )


def place_in_turns(sizes: Sequence[int], index: int) -> tuple[int, int]:
    """Which class an index falls to, and its rank there, when classes take turns and drop out as they are used up."""
    order = sorted(range(len(sizes)), key=lambda number: (sizes[number], number))
    done = 0
    for place, smallest in enumerate(order):
        live = sorted(order[place:])
        block = (sizes[smallest] - done) * len(live)
        if 0 <= index < block:
            return live[index % len(live)], done + index // len(live)
        index -= block
        done = sizes[smallest]
    raise IndexError("there are fewer problems")


def value_of(operands: Sequence[int], signs: Sequence[str]) -> int:
    """The value of operands with + - * between them; products first."""
    total, factors, sign = 0, [operands[0]], 1
    for operator, operand in zip(signs, operands[1:], strict=True):
        if operator == "*":
            factors.append(operand)
        else:
            total += sign * math.prod(factors)
            factors, sign = [operand], 1 if operator == "+" else -1
    return total + sign * math.prod(factors)
