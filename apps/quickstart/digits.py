"""The quick start's task: the largest or the smallest of four digits, as files that are the same for the same seed.

demonstrations.jsonl   what the model is shown first: every training question four times, answered with each of its
                       digits once. They show how an answer is written, and nothing about which digit is right.
right.jsonl            every training question once, with its right answer: what a teacher learns from (apps/distill).
prompts.jsonl          the training questions with their answers, which only the reward sees.
heldout.jsonl          questions that are in none of the other files.

python apps/quickstart/digits.py FOLDER [SEED]
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

WORDS = ("largest", "smallest")
NUM_DIGITS = 4
NUM_TRAIN = 75
"""Training questions for each answer of each word: there are 12 such pairs, so 900 in all."""
NUM_HELDOUT = 16
"""Held-out questions for each, so 192 in all."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question. `answer` is one of its digits."""

    word: str
    digits: tuple[int, ...]
    answer: int

    @property
    def text(self) -> str:
        return f"Which is the {self.word} of {' '.join(map(str, self.digits))}?"


def questions(seed: int) -> tuple[list[Question], list[Question]]:
    """The training questions and the held-out ones. Every answer is as frequent as any other, so that none pays."""
    rng = random.Random(seed)
    train: list[Question] = []
    heldout: list[Question] = []
    for word in WORDS:
        for answer in range(10):
            others = range(answer) if word == "largest" else range(answer + 1, 10)
            found = [
                Question(word, digits, answer)
                for digits in permutations((*others, answer), NUM_DIGITS)
                if answer in digits
            ]
            if len(found) < NUM_TRAIN + NUM_HELDOUT:
                continue  # among three digits or fewer there is no choice, and among four there are 24 questions
            rng.shuffle(found)
            train += found[:NUM_TRAIN]
            heldout += found[NUM_TRAIN : NUM_TRAIN + NUM_HELDOUT]
    rng.shuffle(train)
    rng.shuffle(heldout)
    return train, heldout


def write_task(folder: str | Path, *, seed: int = 0) -> Path:
    """Write the files into a folder, which is made, and return it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    train, heldout = questions(seed)
    shown = [_shown(question, digit) for question in train for digit in question.digits]
    random.Random(seed).shuffle(shown)
    _write(folder / "demonstrations.jsonl", shown)
    _write(folder / "right.jsonl", (_shown(question, question.answer) for question in train))
    _write(folder / "prompts.jsonl", map(_asked, train))
    _write(folder / "heldout.jsonl", map(_asked, heldout))
    return folder


def _shown(question: Question, digit: int) -> dict[str, Any]:
    said = {"role": "assistant", "content": f"The answer is {digit}."}
    return {"messages": [{"role": "user", "content": question.text}, said]}


def _asked(question: Question) -> dict[str, Any]:
    return {"prompt": question.text, "answer": str(question.answer)}


def _write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    print(write_task(sys.argv[1], seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
